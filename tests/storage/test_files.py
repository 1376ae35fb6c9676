"""Files on a mount that hangs: a child runs the operation, and its caller gets an error within the deadline.

A mount is a folder named by $ML_FACTORY_MOUNTS; a file in it that hangs has a lease on it (`hanging_file`). Real mounts
are in `tests/faults`.
"""

import errno
import hashlib
import os
import threading

import numpy as np
import pytest

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import FileError, UnresponsiveMountError
from ml_factory.process_identity import process_id
from ml_factory.storage import mounts
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.files import files
from ml_factory.storage.locks import file_lock
from ml_factory.storage.mounts import mount_of
from ml_factory.tracking.run_snapshot import RunSnapshot
from tests.storage.hanging_file import make_hanging_file


@pytest.fixture
def drive(tmp_path, monkeypatch):
    folder = tmp_path / "drive"
    folder.mkdir()
    monkeypatch.setenv("ML_FACTORY_MOUNTS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mounts, "DEADLINE", 3.0)
    monkeypatch.setattr(mounts, "RETRY_DEADLINE", 2.0)
    mounts.mount_at.cache_clear()
    yield folder
    mounts.mount_at.cache_clear()


@pytest.fixture
def untouched(monkeypatch, drive):
    """Fail any operating-system call of this very process on a path of the drive."""

    def forbid(name):
        whole = getattr(os, name)

        def observed(path, *args, **named):
            if isinstance(path, str | os.PathLike) and str(path).startswith(f"{drive}/"):
                raise AssertionError(f"this process asked {name} of {path}")
            return whole(path, *args, **named)

        monkeypatch.setattr(os, name, observed)

    for name in ("stat", "lstat", "listdir", "scandir", "open", "mkdir", "unlink", "replace", "readlink", "access"):
        forbid(name)


def test_every_operation_does_there_what_it_does_here(drive, tmp_path):
    for folder in (tmp_path / "here", drive / "there"):
        file, data = folder / "deep" / "a.bin", np.random.default_rng(0).bytes(1_000_000)
        assert (files.kind(file), files.kind(folder), files.names(folder)) == ("", "", [])
        for content in (b"", data):
            files.write(file, content)
            assert files.read(file) == content and files.size(file) == len(content)
        assert files.names(file.parent) == ["a.bin"] and files.names(file) == []
        assert (files.kind(file), files.kind(folder)) == ("file", "folder")
        assert files.sha256(file) == hashlib.sha256(data).hexdigest()
        assert files.free_bytes(folder / "not" / "yet") > 0 and files.is_writable(folder)
        files.replace(file, lambda temporary: temporary.write_bytes(b"new"))
        assert file.read_bytes() == b"new" and os.listdir(file.parent) == ["a.bin"]
        files.download(file, str(tmp_path / "copy"))
        assert (tmp_path / "copy").read_bytes() == b"new"
        with pytest.raises(FileError, match=r"absent.*No such file"):
            files.read(folder / "absent")
        with pytest.raises(FileError, match="The disk refused"):
            files.write(file / "below a file", b"")


def test_this_process_requests_nothing_of_a_mount_itself(drive, untouched):
    files.write_json(drive / "a" / "b.json", {"x": 1})
    assert files.read_json(drive / "a" / "b.json") == {"x": 1}
    assert files.names(drive / "a") == ["b.json"] and files.is_folder(drive / "a")
    registry = ArtifactRegistry(drive / "models")
    artifact = registry.register("DEMO", "model", "toy", {"a": np.ones(3)}, {"horizon": 5})
    assert registry.find("DEMO", 5).hash == artifact.hash and artifact.is_intact()
    assert artifact.load_state()["a"].tolist() == [1, 1, 1]
    with file_lock(drive / "some.lock"), CheckpointManager(drive / "checkpoints", run="r") as manager:
        manager.save_checkpoint("p", {"value": 1}, force=True)
        assert manager.wait(60) and len(manager.list_checkpoints()) == 1


def test_links_lead_onto_a_mount_and_are_not_followed_inside(drive, tmp_path, untouched):
    (tmp_path / "link").symlink_to(drive / "x" / "y")
    (tmp_path / "here").symlink_to("link")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    assert mount_of(tmp_path / "here" / "z") == str(drive)
    assert mount_of(tmp_path / "drives") is None and mount_of(tmp_path / "round" / "x") is None
    files.make_folder(drive / "x" / "y")
    files.write(tmp_path / "here" / "z", b"1")
    assert files.read(drive / "x" / "y" / "z") == b"1"


def test_a_mount_that_hangs_is_output_to_be_silent_and_requested_briefly_until_it_answers(drive, monkeypatch):
    def wait_at_most(seconds: float, retry: float) -> None:
        monkeypatch.setattr(mounts, "DEADLINE", seconds)
        monkeypatch.setattr(mounts, "RETRY_DEADLINE", retry)

    files.write_json(drive / "whole.json", [])
    make_hanging_file(drive / "hangs")
    wait_at_most(1.0, retry=0.5)
    with pytest.raises(UnresponsiveMountError, match="no answer for 1 s"):
        files.read(drive / "hangs")
    with pytest.raises(UnresponsiveMountError, match=r"does not answer.*no answer for 0.5 s.*mount it again"):
        files.read_json(drive / "hangs")
    wait_at_most(30.0, retry=20.0)  # a new child has to start, on a busy machine too
    assert files.read_json(drive / "whole.json") == []
    wait_at_most(1.0, retry=0.5)
    with pytest.raises(UnresponsiveMountError, match="no answer for 1 s"):  # it had answered again
        files.sha256(drive / "hangs")


@pytest.mark.parametrize("code", [errno.ENOTCONN, errno.ESTALE, errno.EHOSTDOWN, errno.EIO])
def test_files_of_disconnected_mount_raise_unresponsive_mount_error(drive, monkeypatch, code):
    answer = {"errno": code, "strerror": os.strerror(code)}
    monkeypatch.setattr(mounts.WorkerProcess, "call", lambda *args: (answer, b""))
    with pytest.raises(FileError if code == errno.EIO else UnresponsiveMountError, match=os.strerror(code)):
        files.read(drive / "a.bin")


def test_files_of_mount_with_nul_in_path_raise_file_error_and_keep_worker(drive):
    files.write(drive / "a.bin", b"a")
    with pytest.raises(FileError, match="null"):
        files.read(drive / "a\0b")
    assert not files.is_unresponsive(drive) and files.read(drive / "a.bin") == b"a"


def test_a_registry_that_is_not_received_of_is_no_empty_one(drive, monkeypatch):
    registry = ArtifactRegistry(drive / "models")
    artifact = registry.register("DEMO", "model", "toy", {"a": 1}, {"horizon": 5})
    state = artifact.path / "state.safetensors"
    state.unlink()
    make_hanging_file(state)
    monkeypatch.setattr(mounts, "DEADLINE", 1.0)
    for query in (artifact.is_intact, artifact.load_state):
        with pytest.raises(UnresponsiveMountError):
            query()
    (artifact.path / "artifact.json").unlink()
    make_hanging_file(artifact.path / "artifact.json")
    for query in (registry.list, registry.find):
        with pytest.raises(UnresponsiveMountError, match="no answer for"):
            query("DEMO")


def test_threads_query_one_mount_at_once(drive):
    make_hanging_file(drive / "hangs")
    files.write_json(drive / "whole.json", [1])
    received = []

    def query():
        with pytest.raises(UnresponsiveMountError):
            files.read(drive / "hangs")
        received.append(True)

    thread = threading.Thread(target=query)
    thread.start()
    assert all(files.read_json(drive / "whole.json") == [1] for _ in range(20))
    thread.join()
    assert received == [True]


ENDS = """
import sys
from ml_factory.errors import UnresponsiveMountError
from ml_factory.process_identity import process_id
from ml_factory.storage import mounts
from ml_factory.storage.files import files
mounts.DEADLINE = 1.0
try:
    files.read(sys.argv[1])
except UnresponsiveMountError as error:
    print(error.got, flush=True)
"""


def test_a_mount_is_read_where_more_than_a_thousand_files_are_open(drive):
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        files.write_json(drive / "a.json", [1])
        assert files.read_json(drive / "a.json") == [1]
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_worker_process_that_died_between_requests_leaves_no_open_socket(drive):
    for content in ([1], [2]):
        files.write_json(drive / "a.json", content)
        (worker,) = mounts.mount_at(str(drive), "ml_factory.storage.files", process_id())._idle
        channel, process = worker._channel, worker._process
        process.kill()
        process.wait()
        assert files.read_json(drive / "a.json") == content
        assert channel.fileno() == -1 and worker._process is not process


def test_a_process_ends_while_its_question_hangs(drive, spawn):
    make_hanging_file(drive / "hangs")
    process = spawn(ENDS, drive / "hangs", ML_FACTORY_MOUNTS=str(drive))
    assert process.stdout.readline() == "no answer for 1 s\n"
    assert process.wait(60) == 0


def test_a_child_made_by_fork_requests_by_a_child_of_its_own(drive, spawn):
    code = """
import os, sys
from ml_factory.storage.files import files
files.write_json(sys.argv[1], [1])
child = os.fork()
if child == 0:
    os._exit(7 if files.read_json(sys.argv[1]) == [1] else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), files.read_json(sys.argv[1]))
"""
    process = spawn(code, drive / "a.json", ML_FACTORY_MOUNTS=str(drive))
    assert process.stdout.read() == "7 [1]\n"


def test_what_wandb_is_to_keep_is_looked_for_by_a_child(drive, untouched, tmp_path):
    for name in ("part-1.json", "part-0.json", "other.json"):
        files.write(drive / "run" / name, b"four")
    (tmp_path / "aside").mkdir()
    snapshot = RunSnapshot("r", str(tmp_path / "pool"), ((str(drive / "run"), "part-*.json"),))
    assert snapshot.content() == {"part-0.json": 4, "part-1.json": 4} and snapshot.size() == 8
    assert list(snapshot.pack(tmp_path / "aside")) == ["run", "fences"]
    assert sorted(os.listdir(tmp_path / "aside")) == ["part-0.json", "part-1.json", "parts.json"]
