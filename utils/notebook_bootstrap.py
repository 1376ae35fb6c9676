"""The first code cell of a notebook: one text for those of the repository, one for those that `make colab` writes.

Standard library only, at most eight lines each (decision 0002): nothing can be imported before they have run.
"""

FOLDED = {"cellView": "form", "jupyter": {"source_hidden": True}, "tags": ["bootstrap"]}  # in Colab, in JupyterLab
# The linter holds each notebook to this text, in which <slug> and <ref> come from pyproject.toml.
CLONE = r"""
#@title Find the code: this checkout, or a clone from GitHub { display-mode: "form" }
import os, pathlib, subprocess, sys  # noqa: E401, I001
url, kept = os.environ.get("ML_FACTORY_REPOSITORY", "https://github.com/<slug>"), pathlib.Path.home() / ".cache" / "ml_factory" / "<ref>"
clone = 'git clone --depth=1 -b <ref> "$0" "$1" || git clone --depth=1 "$0" "$1"'  # the tag, else the default branch
code = next((place for place in (pathlib.Path.cwd(), *pathlib.Path.cwd().parents, kept) if (place / "utils" / "runtime.py").is_file()), None)
if not code and ("/OWNER/" in url or subprocess.run(["/bin/sh", "-c", clone, url, kept]).returncode):
    raise RuntimeError("No checkout is here, and none was cloned. Next: upload what `make colab` writes, or run `make badges OWNER=<your account>`")
sys.path.insert(0, str(code or kept))
""".strip()  # noqa: E501
WHEEL = r"""
#@title Take the code from the wheel on Drive { display-mode: "form" }
import pathlib, shutil, sys  # noqa: E401, I001
from google.colab import drive
drive.mount("/content/drive")  # asks for access; the results are kept there, too
code = pathlib.Path("/content/<folder>")
if not code.is_dir():
    shutil.unpack_archive("/content/drive/MyDrive/ml_factory/<wheel>", code, "zip")
sys.path.insert(0, str(code))
""".strip()


def bootstrap_cell_text(slug: str, ref: str) -> str:
    """Return the first cell for the repository github.com/`slug` at the pinned `ref`."""
    return CLONE.replace("<slug>", slug).replace("<ref>", ref)


def wheel_cell_text(wheel: str, folder: str) -> str:
    """Return the first cell for a wheel of this name in MyDrive/ml_factory; its content is unpacked into `folder`."""
    return WHEEL.replace("<wheel>", wheel).replace("<folder>", folder)
