"""Load prepared data: features, labels and splits as tables, and as a `Dataset` for training."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_horizon
from ml_factory.code_fingerprint import source_hash
from ml_factory.datasets.store import REBUILD, DatasetStore, open_current_store
from ml_factory.errors import NotPreparedError, WorkspaceError, refuse_damaged_content
from ml_factory.leakage.certificate import require_certificate
from ml_factory.settings import DATA_PACKAGES, certified_code_hash
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.workflows.prepared_dataset import PreparedDataset


def prepared_data_fingerprint(raw_hash: str, settings: dict) -> str:
    """Return the fingerprint of the raw file's content, the settings and the sources that make features and labels."""
    return fingerprint_json({"raw": raw_hash, "settings": settings, "sources": source_hash(DATA_PACKAGES)})


def load_dataset(workspace: Workspace | str | Path, symbol: str, horizon: int) -> PreparedDataset:
    """Load features and labels as a `Dataset`.

    Raises NotPreparedError when they are missing, or when the raw bars or the code changed since.
    """
    workspace = Workspace(workspace)
    symbol, horizon = check_symbol(symbol), check_horizon(horizon)
    store = DatasetStore.current(workspace.processed(symbol))
    with refuse_damaged_content(
        NotPreparedError, "The prepared data is damaged", where=store.folder, next_step=REBUILD
    ):
        settings, prepared = store.facts["settings"], store.facts["raw"]["hash"]
    raw = workspace.raw_bars(symbol)
    prepare_again = f"run: python -m ml_factory prepare --symbol {symbol}; what was prepared before stays"
    if files.is_file(raw) and files.sha256(raw) != prepared:
        raise NotPreparedError("The raw bars were replaced since the last prepare", where=raw, next_step=prepare_again)
    if prepared_data_fingerprint(prepared, settings) != store.fingerprint:
        raise NotPreparedError(
            "The code that makes features and labels changed since the last prepare",
            where=store.folder,
            next_step=prepare_again,
        )
    return load_dataset_of_store(store, horizon)


def load_dataset_of_store(store: DatasetStore, horizon: int) -> PreparedDataset:
    """Build the `Dataset` of a stored data set, as `load_dataset` returns it."""
    with refuse_damaged_content(WorkspaceError, "The prepared data is damaged", where=store.folder, next_step=REBUILD):
        rows, settings = store.load_row_facts(), store.facts["settings"]
        data = PreparedDataset(
            symbol=store.facts["symbol"],
            horizon=horizon,
            fingerprint=store.fingerprint,
            features=store.load_features(),
            segment=rows["segment"].to_numpy(),
            close=rows["close"].to_numpy(),
            labels=store.load_labels(horizon),
            splits=store.load_splits(horizon),
            scaler=store.load_scaler(horizon),
            settings={"data": settings, "market": store.facts["market"], "sources": source_hash(DATA_PACKAGES)},
        )
        if not data.features.index.is_unique:
            raise ValueError("two rows of one time")
        if (data.row < 0).any() or any(
            len(positions) and positions.max() >= len(data.labels) for positions in data.splits.values()
        ):
            raise ValueError("labels or splits of rows that the features do not have")
        return data


def load_features(
    workspace: Workspace | str | Path,
    symbol: str,
    columns: Iterable[str] | None = None,
    start: object = None,
    end: object = None,
) -> pd.DataFrame:
    """Load features before scaling: index known_at (UTC), float32 columns, rows with start <= known_at <= end."""
    return open_current_store(workspace, symbol).load_features(columns, start, end)


def load_labels(workspace: Workspace | str | Path, symbol: str, horizon: int) -> pd.DataFrame:
    """Load labels: index known_at; label, label_end, ret, barrier, uniqueness and the columns that
    `triple_barrier_labels` adds.
    """
    return open_current_store(workspace, symbol).load_labels(check_horizon(horizon))


def load_splits(workspace: Workspace | str | Path, symbol: str, horizon: int) -> dict[str, np.ndarray]:
    """Load the splits: {"train", "validation", "test"}, int64 positions into the labels' rows."""
    return open_current_store(workspace, symbol).load_splits(check_horizon(horizon))


def load_certified_dataset(workspace: Workspace, symbol: str, horizon: int, uncertified: bool) -> PreparedDataset:
    """Load the prepared data. Raises NotPreparedError without a certificate, unless `uncertified`."""
    data = load_dataset(workspace, symbol, horizon)
    if not uncertified:
        code = certified_code_hash()
        require_certificate(workspace.processed(symbol), symbol, horizon, subject=data.fingerprint, code=code)
    return data
