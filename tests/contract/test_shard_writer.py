"""Shards of images: keys, bytes, order and refusals."""

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from ml_factory.errors import FactoryError
from tests.contract.doors import array_samples, folder_samples, write_shards


@pytest.fixture
def arrays(tmp_path):
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 256, (23, 8, 8, 3), np.uint8), np.arange(23) % 5
    np.savez(tmp_path / "images.npz", x_train=x, y_train=y)
    return tmp_path / "images.npz", x, y


def test_write_shards_from_arrays_keeps_every_pixel_and_class(arrays, tmp_path):
    path, x, y = arrays
    facts = write_shards(array_samples(path, "train"), tmp_path / "out", 10, "train", 0)
    assert (facts["shards"], facts["samples"], facts["classes"]) == (3, 23, 5)
    assert facts["pattern"].endswith("train-{000000..000002}.tar")
    found = {}
    for shard in sorted((tmp_path / "out").iterdir()):
        with tarfile.open(shard) as tar:
            for member in tar:
                found[member.name] = tar.extractfile(member).read()
    assert len(found) == 46
    for row in range(23):
        image = Image.open(io.BytesIO(found[f"{row:08d}.png"]))
        assert np.array_equal(np.asarray(image), x[row]) and found[f"{row:08d}.cls"] == str(y[row]).encode()
    assert next(iter(found)) != "00000000.png"  # shuffled


def test_write_shards_twice_gives_equal_bytes_and_refuses_the_same_folder(arrays, tmp_path):
    path, *_ = arrays
    for name in "ab":
        write_shards(array_samples(path, "train"), tmp_path / name, 10, "train", 3)
    read = [[file.read_bytes() for file in sorted((tmp_path / name).iterdir())] for name in "ab"]
    assert read[0] == read[1]
    with pytest.raises(FactoryError, match="There are shards of this name"):
        write_shards(array_samples(path, "train"), tmp_path / "a", 10, "train", 3)


def test_write_shards_from_folder_keeps_files_and_numbers_classes_by_name(tmp_path):
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "in" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4), (label, 0, 0)).save(tmp_path / "in" / name / "one.jpg")
    facts = write_shards(folder_samples(tmp_path / "in"), tmp_path / "out", 10, "p", 0)
    assert facts["samples"] == 2
    with tarfile.open(tmp_path / "out" / "p-000000.tar") as tar:
        read = {member.name: tar.extractfile(member).read() for member in tar}
    assert read["00000001.jpg"] == (tmp_path / "in" / "dog" / "one.jpg").read_bytes()
    assert (read["00000000.cls"], read["00000001.cls"]) == (b"0", b"1")


def test_array_samples_of_absent_array_or_damaged_file_name_what_is_there(arrays, tmp_path):
    path, *_ = arrays
    with pytest.raises(FactoryError, match=r"x_train, y_train.*x and y"):
        array_samples(path, "")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FactoryError, match="cannot be read"):
        array_samples(path, "train")
    with pytest.raises(FactoryError, match="No images here"):
        folder_samples(tmp_path / "none")
