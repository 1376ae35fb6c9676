"""A prepared data set: loaded from disk, and in memory with the inputs, weights and masks of models.

A holdout run, a fold and an out-of-fold part use the same functions on different rows.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_horizon
from ml_factory.code_fingerprint import source_hash
from ml_factory.data.validation import RawBarSpec
from ml_factory.datasets.preprocessing import (
    FittedStep,
    fit_preprocessing_steps,
    is_preprocessing_linear,
)
from ml_factory.datasets.row_selection import mask_rows_with_full_window, sample_contiguous_blocks
from ml_factory.datasets.store import REBUILD, DatasetStore, open_current_store
from ml_factory.errors import NotPreparedError, SettingsError, WorkspaceError, refuse_damaged_content
from ml_factory.evaluation.baselines import (
    baseline_trailing_volatility,
    session_time,
)
from ml_factory.features.build import FeatureSpec
from ml_factory.lazy_module import LazyModule
from ml_factory.leakage.certificate import require_certificate
from ml_factory.models.base import ModelBase
from ml_factory.models.registry import find_model_spec
from ml_factory.models.session_clock import TIMES, SessionTime
from ml_factory.settings import DATA_PACKAGES, DataSpec, QuickLimits, certified_code_hash
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.targets.label_table import usable_label_rows
from ml_factory.targets.labels import LabelSpec, label_classes, stored_label_kind
from ml_factory.targets.splits import SplitSpec
from ml_factory.targets.weights import training_weights

SPLITS = ("train", "validation", "test")
windows = LazyModule("ml_factory.datasets.windows")  # torch comes with the networks only
CLOCK_COLUMN = "session_progress"  # column of the clock offset (`models.session_clock`)


@dataclass(frozen=True)
class PreparedDataset:
    """Features and labels of one symbol and horizon, aligned by time.

    features : float32 (N, F), unscaled, index known_at.
    segment, close : (N,) arrays.
    labels : L rows, index a subset of the features' index.
    splits : name -> int64 positions into the labels' rows.
    scaler : preprocessing steps and scaler, fitted on the training rows of the split.
    settings : stored settings of the data and the market.
    """

    symbol: str
    horizon: int
    fingerprint: str
    features: pd.DataFrame
    segment: np.ndarray
    close: np.ndarray
    labels: pd.DataFrame
    splits: dict[str, np.ndarray]
    scaler: FittedStep
    settings: dict

    @cached_property
    def x_NF(self) -> np.ndarray:
        return np.ascontiguousarray(self.features.to_numpy(dtype=np.float32))

    @cached_property
    def row(self) -> np.ndarray:
        """Feature row of each label, int64 (L,)."""
        return self.features.index.get_indexer(self.labels.index)

    @cached_property
    def y(self) -> np.ndarray:
        return self.labels["label"].to_numpy()

    @cached_property
    def kind(self) -> str:
        """Kind of labels, one of LABEL_KINDS."""
        return stored_label_kind(self.settings)

    @cached_property
    def classes(self) -> dict[str, int]:
        """Names and values of the classes that this kind of labels has."""
        return label_classes(self.kind)

    @cached_property
    def last_move(self) -> np.ndarray:
        """Log return of each row's own base bar, float64 (L,): the input of the baseline `last_move`.

        NaN for the first bar of a segment: the jump over a night or a gap is no bar's return.
        """
        moves = np.diff(np.log(self.close), prepend=np.nan)
        moves[np.diff(self.segment, prepend=self.segment[0] - 1) != 0] = np.nan
        return moves[self.row]

    @cached_property
    def clock(self) -> SessionTime:
        """Session time of each of the L rows."""
        return session_time(self.labels.index.as_unit("ns").asi8, self.settings["market"]["calendar"])

    @cached_property
    def volatility(self) -> np.ndarray:
        """`baseline_trailing_volatility` of each label's row over max(horizon, 10) bars, float64 (L,)."""
        return baseline_trailing_volatility(self.close, self.segment, max(self.horizon, 10))[self.row]

    @cached_property
    def unambiguous_mask(self) -> np.ndarray:
        """Mask of the rows with an unambiguous outcome, bool (L,); only these are evaluated."""
        return (self.labels["barrier"] != "ambiguous").to_numpy()

    def full_window_mask(self, lookback: int) -> np.ndarray:
        """Return the mask of rows whose input window of `lookback` base rows lies inside one segment, bool (L,)."""
        return mask_rows_with_full_window(self.segment, self.row, lookback)

    def split_names(self) -> np.ndarray:
        """Return the split of each row, str (L,): train, validation, test, or purged for rows between them."""
        names = np.full(len(self.labels), "purged", dtype=object)
        for name in SPLITS:
            names[self.splits[name]] = name
        return names

    def development_rows(self) -> np.ndarray:
        """Return positions of the labels that ended before the first test row was known: the rows that folds are cut
        from.

        Rows of the sessions that market facts were inferred from are left out.
        """
        first_test = self.labels.index[self.splits["test"][0]]
        ended = np.flatnonzero((self.labels["label_end"] < first_test).to_numpy())
        return np.intersect1d(ended, usable_label_rows(self.labels), assume_unique=True)


