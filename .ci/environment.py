"""Build the environment that the Makefile uses, from exact pins; reuse it while the pins have not changed.

Standard library only: this runs before anything is installed.
    python3 .ci/environment.py .venv requirements/locked/dev.txt [requirements/bench.txt ...]
A file with hashes names a whole closure, and nothing else is installed; pip resolves the others on top of it.
"""

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OLDEST = (3, 11)
CHECKOUT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Build or reuse an environment of exact pins.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("pins", type=Path, nargs="+")
    chosen = parser.parse_args()
    complaint = next(filter(None, map(_complaint, chosen.pins)), "")
    if complaint:
        print(f"make setup: {complaint}", file=sys.stderr)
        return 1
    wanted = _fingerprint(chosen.pins)
    if _stamp(chosen.folder) != wanted:
        code = _build(chosen.folder, chosen.pins, wanted)
        if code:
            return code
    _link_checkout(chosen.folder)
    return 0


def _complaint(pins: Path) -> str:
    """What this machine lacks, with the way out; empty when nothing."""
    version = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info < OLDEST:
        return f"got Python {version}, wanted 3.11 or newer. Next: install it, then make PYTHON=python3.12"
    # Debian and Ubuntu split venv and ensurepip off into a package of their own.
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        return (
            f"Python {version} comes without its venv module. Next: sudo apt-get install python{version}-venv"
            " (the package python3-venv where python3 is that one), then make again"
        )
    return "" if pins.is_file() else f"{pins} is absent. Next: run make from the repository's root"


def _fingerprint(pins: list[Path]) -> str:
    """Equal exactly when nothing has to be installed again."""
    texts = [text for path in pins for text in _texts(path)]
    facts = [sys.version.split()[0], os.path.realpath(sys.base_prefix), *texts]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _texts(pins: Path) -> list[str]:
    """The pins and every file they include (-r) or are held by (-c)."""
    text = pins.read_text(encoding="utf-8")
    named = re.findall(r"^(?:-r|-c|--requirement|--constraint)[ =](\S+)", text, re.MULTILINE)
    return [text, *(inner for name in named for inner in _texts(pins.parent / name))]


def _stamp(folder: Path) -> str:
    """The fingerprint of the last finished installation, if its interpreter still starts."""
    stamp, python = folder / ".pins", _python(folder)
    if not stamp.is_file() or not python.is_file():
        return ""
    alive = subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0
    return stamp.read_text(encoding="utf-8").strip() if alive else ""


def _python(folder: Path) -> Path:
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def _same_python(folder: Path) -> bool:
    """Whether the folder's interpreter is this one's version: then its packages can be kept and topped up."""
    ask = [_python(folder), "-c", "import sys, pip; print(sys.version.split()[0])"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, check=False)
    except OSError:
        return False
    return answer.returncode == 0 and answer.stdout.strip() == sys.version.split()[0]


def _torch_is_for_cpu(folder: Path) -> bool:
    """Whether the installed torch is a build for CPUs, which needs no packages of CUDA."""
    ask = [_python(folder), "-c", "from importlib.metadata import version; print(version('torch'))"]
    return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip().endswith("+cpu")


def _link_checkout(folder: Path) -> None:
    """Make `import ml_factory` work in this environment from any folder: a .pth file names this checkout.

    A path file and not an editable installation: it needs neither network nor build, and what is in the current folder
    or on PYTHONPATH still comes first.
    """
    site = next(folder.glob("Lib/site-packages" if os.name == "nt" else "lib/python*/site-packages"))
    link, text = site / "ml_factory_checkout.pth", f"{CHECKOUT}\n"
    if not link.is_file() or link.read_text(encoding="utf-8") != text:
        link.write_text(text, encoding="utf-8")


def _build(folder: Path, pins: list[Path], wanted: str) -> int:
    began = time.monotonic()
    print(f"Setting up {folder} from {', '.join(map(str, pins))} (minutes the first time) ...", flush=True)
    if not _same_python(folder):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (folder / ".pins").unlink(missing_ok=True)
    for path in pins:
        if "--hash=" in path.read_text(encoding="utf-8"):
            code = _install_locked(folder, path.read_text(encoding="utf-8"))
        else:
            code = _pip(folder, "-r", path)
        if code:
            print("make setup: pip could not install the pins (its message is above); make again to retry", flush=True)
            return code
    _compile(folder)
    (folder / ".pins").write_text(wanted + "\n", encoding="utf-8")
    print(f"{folder} is ready after {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _install_locked(folder: Path, text: str) -> int:
    """Install a closure, file by file against its hash; without CUDA's packages where torch is a build for CPUs."""
    packages = re.findall(r"^[A-Za-z0-9].*\n(?:[ \t].*\n)*", text, re.MULTILINE)
    torch = [block for block in packages if block.startswith("torch==")]
    if torch and not _pip_locked(folder, torch, local=True) and _torch_is_for_cpu(folder):
        of_cuda = _cuda_packages(packages)
        packages = [block for block in packages if block not in of_cuda]
    return _pip_locked(folder, packages)


def _compile(folder: Path) -> None:
    """Compile all modules on all cores; warnings about the texts of packages are ignored."""
    words = ["-W", "ignore", "-m", "compileall", "-qq", "-j", "0", folder / "lib"]
    subprocess.run([_python(folder), *words], check=False)


def _pip_locked(folder: Path, packages: list[str], local: bool = False) -> int:
    """Install packages of a lock file; `local`: from a folder of wheels (PIP_FIND_LINKS) or not at all."""
    with tempfile.TemporaryDirectory() as scratch:
        chosen = Path(scratch) / "locked.txt"
        chosen.write_text("".join(packages), encoding="utf-8")
        words = ["--require-hashes", "--no-deps", *(["--no-index"] if local else []), "-r", chosen]
        return _pip(folder, *words, capture_output=local)


def _pip(folder: Path, *words: str | Path, **how: bool) -> int:
    """Install packages, whose modules `_compile` compiles: pip itself does it on one core."""
    install = [_python(folder), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    return subprocess.run([*install, *words], check=False, **how).returncode


def _cuda_packages(packages: list[str]) -> list[str]:
    """Return the packages that torch alone requires for CUDA: torch's build for CPUs does not require them."""
    blocks = {block.split("==")[0]: block for block in packages if re.match(r"nvidia-|cuda-|triton", block)}
    while kept := [name for name, block in blocks.items() if not _required_by(block) <= {"torch", *blocks}]:
        for name in kept:
            del blocks[name]
    return list(blocks.values())


def _required_by(block: str) -> set[str]:
    """Return the names after `# via` of one package."""
    return set(re.findall(r"^    #(?: via)? +([A-Za-z0-9._-]+)$", block, re.MULTILINE)) - {"via"}


if __name__ == "__main__":
    raise SystemExit(main())
