"""The reader of shards compared with a bare webdataset pipeline of the same decoding, and with the network it feeds.

    python -m benchmarks.shards [--images 2000] [--batch 128] [--width 16] [--repeats 3]

One JSON line a side, all sides in turns in one run.
  ours         ImageBatches: reading, decoding, cutting, mirroring, batches
  plain        ImageBatches without cutting and mirroring
  webdataset   WebDataset(...).to_tuple, Pillow to uint8, batched: the same decoding without cutting and mirroring
  network      training steps of ResNet-50 with --width on one batch that is there already
"""

import argparse
import io
import tempfile
from pathlib import Path

import numpy as np
import torch
import webdataset
from PIL import Image

from benchmarks.measure import in_turns, print_json, rated, times
from ml_factory.recipes.images import ImageBatches, ShardSamples
from ml_factory.recipes.resnet50 import ImageLoss, build_resnet50
from ml_factory.recipes.shard_writer import array_samples, write_shards
from ml_factory.training.device import Device

NETWORK_STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("images", 2000), ("batch", 128), ("width", 16), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        generator = np.random.default_rng(0)
        small_NHWC = generator.integers(0, 256, (options.images, 8, 8, 3), np.uint8)
        x_NHWC = small_NHWC.repeat(4, 1).repeat(4, 2)  # compresses about as photographs do
        np.savez(Path(folder) / "images.npz", x=x_NHWC, y=np.arange(options.images) % 10)
        write_shards(array_samples(Path(folder) / "images.npz", ""), Path(folder) / "shards", 500, "bench", 0)
        compare(sorted((Path(folder) / "shards").glob("*.tar")), options)


def compare(paths: list[Path], options: argparse.Namespace) -> None:
    """Run all sides in turns and print a line for each."""
    device = Device("cpu", torch.get_num_threads())
    feeds = {
        name: ImageBatches(ShardSamples(paths, 32, 10, 0), device, training=training, workers=2)
        for name, training in (("ours", True), ("plain", False))
    }
    starts = range(0, options.images - options.batch + 1, options.batch)
    network, loss = build_resnet50(width=options.width), ImageLoss(0.1, device)
    batch = feeds["ours"](np.arange(options.batch))

    def read(feed: ImageBatches) -> None:
        for _ in feed.batches(np.arange(start, start + options.batch) for start in starts):
            pass

    def learn() -> None:
        for _ in range(NETWORK_STEPS):
            loss_sum, weight = loss(network, batch)
            (loss_sum / weight).backward()

    sides = {name: lambda feed=feed: read(feed) for name, feed in feeds.items()}
    sides |= {"webdataset": lambda: read_with_webdataset(paths, options.batch, len(starts)), "network": learn}
    runs = in_turns(sides, options.repeats)
    rows = {name: len(starts) * options.batch for name in sides} | {"network": NETWORK_STEPS * options.batch}
    for name, taken in runs.items():
        compared = {} if name in ("webdataset", "network") else {"of_webdataset": times(taken, runs["webdataset"])}
        print_json(bench="shards", side=name, rows=rows[name], **rated(taken, rows[name]), **compared)
    for feed in feeds.values():
        feed.close()


def read_with_webdataset(paths: list[Path], size: int, batches: int) -> None:
    """Read so many batches with the bare pipeline."""
    stream = webdataset.WebDataset([str(path) for path in paths], shardshuffle=False).to_tuple("png", "cls")
    held = []
    for image, label in stream:
        held.append((np.asarray(Image.open(io.BytesIO(image)).convert("RGB")), int(label)))
        if len(held) == size:
            images, labels = zip(*held, strict=True)
            torch.from_numpy(np.stack(images)), torch.tensor(labels)
            held, batches = [], batches - 1
            if not batches:
                return


if __name__ == "__main__":
    main()
