"""Prepared data sets that nothing reads any more, and the parts that they alone shared."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ml_factory.datasets.store import PARTS, DatasetStore, read_dataset_manifest
from ml_factory.errors import CheckpointError, NotPreparedError
from ml_factory.storage.files import files
from ml_factory.storage.folder_removal import REMOVED
from ml_factory.storage.locks import check_lock_file_free, file_lock, local_lock_path
from ml_factory.storage.stored_paths import stored_path

_SHARED, _DATA_SET = f"../{PARTS}/", re.compile(r"[0-9a-f]{12}")


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

    def shared_parts(self, names: Collection[str]) -> set[str]:
        """Return the names of the shared part files of these data sets."""
        return {
            file.removeprefix(_SHARED)
            for name in names for file in self.manifests[name]["files"] if file.startswith(_SHARED)
        }  # fmt: skip

    def begun(self) -> set[str]:
        """Return the folder names of data sets that are not complete: of a `prepare` under way, or interrupted."""
        names = set(files.names(self.processed)) - set(self.manifests)
        return {name for name in names if _DATA_SET.fullmatch(name)}

    def begun_parts(self, name: str) -> list[Path]:
        """List the part files of a data set that is not complete, half-written ones included."""
        names = files.names(self.processed / PARTS)
        own = [one for one in names if one.removeprefix(".").startswith(f"{name}-")]
        return [self.processed / PARTS / one for one in own if one not in self.shared_parts(list(self.manifests))]

    def unreferenced_parts(self, without: Collection[str] = ()) -> list[Path]:
        """List the part files that no data set refers to.

        A part whose data set is not complete yet may be of a `prepare` that is under way, and is left out.

        without : names of data sets that do not count.
        """
        referenced = self.shared_parts([name for name in self.manifests if name not in without])
        begun = self.begun()
        found = [name for name in files.names(self.processed / PARTS) if name.endswith(".npy")]
        return [
            self.processed / PARTS / name for name in found
            if name not in referenced and name.partition("-")[0] not in begun
        ]  # fmt: skip


def read_stored_data_sets(processed: Path) -> StoredDataSets:
    """Read the manifests of a symbol's data sets. Raises UnresponsiveMountError."""
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
    """Delete a data set, and the parts that no other refers to; return False where it has become the current one."""
    folder = stored_path(processed, name, inside=processed.parent)
    with file_lock(processed / "prepare.lock"):
        before = read_stored_data_sets(processed)
        if name not in before.superseded(()):
            return False
        own = before.shared_parts([name])
        files.remove_folder(folder)
        for path in read_stored_data_sets(processed).unreferenced_parts():
            if path.name in own:
                files.remove(stored_path(processed, PARTS, path.name, inside=processed.parent))
    return True


def is_preparing(processed: Path) -> bool:
    """Return whether a process of this machine prepares this symbol now."""
    try:
        check_lock_file_free(local_lock_path(processed / "prepare.lock"), "the prepared data")
    except CheckpointError:
        return True
    return False


def remove_interrupted_data_set(processed: Path, name: str) -> bool:
    """Delete what a killed `prepare` left of a data set; return False where it is complete, or a process is at it."""
    folder = stored_path(processed, name, inside=processed.parent)
    if is_preparing(processed):
        return False
    with file_lock(processed / "prepare.lock"):
        stored = read_stored_data_sets(processed)
        if name not in stored.begun():
            return False
        for path in stored.begun_parts(name):
            files.remove(stored_path(processed, PARTS, path.name, inside=processed.parent))
        files.remove_folder(folder)
    return True


def remove_unreferenced_parts(processed: Path) -> bool:
    """Delete the parts that no data set refers to: what a killed removal left."""
    with file_lock(processed / "prepare.lock"):
        for path in read_stored_data_sets(processed).unreferenced_parts():
            files.remove(stored_path(processed, PARTS, path.name, inside=processed.parent))
    return True
