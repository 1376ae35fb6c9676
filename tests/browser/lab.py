"""A real JupyterLab on loopback, its kernels on the project's environment, and a headless Chromium that looks at it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).resolve().parents[2]
KERNEL = ROOT / ".venv" / "bin" / "python"
PATIENCE = 600.0  # seconds for whatever has to come some day

# Everything below asks the front end's own model of the notebook: what is scrolled out of sight is not in the page.
_CELLS = """
const panel = window.jupyterapp.shell.currentWidget;
if (!panel || !panel.content || !panel.content.model || !panel.context.isReady) { return null; }
return panel.content.widgets.map(cell => {
    const outputs = cell.model.type === 'code' ? cell.model.outputs.toJSON() : [];
    const joined = text => Array.isArray(text) ? text.join('') : (text || '');
    return {
        source: cell.model.sharedModel.getSource(),
        count: cell.model.type === 'code' ? cell.model.executionCount : null,
        running: cell.model.type === 'code' && cell.model.executionState === 'running',
        text: outputs.map(one => joined(one.text || (one.data || {})['text/plain'])).join('\\n'),
        error: outputs.filter(one => one.output_type === 'error').map(one => one.ename + ': ' + one.evalue).join(),
        traceback: outputs.map(one => (one.traceback || []).join('\\n')).join(''),
        picture: outputs.map(one => joined((one.data || {})['image/png'])).join(''),
        widget: outputs.some(one => 'application/vnd.jupyter.widget-view+json' in (one.data || {})),
    };
});
"""


class Notebook:
    """A notebook opened in the browser."""

    def __init__(self, browser: webdriver.Chrome):
        self.browser = browser

    def cells(self) -> list[dict]:
        """Each cell as the front end has it (the names are those of _CELLS); [] until it does."""
        return self.browser.execute_script(_CELLS) or []

    def cell(self, holds: str) -> dict:
        """The one cell whose source holds this."""
        found = [cell for cell in self.cells() if holds in cell["source"]]
        assert len(found) == 1, f"{len(found)} cells hold {holds!r}"
        return found[0]

    def command(self, name: str) -> None:
        """What a person finds in the menus; returns at once."""
        self.browser.execute_script(f"window.jupyterapp.commands.execute('{name}');")

    def run_until(self, holds: str) -> None:
        """Run the cells from the first to the one whose source holds this; returns when the kernel has done so."""
        sources = [cell["source"] for cell in self.cells()]
        (last,) = (place for place, source in enumerate(sources) if holds in source)
        for _ in range(last + 1):
            self.command("notebook:run-cell-and-select-next")
        self.wait(f"the end of {holds}", lambda: self.cell(holds)["text"] and self.idle())

    def lists(self) -> dict[str, list[str]]:
        """What each drop-down list of the page offers, by its label."""
        found = self.browser.find_elements("css selector", ".widget-dropdown")
        return {one.find_element("css selector", "label").text: one.text.splitlines()[1:] for one in found}

    def bar_widths(self) -> list[str]:
        """How far each progress bar of the page is, as its width."""
        return self.browser.execute_script(
            "return [...document.querySelectorAll('.progress-bar')].map(one => one.style.width);"
        )

    def press(self, label: str) -> None:
        """Press the one button with this label."""
        found = [one for one in self.browser.find_elements("css selector", "button") if label in one.text]
        assert len(found) == 1, f"{len(found)} buttons are labelled {label!r}"
        found[0].click()

    def idle(self) -> bool:
        return self.browser.execute_script(
            "const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel;"
            "return !!kernel && kernel.status === 'idle';"
        )

    def wait(self, what: str, until, seconds: float = PATIENCE):
        """The first truth that `until` returns; an AssertionError with the cells' errors after so long."""
        end = time.monotonic() + seconds
        while not (found := until()):
            errors = [cell["error"] for cell in self.cells() if cell["error"]]
            assert time.monotonic() < end, f"no sign of {what} after {seconds:g} s; errors: {errors}"
            time.sleep(0.2)
        return found

    def see(self, path: Path) -> None:
        """A picture of the window as a person sees it."""
        self.browser.save_screenshot(str(path))


@contextmanager
def copied_notebooks(changes: dict[str, str]) -> Iterator[Path]:
    """A folder of copies of the notebooks inside this checkout, whose code and compiled kernels they find.

    changes : text of notebook 03 -> other text.
    """
    folder = ROOT / "build" / f"browser-{os.getpid()}"
    shutil.copytree(ROOT / "colab_notebooks", folder / "colab_notebooks", symlinks=True)
    notebook = folder / "colab_notebooks" / "03_train_sequence.ipynb"
    for old, new in changes.items():
        text = notebook.read_text(encoding="utf-8")
        assert old in text, old
        notebook.write_text(text.replace(old, new), encoding="utf-8")
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def lab(folder: Path, files: Path, **environment: str) -> Iterator[str]:
    """The address of a JupyterLab over `folder`, its own files below `files`, its kernels with these variables."""
    kernel = files / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    words = [str(KERNEL), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": words, "display_name": "Python 3", "language": "python"}))
    places = {name: str(files / name) for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    for place in places.values():
        Path(place).mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = files / "lab.log"
    server = subprocess.Popen(
        [
            sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
            "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", f"--ServerApp.root_dir={folder}",
            "--IdentityProvider.token=", "--KernelSpecManager.ensure_native_kernel=False",
            "--LabApp.news_url=", "--LabApp.extension_manager=readonly",
        ],
        env={**os.environ, "ML_FACTORY_WANDB": "off", **places, "JUPYTER_PATH": str(kernel.parents[1]), **environment},
        stdin=subprocess.DEVNULL, stdout=os.open(log, os.O_WRONLY | os.O_CREAT), stderr=subprocess.STDOUT,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        _answering(server, f"{address}/api/status", log)
        yield address
    finally:
        server.terminate()
        server.wait(30)


def _answering(server: subprocess.Popen, address: str, log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.2)


@contextmanager
def opened(address: str, notebook: str, folder: Path) -> Iterator[Notebook]:
    """The notebook in a headless Chromium, its kernel ready."""
    options = webdriver.ChromeOptions()
    for word in (
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1400,1000",
        f"--user-data-dir={folder}",
    ):  # fmt: skip
        options.add_argument(word)
    options.binary_location = shutil.which("chromium")
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        # Without focus JupyterLab has no current widget, and its commands reach no notebook.
        browser.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
        browser.get(f"{address}/lab/tree/colab_notebooks/{notebook}?reset")
        page = Notebook(browser)
        page.wait("JupyterLab", lambda: browser.execute_script("return !!window.jupyterapp;"))
        page.wait("the notebook", page.cells)
        page.wait("its kernel", page.idle)
        yield page
    finally:
        browser.quit()
