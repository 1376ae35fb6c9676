"""Prepared data sets on disk: files that never change, and a manifest of their hashes that is written last.

processed/{SYMBOL}/current.json                    which fingerprint the next step reads
processed/{SYMBOL}/{fingerprint12}/features.npy    float32 (rows, features), before scaling
                                   rows.npy        known_at, session, segment, close of each row
                                   labels_h20.parquet  splits_h20.json  scaler_h20.json
                                   manifest.json   hash and size of every file above, and its own hash

A folder without a valid manifest, or with a file that does not match the manifest, counts as absent: it is rebuilt.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from ml_factory.datasets import memmap, store_parts
from ml_factory.datasets.preprocessing import FittedStep, preprocessing_from_dict
from ml_factory.errors import (
    FileError,
    NotPreparedError,
    SettingsError,
    WorkspaceError,
    did_you_mean,
)
from ml_factory.storage.files import disk_errors, files, open_regular_file
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.stored_paths import is_plain_name, stored_path
from ml_factory.storage.workspace import Workspace, check_symbol

FORMAT = 3
MANIFEST, CURRENT, FEATURES, ROWS = "manifest.json", "current.json", "features.npy", "rows.npy"
REBUILD = "run prepare again: it rebuilds what is missing or damaged"


class DatasetStore:
    """One prepared data set, to read, from `find`, `current` or `open`; `datasets.store_writer` writes them."""

    def __init__(self, folder: Path, fingerprint: str, manifest: dict | None):
        self.folder, self.fingerprint = Path(folder), fingerprint
        self._manifest = manifest

    # -- opening -------------------------------------------------------------------------------------------------

    @classmethod
    def find(cls, processed: Path, fingerprint: str) -> "DatasetStore | None":
        """Return the committed data set of this fingerprint with every hash checked, or None where it must be built."""
        folder = dataset_folder(processed, fingerprint)
        manifest = read_dataset_manifest(folder)
        if manifest is None or manifest["fingerprint"] != fingerprint:
            return None
        store = cls(folder, fingerprint, manifest)
        return None if store.verify() else store

    @classmethod
    def current(cls, processed: Path) -> "DatasetStore":
        """Return the data set committed last. Raises NotPreparedError."""
        pointer = Path(processed) / CURRENT
        if not files.is_file(pointer):
            raise NotPreparedError(
                "Nothing is prepared for this symbol yet",
                where=processed,
                got=f"no {CURRENT}",
                wanted="features and labels",
                next_step="run prepare (notebook 01, or python -m ml_factory prepare)",
            )
        stored = files.read_json_or_none(pointer)  # a half-written one is reported below, with the next step
        name = stored.get("fingerprint") if isinstance(stored, dict) else None
        if not _is_fingerprint(name):
            raise NotPreparedError("The pointer to the prepared data is damaged", where=pointer, next_step=REBUILD)
        return cls.open(dataset_folder(processed, name))

    @classmethod
    def open(cls, folder: Path) -> "DatasetStore":
        """Return the committed data set in this folder; each file's hash is checked when it is first read.

        Raises NotPreparedError when there is no valid manifest.
        """
        manifest = read_dataset_manifest(Path(folder))
        if manifest is None:
            raise NotPreparedError(
                "This data set is not complete", where=folder, got=f"no sound {MANIFEST}", next_step=REBUILD
            )
        return cls(Path(folder), manifest["fingerprint"], manifest)

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def committed(self) -> bool:
        """True once the manifest is written: all files in it exist."""
        return self._manifest is not None

    @property
    def files(self) -> dict[str, dict]:
        """name -> {"hash", "bytes"} of every committed file."""
        return self._manifest["files"] if self._manifest else {}

    @property
    def facts(self) -> dict:
        """Facts passed to `commit`."""
        return self._manifest["facts"] if self._manifest else {}

    @property
    def _readable(self) -> dict[str, dict]:
        """name -> {"hash", "bytes"} of every file that may be read."""
        return self.files

    @property
    def _features(self) -> dict:
        """Names of the features, and number of rows."""
        return self._manifest["features"]

    @property
    def horizons(self) -> tuple[int, ...]:
        """Horizons whose labels, splits and scaler are all committed."""
        numbers = sorted(int(name[8:-8]) for name in self.files if name.startswith("labels_h"))
        return tuple(h for h in numbers if {f"splits_h{h}.json", f"scaler_h{h}.json"} <= set(self.files))

    @property
    def feature_names(self) -> list[str]:
        """F names, in the order of the columns."""
        return self._features["names"]

    @property
    def rows(self) -> int:
        """Number of feature rows."""
        return self._features["rows"]

    def load_features(
        self, columns: Iterable[str] | None = None, start: object = None, end: object = None
    ) -> pd.DataFrame:
        """Return float32 features, index known_at (UTC); only `columns`, only start <= known_at <= end (no zone: UTC).

        Raises SettingsError for an unknown column.
        """
        time = self.known_at
        first = 0 if start is None else time.searchsorted(_parse_time_bound(start, "start"), side="left")
        stop = len(time) if end is None else time.searchsorted(_parse_time_bound(end, "end"), side="right")
        rows, names = slice(first, max(first, stop)), self._known_columns(columns)
        values = self.values[rows]
        if names != self.feature_names:
            values = values[:, [self.feature_names.index(name) for name in names]]
        return pd.DataFrame(values, index=time[rows], columns=names, copy=False)

    @property
    def values(self) -> np.ndarray:
        """float32 (rows, features), C-contiguous: memory-mapped, read-only, not copied."""
        return self._array(FEATURES)

    @property
    def known_at(self) -> pd.DatetimeIndex:
        """Moment at which each feature row is known, UTC."""
        return store_parts.to_utc_index(self._array(ROWS)["known_at"])

    def load_row_facts(self) -> pd.DataFrame:
        """Return session, segment (int32) and close (float64) of each feature row, index known_at (UTC)."""
        facts = self._array(ROWS)
        columns = {name: facts[name].copy() for name in ("session", "segment", "close")}
        return pd.DataFrame(columns, index=store_parts.to_utc_index(facts["known_at"]))

    def load_labels(self, horizon: int) -> pd.DataFrame:
        """Return the labels, index known_at (UTC). Raises NotPreparedError naming the prepared horizons."""
        path = self._valid_path(self._horizon_file("labels", horizon, "parquet"))
        return store_parts.labels_from_arrow(pq.read_table(path))

    def load_splits(self, horizon: int) -> dict[str, np.ndarray]:
        """Return name -> int64 positions into the labels' rows."""
        path = self._valid_path(self._horizon_file("splits", horizon, "json"))
        stored = files.read_json(path)
        return {name: store_parts.decode_position_runs(runs) for name, runs in stored.items()}

    def load_scaler(self, horizon: int) -> FittedStep:
        """Return the scaler, or all steps up to it, fitted on this horizon's training rows."""
        return preprocessing_from_dict(files.read_json(self._valid_path(self._horizon_file("scaler", horizon, "json"))))

    def verify(self) -> list[str]:
        """Return the damaged files in words; [] when each file has its size and hash.

        Sizes are checked every time, content once in a process for each state of a file.
        """
        if not self.committed:
            return [f"{self.folder}: not committed"]
        return [problem for name in self.files if (problem := self.describe_damage(name))]

    def describe_damage(self, name: str) -> str:
        """Return the damage of one file in words; "" when it is intact."""
        path, wanted = self._path(name), self._readable[name]
        try:
            with disk_errors(path), open_regular_file(path) as file:
                size = os.fstat(file.fileno()).st_size
        except FileError as error:
            return f"{path.name}: {error.got}"
        if size != wanted["bytes"]:
            return f"{path.name}: {size:,} bytes, not {wanted['bytes']:,}"
        same = memmap.cached_file_hash(path) == wanted["hash"]
        return "" if same else f"{path.name}: its content has changed"

    def _path(self, name: str) -> Path:
        return stored_path(self.folder, name, inside=self.folder.parent)

    def _array(self, name: str) -> np.ndarray:
        """Map one array file, read-only."""
        return memmap.map_npy(self._valid_path(name))

    def _valid_path(self, name: str) -> Path:
        """Return the local path of an intact file. Raises WorkspaceError."""
        if name not in self._readable:
            raise NotPreparedError("This part is not prepared", where=self.folder, got=f"no {name}", next_step=REBUILD)
        if problem := self.describe_damage(name):
            raise WorkspaceError("The prepared data is damaged", where=self.folder, got=problem, next_step=REBUILD)
        return self._path(name)

    def _horizon_file(self, kind: str, horizon: int, suffix: str) -> str:
        name = f"{kind}_h{horizon}.{suffix}"
        if name not in self.files:
            raise NotPreparedError(
                f"Horizon {horizon} is not prepared",
                where=self.folder,
                got=f"horizons {', '.join(map(str, self.horizons)) or 'none'}",
                wanted=horizon,
                next_step=f"run prepare with horizon {horizon}, or use one that is there",
            )
        return name

    def _known_columns(self, columns: Iterable[str] | None) -> list[str]:
        names = self.feature_names
        wanted = names if columns is None else list(columns)
        for name in wanted:
            if name not in names:
                raise SettingsError(
                    "There is no such feature", where=self.folder, got=repr(name), next_step=did_you_mean(name, names)
                )
        return wanted


