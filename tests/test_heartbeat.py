"""A line every few seconds while work goes on, in a pipe and below a notebook's cell."""

import threading
import types

import pytest

from ml_factory import heartbeat
from ml_factory.heartbeat import CellHeartbeat, Heartbeat
from ml_factory.progress import Phase, duration, phase


def test_heartbeat_writes_the_work_the_phase_its_total_and_the_time_so_far():
    lines, enough = [], threading.Event()

    def write(line: str) -> None:
        lines.append(line)
        if "500 of 2,000" in line:
            enough.set()

    with Heartbeat(write, "preparing MES", seconds=0.01), phase("features", 2_000) as done:
        done(500)
        assert enough.wait(10)
    count = len(lines)
    line = next(line for line in lines if "500 of 2,000" in line)
    assert line.startswith("preparing MES, features: 500 of 2,000 rows") and line.endswith("s so far")
    with phase("labels", 5):
        pass
    assert len(lines) == count and not any(thread.name == "heartbeat" for thread in threading.enumerate())


def test_heartbeat_stops_after_an_error_in_the_block():
    with pytest.raises(ZeroDivisionError), Heartbeat(lambda line: None, seconds=60.0):
        raise ZeroDivisionError
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())


def test_phase_line_by_hand():
    """300 of 1,000 rows, 100 of them before this session, 200 in 50 s: 4 a second, 175 s for the other 700."""
    one = Phase("training", 1_000, done=300, start=100, seconds=50.0, over=True, of="rounds")
    assert one.rate == 4.0 and one.left == 175.0
    assert one.line() == "training: 300 of 1,000 rounds, 4 a second, 3 min left"
    assert Phase("reading", None).line() == "reading" and Phase("reading", None).left is None
    assert Phase("x", 10, done=4, start=4).left is None  # nothing done in this session yet
    assert (duration(119.4), duration(121)) == ("119 s", "2 min")


class Events:
    def __init__(self):
        self.held = {"pre_run_cell": [], "post_run_cell": []}

    def register(self, name, function):
        self.held[name].append(function)

    def unregister(self, name, function):
        self.held[name].remove(function)


def test_cell_heartbeat_shows_one_line_that_is_updated_and_cleared(monkeypatch):
    shown, twice = [], threading.Event()

    def seen(how: str, data: dict) -> None:
        shown.append((how, data["text/plain"]))
        if len(shown) > 2:
            twice.set()

    def display(data, **_):
        seen("shown", data)
        return types.SimpleNamespace(update=lambda later, **_: seen("updated", later))

    monkeypatch.setattr(heartbeat, "display_of", types.SimpleNamespace(display=display))
    monkeypatch.setattr(heartbeat, "NOTEBOOK_SECONDS", (0.01, 0.01))
    shell = types.SimpleNamespace(events=Events())
    CellHeartbeat().register(shell)
    CellHeartbeat().register(shell)
    assert [len(held) for held in shell.events.held.values()] == [1, 1]
    shell.events.held["pre_run_cell"][0]()
    with phase("kernels", 10, of="kinds") as done:
        done(3)
        assert twice.wait(10)
    shell.events.held["post_run_cell"][0]()
    assert [how for how, _ in shown].count("shown") == 1 and shown[-1] == ("updated", "")
    assert any("kernels: 3 of 10 kinds" in text for _, text in shown)


def test_no_line_is_shown_in_cells_that_nobody_looks_at(monkeypatch):
    shell = types.SimpleNamespace(events=Events(), user_ns={})
    monkeypatch.setattr(heartbeat, "ipython", types.SimpleNamespace(get_ipython=lambda: shell))
    for name in ("COLAB_RELEASE_TAG", "JPY_SESSION_NAME"):
        monkeypatch.delenv(name, raising=False)
    heartbeat.show_in_cells()
    assert shell.events.held["pre_run_cell"] == []
    monkeypatch.setenv("JPY_SESSION_NAME", "01.ipynb")
    heartbeat.show_in_cells()
    assert len(shell.events.held["pre_run_cell"]) == 1
