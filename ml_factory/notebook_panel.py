"""Panel of a long cell in an interactive notebook: the machine, a bar with the time left, curves, and a safe stop.

Headless (papermill, nbval, a script) the same facts are lines. A stored notebook holds no widget: they are taken away
at the end of their cell, the lists to choose from when the next cell begins.
"""

import html
import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pandas as pd

from ml_factory.checkpoints.manager import save_status_line
from ml_factory.checkpoints.schedule import configured_hours_remaining
from ml_factory.lazy_module import LazyModule, check_packages_installed
from ml_factory.notebook import figure_png, is_interactive_notebook, list_workspace_choices
from ml_factory.progress import Heartbeat, ProgressPhase, watchers
from ml_factory.storage.json_values import parse_json

ipython, display_of, widgets = LazyModule("IPython"), LazyModule("IPython.display"), LazyModule("ipywidgets")
plots = LazyModule("ml_factory.evaluation.plots")  # needs packages that a new machine does not have in the first cell
SECONDS = (2.0, 1.0)  # until a cell's panel appears and between curves, and between updates of the panel


class CellPanel:
    """A panel below every cell that takes longer than two seconds, updated once a second from a thread of its own."""

    def __init__(self, shell: Any):
        self._shell, self._heartbeat, self._view = shell, None, None
        self._machine, self._strip, self._lists = None, None, None  # set by `offer`

    def register(self) -> None:
        """Register from the next cell on; an interrupt is then one line."""
        self._shell.events.register("pre_run_cell", self.begin)
        self._shell.events.register("post_run_cell", self.end)
        self._shell.set_custom_exc((KeyboardInterrupt,), _show_interrupt)
        self._shell.ml_factory_panel = self

    def offer(self, env_info: Any, chosen: SimpleNamespace, found: Mapping[str, list]) -> None:
        """Show the machine's line, which follows the time left and the newest checkpoint, and lists to choose from."""
        self._machine, self._strip = env_info, None
        self._update_machine()
        lists = []
        for name, there in found.items():
            value = getattr(chosen, name)
            lists.append(widgets.Dropdown(description=name, options=sorted({*there, value}), value=value))
            lists[-1].observe(lambda change: setattr(chosen, change.owner.description, change.new), "value")
        self._lists = _shown(None, _view_of(widgets.HBox(lists), ""), raw=True)

    def begin(self, *_: object) -> None:
        self.end()
        if self._lists is not None:
            self._lists = self._lists.update({"text/plain": ""}, raw=True)
        self._heartbeat = Heartbeat(self._update, first=SECONDS[0], seconds=SECONDS[1])
        self._heartbeat.start()
        watchers.append(self._read_clicks)

    def end(self, *_: object) -> None:
        if self._heartbeat is None:
            return
        watchers.remove(self._read_clicks)
        self._heartbeat.stop()
        if self._view is not None:
            self._view.update({"text/plain": ""}, raw=True)
            for one in (self._bar, self._label, self._button, self._box):
                one.close()
        self._update_machine()
        self._heartbeat = self._view = None

    def _update(self, line: str) -> None:
        if self._view is None:
            self._bar, self._label = widgets.FloatProgress(min=0.0, max=1.0), widgets.HTML()
            what = "Saves, then ends this cell, as the square in the toolbar does. Run it again to continue"
            self._button = widgets.Button(description="Safe stop", tooltip=what)
            self._button.on_click(self._stop)
            # ipykernel 7.4 would answer in the shell that opened the widget, which is busy, and not in the front end's.
            self._button.comm._reply_subshell_for = lambda data, subshell: subshell
            self._box = widgets.HBox([self._bar, self._label, self._button])
            self._view = _shown(None, _view_of(self._box, line), raw=True)
        phase = self._heartbeat.phase
        self._bar.value = phase.done / phase.rows if phase is not None and phase.rows and not phase.over else 0.0
        self._label.value = html.escape(line)
        self._update_machine()

    def _stop(self, button: Any) -> None:
        button.disabled, button.description = True, "Stopping"
        os.kill(os.getpid(), signal.SIGINT)  # as the toolbar's square: a training saves before it lets the signal act

    def _update_machine(self) -> None:
        if self._machine is None:
            return
        one, hours = self._machine, configured_hours_remaining()
        line = " · ".join((
            "Colab" if one.on_colab else "this machine",
            " ".join(filter(None, (one.accelerator, one.device_name))),
            "no time limit" if math.isinf(hours) else f"at most {hours:.1f} h left",
            one.workspace.address, f"wandb {one.tracking}", f"checkpoint: {save_status_line() or 'none yet'}",
        ))  # fmt: skip
        shown = {"text/plain": line, "text/html": f"<small>{html.escape(line)}</small>"}
        self._strip = _shown(self._strip, shown, raw=True)

    def _read_clicks(self, phase: ProgressPhase) -> None:
        """Handle the widgets' messages that wait for the cell's end; others keep their order behind it.

        ipykernel 7 does this itself, in a thread (a subshell) that the front end opens for them.
        """
        kernel = self._shell.kernel
        if hasattr(kernel, "shell_channel_thread") or threading.current_thread() is not threading.main_thread():
            return
        stream = kernel.shell_stream
        while stream.socket.poll(0):
            frames = stream.socket.recv_multipart(copy=False)
            identities, parts = kernel.session.feed_identities(frames, copy=False)
            kind = parse_json(bytes(parts[1]))["msg_type"]  # signature, header, …
            if kind.startswith("comm_"):
                message = kernel.session.deserialize(parts, content=True, copy=False)
                kernel.shell_handlers[kind](stream, identities, message)
            else:
                kernel.schedule_dispatch(kernel.dispatch_shell, frames)


