"""Write requirements/locked: the closures of three environments, with versions, hashes and the reason of each package.

    .venv-tools/bin/python .ci/lock.py [dev xla image ...]        (make lock ARGS="dev")

A name is a file of `requirements`. Locked versions stay unless a pin moved; --upgrade takes the newest.
"""

import argparse
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements"
NAMES = ("dev", "xla", "image")
NOT_IN_IMAGE = ("pyarrow", "scipy")  # of the base, and not needed to predict
# Wheels of download.pytorch.org without CUDA, which the package index does not list: torch 2.13.0+cpu, Python 3.11.
CPU_WHEELS = {"torch==2.13.0": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"}


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
    command += ["--python-version", "3.11"]
    command += ["--custom-compile-command", f"make lock ARGS={name}", "--output-file", path]
    command += ["--upgrade"] if upgrade else []
    if name == "image":  # the versions that the tests run on
        command += ["--constraint", path.with_name("dev.txt")]
        command += [word for package in NOT_IN_IMAGE for word in ("--no-emit-package", package)]
    subprocess.run([*command, f"{name}.txt"], cwd=REQUIREMENTS, check=True)
    text = path.read_text(encoding="utf-8")
    for pin, digest in CPU_WHEELS.items():
        text = text.replace(f"    --hash=sha256:{digest} \\\n", "")  # kept from the file as it was
        text = text.replace(f"\n{pin} \\\n", f"\n{pin} \\\n    --hash=sha256:{digest} \\\n")
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
