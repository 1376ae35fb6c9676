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


def test_curves_move_stop_works_and_run_all_goes_on(page, tmp_path):
    page.command("notebook:run-all-cells")
    pictures = set()

    def drawn():
        pictures.add(page.cell(TRAINING)["picture"])
        return len(pictures - {""}) >= 2  # the curves, drawn anew in their place while the cell runs

    page.wait("curves", drawn)
    assert page.cell(TRAINING)["count"] is None or page.cell(TRAINING)["running"], "they were drawn while it ran"
    page.see(tmp_path / "training.png")
    page.command("notebook:interrupt-kernel")
    page.wait("the interrupt", lambda: "KeyboardInterrupt" in page.cell(TRAINING)["error"])
    page.wait("a free kernel", page.idle)

    page.command("notebook:run-all-cells")
    page.wait("the last cell", lambda: page.cell(LAST)["text"] and page.idle())
    cells = page.cells()
    assert [cell["error"] for cell in cells if cell["error"]] == []
    assert re.search(r"[Rr]esum", page.cell(TRAINING)["text"]), "it says from where it went on"
    assert page.cell(TRAINING)["picture"], "the curves are still there"
    page.see(tmp_path / "done.png")