class LiveCurves:
    """A training callback: one line that is kept up to date, below learning curves in an interactive notebook."""

    def __init__(self) -> None:
        self._history: list[dict] = []
        self._resumed: int | None = None
        self._line, self._picture, self._drawn = None, None, float("-inf")

    def remember(self, history: Iterable[Mapping]) -> None:
        """Prepend the epochs of an earlier session: drawn at once, with a mark where this session resumes."""
        self._history = [dict(epoch) for epoch in history]
        self._resumed = self._history[-1]["epoch"]
        self._draw_if_due()

    def __call__(self, epoch: int, metrics: Mapping[str, float | None]) -> None:
        self._history.append({"epoch": epoch, **metrics})
        self._draw_if_due()
        shown = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        text = f"epoch {epoch} · " + " · ".join(f"{name} {value:.4g}" for name, value in shown.items())
        kept = save_status_line()  # progress of the checkpoint: local disk, mount
        line = {"text/plain": text + (f" · checkpoint {kept}" if kept else "")}
        self._line = _shown(self._line, line, raw=True)

    def _draw_if_due(self) -> None:
        if not is_interactive_notebook() or time.monotonic() - self._drawn < SECONDS[0]:
            return
        curves = plots.plot_learning_curves(pd.DataFrame(self._history), resumed_from=self._resumed)
        self._picture = _shown(self._picture, {"image/png": figure_png(curves)}, raw=True)
        self._drawn = time.monotonic()


def show_cell_panels() -> None:
    """Show a panel below long cells from now on, in an interactive notebook; once, and not elsewhere."""
    shell = ipython.get_ipython()
    if shell is not None and is_interactive_notebook() and not hasattr(shell, "ml_factory_panel"):
        check_packages_installed("ipywidgets")
        CellPanel(shell).register()


def show_machine(env_info: Any, chosen: SimpleNamespace) -> None:
    """Print what the workspace has of the parameters; interactive, show the machine's line and lists to choose from.

    A choice is stored in `chosen`, for the cells that are run after it.
    """
    found = list_workspace_choices(env_info.workspace, chosen)
    listed = (f"{name} {', '.join(map(str, there)) or 'none'}" for name, there in found.items())
    print("In the workspace: " + "; ".join(listed))
    panel = getattr(ipython.get_ipython(), "ml_factory_panel", None)
    if panel is not None:
        panel.offer(env_info, chosen, found)


def _show_interrupt(shell: Any, kind: type, error: BaseException, trace: Any, tb_offset: Any = None) -> None:
    kept = save_status_line()
    line = "Stopped" + (f"; checkpoint {kept}" if kept else "") + ". Next: run this cell again, it goes on from there"
    shell._showtraceback(kind, error, [line])


def _view_of(widget: Any, text: str) -> dict[str, Any]:
    """Return what shows the widget, and the text where there are no widgets."""
    shown = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": shown, "text/plain": text}


def _shown(handle: Any, data: Any, **options: Any) -> Any:
    """Show the data in the place of what the handle shows; return its handle."""
    if handle is None:
        return display_of.display(data, display_id=True, **options)
    handle.update(data, **options)
    return handle
