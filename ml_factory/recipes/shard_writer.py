"""Writing of images as tar shards: KEY.png (or the image file as it is) and KEY.cls, as WebDataset reads them."""

import io
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from ml_factory.errors import FileError, SettingsError, did_you_mean
from ml_factory.lazy_module import LazyModule
from ml_factory.seeding import seeded_generator
from ml_factory.storage.files import files
from ml_factory.storage.stored_paths import is_plain_name

webdataset = LazyModule("webdataset")
IMAGES = ("png", "jpg", "jpeg", "webp", "bmp", "ppm")  # suffixes of image files
Sample = tuple[str, int, Callable[[], bytes]]  # suffix, class, function that returns the image's file


def array_samples(path: Path, part: str) -> list[Sample]:
    """Return the samples of the arrays x and y of an NPZ file (x_PART, y_PART), encoded when they are written.

    Raises FileError for a damaged file, SettingsError where there are no such arrays of images and classes.
    """
    names = [f"{name}_{part}" if part else name for name in "xy"]
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            known = list(held)
            x_NHWC, y_N = (held[name] if name in known else None for name in names)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise FileError("These arrays cannot be read", where=path, got=error, wanted="NPZ without objects") from None
    if x_NHWC is None or y_N is None:
        raise SettingsError("There are no such arrays", where=path, got=", ".join(known), wanted=" and ".join(names),
                            next_step=did_you_mean(names[0], known) or "name the suffix with --part")  # fmt: skip
    if x_NHWC.dtype != np.uint8 or x_NHWC.ndim != 4 or x_NHWC.shape[3] != 3 or y_N.shape != x_NHWC.shape[:1]:
        raise SettingsError(
            "Not images and their classes", where=path, got=f"{x_NHWC.dtype} {x_NHWC.shape} and {y_N.shape}",
            wanted="uint8 (N, H, W, 3) and (N,)",
        )  # fmt: skip
    return [
        ("png", int(label), lambda pixels=pixels: _encoded(pixels)) for pixels, label in zip(x_NHWC, y_N, strict=True)
    ]


def folder_samples(folder: Path) -> list[Sample]:
    """Return the images below folder/CLASS/; classes count from 0 in the order of their names.

    Raises FileError where the folder has none.
    """
    classes = sorted(path for path in folder.iterdir() if path.is_dir()) if files.is_folder(folder) else []
    found = [
        (path.suffix.lower().lstrip("."), label, path.read_bytes)
        for label, inner in enumerate(classes) for path in sorted(inner.iterdir())
        if path.suffix.lower().lstrip(".") in IMAGES
    ]  # fmt: skip
    if not found:
        raise FileError("No images here", where=folder, wanted=f"folders of {', '.join(IMAGES)}, one a class")
    return found


def write_shards(samples: list[Sample], folder: Path, per_shard: int, prefix: str, seed: int) -> dict:
    """Write the samples, shuffled by the seed, as PREFIX-000000.tar, …; equal samples give equal bytes.

    Returns the facts: shards, samples, classes, and the shards as a pattern with braces. Raises SettingsError where
    the folder has shards of this prefix already.
    """
    if not is_plain_name(prefix):
        raise SettingsError("This cannot begin a file's name", where="prefix", got=repr(prefix), wanted="such as train")
    files.make_folder(folder)
    if there := [name for name in files.names(folder) if name.startswith(f"{prefix}-") and name.endswith(".tar")]:
        raise SettingsError(
            "There are shards of this name", where=folder, got=f"{len(there)} files, {sorted(there)[0]} …",
            next_step="take another folder or --prefix, or delete them",
        )  # fmt: skip
    order = seeded_generator(seed, "shards").permutation(len(samples)).tolist()
    pieces = [order[start : start + per_shard] for start in range(0, len(order), per_shard)]

    def write(path: Path, rows: list[int]) -> None:
        with webdataset.TarWriter(str(path), encoder=False, mtime=0, compress=False) as tar:
            for row in rows:
                suffix, label, read = samples[row]
                tar.write({"__key__": f"{row:08d}", suffix: read(), "cls": str(label).encode()})

    for number, rows in enumerate(pieces):
        files.replace(folder / f"{prefix}-{number:06d}.tar", lambda path, rows=rows: write(path, rows), 0)
    braces = f"{{000000..{len(pieces) - 1:06d}}}" if len(pieces) > 1 else "000000"
    return {"shards": len(pieces), "samples": len(samples), "classes": len({label for _, label, _ in samples}),
            "pattern": str(folder / f"{prefix}-{braces}.tar")}  # fmt: skip


def _encoded(pixels_HWC: np.ndarray) -> bytes:
    encoded = io.BytesIO()
    Image.fromarray(pixels_HWC).save(encoded, "png", compress_level=1)
    return encoded.getvalue()
