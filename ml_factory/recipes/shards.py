"""Samples in tar shards: what each shard holds, and the order of an epoch, which any number of ranks can continue.

A sample is the members of one key: KEY.png and KEY.cls. The order of an epoch is one list of all samples, a function of
(seed, epoch) alone; rank r of w takes every w-th of them. What remains after `start` samples is then the same whichever
number of ranks took those.
"""

import os
import re
import tarfile
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ml_factory.errors import FileError, SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.seeding import seeded_generator
from ml_factory.storage.files import files, local_cache_folder
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.remote import Remote

webdataset = LazyModule("webdataset")
_BLOCK = 512  # bytes of a tar header, to which contents are padded
_END = 2 * _BLOCK  # zeros after the last member
# Shards whose samples are mixed with each other; the order within them is random, and reading stays in few files.
GROUP = 16
MOST_FETCHED = 3 * GROUP  # shards of buckets on this disk: the group that is read, the next one, that of an evaluation
_AT_ONCE = 8  # shards that are fetched and indexed at the same time

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


def index_shards(shards: Iterable[Path | BucketShard]) -> dict[str, dict[str, Members]]:
    """Return the samples of each shard, as of `index_shard`; those of a bucket are kept, so that they are read once."""
    shards = list(shards)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(map(str, shards), pool.map(_indexed, shards), strict=True))


def _indexed(shard: Path | BucketShard) -> dict[str, Members]:
    if isinstance(shard, Path):
        return index_shard(shard)
    kept = shard.copy.with_suffix(".json")
    if not files.is_file(kept):
        files.write_json(kept, index_shard(shard))
    return files.read_json(kept)


def index_shard(shard: str | os.PathLike | BucketShard) -> dict[str, Members]:
    """Return the samples of a shard in its order, by key. Raises FileError for a shard cut off, damaged or empty."""
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
                    if suffix.lower() in parts:
                        raise tarfile.TarError(f"{member.name} twice")
                    parts[suffix.lower()] = (member.offset_data, member.size)
            # tarfile ends in silence at a damaged header, and where a file ends between two members
            file.seek(end)
            if file.read(_END) != bytes(_END):
                raise tarfile.TarError(f"no end mark after byte {end:,}")
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
        if type(world) is not int or world < 1:
            raise SettingsError("At least one rank", where="world", got=repr(world), wanted=">= 1")
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
    if not source.strip():
        raise SettingsError("No shards are named", where="--wds_traindir", wanted="a folder, gs://… or files in braces",
                            next_step="write some with `recipe shards`, or train on --fake_data")  # fmt: skip
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