def dataset_folder(processed: Path, fingerprint: str) -> Path:
    """Return the folder of the data set of this fingerprint."""
    if not _is_fingerprint(fingerprint):
        raise ValueError(f"a fingerprint is at least 12 hex digits, not {fingerprint!r}")
    return Path(processed) / fingerprint[:12]


def _is_fingerprint(text: object) -> bool:
    return isinstance(text, str) and len(text) >= 12 and set(text) <= set("0123456789abcdef")


def read_dataset_manifest(folder: Path) -> dict | None:
    """Return the manifest when its own hash matches, else None: a damaged manifest counts as absent."""
    manifest = files.read_json_or_none(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return None
    content = {name: value for name, value in manifest.items() if name != "hash"}
    if manifest.get("hash") != fingerprint_json(content):
        return None
    return manifest if all(is_plain_name(name) for name in manifest["files"]) else None


def _parse_time_bound(text: object, where: str) -> pd.Timestamp:
    """Parse a moment in UTC; without a zone UTC is assumed. Raises SettingsError."""
    try:
        found = pd.Timestamp(text)
    except (ValueError, TypeError) as error:
        raise SettingsError(
            "Not a moment in time", where=where, got=repr(text), wanted="for example '2024-12-31 14:30'"
        ) from error
    return (found.tz_localize("UTC") if found.tzinfo is None else found.tz_convert("UTC")).as_unit("ns")


def open_current_store(workspace: Workspace | str | Path, symbol: str) -> DatasetStore:
    """Return the symbol's prepared data. Raises NotPreparedError where there is none."""
    return DatasetStore.current(Workspace(workspace).processed(check_symbol(symbol)))
