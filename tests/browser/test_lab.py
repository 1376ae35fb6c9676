"""What somebody sees who opens notebook 03 in a browser: a bar that moves, a safe stop, the same numbers after it."""

import os
import re
import shutil
import subprocess

import pytest

pytest.importorskip("selenium", reason="the browser's driver is in an environment of its own: make browser")
from tests.browser import lab

pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver") and lab.KERNEL.exists()),
    reason="needs chromium and chromedriver (Debian: chromium, chromium-driver) and make setup",
)
TRAINING = "trained = pipeline.train("
MACHINE = "show_machine(env_info, chosen)"
METRICS = "columns = "
LAST = "finish(written"
# The market of a user, shorter.
MARKET = """
from ml_factory import Workspace
from ml_factory.data.synthetic import ensure_synthetic_demo_market
ensure_synthetic_demo_market(Workspace(), "DEMO", days=60)
"""
# The numbers of a run that nothing interrupted, printed as the notebook prints them.
UNINTERRUPTED = """
from ml_factory import Workspace, pipeline
trained = pipeline.train(
    Workspace(), "DEMO", 20, "lstm", quick=True, fresh=True, mirror="off", model_settings={"epochs": 8}
)
columns = ["split", "name", "log_loss", "log_loss_gain", "best_baseline", "gain_best", "gain_best_low"]
columns += ["direction_gain"]
print(trained.metrics[columns].round(3).to_string(index=False))
"""


def test_jupyterlab_notebook_03_moves_bar_stops_safely_and_ends_with_same_numbers(tmp_path):
    settings = {"ML_FACTORY_QUICK": "1", "ML_FACTORY_SAVE_MINUTES": "0", "ML_FACTORY_ROOT": str(tmp_path / "workspace")}

    def kernel(code: str) -> str:
        words = [str(lab.KERNEL), "-c", code]
        done = subprocess.run(words, cwd=lab.ROOT, env=os.environ | settings, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    kernel(MARKET)
    with (
        lab.copied_notebooks(
            {'SETTINGS: str = \\"\\"': 'SETTINGS: str = \\"epochs=8\\"'}
        ) as folder,  # long enough to be seen
        lab.lab(folder, tmp_path, **settings) as address,
        lab.opened(address, "03_train_sequence.ipynb", tmp_path / "profile") as page,
    ):
        widths, pictures = set(), set()

        def trains() -> bool:
            """Whether the training cell runs, and has saved an epoch; where its bar is and its curves are noted."""
            cell = page.cell(TRAINING)
            if cell["running"] and cell["widget"]:
                widths.update(page.bar_widths())
                pictures.add(cell["picture"])
            return cell["running"] and "checkpoint train_lstm" in cell["text"]

        page.run_until(MACHINE)
        assert page.wait("lists to choose from", page.lists) == {
            "symbol": ["DEMO", "DEMO-NULL"],
            "horizon": ["20"],
            "model": ["lstm"],
        }
        page.see(tmp_path / "lists.png")

        page.command("notebook:run-all-cells")
        page.wait("a bar that moves while epochs are saved", lambda: trains() and len(widths) >= 2)
        page.see(tmp_path / "training.png")
        page.press("Safe stop")
        page.wait("the end of the cell", lambda: page.cell(TRAINING)["error"])
        page.wait("a free kernel without a panel", lambda: page.idle() and not page.cell(TRAINING)["widget"])
        assert re.search(r"Stopped; checkpoint train_lstm #\d+", page.cell(TRAINING)["traceback"])
        assert not page.cell(LAST)["text"]

        page.command("notebook:run-all-cells")
        page.wait("the last cell", lambda: not trains() and page.cell(LAST)["text"] and page.idle())
        page.see(tmp_path / "done.png")
        cells = page.cells()
        assert [cell["error"] for cell in cells if cell["error"]] == []
        assert re.search(r"[Rr]esumed", page.cell(TRAINING)["text"]), page.cell(TRAINING)["text"]
        assert pictures - {""}, "curves were drawn while the cell ran"
        assert [cell["source"] for cell in cells if cell["widget"]] == [], "no widget is left for the stored notebook"
        text = page.cell(METRICS)["text"]
    assert kernel(UNINTERRUPTED).strip() in text
