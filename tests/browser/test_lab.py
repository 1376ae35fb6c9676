"""What somebody sees who opens notebook 03 in a browser: curves that move, Stop, Run all, and the same result."""

import re
import shutil

import pytest

pytest.importorskip("selenium", reason="the browser's driver is in an environment of its own: make browser")
from tests.browser import lab

pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver") and lab.KERNEL.exists()),
    reason="needs chromium and chromedriver (Debian: chromium, chromium-driver) and make setup",
)
TRAINING = "trained = pipeline.train("
LAST = "finish(written"


@pytest.fixture
def page(tmp_path):
    folder = lab.checkout(tmp_path / "checkout")
    with (
        lab.lab(folder, ML_FACTORY_QUICK="1", ML_FACTORY_SAVE_MINUTES="0") as address,
        lab.opened(address, "03_train_sequence.ipynb", tmp_path / "profile") as notebook,
    ):
        yield notebook


def test_jupyterlab_notebook_03_updates_curves_stops_and_resumes_on_run_all(page, tmp_path):
    pictures = set()

    def drawn() -> str:
        """The curves as they are in the running cell now: drawn in their place, anew after an epoch."""
        cell = page.cell(TRAINING)
        if cell["picture"] and cell["running"]:
            pictures.add(cell["picture"])
        return cell["picture"]

    page.command("notebook:run-all-cells")
    page.wait("curves", drawn)
    page.command("notebook:interrupt-kernel")
    page.see(tmp_path / "training.png")
    page.wait("the interrupt", lambda: "KeyboardInterrupt" in page.cell(TRAINING)["error"])
    page.wait("a free kernel", page.idle)

    page.command("notebook:run-all-cells")
    page.wait("the last cell", lambda: drawn() and page.cell(LAST)["text"] and page.idle())
    assert [cell["error"] for cell in page.cells() if cell["error"]] == []
    assert re.search(r"[Rr]esumed", page.cell(TRAINING)["text"]), page.cell(TRAINING)["text"]
    assert len(pictures) >= 2, "they moved while the cell ran"
    page.see(tmp_path / "done.png")
