"""Prepared data sets that nothing reads any more."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ml_factory.datasets.store import DatasetStore, read_dataset_manifest
from ml_factory.errors import CheckpointError, NotPreparedError
from ml_factory.storage.files import REMOVED, files
from ml_factory.storage.locks import check_lock_file_free, file_lock
from ml_factory.storage.stored_paths import stored_path

_DATA_SET = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True)
class StoredDataSets:
    """The data sets of one symbol.

    processed : the symbol's folder.
    manifests : folder name -> manifest of every complete data set.
    current : fingerprint of the one that is read; None where its pointer is missing or damaged.
    """

    processed: Path
    manifests: Mapping[str, Mapping]
    current: str | None

    def superseded(self, needed: Collection[str]) -> list[str]:
        """List the folder names of data sets that are neither current nor `needed`, by fingerprint."""
        if self.current is None:
            return []
        kept = {self.current, *needed}
        return [name for name, manifest in self.manifests.items() if manifest["fingerprint"] not in kept]

    def begun(self) -> set[str]:
        """Return the folder names of data sets that are not complete: of a `prepare` under way, or interrupted."""
        names = set(files.names(self.processed)) - set(self.manifests)
        return {name for name in names if _DATA_SET.fullmatch(name)}


def read_stored_data_sets(processed: Path) -> StoredDataSets:
    """Read the manifests of a symbol's data sets."""
    manifests = {}
    for name in files.names(processed):
        if not name.startswith((".", REMOVED)) and files.is_folder(processed / name):
            manifest = read_dataset_manifest(processed / name)
            if manifest is not None and manifest["fingerprint"][:12] == name:
                manifests[name] = manifest
    try:
        current = DatasetStore.current(processed).fingerprint
    except NotPreparedError:
        current = None
    return StoredDataSets(processed, manifests, current)


def remove_data_set(processed: Path, name: str) -> bool:
    """Delete a data set; return False where it has become the current one."""
    folder = stored_path(processed, name, inside=processed.parent)
    with file_lock(processed / "prepare.lock"):
        if name not in read_stored_data_sets(processed).superseded(()):
            return False
        files.remove_folder(folder)
    return True


def is_preparing(processed: Path) -> bool:
    """Return whether a process of this machine prepares this symbol now."""
    try:
        check_lock_file_free(processed / "prepare.lock", "the prepared data")
    except CheckpointError:
        return True
    return False


def remove_interrupted_data_set(processed: Path, name: str) -> bool:
    """Delete what a killed `prepare` left of a data set; return False where it is complete, or a process is at it."""
    folder = stored_path(processed, name, inside=processed.parent)
    if is_preparing(processed):
        return False
    with file_lock(processed / "prepare.lock"):
        if name not in read_stored_data_sets(processed).begun():
            return False
        files.remove_folder(folder)
    return True
