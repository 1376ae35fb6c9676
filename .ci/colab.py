"""What is uploaded to MyDrive/ml_factory: the eight notebooks, the recipes, and one wheel with the code, nothing else.

Standard library only: `python3 .ci/colab.py dist/colab`. The first cell of these notebooks mounts Drive and unpacks the
wheel. Besides the library it holds what the notebooks import and read: utils and the lists of requirements.
"""

import base64
import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HELD = (
    "ml_factory/**/*.py",
    "ml_factory/**/*.json",
    "ml_factory/py.typed",
    "utils/*.py",
    "requirements.txt",
    "requirements/*.txt",
    "LICENSE",
)
WHEEL = "Wheel-Version: 1.0\nGenerator: ml_factory\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
MOMENT = (2020, 1, 1, 0, 0, 0)  # of every file, so that the same code is the same wheel


def main(folder: Path) -> int:
    notebooks = sorted((ROOT / "colab_notebooks").glob("[0-9][0-9]_*.ipynb"))
    recipes = sorted((ROOT / "colab_notebooks" / "recipes").glob("*.ipynb"))
    (folder / "recipes").mkdir(parents=True, exist_ok=True)
    for pattern in ("ml_factory-*.whl", "[0-9][0-9]_*.ipynb", "recipes/*.ipynb"):
        for old in folder.glob(pattern):
            old.unlink()
    wheel = write_wheel(folder)
    unpacked = f"{wheel.stem}-{hashlib.sha256(wheel.read_bytes()).hexdigest()[:12]}"
    for path in (*notebooks, *recipes):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        (first,) = [cell for cell in notebook["cells"] if cell["id"] == "bootstrap"]
        first["source"] = wheel_cell_text(wheel.name, unpacked).splitlines(keepends=True)
        written = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        (folder / path.relative_to(ROOT / "colab_notebooks")).write_text(written, encoding="utf-8")
    size = f"{wheel.stat().st_size / 1e6:.1f} MB"
    print(f"{len(notebooks)} notebooks, {len(recipes)} recipes and {wheel.name} ({size}) are in {folder}")
    print("Next: upload them to MyDrive/ml_factory and open a notebook there with Colab")
    return 0


def write_wheel(folder: Path) -> Path:
    """The wheel of this checkout in `folder`."""
    init = (ROOT / "ml_factory" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"', init, re.MULTILINE)[1]
    about = f"ml_factory-{version}.dist-info"
    found = sorted({path for pattern in HELD for path in ROOT.glob(pattern) if path.is_file()})
    files = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in found}
    metadata = f"Metadata-Version: 2.1\nName: ml_factory\nVersion: {version}\nRequires-Python: >=3.11\n"
    files |= {f"{about}/METADATA": metadata.encode(), f"{about}/WHEEL": WHEEL.encode()}
    records = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{about}/RECORD"] = "\n".join([*records, f"{about}/RECORD,,", ""]).encode()
    path = folder / f"ml_factory-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, MOMENT), content, zipfile.ZIP_DEFLATED)
    return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from utils.notebook_bootstrap import wheel_cell_text

    raise SystemExit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist/colab")))
