"""Pipes, devices, folders and sparse files in the place of files that are read: refused at once, never waited for."""

import os
from types import SimpleNamespace

import pytest

from ml_factory.errors import FileError
from ml_factory.storage import regular_files
from ml_factory.storage.files import files
from ml_factory.storage.regular_files import RefusedFileError, open_regular_file, read_regular_file
from tests.limited_reading import read_with_limits

HUGE = 64 << 30


def put_pipe(path):
    os.mkfifo(path)


def put_device(path):
    path.symlink_to("/dev/zero")


def put_folder(path):
    path.mkdir()


def put_sparse(path):
    with open(path, "wb") as file:
        file.write(b"PAR1 {}")
        file.truncate(HUGE)


PUT = {"pipe": put_pipe, "device": put_device, "folder": put_folder, "sparse": put_sparse}
TOML = {
    "lists": "a = " + "[" * 10_000,
    "digits": "a = " + "9" * 4400,
    "dotted": "[" + ".".join("a" * 20_000) + "]\nb = 1",
    "tables": "\n".join("[" + ".".join("a" * depth) + "]" for depth in range(2, 200)),
    "twice": "a = 1\n" * 2,
    "large": "a = 1\n" * 100_000,
}


def test_file_without_holes_whose_blocks_are_counted_later_is_read(tmp_path, monkeypatch):
    """ZFS counts the blocks of a new file seconds after it was written; it knows at once that there is no hole."""
    path, fstat = tmp_path / "new", os.fstat
    monkeypatch.setattr(regular_files, "_SPARSE_BYTES", 1 << 10)
    path.write_bytes(bytes(1 << 20))

    def late(descriptor):
        facts = fstat(descriptor)
        return SimpleNamespace(st_mode=facts.st_mode, st_size=facts.st_size, st_blocks=1)

    monkeypatch.setattr(os, "fstat", late)
    descriptor = open_regular_file(path)
    assert os.read(descriptor, 4) == bytes(4) and os.lseek(descriptor, 0, os.SEEK_CUR) == 4
    os.close(descriptor)
    with open(path, "r+b") as file:
        file.truncate(0)
        file.truncate(1 << 20)
    with pytest.raises(RefusedFileError, match="sparse"):
        open_regular_file(path)


@pytest.mark.parametrize(
    "reader",
    [
        "ml_factory.storage.files:files.read",
        "ml_factory.storage.files:files.read_json",
        "ml_factory.storage.files:files.sha256",
        "ml_factory.cli:_read_table",
        "ml_factory.notebook_parameters:read_notebook_parameters",
    ],
)
def test_reading_what_is_no_stored_file_raises_within_limits(tmp_path, reader):
    for kind, put in PUT.items():
        put(tmp_path / kind)
    for outcome in read_with_limits(reader, [tmp_path / kind for kind in PUT]):
        outcome.check_refused("FileError", "SettingsError")


def test_read_table_of_hostile_toml_raises_one_line_within_limits(tmp_path):
    paths = [tmp_path / f"{name}.toml" for name in TOML]
    for path in paths:
        path.write_text(TOML[path.stem])
    for outcome in read_with_limits("ml_factory.cli:_read_table", paths):
        outcome.check_refused("SettingsError", "FileError")


def test_open_regular_file_reads_small_sparse_files_and_large_stored_ones(tmp_path):
    with open(tmp_path / "small", "wb") as file:
        file.truncate(1 << 27)
    os.close(open_regular_file(tmp_path / "small"))
    with open(tmp_path / "half", "wb") as file:
        file.write(bytes(4 << 20))
        file.truncate(300 << 20)  # a disk that compresses well
    os.close(open_regular_file(tmp_path / "half"))


def test_read_regular_file_of_more_than_the_largest_raises(tmp_path):
    (tmp_path / "a").write_bytes(bytes(11))
    assert read_regular_file(tmp_path / "a", 11) == bytes(11)
    with pytest.raises(RefusedFileError, match="11 bytes, more than 10"):
        read_regular_file(tmp_path / "a", 10)
    with pytest.raises(FileError, match="11 bytes, more than 10"):
        files.read(tmp_path / "a", 10)
