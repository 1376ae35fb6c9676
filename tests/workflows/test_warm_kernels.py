"""Kernels compiled ahead: by children, once a machine, and never in anybody's way."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from numba.core import caching

from ml_factory import progress
from ml_factory.storage.worker_process import WorkerUnavailable
from ml_factory.workflows import warm_kernels
from ml_factory.workflows.warm_kernels import TARGETS, compile_kernels

FAMILIES = ("fractional",)
AGAIN = """
import sys
from numba.core.event import Listener, install_listener
from ml_factory.workflows.warm_kernels import compile_share
compiled = []
class Told(Listener):
    on_start = lambda self, event: compiled.append(event.data["dispatcher"].py_func.__name__)
    on_end = lambda self, event: None
with install_listener("numba:compile", Told()):
    compile_share(sys.argv[1])
print(*compiled)
"""


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A machine with two cores and no kernels."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warm_kernels, "cores", lambda: 2)
    return tmp_path


class Children:
    """In the place of real ones: what they were asked, and one share that none of them manages."""

    def __init__(self, fails: str = "", seconds: float = 0.0):
        self.fails, self.seconds, self.started, self.requested = fails, seconds, 0, []

    def __call__(self, *_, **__):
        self.started += 1
        return self

    def call(self, request):
        self.requested.append(request["share"])
        time.sleep(self.seconds)
        if request["share"] == self.fails:
            raise WorkerUnavailable("the child process died")
        return {}, b""

    def close(self):
        pass


@pytest.mark.soak
def test_another_process_finds_everything_compiled(fresh):
    with progress.record() as phases:
        compile_kernels(FAMILIES)
    assert [(one.name, one.done, one.of) for one in phases] == [("kernels", 2, "kinds")]
    assert len(list(fresh.glob("*.whole"))) == 2
    for share in (*FAMILIES, TARGETS):
        again = subprocess.run([sys.executable, "-c", AGAIN, share], capture_output=True, text=True, check=True)
        assert again.stdout.split() == [], f"{share} was compiled again"


def test_it_is_done_once(fresh, monkeypatch):
    children = Children()
    monkeypatch.setattr(warm_kernels, "WorkerProcess", children)
    compile_kernels(("calendar", "volatility"))
    assert sorted(children.requested) == ["calendar", TARGETS, "volatility"] and children.started == 2
    assert children.requested.index("volatility") < children.requested.index("calendar"), (
        "the longest is to begin first"
    )
    compile_kernels(("calendar", "volatility"))
    assert len(children.requested) == 3


def test_who_waited_for_another_process_finds_nothing_left(fresh, monkeypatch):
    @contextmanager
    def waited(lock):
        for share in (*FAMILIES, TARGETS):
            warm_kernels._mark(fresh, share).touch()
        yield

    monkeypatch.setattr(warm_kernels, "WorkerProcess", Children())
    monkeypatch.setattr(warm_kernels, "file_lock", waited)
    with progress.record() as phases:
        compile_kernels(FAMILIES)
    assert not warm_kernels.WorkerProcess.started and not phases


def test_a_share_that_fails_is_said_and_left_to_the_first_call(fresh, monkeypatch, caplog):
    children = Children(fails="calendar")
    monkeypatch.setattr(warm_kernels, "WorkerProcess", children)
    compile_kernels(("calendar", "volatility"))
    assert "calendar could not be compiled ahead" in caplog.text and "died" in caplog.text
    assert sorted(path.name.split("-")[0] for path in fresh.glob("*.whole")) == [TARGETS, "volatility"]


@pytest.mark.parametrize(("cores", "families"), [(1, FAMILIES), (2, ())])
def test_nothing_is_started_where_nothing_is_to_be_gained(cores, families, monkeypatch):
    monkeypatch.setattr(warm_kernels, "WorkerProcess", Children())
    monkeypatch.setattr(warm_kernels, "cores", lambda: cores)
    compile_kernels(families)
    assert not warm_kernels.WorkerProcess.started


def test_a_mark_is_of_one_numba_and_one_processor(fresh, monkeypatch):
    monkeypatch.setattr(warm_kernels, "WorkerProcess", Children())
    compile_kernels(("calendar",))
    monkeypatch.setattr(warm_kernels, "get_host_cpu_name", lambda: "another")
    compile_kernels(("calendar",))
    assert len(warm_kernels.WorkerProcess.requested) == 4


def test_who_stops_it_does_not_wait_for_what_is_left(monkeypatch):
    def stop(one: progress.Phase) -> None:
        if one.done:
            raise KeyboardInterrupt

    monkeypatch.setattr(warm_kernels, "WorkerProcess", Children(seconds=0.05))
    with pytest.raises(KeyboardInterrupt), progress.watch(stop):
        compile_kernels(("momentum", "volatility", "volume", "regime", "calendar", "entropy"))
    assert (
        len(warm_kernels.WorkerProcess.requested) <= 4
    )  # two had begun when the first was done, and may have taken one more


def test_two_children_do_not_save_at_once(fresh, monkeypatch):
    """Numba's own way, index first and then the code, takes no lock."""
    told = []

    def save(files, key, data):
        told.append("begins")
        time.sleep(0.05)
        told.append("ends")

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", save)
    warm_kernels._save_one_at_a_time(fresh / "save.lock")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda key: caching.IndexDataCacheFile.save(None, key, b""), range(2)))
    assert told == ["begins", "ends"] * 2
