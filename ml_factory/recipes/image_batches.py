"""Batches of images from shards or made up: decoded and augmented on threads, one batch ahead of the step.

B rows of a batch, N samples, H height, W width.
"""

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from ml_factory.errors import FileError
from ml_factory.recipes.shard_writer import IMAGES
from ml_factory.recipes.shards import LABEL, ShardPlan, index_shard
from ml_factory.seeding import seeded_generator
from ml_factory.training.device import Device
from ml_factory.training.sampler import StreamSampler

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM")  # those of IMAGES; Pillow would also start programs for others
_PIECE = 32  # images that one thread decodes in a row


class Samples(Protocol):
    """Images by number: a shard's, or made up."""

    def __len__(self) -> int: ...
    def order(self, epoch: int) -> np.ndarray:
        """Return the numbers of all samples in the order of an epoch, int64 (N,)."""

    def read(self, number: int) -> tuple[np.ndarray, int] | None:
        """Return the image uint8 (H, W, 3) and its class; None for a broken sample that is to be left out."""


class ShardSamples:
    """The samples of shards on this machine's disk.

    size : height and width; other images are scaled by their short side and cut at the centre.
    classes : number of classes; a class of a sample is 0 .. classes - 1.
    skip_broken : leave out broken shards and samples, and count them in `skipped`; otherwise FileError names the first.
    """

    def __init__(self, paths: Sequence[Path], size: int, classes: int, seed: int, skip_broken: bool = False):
        self.size, self.classes, self.seed, self._skip = size, classes, seed, skip_broken
        self.skipped: dict[str, None] = {}  # an ordered set: a sample is met again in each epoch
        self.shards = []
        for path in paths:
            try:
                shard = index_shard(path, IMAGES)
            except FileError as error:
                self._report(path.name, error)
                continue
            for broken in shard.broken:
                self._report(broken, None)
            self.shards.append(shard)
        self._ends = np.cumsum([len(shard.keys) for shard in self.shards])
        self._files = [os.open(shard.path, os.O_RDONLY) for shard in self.shards]
        if not len(self):
            raise FileError("No whole sample in these shards", got=f"{len(paths)} shards", wanted="KEY.png and KEY.cls")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def order(self, epoch: int) -> np.ndarray:
        return ShardPlan(self.shards, self.seed, epoch).order()

    def name(self, number: int) -> str:
        """Return SHARD: KEY of a sample."""
        shard, within = self._find(number)
        return f"{self.shards[shard].name}: {self.shards[shard].keys[within]}"

    def read(self, number: int) -> tuple[np.ndarray, int] | None:
        shard, within = self._find(number)
        members, file = self.shards[shard].members[within], self._files[shard]
        try:
            suffix = next(one for one in IMAGES if one in members)
            label = int(os.pread(file, *members[LABEL][::-1]))
            if not 0 <= label < self.classes:
                raise ValueError(f"class {label} of {self.classes}")
            image = Image.open(io.BytesIO(os.pread(file, *members[suffix][::-1])), formats=_FORMATS)
            return _sized(image.convert("RGB"), self.size), label
        except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            self._report(self.name(number), error)
            return None

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _find(self, number: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self._ends, number, side="right"))
        return shard, number - (int(self._ends[shard - 1]) if shard else 0)

    def _report(self, name: str, error: Exception | None) -> None:
        """Count what is left out; raise instead, unless that is set."""
        if not self._skip:
            if isinstance(error, FileError):
                raise error
            raise FileError("This sample is broken", where=name, got=error, wanted="an image and its class",
                            next_step="mend it, or leave broken ones out with --skip_broken") from None  # fmt: skip
        self.skipped[name] = None


