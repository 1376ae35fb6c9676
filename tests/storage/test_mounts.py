"""Mount detection by tables as real machines have them; only `storage` knows that a mount can hang."""

import ast
from pathlib import Path

import pytest

from ml_factory.storage import mounts
from ml_factory.storage.files import files


@pytest.mark.parametrize(
    ("table", "path", "remote"),
    [
        ("/dev/sda / ext4 rw", "/content/drive/MyDrive/x", False),
        ("/dev/sda / ext4 rw\ndrive /content/drive fuse.drive rw", "/content/drive/MyDrive/x", True),
        ("/dev/sda / ext4 rw\ndrive /content/drive fuse.drive rw", "/content/drives/x", False),
        ("host:/ /mnt/my\\040disk nfs4 rw\n/dev/sda / ext4 rw", "/mnt/my disk/x", True),
        ("over / fuse.fuse-overlayfs rw", "/x", False),
    ],
)
def test_what_is_a_mount(table, path, remote, monkeypatch, tmp_path):
    (tmp_path / "mounts").write_text("".join(f"{line} 0 0\n" for line in table.splitlines()))
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "mounts")
    assert files.is_remote(path) is remote


ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "ml_factory").rglob("*.py"), *(ROOT / "utils").rglob("*.py")])


def _names(tree):
    """Return every name and dotted module that the code mentions."""
    for node in ast.walk(tree):
        yield from {getattr(node, field, None) for field in ("id", "attr", "module", "name")} - {None}


def test_mounts_are_named_by_the_files_object_alone():
    """And by the private folder, which is on none; it is below the files object in the import order."""
    known = {"mount_of", "mount_at", "ml_factory.storage.mounts"}
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
    found = {path for path, tree in trees.items() if known & set(_names(tree))}
    assert found == {f"ml_factory/storage/{name}.py" for name in ("mounts", "files", "private_folder")}


def test_no_process_catches_an_unresponsive_mount_only_to_raise_it_again():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler) and "UnresponsiveMountError" in ast.unparse(node.type or node):
                assert not (isinstance(node.body[0], ast.Raise) and node.body[0].exc is None), f"{path}:{node.lineno}"
