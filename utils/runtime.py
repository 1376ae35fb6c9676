"""Packages and accelerator of this runtime, found without importing any package.

Versions come from the installed metadata, accelerators from the driver's tool and the PCI bus: quick, and the device is
not opened. Packages in `KEEP`, which a Colab runtime brings along, are never replaced.
"""

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ml_factory.errors import FactoryError
from ml_factory.storage.workspace import on_colab

ROOT = Path(__file__).resolve().parents[1]
GENERAL = ROOT / "requirements.txt"
KEEP = ROOT / "requirements" / "colab-constraints.txt"
PIP_SECONDS = 1800
BUCKETS = ROOT / "requirements" / "gs.txt"  # what a workspace gs://bucket/prefix needs; the TPU runtime lacks it
# PCI device ids by which jax and libtpu know a TPU; the same vendor also makes network cards.
_TPU_VENDOR = "0x1ae0"
_TPU_CHIPS = {"0x0027": "v2/v3", "0x0056": "TPU", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e"}


class RuntimeMismatchError(FactoryError):
    """Packages of this runtime cannot work together, or cannot be installed."""


# ------------------------------------------------------------------ packages


def check_torch_xla_pair(versions: dict[str, str]) -> None:
    """Raise RuntimeMismatchError when torch and torch_xla have different versions.

    torch_xla is compiled against one torch; with any other its import ends in an undefined symbol.
    """
    torch, xla = versions.get("torch"), versions.get("torch_xla")
    if xla is None or (torch is not None and _release(torch) == _release(xla)):
        return
    wanted = ".".join(map(str, _release(xla)))
    if on_colab():
        mend = "choose Runtime > Disconnect and delete runtime, and let no cell install torch"
    else:
        mend = f"pip install torch=={wanted} torch_xla=={wanted}, or pip uninstall torch_xla where there is no TPU"
    raise RuntimeMismatchError(
        f"torch_xla {xla} cannot work with this torch",
        where="the installed packages",
        got=f"torch {torch or 'absent'}",
        wanted=f"torch {wanted}",
        next_step=mend,
    )


def install_missing_packages(requirements: Path, extra: tuple[str, ...]) -> tuple[str, ...]:
    """Install the packages of `requirements` and of the library that this runtime lacks, by pip. An installed package
    is replaced only where it is too old for a new one and `KEEP` does not list it.

    Parameters
    ----------
    requirements : its lines must be met; of the library's own list only absent packages are added, so that a runtime
        which drops a package heals itself.
    extra : further lines that must be met.

    Returns the names installed. Raises RuntimeMismatchError when pip fails.
    """
    lines = [line for line in (*read_requirement_lines(requirements), *extra) if not _is_met(line)]
    listed = {_name(line) for line in lines}
    general = read_requirement_lines(GENERAL)
    lines += [line for line in general if _name(line) not in listed and installed_version(_name(line)) is None]
    if not lines:
        return ()
    requested = {_name(line) for line in lines}
    print(f"Installing {', '.join(sorted(requested))}: a minute or two", flush=True)
    output = _pip_install(lines, [line for line in _pip_constraint_lines(KEEP) if _name(line) not in requested])
    importlib.invalidate_caches()
    if output:
        raise RuntimeMismatchError(
            "Packages could not be installed",
            where=", ".join(lines),
            got=output,
            next_step=f"check the network and run this again, or pip install -r {requirements.name} by hand",
        )
    return tuple(f"{_name(line)} {installed_version(_name(line))}" for line in lines)


def _pip_install(lines: list[str], keep: list[str]) -> str:
    """Install packages next to the kept ones; return the end of pip's message where it fails, else ""."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "keep.txt"
        constraints.write_text("\n".join(keep) + "\n")
        try:
            result = subprocess.run(
                [*command, "-c", str(constraints), *lines], capture_output=True, text=True, timeout=PIP_SECONDS
            )
        except (subprocess.TimeoutExpired, OSError) as error:
            return str(error)
    if not result.returncode:
        return ""
    return " ".join((result.stderr or result.stdout).strip().splitlines()[-3:]) or "no message from pip"


def read_requirement_lines(path: Path) -> list[str]:
    """Return the lines of a requirements file, without comments and options."""
    found = []
    for line in (line.split("#")[0].strip() for line in path.read_text().splitlines()):
        if line.startswith("-r "):
            found += read_requirement_lines(path.parent / line.removeprefix("-r "))
        elif line and not line.startswith("-"):
            found.append(line)
    return found


def _pip_constraint_lines(path: Path) -> list[str]:
    """Return pip constraints: installed packages stay at their version, the rest follows `path`."""
    found = ((line, installed_version(_name(line))) for line in read_requirement_lines(path))
    return [f"{_name(line)}=={version}" if version else line for line, version in found]


def _name(line: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", line)[0]


def _release(version: str) -> tuple[int, ...]:
    """Return the release numbers, 2.9.0+cpu -> (2, 9, 0), which is all that the library's own lists compare."""
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", version)[0].split("."))


def _is_met(line: str) -> bool:
    version = installed_version(_name(line))
    if version is None:
        return False
    have = _release(version)
    for sign, wanted in re.findall(r"(>=|<|==)([\d.]+)", line):
        size = max(len(have), len(_release(wanted)))
        left, right = ((*part, *[0] * (size - len(part))) for part in (have, _release(wanted)))
        if not {">=": left >= right, "<": left < right, "==": left == right}[sign]:
            return False
    return True


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str]:
    """Return the installed versions of the packages used; absent ones are left out."""
    names = [_name(line) for line in read_requirement_lines(GENERAL)]
    found = {name: installed_version(name) for name in [*names, "torch_xla", "libtpu"]}
    return {"python": platform.python_version()} | {name: version for name, version in found.items() if version}


