"""Write the zip of a Lambda function that predicts feature rows: handler, ONNX graph, NumPy and onnxruntime.

    python deploy/lambda/build_zip.py DEMO-h20-xgboost.bundle --out dist/lambda.zip [--python 3.12]

The bundle is one of `export --format bundle --format onnx`. pip downloads the two packages for x86-64 Linux, at the
versions of requirements/locked/image.txt and against its hashes. Handler of the function: feature_rows.handler.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # from a checkout, without an installation

from ml_factory.errors import FactoryError, SettingsError, WorkspaceError  # noqa: E402
from ml_factory.inference.bundle import Bundle  # noqa: E402
from ml_factory.storage.files import files  # noqa: E402
from utils.package_lock import read_package_lock  # noqa: E402

PACKAGES = ("numpy", "onnxruntime")
MODULES = ("feature_rows.py", "http_event.py")
LARGEST = 250_000_000  # bytes unpacked; AWS takes 250 MB with layers
LEFT_OUT = shutil.ignore_patterns("__pycache__", "tests", "*.pyi", "*.dist-info")
MOMENT = (2020, 1, 1, 0, 0, 0)  # of every file, so that the same content is the same zip


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path, default=Path("dist/lambda.zip"))
    parser.add_argument("--python", default="3.12", help="version of the function's runtime")
    parser.add_argument("--packages", type=Path, help="folder with numpy and onnxruntime, in the place of a download")
    options = parser.parse_args(words)
    try:
        with tempfile.TemporaryDirectory() as folder:
            packages = options.packages or download_packages(Path(folder), options.python)
            size = write_zip(options.bundle, packages, options.out)
    except FactoryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {size / 1e6:.0f} MB unpacked, {options.out.stat().st_size / 1e6:.0f} MB packed")
    return 0


def download_packages(folder: Path, python: str) -> Path:
    """Install the locked packages for this Python on x86-64 Linux into the folder; return where they are."""
    lock = read_package_lock(ROOT / "requirements" / "locked" / "image.txt")
    (folder / "packages.txt").write_text("".join(lock[name].text for name in PACKAGES), encoding="utf-8")
    platforms = [f"--platform=manylinux_2_{number}_x86_64" for number in (17, 27, 28)] + [
        "--platform=manylinux2014_x86_64"
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
    ]
    command += [
        "--require-hashes",
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={python}",
        *platforms,
    ]
    done = subprocess.run([*command, "--target", folder / "packages", "-r", folder / "packages.txt"], check=False)
    if done.returncode:
        raise WorkspaceError("pip could not download the packages of the function", where=", ".join(PACKAGES),
                             got="its message above", next_step="check the network, or another --python")  # fmt: skip
    return folder / "packages"


def write_zip(bundle: Path, packages: Path, out: Path) -> int:
    """Write the zip, whole or not at all; return its unpacked size in bytes. Raises FactoryError."""
    graph = Bundle.load(bundle).onnx
    if not graph:
        raise SettingsError("This bundle has no ONNX graph", where=bundle, wanted="a graph, which the function runs",
                            next_step="export it with --format bundle --format onnx")  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        for name in (*PACKAGES, *(f"{name}.libs" for name in PACKAGES)):
            if (packages / name).is_dir():
                shutil.copytree(packages / name, place / name, ignore=LEFT_OUT)
            elif name in PACKAGES:
                raise WorkspaceError("A package of the function is absent", where=packages, got=f"no {name}",
                                     next_step="leave out --packages, and pip downloads them")  # fmt: skip
        for name in MODULES:
            shutil.copy(HERE / name, place)
        (place / "model.onnx").write_bytes(graph)
        found = sorted(path for path in place.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in found)
        if size > LARGEST:
            raise SettingsError("The function is too large", where=out, got=f"{size / 1e6:.0f} MB unpacked",
                                wanted=f"at most {LARGEST / 1e6:.0f}", next_step="use the container image")  # fmt: skip
        packed = place.with_suffix(".zip")
        try:
            _pack(packed, place, found)
            files.write(out, packed.read_bytes())
        finally:
            packed.unlink(missing_ok=True)
    return size


def _pack(packed: Path, place: Path, found: list[Path]) -> None:
    """Write these files, readable by everybody, as Lambda wants them."""
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in found:
            entry = zipfile.ZipInfo(path.relative_to(place).as_posix(), MOMENT)
            entry.external_attr = 0o755 << 16 if path.suffix == ".so" or ".so." in path.name else 0o644 << 16
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    raise SystemExit(main())
