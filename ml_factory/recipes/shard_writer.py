"""Writing of images as tar shards: KEY.png (or the image file as it is) and KEY.cls, as WebDataset reads them."""

import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from ml_factory.errors import FileError, SettingsError, did_you_mean
from ml_factory.seeding import seeded_generator
from ml_factory.storage.files import files
from ml_factory.storage.stored_paths import is_plain_name

IMAGES = ("png", "jpg", "jpeg", "webp", "bmp", "ppm")  # suffixes of image files


class ShardSample(NamedTuple):
    """One image with its class.

    suffix : of the image's file, without a dot.
    """

    suffix: str
    image: bytes
    label: int


def array_samples(path: Path, part: str, seed: int) -> list[tuple[str, "_Pixels"]]:
    """Return the samples of the arrays x and y of an NPZ file (x_PART, y_PART), shuffled; each is encoded when written.

    Raises FileError for a damaged file, SettingsError where there are no such arrays of images and classes.
    """
    names = [f"{name}_{part}" if part else name for name in "xy"]
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            known = list(held)
            if absent := [name for name in names if name not in known]:
                raise SettingsError(
                    "There is no such array", where=path, got=f"{', '.join(known)}", wanted=absent[0],
                    next_step=did_you_mean(absent[0], known) or "name the suffix with --part",
                )  # fmt: skip
            x_NHWC, y_N = (held[name] for name in names)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, SettingsError):
            raise
        raise FileError("These arrays cannot be read", where=path, got=error, wanted="NPZ without objects") from None
    if x_NHWC.dtype != np.uint8 or x_NHWC.ndim != 4 or x_NHWC.shape[3] != 3 or y_N.shape != x_NHWC.shape[:1]:
        raise SettingsError(
            "Not images and their classes", where=path, got=f"{x_NHWC.dtype} {x_NHWC.shape} and {y_N.shape}",
            wanted="uint8 (N, H, W, 3) and (N,)",
        )  # fmt: skip
    return [(f"{row:08d}", _Pixels(x_NHWC[row], int(y_N[row]))) for row in _shuffled(len(x_NHWC), seed)]


def folder_samples(folder: Path, seed: int) -> list[tuple[str, "_ImageFile"]]:
    """Return the images below folder/CLASS/, shuffled; classes count from 0 in the order of their names.

    Raises FileError where the folder has none.
    """
    classes = sorted(path for path in folder.iterdir() if path.is_dir()) if files.is_folder(folder) else []
    found = [
        _ImageFile(path, label)
        for label, inner in enumerate(classes)
        for path in sorted(inner.iterdir())
        if path.suffix.lower().lstrip(".") in IMAGES
    ]
    if not found:
        raise FileError("No images here", where=folder, wanted=f"folders of {', '.join(IMAGES)}, one a class")
    return [(f"{row:08d}", found[row]) for row in _shuffled(len(found), seed)]


class _Pixels(NamedTuple):
    """An image as an array uint8 (H, W, 3)."""

    pixels_HWC: np.ndarray
    label: int

    def encode(self) -> ShardSample:
        encoded = io.BytesIO()
        Image.fromarray(self.pixels_HWC).save(encoded, "png", compress_level=1)
        return ShardSample("png", encoded.getvalue(), self.label)


class _ImageFile(NamedTuple):
    """An image as a file, which goes into the shard as it is."""

    path: Path
    label: int

    def encode(self) -> ShardSample:
        return ShardSample(self.path.suffix.lower().lstrip("."), files.read(self.path), self.label)


def write_shards(
    samples: list[tuple[str, _Pixels]] | list[tuple[str, _ImageFile]], folder: Path, per_shard: int, prefix: str
) -> dict:
    """Write samples (key, image) as PREFIX-000000.tar, …; equal samples give equal bytes.

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
    pieces = [samples[start : start + per_shard] for start in range(0, len(samples), per_shard)]
    for number, piece in enumerate(pieces):
        path = folder / f"{prefix}-{number:06d}.tar"
        files.replace(path, lambda temporary, piece=piece: _write_tar(temporary, piece), 0)
    braces = f"{{000000..{len(pieces) - 1:06d}}}" if len(pieces) > 1 else "000000"
    classes = len({image.label for _, image in samples})
    return {"shards": len(pieces), "samples": len(samples), "classes": classes,
            "pattern": str(folder / f"{prefix}-{braces}.tar")}  # fmt: skip


def _write_tar(path: Path, samples: list) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in _members(samples):
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = len(content), 0, 0o644
            tar.addfile(info, io.BytesIO(content))


def _members(samples: list) -> Iterator[tuple[str, bytes]]:
    for key, image in samples:
        sample = image.encode()
        yield f"{key}.{sample.suffix}", sample.image
        yield f"{key}.cls", str(sample.label).encode()


def _shuffled(count: int, seed: int) -> list[int]:
    return seeded_generator(seed, "shards").permutation(count).tolist()
