"""Files are there whole or not at all."""

import errno
import hashlib
import os
import time

import pytest

from ml_factory.errors import FileError, WorkspaceError
from tests.contract.doors import files


def test_a_file_is_replaced_whole_and_nothing_stays_other_it(tmp_path):
    file = tmp_path / "deep" / "a.bin"
    for data in (b"old", b"new and longer", b""):
        files.write(file, data)
        assert file.read_bytes() == data
        assert files.sha256(file) == hashlib.sha256(data).hexdigest()
    assert [path.name for path in file.parent.iterdir()] == ["a.bin"]


@pytest.mark.parametrize("operation", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_every_fault_of_every_operation_leaves_the_old_file(tmp_path, monkeypatch, operation, code):
    file = tmp_path / "a.bin"
    file.write_bytes(b"old")

    def fail(*arguments):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, fail)
        words = r"a\.bin" if code == errno.EIO else r"No space left.*a\.bin.*bytes free.*at least 3 bytes"
        with pytest.raises(WorkspaceError, match=words):
            files.write(file, b"new")
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_temporary_file_of_a_living_writer_stays_and_that_of_a_killed_one_goes_after_an_hour(tmp_path):
    for name, minutes in ((".a.bin.999999999-1.tmp", 50), (".a.bin.12-3.tmp", 70), (".b.bin.1-1.tmp", 70)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - 60 * minutes,) * 2)  # of the last write
    files.write(tmp_path / "a.bin", b"new")
    assert sorted(os.listdir(tmp_path)) == [".a.bin.999999999-1.tmp", ".b.bin.1-1.tmp", "a.bin"]


def test_file_replaced_by_endless_device_is_refused(tmp_path):
    (tmp_path / "a.json").symlink_to("/dev/zero")
    with pytest.raises(FileError, match="not a regular file"):
        files.read(tmp_path / "a.json")
