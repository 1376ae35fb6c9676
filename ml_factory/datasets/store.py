"""Prepared data sets on disk: files that never change, and a manifest of their hashes that is written last.

processed/{SYMBOL}/current.json                    which fingerprint the next step reads
processed/{SYMBOL}/{fingerprint12}/features.npy    float32 (rows, features), before scaling; memory-mapped
                                   rows.npy        known_at, segment, close of each row
                                   labels_h20.parquet  splits_h20.json  scaler_h20.json
                                   manifest.json   hash and size of every file above, and its own hash

A folder without a valid manifest, or with a file that does not match the manifest, counts as absent: it is rebuilt.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.data.resample import known_at_index
from ml_factory.datasets.preprocessing import preprocessing_from_dict
from ml_factory.datasets.scaling import FittedStep
from ml_factory.errors import (
    FileError,
    NotPreparedError,
    SettingsError,
    WorkspaceError,
    did_you_mean,
)
from ml_factory.features.build import FeatureRows
from ml_factory.process_identity import cores
from ml_factory.progress import progress_phase
from ml_factory.redaction import redact_values
from ml_factory.storage.files import disk_errors, files, is_plain_name, open_regular_file, stored_path
from ml_factory.storage.json_values import fingerprint_json, to_json_value
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.targets.barrier_kernels import BARRIERS

FORMAT = 5
MANIFEST, CURRENT, FEATURES, ROWS = "manifest.json", "current.json", "features.npy", "rows.npy"
ROW_FACTS = np.dtype([("known_at", "<i8"), ("segment", "<i4"), ("close", "<f8")])
HORIZON_FILES = ("labels_h{}.parquet", "splits_h{}.json", "scaler_h{}.json")
REBUILD = "run prepare again: it rebuilds what is missing or damaged"
_hashes: dict[tuple, str] = {}  # state of a file -> its hash; a file is hashed once in a process


class DatasetStore:
    """One prepared data set: to read, from `find` or `current`; to extend, from `find`; to write, from `begin`."""

    def __init__(self, folder: Path, fingerprint: str, manifest: dict | None):
        self.folder, self.fingerprint = Path(folder), fingerprint
        self._manifest = manifest
        self._written: dict[str, dict] = {}
        self._features: dict | None = None  # names and number of rows, until they are committed

    # -- opening -------------------------------------------------------------------------------------------------

    @classmethod
    def find(cls, processed: Path, fingerprint: str) -> "DatasetStore | None":
        """Return the committed data set of this fingerprint with every hash checked, or None where it must be built."""
        folder = _dataset_folder(processed, fingerprint)
        manifest = read_dataset_manifest(folder)
        if manifest is None or manifest["fingerprint"] != fingerprint:
            return None
        store = cls(folder, fingerprint, manifest)
        return None if store.verify() else store

    @classmethod
    def begin(cls, processed: Path, fingerprint: str) -> "DatasetStore":
        """Return a data set of this fingerprint to write, whatever is there already.

        fingerprint : hex digest of all that decides the content
        """
        return cls(_dataset_folder(processed, fingerprint), fingerprint, None)

    @classmethod
    def current(cls, processed: Path) -> "DatasetStore":
        """Return the data set made current last; each file's hash is checked when it is first read.

        Raises NotPreparedError.
        """
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
        if not isinstance(name, str) or not re.fullmatch(r"[0-9a-f]{12,}", name):
            raise NotPreparedError("The pointer to the prepared data is damaged", where=pointer, next_step=REBUILD)
        folder = _dataset_folder(processed, name)
        manifest = read_dataset_manifest(folder)
        if manifest is None:
            raise NotPreparedError(
                "This data set is not complete", where=folder, got=f"no sound {MANIFEST}", next_step=REBUILD
            )
        return cls(folder, manifest["fingerprint"], manifest)

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
    def horizons(self) -> tuple[int, ...]:
        """Horizons whose labels, splits and scaler are all committed."""
        numbers = sorted(int(name[8:-8]) for name in self.files if name.startswith("labels_h"))
        return tuple(one for one in numbers if {name.format(one) for name in HORIZON_FILES} <= set(self.files))

    @property
    def feature_names(self) -> list[str]:
        """F names, in the order of the columns."""
        return self._manifest["features"]["names"]

    @property
    def rows(self) -> int:
        """Number of feature rows."""
        return self._manifest["features"]["rows"]

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
        return known_at_index(self._array(ROWS)["known_at"])

    def load_row_facts(self) -> pd.DataFrame:
        """Return segment (int32) and close (float64) of each feature row, index known_at (UTC)."""
        facts = self._array(ROWS)
        columns = {name: facts[name].copy() for name in ("segment", "close")}
        return pd.DataFrame(columns, index=known_at_index(facts["known_at"]))

    def load_labels(self, horizon: int) -> pd.DataFrame:
        """Return the labels, index known_at (UTC). Raises NotPreparedError naming the prepared horizons."""
        labels = pd.read_parquet(self._valid_path(self._horizon_file("labels", horizon, "parquet")))
        return labels.assign(barrier=labels["barrier"].astype(pd.CategoricalDtype(list(BARRIERS))))

    def load_label_moments(self, horizon: int) -> pd.DatetimeIndex:
        """Return when the row of each label is known, UTC, without reading the labels."""
        return pd.read_parquet(self._valid_path(self._horizon_file("labels", horizon, "parquet")), columns=[]).index

    def load_splits(self, horizon: int) -> dict[str, np.ndarray]:
        """Return name -> int64 positions into the labels' rows."""
        stored = files.read_json(self._valid_path(self._horizon_file("splits", horizon, "json")))
        return {name: np.concatenate([np.arange(*run) for run in [[0, 0], *runs]]) for name, runs in stored.items()}

    def load_scaler(self, horizon: int) -> FittedStep:
        """Return the scaler, or all steps up to it, fitted on this horizon's training rows."""
        return preprocessing_from_dict(files.read_json(self._valid_path(self._horizon_file("scaler", horizon, "json"))))

    def verify(self) -> list[str]:
        """Return the damaged files in words; [] when each file has its size and hash.

        Sizes are checked every time, content once in a process for each state of a file.
        """
        return [problem for name in self.files if (problem := self.describe_damage(name))]

    def describe_damage(self, name: str) -> str:
        """Return the damage of one file in words; "" when it is intact."""
        path, wanted = self._path(name), self.files[name]
        try:
            with disk_errors(path), open_regular_file(path) as file:
                size = os.fstat(file.fileno()).st_size
        except FileError as error:
            return f"{path.name}: {error.got}"
        if size != wanted["bytes"]:
            return f"{path.name}: {size:,} bytes, not {wanted['bytes']:,}"
        return "" if _hash_of(path) == wanted["hash"] else f"{path.name}: its content has changed"

    def _path(self, name: str) -> Path:
        return stored_path(self.folder, name, inside=self.folder.parent)

    def _array(self, name: str) -> np.ndarray:
        """Map one array file, read-only."""
        return np.load(self._valid_path(name), mmap_mode="r").view(np.ndarray)

    def _valid_path(self, name: str) -> Path:
        """Return the local path of an intact file. Raises WorkspaceError."""
        if name not in self.files:
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

    # -- writing -------------------------------------------------------------------------------------------------

    def write_features(self, build: Callable[[Callable[[np.ndarray, int], None]], FeatureRows]) -> FeatureRows:
        """Write features while they are built, and then the facts of their rows, which are returned.

        build : its argument takes the values of each piece, and how many rows are left with them (`build_features`)
        """
        made: list[FeatureRows] = []
        try:
            self._write(FEATURES, lambda path: _save_pieces(path, lambda keep: made.append(build(keep))))
        except BaseException:
            with suppress(OSError):  # a refused build leaves no folder, unless it holds an earlier file
                self.folder.rmdir()
            raise
        facts = np.empty(len(made[0].known_at), ROW_FACTS)
        with progress_phase("writing", len(facts)):
            for name in ROW_FACTS.names:
                facts[name] = getattr(made[0], name)
            self._write(ROWS, lambda path: _save_pieces(path, lambda keep: keep(facts, len(facts))))
        self._features = {"names": list(made[0].names), "rows": len(facts)}
        return made[0]

    def write_horizon(
        self, horizon: int, labels: pd.DataFrame, splits: dict[str, np.ndarray], scaler: FittedStep
    ) -> None:
        """Write labels (index known_at), splits (positions into their rows, as runs [first, stop)) and the scaler."""
        runs = {name: _runs(np.asarray(rows, np.int64)) for name, rows in splits.items()}
        writers = (
            # Float columns hardly shrink, and reading is a copy; only the names of barriers repeat.
            lambda path: labels.to_parquet(path, compression=None, use_dictionary=["barrier"]),
            lambda path: _write_json(path, runs),
            lambda path: _write_json(path, scaler.to_dict()),
        )
        for name, writer in zip(HORIZON_FILES, writers, strict=True):
            self._write(name.format(horizon), writer)

    def commit(self, facts: dict) -> None:
        """Write the manifest of all files.

        facts : JSON values, merged over those of an earlier commit (so a horizon can be added later)
        """
        stored = read_dataset_manifest(self.folder) or {}  # of an earlier commit
        if stored.get("fingerprint") != self.fingerprint:
            stored = {"files": {}, "facts": {}}
        kept = DatasetStore(self.folder, self.fingerprint, stored)
        intact = {name: file for name, file in kept.files.items() if not kept.describe_damage(name)}
        manifest = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "features": self._features or stored["features"],
            "files": dict(sorted((intact | self._written).items())),
            "facts": _merge(stored["facts"], facts),
        }
        # JSON turns number keys into text, writing leaves secrets out, and the hash must be of what is written.
        manifest = redact_values(to_json_value(manifest))
        manifest["hash"] = fingerprint_json(manifest)
        files.write_json(self.folder / MANIFEST, manifest)
        self._manifest, self._written = manifest, {}

    def make_current(self) -> None:
        """Make this data set the one that the next steps read."""
        path = self.folder.parent / CURRENT
        pointer = {"fingerprint": self.fingerprint}
        if files.read_json_or_none(path) != pointer:
            files.write_json(path, pointer)

    def _write(self, name: str, writer: Callable[[Path], str | None]) -> None:
        """Write a file in one step. It is not flushed: one lost in a power cut fails its hash and is written again.

        writer : may return the SHA-256 of what it has written
        """
        path, digests = self.folder / name, []
        files.replace(path, lambda temporary: digests.append(writer(temporary)), flush=False)
        self._written[name] = {"hash": _hash_of(path, digests.pop()), "bytes": path.stat().st_size}