# ---- loading ---------------------------------------------------------------------------------------------------------


def prepared_data_fingerprint(raw_hash: str, settings: dict) -> str:
    """Return the fingerprint of the raw file's content, the settings and the sources that make features and labels."""
    return fingerprint_json({"raw": raw_hash, "settings": settings, "sources": source_hash(DATA_PACKAGES)})


def load_dataset(workspace: Workspace | str | Path, symbol: str, horizon: int) -> PreparedDataset:
    """Load features and labels as a `PreparedDataset`.

    Raises NotPreparedError when they are missing, or when the raw bars or the code changed since.
    """
    workspace = Workspace(workspace)
    symbol, horizon = check_symbol(symbol), check_horizon(horizon)
    store = DatasetStore.current(workspace.processed(symbol))
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


def stored_data_settings(store: DatasetStore) -> DataSpec:
    """Return the settings a data set was prepared with."""
    stored = dict(store.facts["settings"])
    kinds = {"bars": RawBarSpec, "features": FeatureSpec, "labels": LabelSpec, "splits": SplitSpec}
    return DataSpec(**stored | {name: kind(**stored[name]) for name, kind in kinds.items()})


def load_dataset_of_store(store: DatasetStore, horizon: int) -> PreparedDataset:
    """Build the `PreparedDataset` of a stored data set, as `load_dataset` returns it."""
    with refuse_damaged_content(WorkspaceError, "The prepared data is damaged", where=store.folder, next_step=REBUILD):
        rows, settings = store.load_row_facts(), store.facts["settings"]
        return PreparedDataset(
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


# ---- rows and inputs of models ---------------------------------------------------------------------------------------


def fit_dataset_preprocessing(data: PreparedDataset, rows: np.ndarray) -> FittedStep:
    """Fit the data set's preprocessing steps and scaler on these rows.

    rows : positions into the labels' rows.
    """
    return fit_preprocessing_steps(data.settings["data"]["preprocess"], data.x_NF, data.row[rows])


InputReader = Callable[[np.ndarray], object]


def dataset_input_reader(data: PreparedDataset, scaler: FittedStep, model: ModelBase) -> InputReader:
    """Return the function from positions into the labels to model inputs: scaled rows (N, F), or windows over them."""
    scaled_NF = scaler.transform(data.x_NF)
    if model.lookback <= 1:
        return lambda positions: scaled_NF[data.row[positions]]
    return lambda positions: windows.Windows(scaled_NF, data.row[positions], model.lookback)


def resolve_dataset_settings(data: PreparedDataset, settings: Mapping) -> dict:
    """Resolve `offset` ("clock", the default, or "none") to the column that the model reads.

    Data without the clock column, or whose preprocessing changes or bends that column (a quantile scaler), have no
    offset. Raises SettingsError for an unknown offset, and for an explicit "clock" where there is none.
    """
    settings = dict(settings)
    given = settings.pop("offset", None)
    offset = "clock" if given is None else given
    if offset not in TIMES:
        raise SettingsError("No such offset", where="offset", got=repr(offset), wanted=", ".join(TIMES))
    columns = list(data.features.columns)
    if offset == "none" or "offset_column" in settings:
        return settings
    steps = data.settings["data"]["preprocess"]
    if CLOCK_COLUMN not in columns or not is_preprocessing_linear(steps):
        if given:
            raise SettingsError(
                "This data set has no clock column for the offset", where="offset", got=given,
                wanted=f"the column {CLOCK_COLUMN}, scaled evenly and kept by the preprocessing",
                next_step="leave offset out, or prepare with the calendar's features and another scaler",
            )  # fmt: skip
        return settings
    return settings | {"offset_column": columns.index(CLOCK_COLUMN), "offset_bars": data.horizon}


def quick_row_limit(model: str, quick: bool) -> int:
    """Return the most training rows of a run of this model; 0 for no limit."""
    return QuickLimits().rows_for(find_model_spec(model).family) if quick else 0


def limit_training_rows(rows: np.ndarray, limit: int) -> tuple[np.ndarray, dict]:
    """Return at most `limit` training rows (0: all) in contiguous blocks, and a description of it for the report."""
    if not limit or len(rows) <= limit:
        return rows, {}
    kept = sample_contiguous_blocks(rows, limit)
    return kept, {"training rows": f"{len(kept):,} of {len(rows):,}"}


def dataset_rows_with_weight(data: PreparedDataset, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of positive weight, and their weights, computed from these rows alone."""
    weights = training_weights(data.labels.iloc[rows])
    return rows[weights > 0], weights[weights > 0]
