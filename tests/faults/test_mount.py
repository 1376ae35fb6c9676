"""The faulty drive itself: each habit seen with plain file calls through a real mount."""

import errno
import os
import subprocess
import sys
import threading

import pytest

from tests.faults.cloud import Cloud
from tests.faults.drive import Drive


def names(mount) -> list[str]:
    return sorted(path.name for path in mount.cloud.rglob("*") if path.is_file())


def refused(code: int | set[int], call, *args) -> None:
    with pytest.raises(OSError) as caught:
        call(*args)
    assert caught.value.errno in ({code} if isinstance(code, int) else code)


def test_faulty_mount_without_faults_behaves_as_file_system(mount):
    drive = mount()
    (drive.path / "a").mkdir()
    file = drive.path / "a" / "x"
    file.write_bytes(b"12345")
    with open(file, "r+b") as again:
        again.seek(3)
        again.write(b"abcdef")
        again.truncate(7)
        os.fsync(again.fileno())
    assert file.read_bytes() == b"123abcd"
    os.rename(file, drive.path / "a" / "y")
    assert os.listdir(drive.path / "a") == ["y"]
    refused(errno.ENOTEMPTY, os.rmdir, drive.path / "a")
    (drive.path / "a" / "y").unlink()
    os.rmdir(drive.path / "a")
    assert os.listdir(drive.path) == []
    big = os.urandom(3_000_000)
    (drive.path / "big").write_bytes(big)
    assert (drive.path / "big").read_bytes() == big


def test_faulty_mount_after_kill_shows_uploaded_files_only(mount, tmp_path):
    drive = mount()
    (drive.path / "kept").write_bytes(b"old")
    drive.upload()
    (drive.path / "kept").write_bytes(b"new, never uploaded")
    (drive.path / "lost").write_bytes(b"x")
    drive.kill()
    refused(errno.ENOTCONN, os.listdir, drive.path)
    assert {path.name for path in drive.cloud_only(tmp_path / "copy").iterdir()} == {"kept"}
    drive.remount()
    assert os.listdir(drive.path) == ["kept"]
    assert (drive.path / "kept").read_bytes() == b"old"


def test_faulty_drive_uploads_in_seed_dependent_order():
    seen = set()
    for seed in range(200):
        drive = Drive(Cloud(), seed=seed, uploads=0.2)
        for name in "abcd":
            for text in (b"old", b"new"):
                number = drive.open(f"/{name}", create=True, cut=True)
                drive.write(number, text, 0)
                drive.close(number)
                drive.forget(number)
        seen.add(tuple(sorted((path, bytes(data)) for path, data in drive.cloud.files.items())))
    assert len(seen) > 50
    mixes = [dict(files) for files in seen]
    assert any(mix.get("/a") == b"old" and mix.get("/c") == b"new" for mix in mixes)
    assert any("/a" not in mix and "/c" in mix for mix in mixes)
    assert any(data == b"" for mix in mixes for data in mix.values()), "nothing was caught in the middle"


def test_faulty_mount_raises_injected_errno(mount):
    drive = mount()
    file = drive.path / "x"
    file.write_bytes(b"1")
    for name in ("ENOTCONN", "EIO", "ETIMEDOUT", "ESTALE"):
        drive.fault(name, "read", "names")
        refused(getattr(errno, name), file.read_bytes)
        refused(getattr(errno, name), os.listdir, drive.path)
        drive.heal()
    drive.fault("EIO", "write", path="*x", after=1, times=1)
    file.write_bytes(b"2")
    refused(errno.EIO, file.write_bytes, b"3")
    file.write_bytes(b"4")
    assert file.read_bytes() == b"4"


def test_faulty_mount_quota_counts_trash_but_not_truncation(mount):
    drive = mount(quota=1_000_000)
    file = drive.path / "x"
    for _ in range(4):
        file.write_bytes(bytes(200_000))
        file.unlink()
    assert drive.facts()["trash"] == 800_000
    refused(errno.EDQUOT, file.write_bytes, bytes(300_000))
    drive.query("empty trash")
    for _ in range(20):
        file.write_bytes(bytes(200_000))  # cut and written again
        os.truncate(file, 0)
    assert drive.facts()["trash"] == 0
    file.write_bytes(bytes(300_000))
    (drive.path / "new").write_bytes(bytes(10))
    os.replace(drive.path / "new", file)
    assert drive.facts()["trash"] == 300_000
    assert os.statvfs(drive.path).f_bavail * 4096 == pytest.approx(700_000, abs=5000)
    drive.query("set", honest=False)
    assert os.statvfs(drive.path).f_bavail * 4096 > 10**9


