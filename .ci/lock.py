"""Write requirements/locked: the closure of every environment, with versions, hashes and the reason of each package.

    .venv-tools/bin/python .ci/lock.py [dev xla ...]        (make lock ARGS="dev")

A name is a file of `requirements`. NAME-cpu.txt has torch's build for CPUs, which the package index lacks, and
NAME-cuda.txt what torch needs where its build is another. Locked versions stay unless a pin moved; --upgrade takes the
newest.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
NAMES = ("dev", "xla", "browser", "peers", "bench", "dvc", "tools", "colab", "image")
NOT_IN_IMAGE = ("pyarrow", "scipy")  # of the base, and not needed to predict
# Wheels of download.pytorch.org without CUDA, which the package index does not list: torch 2.13.0+cpu, Python 3.11.
CPU_WHEELS = {"torch==2.13.0": ["6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, help=" ".join(NAMES))
    parser.add_argument("--upgrade", action="store_true")
    options = parser.parse_args()
    for name in options.names:
        write_lock(name, options.upgrade)


def write_lock(name: str, upgrade: bool) -> None:
    """Resolve requirements/NAME.txt for Python 3.11 to 3.13 on every platform into requirements/locked/NAME.txt."""
    path = REQUIREMENTS / "locked" / f"{name}.txt"
    command = [Path(sys.executable).parent / "uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes"]
    command += ["--python-version", "3.12" if name == "colab" else "3.11"]  # Colab's own have no older one
    command += ["--custom-compile-command", f"make lock ARGS={name}", "--output-file", path]
    command += ["--upgrade"] if upgrade else []
    if name == "colab":
        command += ["--constraint", REQUIREMENTS / "colab-constraints.txt"]
    if name == "image":  # the versions that the tests run on
        command += ["--constraint", path.with_name("dev.txt")]
        command += [word for package in NOT_IN_IMAGE for word in ("--no-emit-package", package)]
    subprocess.run([*command, f"{name}.txt"], cwd=REQUIREMENTS, check=True)
    text = path.read_text(encoding="utf-8")
    if name == "bench":  # on top of dev
        dev = {block.split()[0] for block in _blocks((path.parent / "dev.txt").read_text(encoding="utf-8"))}
        text = "-r dev.txt\n" + "".join(block for block in _blocks(text) if block.split()[0] not in dev)
    of_cuda = _cuda_packages(text)
    for package in of_cuda:
        text = text.replace(package, "")
    path.write_text(text, encoding="utf-8")
    if of_cuda:
        path.with_name(f"{name}-cuda.txt").write_text("".join(of_cuda), encoding="utf-8")
    for pin, hashes in CPU_WHEELS.items():
        if f"\n{pin} " in text:
            lines = " \\\n    ".join([pin, *(f"--hash=sha256:{one}" for one in hashes)])
            path.with_name(f"{name}-cpu.txt").write_text(lines + "\n", encoding="utf-8")


def _cuda_packages(text: str) -> list[str]:
    """Return the packages that torch alone requires for CUDA: torch's build for CPUs does not require them."""
    blocks = {block.split("==")[0]: block for block in _blocks(text) if re.match(r"nvidia-|cuda-|triton", block)}
    while kept := [name for name, block in blocks.items() if not _required_by(block) <= {"torch", *blocks}]:
        for name in kept:
            del blocks[name]
    return list(blocks.values())


def _required_by(block: str) -> set[str]:
    """Return the names after `# via` of one package."""
    return set(re.findall(r"^    #(?: via)? +([A-Za-z0-9._-]+)$", block, re.MULTILINE)) - {"via"}


def _blocks(text: str) -> list[str]:
    """Split a lock file into packages, each with its hashes and the comment that names what requires it."""
    return re.findall(r"^[A-Za-z0-9].*\n(?:[ \t].*\n)*", text, re.MULTILINE)


if __name__ == "__main__":
    main()
