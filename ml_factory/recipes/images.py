"""Batches of images from shards or made up: decoded and augmented on threads, one batch ahead of the step.

B rows of a batch, N samples, H height, W width.
"""

import io
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from ml_factory.errors import FactoryError, FileError
from ml_factory.recipes.shards import IMAGES, BucketShard, ShardPlan, index_shard_once
from ml_factory.seeding import seeded_generator
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.training.device import Device
from ml_factory.training.sampler import StreamSampler

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM")  # those of IMAGES; Pillow would also start programs for others
_AT_ONCE = 8  # shards that are fetched and indexed at the same time
_PIECE = 32  # images that one thread decodes in a row


class ShardSamples:
    """The samples of shards: a length, `order(epoch)`, and images with classes by number.

    size : height and width; other images are scaled by their short side and cut at the centre.
    classes : number of classes; a class of a sample is 0 .. classes - 1.
    fingerprint : of the samples' keys, members and shards, without the shards' folder.
    """

    def __init__(self, shards: Sequence[Path | BucketShard], size: int, classes: int, seed: int):
        self.size, self.classes, self.seed = size, classes, seed
        opened = {str(shard): shard for shard in shards}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            self._shards = dict(zip(opened, pool.map(index_shard_once, shards), strict=True))
        named = [[opened[place].name, fingerprint_json(found)] for place, found in self._shards.items()]
        self.fingerprint = fingerprint_json(named)[:24]
        self._rows = [(opened[place], key, one) for place, found in self._shards.items() for key, one in found.items()]

    def __len__(self) -> int:
        return len(self._rows)

    def order(self, epoch: int) -> np.ndarray:
        """Return the numbers of all samples in the order of an epoch, int64 (N,)."""
        return ShardPlan(self._shards, self.seed, epoch).order()

    def read(self, number: int) -> tuple[np.ndarray, int]:
        """Return the image uint8 (H, W, 3) and its class. Raises FileError for a broken sample, WorkspaceError where a
        bucket does not answer.
        """
        shard, key, members = self._rows[number]

        def content(suffix: str) -> bytes:
            offset, length = members[suffix]
            with shard.open("rb") as file:
                file.seek(offset)
                return file.read(length)

        try:
            label = int(content("cls"))
            if not 0 <= label < self.classes:
                raise ValueError(f"class {label} of {self.classes}")
            suffix = next((one for one in IMAGES if one in members), IMAGES[0])
            image = Image.open(io.BytesIO(content(suffix)), formats=_FORMATS).convert("RGB")
            return np.asarray(ImageOps.fit(image, (self.size, self.size))), label
        except FactoryError:  # of the bucket
            raise
        except (OSError, ValueError, SyntaxError, LookupError, Image.DecompressionBombError) as error:
            raise FileError("This sample is broken", where=f"{shard.name}: {key}", got=repr(error)[:200],
                            wanted="an image and its class", next_step="write this shard again") from None  # fmt: skip


class MadeUpSamples:
    """Images of noise with a class in their colour, a function of (seed, number) alone."""

    def __init__(self, count: int, size: int, classes: int, seed: int):
        self.count, self.size, self.classes, self.seed = count, size, classes, seed
        self.fingerprint = f"fake-{count}"

    def __len__(self) -> int:
        return self.count

    def order(self, epoch: int) -> np.ndarray:
        return seeded_generator(self.seed, "order", epoch).permutation(self.count)

    def read(self, number: int) -> tuple[np.ndarray, int]:
        label = number % self.classes
        image_HWC = seeded_generator(self.seed, number).integers(0, 128, (self.size, self.size, 3), np.uint8)
        image_HWC[..., label % 3] += np.uint8(127 * (label + 1) // self.classes)
        return image_HWC, label


class ImageBatches:
    """Function from positions to (images uint8 (B, H, W, 3), classes (B,)) on the device.

    samples : ShardSamples or MadeUpSamples.
    first, count : of these samples, those from `first` on, in whose order an epoch takes them; None: all the rest.
    training : positions are those of the stream of all epochs, and images are cut and mirrored at random; otherwise
        positions are samples.
    workers : number of decoding threads.
    """

    sampler = StreamSampler

    def __init__(
        self, samples: Any, device: Device, *, training: bool, first: int = 0, count: int | None = None,
        workers: int = 8, seed: int = 0,
    ):  # fmt: skip
        self.samples, self.device, self.training, self.seed, self.first = samples, device, training, seed, first
        self.count = len(samples) - first if count is None else count
        self._pool, self._order = ThreadPoolExecutor(max(workers, 1), "decode"), lru_cache(2)(self._order_of_epoch)
        self._ahead: tuple[bytes, list[Future]] = b"", []

    def __len__(self) -> int:
        return self.count

    def __call__(self, positions: np.ndarray) -> tuple[torch.Tensor, ...]:
        announced, ahead = self._ahead
        pieces = ahead if announced == positions.tobytes() else self._start(positions)
        images, labels = zip(*(one for piece in pieces for one in piece.result()), strict=True)
        batch = torch.from_numpy(np.stack(images)), torch.tensor(labels)
        return self.device.shard(tuple(self.device.to_device(part) for part in batch))

    def prefetch(self, positions: np.ndarray) -> None:
        """Announce the next positions."""
        self._ahead = positions.tobytes(), self._start(positions)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _order_of_epoch(self, epoch: int) -> np.ndarray:
        order = self.samples.order(epoch) - self.first
        return order[(order >= 0) & (order < self.count)]

    def _start(self, positions: np.ndarray) -> list[Future]:
        """Begin to decode a batch, in pieces."""
        epochs, numbers = np.divmod(positions, self.count)
        if self.training:
            numbers = [int(self._order(epoch)[row]) for epoch, row in zip(epochs.tolist(), numbers, strict=True)]
        pairs = list(zip(positions.tolist(), map(int, numbers), strict=True))
        return [self._pool.submit(self._read, pairs[at : at + _PIECE]) for at in range(0, len(pairs), _PIECE)]

    def _read(self, pairs: list[tuple[int, int]]) -> list[tuple[np.ndarray, int]]:
        """Return images with classes; in training cut and mirrored by (seed, position)."""
        found = []
        for position, number in pairs:
            image_HWC, label = self.samples.read(self.first + number)
            if self.training:
                image_HWC = _cut_and_mirrored(image_HWC, seeded_generator(self.seed, "augment", position))
            found.append((image_HWC, label))
        return found


def _cut_and_mirrored(image_HWC: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Shift by up to an eighth with black edges, and mirror every second image."""
    size, edge = len(image_HWC), len(image_HWC) // 8
    top, left, mirror = (int(generator.integers(high)) for high in (2 * edge + 1, 2 * edge + 1, 2))
    padded_HWC = np.pad(image_HWC, ((edge, edge), (edge, edge), (0, 0)))
    out_HWC = padded_HWC[top : top + size, left : left + size]
    return out_HWC[:, ::-1] if mirror else out_HWC