def test_faulty_mount_hang_blocks_call_until_healed(mount):
    drive = mount()
    drive.fault("hang", "write")
    done = threading.Event()

    def write() -> None:
        (drive.path / "x").write_bytes(b"1")
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    drive.wait_struck("hang")
    assert not done.is_set()
    assert os.listdir(drive.path) == ["x"]  # others go on
    drive.heal()
    thread.join()
    assert (drive.path / "x").read_bytes() == b"1"


def test_faulty_mount_kill_ends_hanging_calls(mount):
    drive = mount()
    (drive.path / "x").write_bytes(b"1")
    drive.fault("hang", "read")
    read = f"import sys\ntry: open({str(drive.path / 'x')!r}, 'rb').read()\nexcept OSError as e: sys.exit(e.errno)"
    reader = subprocess.Popen([sys.executable, "-c", read])
    drive.wait_struck("hang")
    assert drive.facts()["hanging"] == 1 and reader.poll() is None
    drive.kill()
    assert reader.wait() in {errno.ENOTCONN, errno.ECONNABORTED}


def test_faulty_mount_drop_and_torn_faults_lose_written_bytes(mount):
    drive = mount()
    drive.fault("drop", "write", path="*dropped")
    drive.fault("torn", "write", path="*torn")
    (drive.path / "dropped").write_bytes(b"12345678")
    (drive.path / "torn").write_bytes(b"12345678")
    assert (drive.path / "dropped").read_bytes() == b""
    assert (drive.path / "torn").read_bytes() == b"1234"
    drive.fault("drop", "upload", path="*never")
    drive.fault("torn", "upload", path="*half")
    (drive.path / "never").write_bytes(b"12345678")
    (drive.path / "half").write_bytes(b"12345678")
    assert (drive.path / "never").read_bytes() == b"12345678" == (drive.path / "half").read_bytes()
    drive.upload()
    drive.remount()
    assert not (drive.path / "never").exists()
    assert (drive.path / "half").read_bytes() == b"1234"


def test_faulty_mount_duplicate_and_scramble_faults_give_copies_and_random_times(mount):
    drive = mount()
    file = drive.path / "slot-0.ckpt"
    file.write_bytes(b"old")
    drive.upload()
    drive.fault("duplicate", "upload")
    file.write_bytes(b"new")
    drive.upload()
    assert names(drive) == ["slot-0 (1).ckpt", "slot-0.ckpt"]
    drive.remount()
    assert file.read_bytes() == b"old"
    assert (drive.path / "slot-0 (1).ckpt").read_bytes() == b"new"
    drive.fault("scramble", "stat")
    assert len({file.stat().st_mtime for _ in range(5)}) == 5


def test_faulty_mount_rename_by_copy_killed_midway_leaves_partial_file(mount):
    drive = mount(uploads=0.9)
    (drive.path / "old").write_bytes(bytes(10))
    (drive.path / "new").write_bytes(b"x" * 400_000)
    drive.upload()
    drive.fault("copy", "rename")
    drive.fault("die", "copy", after=3)
    # the call that is under way is told ECONNABORTED, those after it ENOTCONN
    refused({errno.ENOTCONN, errno.ECONNABORTED}, os.replace, drive.path / "new", drive.path / "old")
    drive.remount()
    assert (drive.path / "new").stat().st_size == 400_000
    assert (drive.path / "old").stat().st_size < 400_000


def test_faulty_mount_slow_fault_limits_write_rate(mount):
    drive = mount()
    drive.fault("slow", "write", rate=1e9)
    (drive.path / "x").write_bytes(bytes(100_000))
    assert drive.facts()["struck"] == {"slow": 1}
    assert drive.facts()["calls"].count("write /x") == 1
