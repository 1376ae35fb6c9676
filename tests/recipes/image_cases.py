"""Small shards of images and settings of trainings on them."""

import numpy as np
import pytest

from ml_factory.recipes.image_training import ImageOutputs, ImageSources, ImageTrainingSettings
from ml_factory.recipes.resnet50 import ResNetSpec
from ml_factory.recipes.shard_writer import array_samples, write_shards
from ml_factory.storage.serialization import read_state_file
from ml_factory.storage.workspace import Workspace
from ml_factory.training.spec import TrainSpec

NARROW = ResNetSpec(classes=3, width=1)


@pytest.fixture
def shards(tmp_path):
    """32 training images of 3 classes in 4 shards, 9 test images in one, 16 pixels."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 32), ("test", 9)):
        x, y = generator.integers(0, 256, (count, 16, 16, 3), np.uint8), np.arange(count) % 3
        x[..., 0] = y[:, None, None] * 100
        np.savez(tmp_path / f"{part}.npz", x=x, y=y)
        write_shards(array_samples(tmp_path / f"{part}.npz", "", 0), tmp_path / part, 8 if part == "train" else 9, "s")
    return tmp_path / "train", tmp_path / "test"


def settings_of(shards, network=NARROW, outputs=None, skip_broken=False, **training) -> ImageTrainingSettings:
    spec = {
        "epochs": 2,
        "batch": 8,
        "eval_batch": 4,
        "patience": 0,
        "device": "cpu",
        "threads": 1,
        "log_steps": 1,
        "save_seconds": 0.0,
    }
    return ImageTrainingSettings(
        network, TrainSpec(**spec | training),
        ImageSources(str(shards[0]), str(shards[1]), image_size=16, workers=2, skip_broken=skip_broken),
        outputs or ImageOutputs(),
    )  # fmt: skip


def weights_of(workspace: Workspace) -> dict:
    (path,) = (workspace.results / "resnet50").glob("*/weights.state")
    return read_state_file(path)["weights"]
