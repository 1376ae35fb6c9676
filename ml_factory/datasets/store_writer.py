"""Writing a prepared data set: its files first, the manifest of their hashes last (`store`)."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from ml_factory.datasets import memmap, store_parts
from ml_factory.datasets.preprocessing import FittedStep
from ml_factory.datasets.store import (
    CURRENT,
    FEATURES,
    FORMAT,
    MANIFEST,
    ROWS,
    DatasetStore,
    dataset_folder,
    read_dataset_manifest,
)
from ml_factory.features.build import FeatureRows
from ml_factory.redaction import redact_values
from ml_factory.storage.files import files
from ml_factory.storage.json_values import fingerprint_json


class DatasetStoreWriter(DatasetStore):
    """A data set to write, from `begin`, or from `find` where a committed one is extended."""

    def __init__(self, folder: Path, fingerprint: str, manifest: dict | None):
        super().__init__(folder, fingerprint, manifest)
        self._written: dict[str, dict] = {}
        self._rows: dict | None = None  # of the features, when this store has written them

    @classmethod
    def begin(cls, processed: Path, fingerprint: str) -> "DatasetStoreWriter":
        """Return the data set of this fingerprint for writing: an intact one is kept, anything else is started again.

        processed : the symbol's folder
        fingerprint : hex digest of all that decides the content
        """
        found = cls.find(processed, fingerprint)
        if found is not None:
            return found
        folder = dataset_folder(processed, fingerprint)
        files.make_folder(folder)
        return cls(folder, fingerprint, None)

    @property
    def _readable(self) -> dict[str, dict]:
        return self.files | self._written

    @property
    def _features(self) -> dict:
        return self._rows or super()._features

    def write_features(self, matrix: FeatureRows) -> None:
        """Write the features, and the facts of their rows."""
        facts = store_parts.feature_row_facts(matrix)
        for name, array in ((FEATURES, np.asarray(matrix.values, np.float32)), (ROWS, facts)):
            self._written[name] = memmap.write_npy_part(self.folder / name, array)
        self._rows = {"names": list(matrix.names), "rows": len(facts)}

    def write_labels(self, horizon: int, labels: pd.DataFrame) -> None:
        """Write labels_h{horizon}.parquet: index known_at, columns of `triple_barrier_labels`."""
        self._write_table(f"labels_h{horizon}.parquet", store_parts.labels_to_arrow(labels))

    def write_splits(self, horizon: int, splits: dict[str, np.ndarray]) -> None:
        """Write splits_h{horizon}.json: positions into the labels' rows, as runs [first, stop)."""
        runs = {name: store_parts.encode_position_runs(rows) for name, rows in splits.items()}
        self._write(f"splits_h{horizon}.json", lambda temporary: store_parts.write_json_line(runs, temporary))

    def write_scaler(self, horizon: int, scaler: FittedStep) -> None:
        """Write scaler_h{horizon}.json."""
        self._write(
            f"scaler_h{horizon}.json", lambda temporary: store_parts.write_json_line(scaler.to_dict(), temporary)
        )

    def discard_horizon_files(self, horizon: int) -> None:
        """Allow the files of an incomplete horizon to be written again."""
        for name in ("labels_h{}.parquet", "splits_h{}.json", "scaler_h{}.json"):
            self.files.pop(name.format(horizon), None)

    def commit(self, facts: dict, *, current: bool = True) -> None:
        """Write the manifest of all files, and make this the symbol's current data set if `current`.

        facts : JSON values, merged over those of an earlier commit (so a horizon can be added later)
        """
        manifest = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "features": self._rows or self._stored("features"),
            "files": dict(sorted((self._valid_files() | self._written).items())),
            "facts": _merge(self._stored("facts"), facts),
        }
        # JSON turns number keys into text, writing leaves secrets out, and the hash must be of what is written.
        manifest = redact_values(json.loads(json.dumps(manifest, allow_nan=False)))
        manifest["hash"] = fingerprint_json(manifest)
        files.write_json(self.folder / MANIFEST, manifest)
        self._manifest, self._written, self._rows = manifest, {}, None
        if current:
            self.make_current()

    def _stored(self, key: str) -> dict:
        """Return this entry of the manifest on disk: another process may have added a horizon."""
        manifest = read_dataset_manifest(self.folder)
        if manifest is None or manifest["fingerprint"] != self.fingerprint:
            manifest = self._manifest or {}
        return manifest.get(key, {})

    def _valid_files(self) -> dict[str, dict]:
        """Return the committed files that stay in the manifest; damaged and rewritten ones do not."""
        existing = DatasetStore(self.folder, self.fingerprint, {"files": self._stored("files")})
        return {
            name: file
            for name, file in existing.files.items()
            if name not in self._written and not existing.describe_damage(name)
        }

    def make_current(self) -> None:
        """Make this data set the one that the next steps read."""
        path = self.folder.parent / CURRENT
        pointer = {"fingerprint": self.fingerprint, "folder": self.folder.name}
        if files.read_json_or_none(path) != pointer:
            files.write_json(path, pointer)

    def _write_table(self, name: str, table: pa.Table) -> None:
        self._write(name, lambda temporary: store_parts.write_parquet_table(table, temporary))

    def _write(self, name: str, writer: Callable[[Path], object]) -> None:
        if name in self.files:
            raise ValueError(f"{name} is committed in {self.folder}: files never change, use a new fingerprint")
        path, written = self.folder / name, {}

        def write(temporary: Path) -> None:
            writer(temporary)
            written.update(hash=files.sha256(temporary), bytes=temporary.stat().st_size)

        files.replace(path, write)
        memmap.cache_file_hash(path, written["hash"])
        self._written[name] = written


def _merge(old: dict, new: dict) -> dict:
    """Merge `new` over `old`, nested dictionaries too."""
    merged = dict(old)
    for name, value in new.items():
        both = isinstance(value, dict) and isinstance(merged.get(str(name)), dict)
        merged[str(name)] = _merge(merged[str(name)], value) if both else value
    return merged
