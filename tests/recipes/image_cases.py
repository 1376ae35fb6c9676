"""Small shards of images and settings of trainings on them."""

import numpy as np
import pytest

from ml_factory.recipes.shards import array_samples, write_shards
from ml_factory.storage.serialization import read_state_file
from ml_factory.storage.workspace import Workspace
from ml_factory.training.spec import TrainSpec

LOOP = {"epochs": 2, "batch": 8, "eval_batch": 4, "patience": 0, "device": "cpu", "threads": 1, "log_steps": 1,
        "save_seconds": 0.0}  # fmt: skip


@pytest.fixture
def shards(tmp_path):
    """36 training images of 3 classes in 4 shards, of which 4 are held out, 9 test images in one, 16 pixels."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 36), ("test", 9)):
        x, y = generator.integers(0, 256, (count, 16, 16, 3), np.uint8), np.arange(count) % 3
        x[..., 0] = y[:, None, None] * 100
        np.savez(tmp_path / f"{part}.npz", x=x, y=y)
        samples = array_samples(tmp_path / f"{part}.npz", "")
        write_shards(samples, tmp_path / part, 9, "s", 0)
    return tmp_path / "train", tmp_path / "test"


def settings_of(shards, training=None, **more) -> dict:
    """Small settings of a training on these shards; training : other settings of the loop."""
    given = {"train": str(shards[0]), "test": str(shards[1]), "image_size": 16, "workers": 2, "classes": 3, "width": 1}
    return given | more | {"training": TrainSpec(**LOOP | (training or {}))}


def weights_of(workspace: Workspace) -> dict:
    (path,) = (workspace.results / "resnet50").glob("*/weights.state")
    return read_state_file(path)["weights"]
