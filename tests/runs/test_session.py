"""The runtime's age comes from its process 1, not from the notebook."""

import math
import os
import time

import pytest

from ml_factory.runs import session


def write_proc(folder, started: float, name: str = "init") -> None:
    (folder / "1").mkdir()
    ticks = os.sysconf("SC_CLK_TCK")
    boot = 1_000_000
    fields = " ".join(["S", *["7"] * 18, str(int((started - boot) * ticks)), "9", "9"])
    (folder / "1" / "stat").write_text(f"1 ({name}) {fields}\n")
    (folder / "stat").write_text(f"cpu 1 2 3\nbtime {boot}\nprocesses 5\n")


@pytest.mark.parametrize("name", ["init", "a (b) c) S 5"])
def test_start_is_read_from_proc(tmp_path, name):
    write_proc(tmp_path, 1_700_000_000, name)
    assert session.runtime_started(tmp_path) == pytest.approx(1_700_000_000, abs=0.02)


def test_without_proc_the_runtime_begins_now(tmp_path):
    assert session.runtime_started(tmp_path) == pytest.approx(time.time(), abs=5)


def test_hours(monkeypatch):
    monkeypatch.setattr(session, "runtime_started", lambda: 1000.0)
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    assert session.hours_remaining() == math.inf
    assert session.hours_remaining(limit_hours=3, now=1000 + 3600) == 2
    monkeypatch.setenv("COLAB_RELEASE_TAG", "x")
    assert session.hours_remaining(now=1000 + 7200) == 10
    assert session.hours_remaining("pro", now=1000 + 7200) == 22
    assert session.hours_remaining("unheard of", now=1000 + 7200) == 10
    assert session.hours_remaining(now=1e9) == 0


def test_this_machine_started_before_now():
    assert 0 < session.runtime_started() <= time.time()
