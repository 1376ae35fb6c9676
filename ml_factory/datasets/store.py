"""What `prepare` made, on disk: part files that never change, and a manifest written last that vouches for them.

processed/{SYMBOL}/current.json                    which fingerprint the next step reads
processed/{SYMBOL}/parts/{made by}-{first}-{stop}-features.npy    float32 (rows, features), before scaling
                         {made by}-{first}-{stop}-rows.npy        known_at, session, segment, close of each row
processed/{SYMBOL}/{fingerprint12}/labels_h20.parquet  splits_h20.json  scaler_h20.json
                                   ranks_h20.state     of many training rows: what a scaler of more goes on from
                                   stream.state        where bars were appended: what the next rows are made from
                                   manifest.json       hash and size of every file above, and its own hash

Data sets share parts: bars that only grew give a data set with the parts there were and one more for the new rows. A
folder without a sound manifest, or with a file that is not what the manifest says, is not there: it is rebuilt.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ml_factory.datasets import memmap, store_parts
from ml_factory.datasets.incremental_quantiles import QuantileState
from ml_factory.datasets.preprocessing import Fitted, from_dict
from ml_factory.errors import NotPreparedError, SettingsError, WorkspaceError, did_you_mean
from ml_factory.storage import atomic_files, file_access, mount_table
from ml_factory.storage.state import decode_state

FORMAT = 2
MANIFEST, CURRENT, PARTS, STATE = "manifest.json", "current.json", "parts", "stream.state"
REBUILD = "run prepare again: it rebuilds what is missing or damaged"


class Store:
    """One prepared data set, to read. Get one from `find`, `current` or `open`; `datasets.writing` makes them."""

    def __init__(self, folder: Path, fingerprint: str, manifest: dict | None):
        self.folder, self.fingerprint = Path(folder), fingerprint
        self._manifest = manifest

    # -- which data set ------------------------------------------------------------------------------------------

    @classmethod
    def find(cls, processed: Path, fingerprint: str) -> "Store | None":
        """The committed data set of this fingerprint with every hash checked, or None where it must be (re)built."""
        folder = folder_of(processed, fingerprint)
        manifest = read_manifest(folder)
        if manifest is None or manifest["fingerprint"] != fingerprint:
            return None
        store = cls(folder, fingerprint, manifest)
        return None if store.verify() else store

    @classmethod
    def current(cls, processed: Path) -> "Store":
        """The data set committed last. Raises NotPreparedError."""
        pointer = Path(processed) / CURRENT
        if not atomic_files.is_file(pointer):
            raise NotPreparedError(
                "Nothing is prepared for this symbol yet",
                where=processed,
                got=f"no {CURRENT}",
                wanted="features and labels",
                next_step="run prepare (notebook 01, or python -m ml_factory prepare)",
            )
        stored = atomic_files.json_or_none(pointer)  # half-written: said below, with the way out
        name = stored.get("fingerprint") if isinstance(stored, dict) else None
        if not _is_fingerprint(name):
            raise NotPreparedError("The pointer to the prepared data is damaged", where=pointer, next_step=REBUILD)
        return cls.open(folder_of(processed, name))

    @classmethod
    def open(cls, folder: Path) -> "Store":
        """The committed data set in this folder; each file's hash is checked when it is first read.

        Raises NotPreparedError when there is no sound manifest.
        """
        manifest = read_manifest(Path(folder))
        if manifest is None:
            raise NotPreparedError(
                "This data set is not complete", where=folder, got=f"no sound {MANIFEST}", next_step=REBUILD
            )
        return cls(Path(folder), manifest["fingerprint"], manifest)

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def committed(self) -> bool:
        """Whether its manifest is written: all that it names is there."""
        return self._manifest is not None

    @property
    def files(self) -> dict[str, dict]:
        """name -> {"hash", "bytes"} of every committed file."""
        return self._manifest["files"] if self._manifest else {}

    @property
    def facts(self) -> dict:
        """What `commit` was told."""
        return self._manifest["facts"] if self._manifest else {}

    @property
    def _readable(self) -> dict[str, dict]:
        """name -> {"hash", "bytes"} of every file that may be read."""
        return self.files

    @property
    def _features(self) -> dict:
        """Names and parts of the features."""
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
    def parts(self) -> list[dict]:
        """{"rows", "features", "facts"} of each part, in the order of the rows."""
        return self._features["parts"]

    @property
    def rows(self) -> int:
        """How many feature rows there are."""
        return sum(part["rows"] for part in self.parts)

    def load_features(
        self, columns: Iterable[str] | None = None, start: object = None, end: object = None
    ) -> pd.DataFrame:
        """float32 features, index known_at (UTC); only `columns`, only start <= known_at <= end (no zone: UTC).

        Raises SettingsError for a column that is not there.
        """
        time = self.known_at
        first = 0 if start is None else time.searchsorted(store_parts.moment(start, "start"), side="left")
        stop = len(time) if end is None else time.searchsorted(store_parts.moment(end, "end"), side="right")
        rows, names = slice(first, max(first, stop)), self._known_columns(columns)
        values = self.values[rows]
        if names != self.feature_names:
            values = values[:, [self.feature_names.index(name) for name in names]]
        return pd.DataFrame(values, index=time[rows], columns=names, copy=False)

    @property
    def values(self) -> np.ndarray:
        """float32 (rows, features), C-contiguous: mapped into memory, read-only, nothing copied."""
        return self._array("features")

    @property
    def known_at(self) -> pd.DatetimeIndex:
        """When each feature row is known, UTC."""
        return store_parts.utc_index(self._array("facts")["known_at"])

    def load_rows(self) -> pd.DataFrame:
        """session, segment (int32) and close (float64) of each feature row, index known_at (UTC)."""
        facts = self._array("facts")
        columns = {name: facts[name].copy() for name in ("session", "segment", "close")}
        return pd.DataFrame(columns, index=store_parts.utc_index(facts["known_at"]))

    def load_labels(self, horizon: int) -> pd.DataFrame:
        """The labels as they were written, index known_at (UTC). Raises NotPreparedError naming the horizons there."""
        return store_parts.frame(self._table(self._of_horizon("labels", horizon, "parquet")))

    def load_splits(self, horizon: int) -> dict[str, np.ndarray]:
        """name -> int64 positions into the labels' rows."""
        stored = atomic_files.read_json(self._checked(self._of_horizon("splits", horizon, "json")))
        return {name: store_parts.from_runs(runs) for name, runs in stored.items()}

    def load_scaler(self, horizon: int) -> Fitted:
        """The scaler, or all steps up to it, fitted on this horizon's training rows."""
        return from_dict(atomic_files.read_json(self._checked(self._of_horizon("scaler", horizon, "json"))))

    def load_ranks(self, horizon: int) -> QuantileState | None:
        """What was counted of this horizon's training rows for its scaler; None where nothing was kept."""
        name = f"ranks_h{horizon}.state"
        return QuantileState.from_state(decode_state(self._checked(name).read_bytes())) if name in self.files else None

    def load_state(self) -> dict | None:
        """What the rows after these are made from, None where this data set was written without."""
        return decode_state(self._checked(STATE).read_bytes()) if STATE in self.files else None

    def verify(self) -> list[str]:
        """What is wrong, in words; empty when each file has its size and hash.

        Sizes are looked at every time, content once in a process for each state of a file that the disk tells apart.
        """
        if not self.committed:
            return [f"{self.folder}: not committed"]
        return [problem for name in self.files if (problem := self.problem(name))]

    def problem(self, name: str) -> str:
        """What is wrong with one file, in words; empty when nothing is. Raises UnresponsiveMountError."""
        return self._looked_at(name)[1]

    def _looked_at(self, name: str) -> tuple[Path, str]:
        """(where the file is read, on a disk of this machine; what is wrong with it, in words)."""
        path, wanted = self.folder / name, self._readable[name]
        far = mount_table.on_mount(path)  # asked once: it costs more than the file's size
        here, same = path, False
        try:
            size = file_access.size(path) if far else path.stat().st_size
            if size != wanted["bytes"]:
                return path, f"{path.name}: {size:,} bytes, not {wanted['bytes']:,}"
            here = memmap.local(path, wanted["hash"]) if far else path
            same = memmap.file_state_hash(here) == wanted["hash"]
        except file_access.MountTimeout as error:
            raise atomic_files.unresponsive_mount_error(path, error) from error
        except OSError as error:
            return path, f"{path.name}: {error.strerror or error}"
        except WorkspaceError:
            raise
        except ValueError:  # no header of an array
            pass
        return here, "" if same else f"{path.name}: its content has changed"

    def mapped_part(self, *names: str) -> np.ndarray:
        """One part file, or several as one array: read-only, mapped into memory."""
        paths = [self._checked(name) for name in names]
        return memmap.joined(paths, [self._readable[name]["hash"] for name in names])

    def _array(self, key: str) -> np.ndarray:
        return self.mapped_part(*(part[key] for part in self.parts))

    def _checked(self, name: str) -> Path:
        """Where a sound file can be read on a disk of this machine. Raises WorkspaceError."""
        if name not in self._readable:
            raise NotPreparedError("This part is not prepared", where=self.folder, got=f"no {name}", next_step=REBUILD)
        here, problem = self._looked_at(name)
        if problem:
            raise WorkspaceError("The prepared data is damaged", where=self.folder, got=problem, next_step=REBUILD)
        return here

    def _of_horizon(self, kind: str, horizon: int, suffix: str) -> str:
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

    def _table(self, name: str) -> pa.Table:
        return pq.read_table(self._checked(name))

    def _known_columns(self, columns: Iterable[str] | None) -> list[str]:
        names = self.feature_names
        wanted = names if columns is None else list(columns)
        for name in wanted:
            if name not in names:
                raise SettingsError(
                    "There is no such feature", where=self.folder, got=repr(name), next_step=did_you_mean(name, names)
                )
        return wanted


def folder_of(processed: Path, fingerprint: str) -> Path:
    """Where the data set of this fingerprint lies or will lie."""
    if not _is_fingerprint(fingerprint):
        raise ValueError(f"a fingerprint is at least 12 hex digits, not {fingerprint!r}")
    return Path(processed) / fingerprint[:12]


def _is_fingerprint(text: object) -> bool:
    return isinstance(text, str) and len(text) >= 12 and set(text) <= set("0123456789abcdef")


def read_manifest(folder: Path) -> dict | None:
    """The manifest when it is whole and says so itself, else None: damaged is the same as absent, and rebuilt.

    Raises UnresponsiveMountError.
    """
    manifest = atomic_files.json_or_none(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return None
    content = {name: value for name, value in manifest.items() if name != "hash"}
    return manifest if manifest.get("hash") == atomic_files.fingerprint(content) else None
