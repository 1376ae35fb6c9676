"""Names of others become paths inside their folder, or are refused."""

import os

import pytest

from ml_factory.errors import FileError
from tests.contract.doors import is_plain_name, stored_path

REFUSED = [
    "", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "..\\x", "a\0b", "a\nb", "\x7f", "C:", "c:x", "C:\\x",
    "x.", "x ", ".. ", "\ud800", "x" * 256, "\u00e4" * 128,
    None, 7, b"x", ["x"], True,
]  # fmt: skip
PLAIN = ["a", "train-xgboost-h20-s1-0a1b2c-2", ".hidden", "a..b", "10:30.csv", "console", "nullable", "\u00e4" * 127]


@pytest.mark.parametrize("name", REFUSED, ids=repr)
def test_stored_path_of_name_that_is_no_plain_name_raises(tmp_path, name):
    with pytest.raises(FileError, match="cannot be a file's") as refused:
        stored_path(tmp_path, "fine", name)
    assert len(str(refused.value)) < 400 and "\n" not in str(refused.value) and not is_plain_name(name)


def test_stored_path_of_plain_names_is_below_folder(tmp_path):
    assert [stored_path(tmp_path, name) for name in PLAIN] == [tmp_path / name for name in PLAIN]
    assert stored_path(tmp_path / "a", "b", "c", inside=tmp_path) == tmp_path / "a" / "b" / "c"


@pytest.mark.parametrize("linked", ["a", "a/b", "a/b/c"])
@pytest.mark.parametrize("dangling", [True, False])
def test_stored_path_through_symbolic_link_raises(tmp_path, linked, dangling):
    root, outside = tmp_path / "root", tmp_path / "outside"
    if not dangling:
        outside.mkdir()
    (root / linked).parent.mkdir(parents=True)
    (root / linked).symlink_to(outside)
    with pytest.raises(FileError, match="symbolic link") as refused:
        stored_path(root / "a", "b", "c", inside=root)
    assert str(root / linked) in str(refused.value)


def test_stored_path_below_folder_that_is_a_link_is_allowed(tmp_path):
    """The user may have moved the folder itself to another disk."""
    (tmp_path / "disk" / "a").mkdir(parents=True)
    os.symlink(tmp_path / "disk", tmp_path / "results")
    assert stored_path(tmp_path / "results", "a", "b") == tmp_path / "results" / "a" / "b"
    assert stored_path(tmp_path / "results" / "a", "b", inside=tmp_path / "results").name == "b"
