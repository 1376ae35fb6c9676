"""Samples in tar shards: what each holds, the order of an epoch, which any number of ranks can continue, and writing.

A sample is the members of one key: KEY.png and KEY.cls. The order of an epoch is one list of all samples, a function of
(seed, epoch) alone; rank r of w takes every w-th of them (`StreamSampler` and `TrainingState.rows_of` in training,
`ShardPlan.keys` elsewhere). What remains after `start` samples is then the same whichever number of ranks took those.
"""

import io
import os
import re
import tarfile
import threading
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ml_factory.errors import FactoryError, FileError, SettingsError, did_you_mean
from ml_factory.lazy_module import LazyModule
from ml_factory.seeding import seeded_generator
from ml_factory.storage.files import files, local_cache_folder
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.remote import Remote

webdataset, images = LazyModule("webdataset"), LazyModule("PIL.Image")
IMAGES = ("png", "jpg", "jpeg", "webp", "bmp", "ppm")  # suffixes of image files
_BLOCK = 512  # bytes of a tar header, to which contents are padded
_END = 2 * _BLOCK  # zeros after the last member
# Shards whose samples are mixed with each other; the order within them is random, and reading stays in few files.
GROUP = 16
MOST_FETCHED = 3 * GROUP  # shards of buckets on this disk: the group that is read, the next one, that of an evaluation

Sample = tuple[str, int, Callable[[], bytes]]  # suffix, class, function that returns the image's file
Members = dict[str, tuple[int, int]]  # suffix -> (offset, bytes) in the shard's file


@dataclass(frozen=True)
class BucketShard:
    """A shard in a bucket, read through a copy on this disk; of all copies the MOST_FETCHED read last are kept.

    facts : of the object, as of `Remote.list_files`; another version is another copy.
    """

    remote: Any
    address: str
    name: str
    facts: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.address}/{self.name}"

    @cached_property
    def copy(self) -> Path:
        """Path of the copy, whether it is there or not."""
        digest = fingerprint_json([str(self), self.facts["version"]])[:24]
        return local_cache_folder("shards") / f"{digest}.tar"

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open the copy, which is fetched and verified where it is absent. Raises WorkspaceError."""
        with _locks[self.copy]:
            while True:
                with suppress(FileNotFoundError):
                    file = self.copy.open("rb")  # stays readable when another shard takes the place of this one
                    os.utime(self.copy)
                    return file
                files.replace(
                    self.copy, lambda temporary: self.remote.get(self.name, str(temporary), dict(self.facts)),
                    self.facts["size"], flush=False,
                )  # fmt: skip
                _remove_oldest_copies()


_locks: dict[Path, threading.Lock] = defaultdict(threading.Lock)


def _remove_oldest_copies() -> None:
    aged = []
    for path in local_cache_folder("shards").glob("*.tar"):
        with suppress(FileNotFoundError):
            aged.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(aged)[:-MOST_FETCHED]:
        path.unlink(missing_ok=True)


def index_shard_once(shard: Path | BucketShard) -> dict[str, Members]:
    """Return the samples of a shard, as of `index_shard`; those of a bucket are kept, so that they are read once."""
    if isinstance(shard, Path):
        return index_shard(shard)
    kept = shard.copy.with_suffix(".json")
    if not files.is_file(kept):
        files.write_json(kept, index_shard(shard))
    return files.read_json(kept)


def index_shard(shard: str | os.PathLike | BucketShard) -> dict[str, Members]:
    """Return the samples of a shard in its order, by key. Raises FileError for a shard cut off, damaged or empty,
    WorkspaceError where a bucket does not answer.
    """
    path, found = shard if isinstance(shard, BucketShard) else Path(shard), dict[str, Members]()
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            end = 0
            for member in tar:
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                folder, _, name = member.name.rpartition("/")
                key, dot, suffix = name.partition(".")
                if member.isreg() and dot:
                    parts = found.setdefault(f"{folder}/{key}" if folder else key, {})
                    parts[suffix.lower()] = (member.offset_data, member.size)
            # tarfile ends in silence at a damaged header, and where a file ends between two members
            file.seek(end)
            if file.read(_END) != bytes(_END):
                raise tarfile.TarError(f"no end mark after byte {end:,}")
    except FactoryError:  # of the bucket
        raise
    except (OSError, tarfile.TarError, ValueError) as error:
        raise FileError("This shard is broken", where=path, got=error, wanted="a whole tar file",
                        next_step="copy it again, or leave it out of the list") from None  # fmt: skip
    if not found:
        raise FileError("This shard has no sample", where=path, wanted="KEY.png and KEY.cls", next_step="remove it")
    return found


class ShardPlan:
    """The order of the samples in one epoch.

    shards : names of shards with the keys of their samples; or paths of tar files, whose keys are read.
    seed, epoch : the order is a function of these alone.
    world : number of ranks.
    """

    def __init__(
        self, shards: Mapping[str, Collection[str]] | Iterable[str | os.PathLike], seed: int = 0, epoch: int = 0,
        world: int = 1,
    ):  # fmt: skip
        self.seed, self.epoch, self.world = seed, epoch, world
        self.shards = shards if isinstance(shards, Mapping) else {Path(one).name: index_shard(one) for one in shards}

    def __len__(self) -> int:
        """Number of samples in the epoch, of all ranks together."""
        return sum(map(len, self.shards.values()))

    def keys(self, rank: int, start: int = 0) -> Iterator[str]:
        """Yield the samples of a rank as SHARD/KEY, from the epoch's sample number `start` on, counted over all ranks.

        Each sample is one rank's, once an epoch; ranks differ by one sample at most, where `world` does not divide.
        """
        if not (0 <= rank < self.world and 0 <= start <= len(self)):
            raise SettingsError("There is no such sample", where="rank, start", got=f"{rank}, {start}",
                                wanted=f"0 to {self.world - 1}, and 0 to {len(self)}")  # fmt: skip
        names = [f"{name}/{key}" for name, keys in self.shards.items() for key in keys]
        yield from (names[position] for position in self.order()[start + rank :: self.world].tolist())

    def order(self) -> np.ndarray:
        """Return the samples in the epoch's order, int64: positions in the shards one after the other, as given."""
        ends = np.cumsum([0, *map(len, self.shards.values())])
        generator = seeded_generator(self.seed, "shards", self.epoch)
        shards, parts = generator.permutation(len(self.shards)), [np.empty(0, np.int64)]
        for first in range(0, len(shards), GROUP):
            group = [np.arange(ends[one], ends[one + 1]) for one in shards[first : first + GROUP]]
            parts.append(generator.permutation(np.concatenate(group)))
        return np.concatenate(parts)


