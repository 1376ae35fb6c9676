"""Samples in tar shards: what each shard holds, and the order of an epoch, which any number of ranks can continue.

A sample is the members of one key: KEY.png and KEY.cls. The order of an epoch is one list of all samples, a function of
(seed, epoch) alone; rank r of w takes every w-th of them. What remains after `start` samples is then the same whichever
number of ranks took those.
"""

import hashlib
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ml_factory.errors import FactoryError, FileError, SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.seeding import seeded_generator
from ml_factory.storage.files import files, local_cache_folder
from ml_factory.storage.mirror import Mirror, fetch_file

webdataset = LazyModule("webdataset")
PIPE = "pipe:"
_BLOCK = 512  # bytes of a tar header, to which contents are padded
_END = 2 * _BLOCK  # zeros after the last member
# Shards whose samples are mixed with each other; the order within them is random, and reading stays in few files.
GROUP = 16

Members = dict[str, tuple[int, int]]  # suffix -> (offset, bytes) in the shard's file


def index_shard(path: str | os.PathLike) -> dict[str, Members]:
    """Return the samples of a shard in its order, by key. Raises FileError for a shard cut off, damaged or empty."""
    path, found = Path(path), dict[str, Members]()
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


@dataclass(frozen=True)
class ShardPlan:
    """The order of the samples in one epoch.

    shards : names of shards with their keys (a mapping, or pairs), or with the number of their samples; or paths of tar
        files, whose keys are read.
    seed, epoch : the order is a function of these alone.
    world : number of ranks.
    """

    shards: Any
    seed: int = 0
    epoch: int = 0
    world: int = 1
    _sizes: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        if type(self.world) is not int or self.world < 1:
            raise SettingsError("At least one rank", where="world", got=repr(self.world), wanted=">= 1")
        sizes = [keys if isinstance(keys, int) else len(keys) for _, keys in self._content]
        object.__setattr__(self, "_sizes", np.array(sizes, np.int64))

    @cached_property
    def _content(self) -> list[tuple[str, Any]]:
        """Name and keys, or their number, of each shard."""
        listed = self.shards.items() if isinstance(self.shards, Mapping) else self.shards
        return [
            (os.path.basename(one), tuple(index_shard(one))) if isinstance(one, str | os.PathLike) else tuple(one)
            for one in listed
        ]

    def __len__(self) -> int:
        """Number of samples in the epoch, of all ranks together."""
        return int(self._sizes.sum())

    def keys(self, rank: int, start: int = 0) -> Iterator[str]:
        """Yield the samples of a rank as SHARD/KEY, from the epoch's sample number `start` on, counted over all ranks.

        Each sample is one rank's, once an epoch; ranks differ by one sample at most, where `world` does not divide.
        """
        if not 0 <= rank < self.world:
            raise SettingsError("There is no such rank", where="rank", got=rank, wanted=f"0 to {self.world - 1}")
        if not 0 <= start <= len(self):
            raise SettingsError("No such sample", where="start", got=start, wanted=f"0 to {len(self)}")
        ends = np.cumsum(self._sizes)
        for position in self.order()[start + rank :: self.world].tolist():
            shard = int(np.searchsorted(ends, position, side="right"))
            name, keys = self._content[shard]
            within = position - int(ends[shard] - self._sizes[shard])
            yield f"{name}/{within if isinstance(keys, int) else keys[within]}"

    def order(self) -> np.ndarray:
        """Return the samples in the epoch's order, int64: positions in the shards one after the other, as given."""
        ends = np.cumsum(self._sizes)
        generator = seeded_generator(self.seed, "shards", self.epoch)
        shards = generator.permutation(len(ends))
        groups = [shards[first : first + GROUP] for first in range(0, len(shards), GROUP)]
        parts = [
            generator.permutation(np.concatenate([np.arange(ends[one] - self._sizes[one], ends[one]) for one in group]))
            for group in groups
        ]
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


# ---------------------------------------------------------------------- where shards come from


def local_shards(source: str, *, allow_pipe: bool = False) -> list[Path]:
    """Return the local files of a source, in its order. Objects of a bucket are downloaded once and verified.

    source : a folder, or addresses as WebDataset writes them: braces, several joined by "::".
    allow_pipe : run the commands of `pipe:` addresses, as WebDataset does: by a shell.

    Raises SettingsError for an address that cannot be used, FileError where there are no shards, WorkspaceError where a
    bucket does not answer.
    """
    if not source.strip():
        raise SettingsError("No shards are named", where="--wds_traindir", wanted="a folder, gs://… or files in braces",
                            next_step="write some with `recipe shards`, or train on --fake_data")  # fmt: skip
    return [path for address in webdataset.shardlists.expand_urls(source) for path in _local(address, allow_pipe)]


def _local(address: str, allow_pipe: bool) -> list[Path]:
    if address.startswith(PIPE):
        return [_printed(address, allow_pipe)]
    if address.startswith("gs://") and address.endswith(".tar"):
        return [fetch_file(address)]
    path = Path(address.removeprefix("file://")).expanduser()
    if address.startswith("gs://"):
        mirror = Mirror(address.rstrip("/"))
        mirror.pull()
        path = mirror.folder
    elif "://" in address and not address.startswith("file://"):
        raise SettingsError("Shards cannot be read from there", where=address, wanted="a folder, gs:// or pipe:")
    elif files.is_file(path):
        return [path]
    elif not files.is_folder(path):
        raise FileError("No such shard", where=path, next_step="check the path and the numbers in braces")
    names = sorted(name for name in files.names(path) if name.endswith(".tar"))
    if not names:
        raise FileError("No shards here", where=address, wanted="files that end in .tar",
                        next_step="write some with `recipe shards`")  # fmt: skip
    return [path / name for name in names]


def _printed(address: str, allow_pipe: bool) -> Path:
    """Run the command of an address and keep what it prints as a local file."""
    if not allow_pipe:
        bucket = next((word for word in address.split() if word.startswith("gs://")), "")
        raise SettingsError(
            "A command in place of shards runs only where it is allowed", where=address,
            next_step=(f"give {bucket} as it is: buckets are read without a command; or " if bucket else "")
            + "add --allow_pipe",
        )  # fmt: skip

    def run(target: Path) -> None:
        try:
            with webdataset.gopen(address) as printed, target.open("wb") as output:
                shutil.copyfileobj(printed, output)
        except OSError as error:
            raise FactoryError("This command failed", where=address, got=error) from None

    path = local_cache_folder("shards") / f"{hashlib.sha256(address.encode()).hexdigest()[:24]}.tar"
    files.replace(path, run)
    return path
