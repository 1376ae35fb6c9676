"""Kinds of files of the recipes and of TPU slices: shards, packed tokens, the surrogate's cache, settings, states."""

import json
from pathlib import Path

import numpy as np

from tests.fuzz.kind import Kind, damaged_json

FOLDER = "recipes"
LENGTH, K = 16, 3


def write_recipe_files(root: Path) -> None:
    """Make a file of each of these kinds below the workspace."""
    from ml_factory.recipes.shard_writer import array_samples, write_shards
    from ml_factory.tpu.slice_state import StateFile

    folder, generator = root / FOLDER, np.random.default_rng(5)
    folder.mkdir()
    np.savez(folder / "images.npz", x=generator.integers(0, 256, (6, 8, 8, 3), np.uint8), y=np.arange(6))
    write_shards(array_samples(folder / "images.npz", "", 0), folder / "shards", 6, "s")
    (folder / "text.txt").write_text("the king and the queen went to see a small cat\n" * 20)
    read_tokens(root)
    read_surrogate_cache(root)
    (folder / "rows.tsv").write_text("Id\tText\tLabel\n" + "".join(f"{at}\ttext {at}\tab\n" for at in range(9)))
    sections = {"model": {"name_or_path": "gpt2"}, "surrogate": {"k": 30}, "data": {"max_seq_length": 64},
                "training": {"learning_rate": 1e-4, "output_dir": "./outputs"}}  # fmt: skip
    (folder / "settings.yaml").write_text(json.dumps(sections, indent=1))
    (folder / "tpu.yaml").write_text("PROJECT_ID: my-project\nTPU_NAME: a\nZONE: 'us-central2-b'  # zone\nSPOT: true\n")
    StateFile(folder / "slice.json").enter("RUNNING", "4 workers", requests=2)


def read_shard(root: Path) -> object:
    from contextlib import closing

    from ml_factory.recipes.image_batches import ShardSamples

    (path,) = (root / FOLDER / "shards").glob("*.tar")
    with closing(ShardSamples([path], 8, 10, 0)) as samples:
        return [list(samples.read(number)) for number in range(len(samples))]


def read_tokens(root: Path) -> object:
    """Read packed tokens; parts that the index lacks are made again."""
    from ml_factory.recipes.language.text_sources import open_text
    from ml_factory.recipes.language.token_rows import pack_tokens
    from ml_factory.recipes.language.tokenizers import ByteTokenizer

    folder = root / FOLDER
    rows, _ = pack_tokens(open_text(str(folder / "text.txt")), ByteTokenizer(), LENGTH, folder / "tokens", part_rows=30)
    return rows.whole()


def read_surrogate_cache(root: Path) -> object:
    from ml_factory.recipes.language.surrogate_top_tokens import cache_top_tokens
    from ml_factory.recipes.language.token_rows import PartedRows
    from ml_factory.training.device import Device

    folder = root / FOLDER
    rows = PartedRows(sorted((folder / "tokens").glob("*.npy")), 30)
    cached = cache_top_tokens(rows, Surrogate(Device("cpu", 1)), folder / "cache", part_rows=40)
    return [part.whole() for part in cached]


class Surrogate:
    """The tokens after each token, in place of a model's."""

    k, rows_at_once = K, 1

    def __init__(self, device: object):
        self.device = device

    def __call__(self, tokens_BT):
        import torch

        ids_BTK = torch.stack([(tokens_BT + more) % 257 for more in range(K)], -1).int()
        return ids_BTK, -ids_BTK.float() / 257


def read_labelled_rows(root: Path) -> object:
    from ml_factory.recipes.language.labelled_text import read_labelled_texts

    rows = read_labelled_texts(str(root / FOLDER / "rows.tsv"))
    return rows.ids, rows.texts, rows.labels


def read_recipe_settings(root: Path) -> object:
    from ml_factory.recipes.sdce_settings import sdce_settings

    return repr(sdce_settings(root / FOLDER / "settings.yaml"))


def read_slice_settings(root: Path) -> object:
    from ml_factory.tpu.settings import parse_flat_yaml

    path = root / FOLDER / "tpu.yaml"
    return parse_flat_yaml(path.read_text(errors="replace"), path)


def read_slice_state(root: Path) -> object:
    from ml_factory.tpu.slice_state import StateFile

    return repr(StateFile(root / FOLDER / "slice.json").read().describe("a"))


RECIPE_KINDS = {
    "shard": Kind(f"{FOLDER}/shards/*.tar", read_shard, False),
    "index of tokens": Kind(f"{FOLDER}/tokens/index.json", read_tokens, False, damaged_json),
    "packed tokens": Kind(f"{FOLDER}/tokens/*.npy", read_tokens, False),
    "surrogate's cache": Kind(f"{FOLDER}/cache/*.npy", read_surrogate_cache, False),
    "labelled texts": Kind(f"{FOLDER}/rows.tsv", read_labelled_rows, False),
    "recipe settings": Kind(f"{FOLDER}/settings.yaml", read_recipe_settings, False),
    "recipe settings, values": Kind(f"{FOLDER}/settings.yaml", read_recipe_settings, False, damaged_json),
    "slice settings": Kind(f"{FOLDER}/tpu.yaml", read_slice_settings, False),
    "slice state": Kind(f"{FOLDER}/slice.json", read_slice_state, False, damaged_json),
}