# ---------------------------------------------------------------------- where shards come from


def find_shards(source: str) -> list[Path | BucketShard]:
    """Return the shards of a source, in its order. Those of a bucket are fetched when they are read.

    source : a folder, or addresses as WebDataset writes them: braces, several joined by "::". `pipe:gsutil cat ADDRESS`
        is ADDRESS; no other command is run.

    Raises SettingsError for an address that cannot be used, FileError where there are no shards, WorkspaceError where a
    bucket does not answer.
    """
    addresses = webdataset.shardlists.expand_urls(source)
    listed = cache(_list_bucket)
    return [
        shard for address in addresses
        for shard in _found(re.sub(r"^pipe:\s*gsutil\s+cat\s+", "", address), listed)
    ]  # fmt: skip


def _found(address: str, listed: Any) -> list[Path | BucketShard]:
    """listed : folder in a bucket -> its shards by name"""
    if address.startswith("gs://") and address.endswith(".tar"):
        folder, _, name = address.rpartition("/")
        if name not in listed(folder):
            raise FileError("No such shard", where=address, next_step="check the name and the numbers in braces")
        return [listed(folder)[name]]
    if address.startswith("gs://"):
        shards: list[Path | BucketShard] = list(listed(address.rstrip("/")).values())
    else:
        path = Path(address.removeprefix("file://")).expanduser()
        if address.startswith("pipe:") or ("://" in address and not address.startswith("file://")):
            raise SettingsError("Shards cannot be read from there", where=address, wanted="a folder, or gs://…")
        if files.is_file(path):
            return [path]
        if not files.is_folder(path):
            raise FileError("No such shard", where=path, next_step="check the path and the numbers in braces")
        shards = [path / name for name in sorted(files.names(path)) if name.endswith(".tar")]
    if not shards:
        raise FileError("No shards here", where=address, wanted="files that end in .tar",
                        next_step="write some with `recipe shards`")  # fmt: skip
    return shards


def _list_bucket(folder: str) -> dict[str, BucketShard]:
    remote = Remote(folder)
    found = remote.list_files("")
    names = sorted(name for name in found if name.endswith(".tar") and "/" not in name)
    return {name: BucketShard(remote, folder, name, found[name]) for name in names}


# ---------------------------------------------------------------------- writing


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
                            next_step=did_you_mean(names[0], known) or "name the suffix: train, test")  # fmt: skip
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
    files.make_folder(folder)
    if there := [name for name in files.names(folder) if name.startswith(f"{prefix}-") and name.endswith(".tar")]:
        raise SettingsError(
            "There are shards of this name", where=folder, got=f"{len(there)} files, {sorted(there)[0]} …",
            next_step="take another folder or prefix, or delete them",
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
    images.fromarray(pixels_HWC).save(encoded, "png", compress_level=1)
    return encoded.getvalue()
