"""Make the picture of README: `make picture` runs the eight notebooks as `make run` does and photographs the report.

The figures of the report's test rows are stored in the picture (PNG text `metrics`), where a test finds them.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ml_factory import Workspace, pipeline

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "report.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = "1000,1720"  # pixels of the page that is shown
COLUMNS = ["log_loss", "gain_best", "gain_best_low", "gain_best_high"]


def main() -> int:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("make picture: no Chromium found. Next: apt-get install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="ml_factory_picture_") as folder:
        suite = [sys.executable, "-m", "ml_factory", "suite", "--quick", "--workspace", f"{folder}/workspace"]
        subprocess.run(suite, cwd=ROOT, check=True)
        found = pipeline.evaluate(Workspace(f"{folder}/workspace"), "DEMO", 20)
        page, shot = Path(found.report_path).as_uri(), Path(folder) / "report.png"
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking"]
        words += [f"--user-data-dir={folder}/browser", f"--window-size={SIZE}", f"--screenshot={shot}", page]
        subprocess.run([browser, *words], check=True, capture_output=True, timeout=120)
        table = found.metrics[found.metrics["split"] == "test"].set_index("name")[COLUMNS]
        facts = PngInfo()
        facts.add_text("metrics", json.dumps(table.astype(float).round(6).to_dict("index")))
        Image.open(shot).save(PICTURE, pnginfo=facts, optimize=True)
    print(f"{PICTURE.relative_to(ROOT)} shows {', '.join(table.index)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
