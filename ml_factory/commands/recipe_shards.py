"""Recipe that writes images as shards for the others: shards."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ml_factory.argument_checks import check_file_exists
from ml_factory.cli_output import print_json
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule

shard_writer = LazyModule("ml_factory.recipes.shard_writer")


def shards(
    output: Annotated[Path, Argument(help="Folder of the shards; it is made.")],
    images: Annotated[Path | None, Option("--images", help="Folder with a folder of images for each class.")] = None,
    arrays: Annotated[
        Path | None, Option("--arrays", help="NPZ with x uint8 (N, H, W, 3) and y (N,), or x_train and y_train, ….")
    ] = None,
    part: Annotated[str, Option("--part", help="Suffix of the arrays: train, test.")] = "",
    per_shard: Annotated[int, Option("--per-shard", min=1, help="Samples a shard.")] = 1000,
    prefix: Annotated[str, Option("--prefix", help="Shards are PREFIX-000000.tar and so on.")] = "shard",
    seed: Annotated[int, Option("--seed", help="Order of the samples, shuffled once.")] = 0,
    as_json: Annotated[bool, Option("--json", help="Print the facts as JSON on standard output.")] = False,
) -> None:
    """Write images as tar shards, as WebDataset reads them.
    Example: `python -m ml_factory recipe shards OUTPUT --arrays cifar10.npz --part train --per-shard 1000`
    """
    if (images is None) is (arrays is None):
        raise SettingsError("Images come from one place", where="recipe shards", wanted="--images or --arrays")
    if arrays is not None:
        samples = shard_writer.array_samples(check_file_exists(arrays.expanduser()), part, seed)
    else:
        samples = shard_writer.folder_samples(images.expanduser(), seed)
    written = shard_writer.write_shards(samples, output.expanduser(), per_shard, prefix)
    if as_json:
        print_json(written)
    else:
        print(f"{written['samples']:,} samples of {written['classes']} classes in {written['shards']} shards: "
              f"{written['pattern']}")  # fmt: skip
