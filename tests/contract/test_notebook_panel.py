"""What a long cell shows: panel, curves and offers in an interactive notebook, lines elsewhere.

tests/browser sees the same in a real JupyterLab. Here the screen is written down, and widgets are real ones without a
front end.
"""

import json
import os
import signal
import threading
import types

import ipywidgets as widgets
import pandas as pd
import pytest

from ml_factory.storage.workspace import Workspace
from tests.contract import doors

VIEW = "application/vnd.jupyter.widget-view+json"


class Events:
    def __init__(self):
        self.held = {"pre_run_cell": [], "post_run_cell": []}

    def register(self, name, function):
        self.held[name].append(function)

    def unregister(self, name, function):
        self.held[name].remove(function)


class Screen(list):
    """(how, data) in order: shown, or updated in its place; `stored` is what a notebook keeps of each place."""

    def __init__(self):
        super().__init__()
        self.stored = []

    def display(self, data, **_):
        place = len(self.stored)
        self.stored.append(data)
        self.append(("shown", data))

        def update(later, **_):
            self.stored[place] = later
            self.append(("updated", later))

        return types.SimpleNamespace(update=update)

    def kinds(self) -> list[tuple[str, str]]:
        return [(how, "picture" if "image/png" in data else "line") for how, data in self]


@pytest.fixture
def screen(monkeypatch):
    given = Screen()
    monkeypatch.setattr("IPython.display.display", given.display)
    monkeypatch.setattr(doors.notebook_panel, "SECONDS", (0.0, 0.01))
    for name in ("COLAB_RELEASE_TAG", "JPY_SESSION_NAME"):
        monkeypatch.delenv(name, raising=False)
    return given


@pytest.fixture
def shell():
    kernel = types.SimpleNamespace(shell_channel_thread=None)
    return types.SimpleNamespace(events=Events(), user_ns={}, kernel=kernel, set_custom_exc=lambda *_: None)


def machine(workspace):
    return types.SimpleNamespace(on_colab=False, accelerator="cpu", device_name="", workspace=workspace, tracking="off")


def shown_panels(screen) -> list[tuple]:
    """Bar, label and button of each panel that is on the screen."""
    with pytest.deprecated_call():  # of ipywidgets: the list of all widgets
        known = widgets.Widget.widgets
    boxes = [known[data[VIEW]["model_id"]].children for data in screen.stored if VIEW in data]
    return [box for box in boxes if isinstance(box[0], widgets.FloatProgress)]


def run_until(panel, done) -> list:
    """A cell that goes on until the panel shows what is asked for."""
    panel.begin()
    with doors.progress_phase("kernels", 10, of="kinds") as moved:
        moved(3)
        for _ in range(1000):
            if found := done():
                return found
            threading.Event().wait(0.01)
    raise AssertionError("the panel never showed it")


def test_panel_shows_bar_and_machine_and_leaves_no_widget(screen, shell, tmp_path, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "03_train_sequence.ipynb")
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    doors.notebook_panel.show_cell_panels()
    doors.notebook_panel.show_cell_panels()  # Run all, once more: the cell that runs has the first panel
    panel = shell.ml_factory_panel
    assert [len(held) for held in shell.events.held.values()] == [1, 1]
    chosen = types.SimpleNamespace(symbol="MES", family="")
    workspace = Workspace(tmp_path)
    (workspace.raw / "MES_1m.parquet").write_bytes(b"x")
    doors.show_machine(machine(workspace), chosen)
    with pytest.deprecated_call():  # of ipywidgets: the list of all widgets
        (symbols,) = (one for one in widgets.Widget.widgets.values() if isinstance(one, widgets.Dropdown))
    assert symbols.options == ("DEMO", "DEMO-NULL", "MES")
    symbols.value = "DEMO-NULL"
    assert chosen.symbol == "DEMO-NULL"  # for the cells that are run now
    seen = run_until(panel, lambda: [(bar, label.value) for bar, label, _ in shown_panels(screen) if bar.value == 0.3])
    assert "kernels: 3 of 10 kinds" in seen[0][1]
    panel.end()
    lines = [data["text/plain"] for _, data in screen]
    assert any(str(tmp_path) in line and "no time limit" in line and "checkpoint: " in line for line in lines)
    assert not any(VIEW in data for data in screen.stored)
    assert "" in lines  # the panel's place


def test_safe_stop_reaches_waiting_button_before_cell_ends(screen, shell, monkeypatch):
    """ipykernel 6 reads messages between cells only: those of widgets are handled, others wait in their order."""
    handled, later, pressed = [], [], []
    frames = {
        name: [b"", json.dumps({"msg_type": name}).encode()] for name in ("execute_request", "comm_msg")
    }  # signature, header
    waiting = list(frames.values())
    shell.kernel = types.SimpleNamespace(
        shell_stream=types.SimpleNamespace(
            socket=types.SimpleNamespace(poll=lambda _: len(waiting), recv_multipart=lambda copy: waiting.pop(0))
        ),
        session=types.SimpleNamespace(
            feed_identities=lambda message, copy: ([], message), deserialize=lambda parts, **_: parts
        ),
        shell_handlers={"comm_msg": lambda stream, identities, message: handled.append(message)},
        schedule_dispatch=lambda dispatch, message: later.append(message), dispatch_shell=None,
    )  # fmt: skip
    panel = doors.CellPanel(shell)
    ((_, _, button),) = run_until(panel, lambda: shown_panels(screen))
    assert handled == [frames["comm_msg"]] and later == [frames["execute_request"]]
    monkeypatch.setattr(os, "kill", lambda _, number: pressed.append(number))
    button.click()
    panel.end()
    assert pressed == [signal.SIGINT]


def test_live_curves_draw_pictures_in_interactive_notebook_alone(screen, monkeypatch):
    headless = doors.LiveCurves()
    for epoch in (1, 2):
        headless(epoch, {"train_loss": 1.0 / epoch, "val_loss": None})
    assert screen.kinds() == [("shown", "line"), ("updated", "line")]
    monkeypatch.setenv("JPY_SESSION_NAME", "03_train_sequence.ipynb")
    del screen[:]
    curves = doors.LiveCurves()
    curves.remember([{"epoch": epoch, "train_loss": 1.0, "val_loss": 1.0, "seconds": 1.0} for epoch in (1, 2)])
    curves(3, {"train_loss": 0.9, "val_loss": 1.0, "seconds": 1.0})
    assert screen.kinds() == [("shown", "picture"), ("updated", "picture"), ("shown", "line")]


def test_headless_notebook_prints_contents_of_workspace_and_registers_no_panel(screen, tmp_path, capsys):
    workspace = Workspace(tmp_path)
    (workspace.raw / "MES_1m.parquet").write_bytes(b"x")
    doors.notebook_panel.show_cell_panels()
    doors.show_machine(
        machine(workspace), types.SimpleNamespace(symbol="MES", horizon=20, model="lstm", family="sequence")
    )
    said = "In the workspace: symbol DEMO, DEMO-NULL, MES; horizon none; model none\n"
    assert capsys.readouterr().out == said and screen == []


def test_notebook_show_prints_text_and_displays_tables_and_pictures(capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("ml_factory.notebook.display", shown.append)
    table = pd.DataFrame({"a": [1]})
    doors.show("words", table, doors.draw_finished_notebooks({"01_x": []}, "ES"), table[:0])
    assert capsys.readouterr().out == "words\n(nothing to list)\n"
    assert shown[0].equals(table) and shown[1].data.startswith(b"\x89PNG")