class MadeUpSamples:
    """Images of noise with a class in their colour, a function of (seed, number) alone."""

    def __init__(self, count: int, size: int, classes: int, seed: int):
        self.count, self.size, self.classes, self.seed = count, size, classes, seed
        self.skipped: dict[str, None] = {}

    def __len__(self) -> int:
        return self.count

    def order(self, epoch: int) -> np.ndarray:
        return seeded_generator(self.seed, "order", epoch).permutation(self.count)

    def read(self, number: int) -> tuple[np.ndarray, int] | None:
        label = number % self.classes
        image_HWC = seeded_generator(self.seed, number).integers(0, 128, (self.size, self.size, 3), np.uint8)
        image_HWC[..., label % 3] += np.uint8(127 * (label + 1) // self.classes)
        return image_HWC, label

    def close(self) -> None:
        """Nothing is open."""


class ImageBatches:
    """Function from positions to (images uint8 (B, H, W, 3), classes (B,), weights (B,)) on the device.

    samples : with `order` and `read`.
    training : positions are those of the stream of all epochs, and images are cut and mirrored at random; otherwise
        positions are samples.
    workers : number of decoding threads.

    A broken sample that is left out has the weight 0, and the image of the batch's first whole sample: batches stay
    equal on all ranks, and no statistic sees an image that is none.
    """

    sampler = StreamSampler

    def __init__(self, samples: Any, device: Device, *, training: bool, workers: int = 8, seed: int = 0):
        self.samples, self.device, self.training, self.seed = samples, device, training, seed
        self._pool = ThreadPoolExecutor(max(workers, 1), "decode")
        self._worker = ThreadPoolExecutor(1, "batch")
        self._ahead: tuple[np.ndarray, Future] | None = None
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def __call__(self, positions: np.ndarray) -> tuple[torch.Tensor, ...]:
        ahead, self._ahead = self._ahead, None
        announced = ahead is not None and np.array_equal(ahead[0], positions)
        batch = ahead[1].result() if announced else self.host_batch(positions)
        return self.device.shard(tuple(self.device.to_device(torch.from_numpy(part)) for part in batch))

    def prefetch(self, positions: np.ndarray) -> None:
        """Announce the next positions."""
        self._ahead = positions, self._worker.submit(self.host_batch, positions)

    def batches(self, wanted: Iterable[np.ndarray]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the batch of each of these positions; the next one is decoded meanwhile."""
        remaining = iter(wanted)
        now = next(remaining, None)
        while now is not None:
            batch, now = self(now), next(remaining, None)
            if now is not None:
                self.prefetch(now)
            yield batch

    def close(self) -> None:
        """End the threads and close the shards."""
        self._worker.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)
        self.samples.close()

    def host_batch(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Decode and augment a batch on the host."""
        pieces = [positions[start : start + _PIECE].tolist() for start in range(0, len(positions), _PIECE)]
        read = [one for piece in self._pool.map(self._read_all, pieces) for one in piece]
        first = next((one for one in read if one is not None), None)
        if first is None:
            raise FileError("Every sample of this batch is broken", got=len(read), next_step="look at the shards")
        weight_B = np.array([one is not None for one in read], np.float32)
        images, labels = zip(*(first if one is None else one for one in read), strict=True)
        return np.stack(images), np.array(labels, np.int64), weight_B

    def _read_all(self, positions: list[int]) -> list[tuple[np.ndarray, int] | None]:
        return [self._augmented(one) if self.training else self.samples.read(one) for one in positions]

    def _augmented(self, position: int) -> tuple[np.ndarray, int] | None:
        """Read a sample of the stream; cut and mirror it by (seed, position)."""
        epoch, within = divmod(position, len(self.samples))
        found = self.samples.read(int(self._order(epoch)[within]))
        if found is None:
            return None
        image_HWC, label = found
        return _cut_and_mirrored(image_HWC, seeded_generator(self.seed, "augment", position)), label

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            order = self.samples.order(epoch)
            self._orders = {one: kept for one, kept in self._orders.items() if one >= epoch - 1} | {epoch: order}
        return order


def _cut_and_mirrored(image_HWC: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Shift by up to an eighth with black edges, and mirror every second image."""
    size = len(image_HWC)
    edge = size // 8
    top, left, mirror = (int(generator.integers(high)) for high in (2 * edge + 1, 2 * edge + 1, 2))
    out_HWC = np.zeros_like(image_HWC)
    rows, columns = (slice(max(edge - one, 0), min(size + edge - one, size)) for one in (top, left))
    from_rows, from_columns = (slice(max(one - edge, 0), min(size + one - edge, size)) for one in (top, left))
    out_HWC[rows, columns] = image_HWC[from_rows, from_columns]
    return out_HWC[:, ::-1] if mirror else out_HWC


def _sized(image: Image.Image, size: int) -> np.ndarray:
    """Return the image as uint8 (size, size, 3): scaled by its short side, and cut at the centre."""
    if image.size != (size, size):
        scale = size / min(image.size)
        width, height = (max(size, round(side * scale)) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        image = image.resize((width, height)).crop((left, top, left + size, top + size))
    return np.asarray(image)
