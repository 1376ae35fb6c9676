"""The cloud's files: all that remains of a workspace when its machine is preempted."""

import os
import zlib
from pathlib import Path, PurePosixPath


class Cloud:
    """path -> content of each file that has arrived, kept in a folder as well when one is given, so that it survives
    the process. A folder that has files already is what an earlier machine left."""

    def __init__(self, folder: Path | None = None):
        self.folder = folder
        self.files: dict[str, bytes] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for file in folder.rglob("*"):
                if file.is_file():
                    self.files[f"/{file.relative_to(folder).as_posix()}"] = file.read_bytes()

    def put(self, path: str, data: bytes | None, duplicate: bool = False) -> None:
        """The file arrives, whole; None: it is gone. duplicate : under a second name, and the old one stays."""
        if duplicate and data is not None and path in self.files:
            path = second_name(path)
        if data is None:
            self.files.pop(path, None)
        else:
            self.files[path] = data
        if self.folder is not None:
            self._keep(self.folder / path[1:], data)

    def _keep(self, there: Path, data: bytes | None) -> None:
        if data is None:
            there.unlink(missing_ok=True)
            return
        there.parent.mkdir(parents=True, exist_ok=True)
        # outside the tree, so that a kill leaves no partial file in it
        temporary = self.folder.parent / f"{self.folder.name}.uploading"
        temporary.write_bytes(data)
        os.replace(temporary, there)
        os.utime(there, (0, zlib.crc32(there.name.encode()) >> 1))  # a time that says nothing


def second_name(path: str) -> str:
    """As Drive shows the second of two files with one name."""
    pure = PurePosixPath(path)
    return str(pure.with_name(f"{pure.stem} (1){pure.suffix}"))
