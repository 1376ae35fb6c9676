"""Samples in tar shards: what each shard holds, and the order of an epoch, which any number of ranks can continue.

A sample is the members of one key: KEY.png and KEY.cls. The order of an epoch is one list of all samples, a function of
(seed, epoch) alone; rank r of w takes every w-th of them. What remains after `start` samples is then the same whichever
number of ranks took those.
"""

import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ml_factory.errors import FileError, SettingsError
from ml_factory.seeding import seeded_generator

LABEL = "cls"  # suffix of a sample's class
_BLOCK = 512  # bytes of a tar header, to which contents are padded
_END = 2 * _BLOCK  # zeros after the last member
# Shards whose samples are mixed with each other; the order within them is random, and reading stays in few files.
GROUP = 16


@dataclass(frozen=True)
class ShardIndex:
    """Content of one shard.

    name : of the shard's file, without its folder.
    keys : of its whole samples, in the shard's order.
    members : of each sample, suffix -> (offset, bytes) in the file.
    broken : samples that lack an image or a class, with the reason.
    """

    name: str
    path: Path
    keys: tuple[str, ...]
    members: tuple[Mapping[str, tuple[int, int]], ...]
    broken: tuple[str, ...] = ()


def index_shard(path: str | os.PathLike, images: Sequence[str] = ()) -> ShardIndex:
    """Read the headers of a shard. Raises FileError for one that is cut off, damaged or empty.

    images : suffixes of which a whole sample has one, next to `cls`; any samples without.
    """
    path, found = Path(path), dict[str, dict[str, tuple[int, int]]]()
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            end = 0
            for member in tar:
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                folder, _, name = member.name.rpartition("/")
                key, dot, suffix = name.partition(".")
                if member.isreg() and dot:
                    whole = f"{folder}/{key}" if folder else key
                    if suffix.lower() in found.setdefault(whole, {}):
                        raise tarfile.TarError(f"{member.name} twice")
                    found[whole][suffix.lower()] = (member.offset_data, member.size)
            # tarfile ends in silence at a damaged header, and where a file ends between two members
            file.seek(end)
            if file.read(_END) != bytes(_END):
                raise tarfile.TarError(f"no end mark after byte {end:,}")
    except (OSError, tarfile.TarError, ValueError) as error:
        raise FileError(
            "This shard is broken", where=path, got=error, wanted="a whole tar file",
            next_step="copy it again, or leave it out with --skip_broken",
        ) from None  # fmt: skip
    if not found:
        raise FileError("This shard has no sample", where=path, wanted="KEY.png and KEY.cls", next_step="remove it")
    lacking = {key: _lacking(parts, images) for key, parts in found.items()}
    broken = tuple(f"{path.name}: {key}: {reason}" for key, reason in lacking.items() if reason)
    whole = {key: parts for key, parts in found.items() if not lacking[key]}
    return ShardIndex(path.name, path, tuple(whole), tuple(whole.values()), broken)


def _lacking(parts: Mapping[str, object], images: Sequence[str]) -> str:
    """Return what a sample of these members lacks; "" for a whole one."""
    if not images:
        return ""
    if not any(suffix in parts for suffix in images):
        return f"no image among {', '.join(parts)}"
    return "" if LABEL in parts else f"no class among {', '.join(parts)}"


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
    _content: tuple[tuple[str, Sequence | int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        if type(self.world) is not int or self.world < 1:
            raise SettingsError("At least one rank", where="world", got=repr(self.world), wanted=">= 1")
        listed = self.shards.items() if isinstance(self.shards, Mapping) else self.shards
        object.__setattr__(self, "_content", tuple(_named_keys(one) for one in listed))

    def __len__(self) -> int:
        """Number of samples in the epoch, of all ranks together."""
        return int(sum(self._sizes()))

    def keys(self, rank: int, start: int = 0) -> Iterator[str]:
        """Yield the samples of a rank as SHARD/KEY, from the epoch's sample number `start` on, counted over all ranks.

        Each sample is one rank's, once an epoch; ranks differ by one sample at most, where `world` does not divide.
        """
        if not 0 <= rank < self.world:
            raise SettingsError("There is no such rank", where="rank", got=rank, wanted=f"0 to {self.world - 1}")
        if not 0 <= start <= len(self):
            raise SettingsError("No such sample", where="start", got=start, wanted=f"0 to {len(self)}")
        ends = np.cumsum(self._sizes())
        for position in self.order()[start + rank :: self.world].tolist():
            shard = int(np.searchsorted(ends, position, side="right"))
            name, keys = self._content[shard]
            within = position - (int(ends[shard - 1]) if shard else 0)
            yield f"{name}/{within if isinstance(keys, int) else keys[within]}"

    def order(self) -> np.ndarray:
        """Return the samples in the epoch's order, int64: positions in the shards one after the other, as given."""
        sizes = self._sizes()
        starts = np.cumsum(sizes) - sizes
        generator = seeded_generator(self.seed, "shards", self.epoch)
        shards = generator.permutation(len(sizes))
        groups = [shards[first : first + GROUP] for first in range(0, len(shards), GROUP)]
        parts = [
            generator.permutation(np.concatenate([np.arange(starts[one], starts[one] + sizes[one]) for one in group]))
            for group in groups
        ]
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def _sizes(self) -> np.ndarray:
        return np.array([keys if isinstance(keys, int) else len(keys) for _, keys in self._content], dtype=np.int64)


def _named_keys(shard: Any) -> tuple[str, Sequence | int]:
    if isinstance(shard, str | os.PathLike):
        shard = index_shard(shard)
    if isinstance(shard, ShardIndex):
        return shard.name, shard.keys
    name, keys = shard
    return str(name), keys if isinstance(keys, int) else tuple(keys)
