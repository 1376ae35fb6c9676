"""The longest time in which a command, or a notebook that is looked at, shows nothing new.

    python -m benchmarks.silence -- python -m ml_factory prepare --workspace /tmp/w
    python -m benchmarks.silence --terminal -- python -m ml_factory prepare --workspace /tmp/w
    python -m benchmarks.silence --notebook 04_train_advanced -p WORKSPACE=/tmp/w

Of a command: seconds between two bytes on standard output or error, the first from its start; in a
pipe, or in a terminal with --terminal, where a line of control codes and elapsed seconds counts as new too. Of a
notebook: seconds between two messages of the kernel inside one cell, with the environment of a Jupyter server.
"""

import argparse
import os
import pty
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from ml_factory.notebook_parameters import convert_notebook_parameters
from ml_factory.notebook_suite import find_suite_notebook

SHOWN = 60  # characters of the output before a gap


def chunks(command: list[str], terminal: bool) -> Iterator[bytes]:
    """Yield the output of the command as it is written."""
    read, write = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen(command, stdout=write, stderr=write, stdin=subprocess.DEVNULL):
        os.close(write)
        while True:
            try:
                piece = os.read(read, 65_536)
            except OSError:  # a terminal whose other end is closed
                return
            if not piece:
                return
            yield piece


def longest_gap(command: list[str], terminal: bool) -> tuple[float, str, float, float]:
    """(seconds, the last text before them, seconds from the last output to the end, seconds in all)."""
    began = last = time.monotonic()
    worst, before, text = 0.0, "", "(start)"
    for piece in chunks(command, terminal):
        now = time.monotonic()
        if now - last > worst:
            worst, before = now - last, text
        last, text = now, (piece.decode(errors="replace").strip() or text)[-SHOWN:]
    now = time.monotonic()
    return worst, before, now - last, now - began


class _Watched(NotebookClient):
    """Remembers, for every cell, the longest time between two messages."""

    def __init__(self, notebook: nbformat.NotebookNode, **settings: object):
        super().__init__(notebook, on_cell_start=self._begin, on_cell_executed=self._end, **settings)
        self.gaps: dict[str, float] = {}
        self._last = 0.0

    def _begin(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        self._last = time.monotonic()

    def _received(self, cell: nbformat.NotebookNode) -> None:
        now = time.monotonic()
        self.gaps[cell["id"]] = max(self.gaps.get(cell["id"], 0.0), now - self._last)
        self._last = now

    def _end(self, cell: nbformat.NotebookNode, **_: object) -> None:
        self._received(cell)

    def process_message(self, msg: dict, cell: nbformat.NotebookNode, cell_index: int):
        if msg["msg_type"] in ("stream", "display_data", "update_display_data", "execute_result"):
            self._received(cell)
        return super().process_message(msg, cell, cell_index)


def notebook_gaps(path: Path, given: dict[str, str]) -> dict[str, float]:
    """Cell id -> longest seconds without a message."""
    notebook = nbformat.read(path, 4)
    values = convert_notebook_parameters(path, given)
    for cell in notebook.cells:
        if "parameters" in cell["metadata"].get("tags", ()):
            cell["source"] += "\n" + "\n".join(
                f"{name}: {type(value).__name__} = {value!r}" for name, value in values.items()
            )
    os.environ["JPY_SESSION_NAME"] = path.name
    client = _Watched(notebook, timeout=None, resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    return client.gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terminal", action="store_true")
    parser.add_argument("--notebook")
    parser.add_argument("-p", dest="given", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("command", nargs="*")
    chosen = parser.parse_args()
    if chosen.notebook:
        given = dict(text.split("=", 1) for text in chosen.given)
        gaps = notebook_gaps(find_suite_notebook(chosen.notebook), given)
        for name, seconds in sorted(gaps.items(), key=lambda item: -item[1])[:5]:
            print(f"{seconds:6.1f} s  cell {name}")
        return
    seconds, before, end, whole = longest_gap(chosen.command, chosen.terminal)
    print(f"longest silence {seconds:.1f} s of {whole:.1f} s, after: {before!r}; {end:.1f} s from last output to end")


if __name__ == "__main__":
    main()