def missing_requirements() -> list[str]:
    lines = read_requirement_lines(GENERAL)
    missing = [line for line in lines if not _is_met(line)]
    return [f"missing or out of range: {', '.join(missing)}. Next: pip install -r requirements.txt"] if missing else []


# ------------------------------------------------------------------ the accelerator


def gpu_name() -> str:
    """Return name and memory of the first CUDA GPU, from the driver's own tool; '' without one."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1") or not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (subprocess.TimeoutExpired, OSError):
        return ""
    return result.stdout.strip().splitlines()[0] if result.returncode == 0 and result.stdout.strip() else ""


def tpu_chip(bus: Path = Path("/sys/bus/pci/devices")) -> str:
    """Return the kind of the attached TPU, such as v5e-1; '' without one. Colab's variables first, then the PCI bus."""
    if os.environ.get("TPU_ACCELERATOR_TYPE") or os.environ.get("COLAB_TPU_1VM") == "1":
        return os.environ.get("TPU_ACCELERATOR_TYPE") or "TPU"
    for device in sorted(bus.glob("*")):
        try:
            ids = [(device / name).read_text().strip() for name in ("vendor", "device")]
        except OSError:
            continue
        if ids[0] == _TPU_VENDOR and ids[1] in _TPU_CHIPS:
            return _TPU_CHIPS[ids[1]]
    return ""


def choose_accelerator(tpu: str, gpu: str, versions: dict[str, str], notes: list[str]) -> tuple[str, str]:
    """Return the best of TPU, GPU, CPU that the installed packages can drive; add a note where hardware goes unused."""
    if tpu and "torch_xla" in versions:
        return "tpu", tpu
    if tpu:
        notes.append(
            f"A TPU ({tpu}) is here but torch_xla is not. Next: install torch_xla of the same version as torch"
        )
    if gpu and not versions.get("torch", "+cpu").endswith("+cpu"):
        return "cuda", gpu
    if gpu:
        notes.append(f"A GPU ({gpu}) is here but this torch is built without CUDA. Next: install a CUDA build of torch")
    return "cpu", ""
