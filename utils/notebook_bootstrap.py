"""The first code cell of every notebook, and the part of it that runs once this module can be imported (decision 0002).

The cell finds a checkout, an earlier download or the wheel of `make colab`, or clones the repository, and calls
`use_code` of what it found. Standard library only: nothing is installed yet.
"""

import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

FOLDED = {"cellView": "form", "jupyter": {"source_hidden": True}, "tags": ["bootstrap"]}  # in Colab, in JupyterLab
# At most 14 lines; the linter holds each notebook to this text, in which <slug> and <ref> come from pyproject.toml.
CELL = r"""
#@title Find the code, or fetch it { display-mode: "form" }
import importlib, os, pathlib, re, subprocess, sys  # noqa: E401, I001
url, ref = os.environ.get("ML_FACTORY_REPOSITORY", "https://github.com/<slug>"), os.environ.get("ML_FACTORY_REF", "<ref>")
here, drive, shown = pathlib.Path.cwd(), pathlib.Path("/content/drive"), re.split("[?#;]", url.split("@")[-1])[0]  # shown: without a token
kept = pathlib.Path.home() / ".cache" / "ml_factory" / f"{shown}-{ref}".replace("/", "-").replace(":", "")  # a local disk, never Drive
found = [place for place in (here, *here.parents, kept) if (place / "utils" / "notebook_bootstrap.py").is_file()]
if not found and "/OWNER/" in url and ("COLAB_RELEASE_TAG" in os.environ or pathlib.Path("/var/colab/hostname").exists()) and not (drive / "MyDrive").is_dir():
    importlib.import_module("google.colab.drive").mount(str(drive))  # the wheel of make colab is there
found += [*here.glob("ml_factory-*.whl"), *drive.glob("MyDrive/ml_factory/ml_factory-*.whl")]
clone = 'case "$1" in */OWNER/*) echo its owner is a placeholder >&2; exit 1; esac; export GIT_TERMINAL_PROMPT=0; git clone -q --depth=1 -b "$2" "$1" "$3" || git clone -q --depth=1 "$1" "$3"'
if not found and (done := subprocess.run(["/bin/sh", "-c", clone, "sh", url, ref, f"{kept}.{os.getpid()}"], capture_output=True, text=True)).returncode:
    raise RuntimeError(f"Could not fetch {ref} from {shown}: " + re.sub(r"\S+://\S+", shown, done.stderr.strip()) + ". Next: put what `make colab` writes into MyDrive/ml_factory, or set ML_FACTORY_REPOSITORY and ML_FACTORY_REF")
sys.path.insert(0, str(found[0] if found else f"{kept}.{os.getpid()}"))
importlib.import_module("utils.notebook_bootstrap").use_code(pathlib.Path(sys.path[0]), kept, ref)
""".strip()  # noqa: E501


def bootstrap_cell_text(slug: str, ref: str) -> str:
    """The first cell for the repository github.com/`slug` at the pinned `ref`."""
    return CELL.replace("<slug>", slug).replace("<ref>", ref)


def use_code(place: Path, kept: Path, ref: str) -> Path:
    """Make the code that the cell found importable from a local disk, print where it is and return that folder.

    Parameters
    ----------
    place : a checkout, a wheel of `make colab`, or a new clone, named as `kept` with the process id behind it; it
        is the first entry of sys.path.
    kept : the folder that keeps a clone for later notebooks.
    ref : the tag, branch or commit that was asked for.
    """
    source, code = "", place
    if place.suffix == ".whl":
        wheel = max(place.parent.glob("ml_factory-*.whl"), key=os.path.getmtime)
        code, source = _unpacked(wheel, kept.parent), wheel.name
    elif place.name == f"{kept.name}.{os.getpid()}":
        _check_out(place, ref)
        code = _moved(place, kept)
    if code != place:
        sys.path[0] = str(code)
        for name in [name for name in sys.modules if name == "utils" or name.startswith("utils.")]:
            del sys.modules[name]  # they came from the place that was left
        importlib.invalidate_caches()
    print(f"Code: {code} ({_git(code, 'describe', '--always', '--dirty') or source or 'not under git'})")
    return code


def _unpacked(wheel: Path, folder: Path) -> Path:
    """The wheel's folder below `folder`, named by its content; written next to it and renamed, so never half there."""
    code = folder / f"{wheel.stem}-{hashlib.sha256(wheel.read_bytes()).hexdigest()[:12]}"
    if not code.is_dir():
        partial = code.with_name(f"{code.name}.{os.getpid()}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        _moved(partial, code)
    return code


def _check_out(clone: Path, ref: str) -> None:
    """Bring a new clone to `ref` where it is a commit; say so where the repository does not have it."""
    url = _git(clone, "remote", "get-url", "origin")
    _git(clone, "remote", "remove", "origin")  # an address may hold a token, which must not stay on the disk
    here = _git(clone, "rev-parse", "HEAD")
    if _git(clone, "rev-parse", "--verify", f"{ref}^{{commit}}") == here:
        return
    _git(clone, "fetch", "--quiet", "--depth=1", url, ref)
    _git(clone, "checkout", "--quiet", "--detach", "FETCH_HEAD")
    if _git(clone, "rev-parse", "HEAD") == here:
        print(f"The repository has no {ref} yet: took its default branch instead.")


def _moved(partial: Path, place: Path) -> Path:
    """`partial` renamed to `place`; if another notebook was faster, its folder."""
    try:
        partial.rename(place)
    except OSError:
        if not (place / "utils" / "notebook_bootstrap.py").is_file():
            raise
        shutil.rmtree(partial)
    return place


def _git(folder: Path, *words: str) -> str:
    """Return the output of git for a folder; empty where git fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