def _dataset_folder(processed: Path, fingerprint: str) -> Path:
    """Return the folder of the data set of this fingerprint."""
    return Path(processed) / fingerprint[:12]


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


def _hash_of(path: Path, known: str | None = None) -> str:
    """Return the SHA-256 of a file, computed once in a process for each state of it; "" where it cannot be read.

    known : the hash of this state, where its writer has computed it
    """
    try:
        facts = path.stat()
        state = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        if state not in _hashes:
            _hashes[state] = known or files.sha256(path)
        return _hashes[state]
    except OSError:
        return ""


def _save_pieces(path: Path, build: Callable[[Callable[[np.ndarray, int], None]], object]) -> str:
    """Write an array file of the pieces that `build` passes to its argument; return its SHA-256.

    Where there are cores, a thread writes and hashes a piece while the next one is made.
    """
    digest, job = hashlib.sha256(), None
    with open(path, "wb") as file, ThreadPoolExecutor(1) as thread:

        def write(content: bytes | np.ndarray) -> None:
            file.write(content)
            digest.update(content)

        def keep(piece: np.ndarray, left: int) -> None:
            nonlocal job
            if job:
                job.result()
            if not file.tell():
                header = np.lib.format.header_data_from_array_1_0(piece) | {"shape": (left, *piece.shape[1:])}
                np.lib.format.write_array_header_1_0(start := io.BytesIO(), header)
                write(start.getvalue())
            content = piece.reshape(-1).view(np.uint8)
            job = thread.submit(write, content) if cores() > 1 else write(content)

        build(keep)
        if job:
            job.result()
    return digest.hexdigest()


def _write_json(path: Path, content: dict) -> None:
    """Write one line of JSON; raise ValueError for NaN and infinity, which JSON cannot hold."""
    path.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")


def _runs(rows: np.ndarray) -> list[list[int]]:
    """Return positions as contiguous runs [first, stop)."""
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else []
    return [[int(run[0]), int(run[-1]) + 1] for run in runs]


def _merge(old: dict, new: dict) -> dict:
    """Merge `new` over `old`, nested dictionaries too."""
    merged = dict(old)
    for name, value in new.items():
        both = isinstance(value, dict) and isinstance(merged.get(str(name)), dict)
        merged[str(name)] = _merge(merged[str(name)], value) if both else value
    return merged
