"""Kernels compiled ahead: by children, once a machine, and never in anybody's way."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from numba.core import caching

from ml_factory import progress
from ml_factory.storage.worker_process import WorkerUnavailableError
from ml_factory.workflows import warm_kernels
from ml_factory.workflows.warm_kernels import TARGETS, warm_up_kernels

FAMILIES = ("fractional",)
AGAIN = """
import sys
from numba.core.event import Listener, install_listener
from ml_factory.workflows.warm_kernels import warm_up_kernel_share
compiled = []
class Told(Listener):
    on_start = lambda self, event: compiled.append(event.data["dispatcher"].py_func.__name__)
    on_end = lambda self, event: None
with install_listener("numba:compile", Told()):
    warm_up_kernel_share(sys.argv[1])
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
        self.requested.append(request)
        time.sleep(self.seconds)
        if request == self.fails:
            raise WorkerUnavailableError("the child process died")

    def close(self):
        pass


@pytest.mark.soak
def test_compile_kernels_leaves_no_compilation_for_next_process(fresh):
    with progress.record_progress() as phases:
        warm_up_kernels(FAMILIES)
    assert [(one.name, one.done, one.of) for one in phases] == [("kernels", 2, "kinds")]
    assert len(list(fresh.glob("*.whole"))) == 2
    for share in (*FAMILIES, TARGETS):
        again = subprocess.run([sys.executable, "-c", AGAIN, share], capture_output=True, text=True, check=True)
        assert again.stdout.split() == [], f"{share} was compiled again"


def test_compile_kernels_second_call_starts_no_worker(fresh, monkeypatch):
    children = Children()
    monkeypatch.setattr(warm_kernels, "WorkerProcess", children)
    warm_up_kernels(("calendar", "volatility"))
    assert sorted(children.requested) == ["calendar", TARGETS, "volatility"] and children.started == 2
    assert children.requested.index("volatility") < children.requested.index("calendar"), (
        "the longest is to begin first"
    )
    warm_up_kernels(("calendar", "volatility"))
    assert len(children.requested) == 3


def test_compile_kernels_after_waiting_for_lock_skips_compiled_kernels(fresh, monkeypatch):
    @contextmanager
    def waited(lock):
        for share in (*FAMILIES, TARGETS):
            warm_kernels._mark(fresh, share).touch()
        yield

    monkeypatch.setattr(warm_kernels, "WorkerProcess", Children())
    monkeypatch.setattr(warm_kernels, "file_lock", waited)
    with progress.record_progress() as phases:
        warm_up_kernels(FAMILIES)
    assert not warm_kernels.WorkerProcess.started and [one.name for one in phases] == ["kernels"]


def test_compile_kernels_with_failing_family_warns_and_compiles_others(fresh, monkeypatch, caplog):
    children = Children(fails="calendar")
    monkeypatch.setattr(warm_kernels, "WorkerProcess", children)
    warm_up_kernels(("calendar", "volatility"))
    assert "calendar could not be compiled ahead" in caplog.text and "died" in caplog.text
    assert sorted(path.name.split("-")[0] for path in fresh.glob("*.whole")) == [TARGETS, "volatility"]


@pytest.mark.parametrize(("cores", "families"), [(1, FAMILIES), (2, ())])
def test_compile_kernels_with_one_core_or_no_family_starts_no_worker(cores, families, monkeypatch):
    monkeypatch.setattr(warm_kernels, "WorkerProcess", Children())
    monkeypatch.setattr(warm_kernels, "cores", lambda: cores)
    warm_up_kernels(families)
    assert not warm_kernels.WorkerProcess.started


def test_compile_kernels_marks_are_per_processor(fresh, monkeypatch):
    monkeypatch.setattr(warm_kernels, "WorkerProcess", Children())
    warm_up_kernels(("calendar",))
    monkeypatch.setattr(warm_kernels, "get_host_cpu_name", lambda: "another")
    warm_up_kernels(("calendar",))
    assert len(warm_kernels.WorkerProcess.requested) == 4


@pytest.mark.parametrize("another", [(Path("elsewhere/kernels.py"), 7), (None, 8)], ids=["path", "time"])
def test_compile_kernels_marks_are_per_checkout_and_file_time(fresh, monkeypatch, tmp_path_factory, another):
    sources = [tmp_path_factory.mktemp("sources") / "kernels.py"]
    monkeypatch.setattr(warm_kernels, "numba_source_files", lambda: {sources[0]: b""})
    monkeypatch.setattr(warm_kernels, "WorkerProcess", Children())
    sources[0].touch()
    os.utime(sources[0], (7, 7))
    warm_up_kernels(("calendar",))
    path, when = another
    sources[0] = sources[0].parent / path if path else sources[0]
    sources[0].parent.mkdir(exist_ok=True)
    sources[0].touch()
    os.utime(sources[0], (when, when))
    warm_up_kernels(("calendar",))
    assert len(warm_kernels.WorkerProcess.requested) == 4


def test_compile_kernels_on_interrupt_stops_remaining_families(monkeypatch):
    def stop(one: progress.ProgressPhase) -> None:
        if one.done:
            raise KeyboardInterrupt

    monkeypatch.setattr(warm_kernels, "WorkerProcess", Children(seconds=0.05))
    with pytest.raises(KeyboardInterrupt), progress.report_progress_to(stop):
        warm_up_kernels(("momentum", "volatility", "volume", "regime", "calendar", "entropy"))
    assert (
        len(warm_kernels.WorkerProcess.requested) <= 4
    )  # two had begun when the first was done, and may have taken one more


def test_save_one_at_a_time_serialises_kernel_cache_writes(fresh, monkeypatch):
    """Numba's own way, index first and then the code, takes no lock."""
    reported = []

    def save(files, key, data):
        reported.append("begins")
        time.sleep(0.05)
        reported.append("ends")

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", save)
    warm_kernels._save_one_at_a_time(fresh / "save.lock")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda key: caching.IndexDataCacheFile.save(None, key, b""), range(2)))
    assert reported == ["begins", "ends"] * 2
