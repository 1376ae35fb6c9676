"""Prepared data whose hashes are right and whose content is not: refused in one line, before it is used."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from ml_factory.datasets.store_parts import decode_position_runs
from ml_factory.errors import FactoryError
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.workflows.load_prepared import load_dataset
from tests.fuzz.kinds import seal_prepared


@pytest.fixture
def place(prepared_template, tmp_path):
    return shutil.copytree(prepared_template, tmp_path / "workspace")


def manifest_of(place):
    (path,) = (place / "data/processed/DEMO").glob("*/manifest.json")
    return path


def np_header(text: str) -> bytes:
    """The beginning of a file of NumPy's format, version 1.0."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def refused(place):
    with pytest.raises(FactoryError) as caught:
        load_dataset(place, "DEMO", 5)
    assert "\n" not in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["files"]["labels_h5.parquet"].pop("bytes"),
        lambda manifest: manifest["files"].update(labels_h5=5),
        lambda manifest: manifest.pop("features"),
        lambda manifest: manifest["features"]["names"].append(manifest["features"]["names"][0]),
        lambda manifest: manifest["features"]["names"].pop(),
        lambda manifest: manifest["features"].update(rows=10**18),
        lambda manifest: manifest["files"].pop("rows.npy"),
        lambda manifest: manifest["facts"].pop("raw"),
        lambda manifest: manifest.update(facts=[]),
        lambda manifest: manifest.update(fingerprint=5),
    ],
)
def test_load_dataset_of_manifest_with_other_fields_under_right_hash_is_refused(place, change):
    path = manifest_of(place)
    manifest = json.loads(path.read_bytes())
    del manifest["hash"]
    change(manifest)
    path.write_text(json.dumps({**manifest, "hash": fingerprint_json(manifest)}))
    refused(place)


def test_load_dataset_of_parts_and_labels_under_right_hash_is_refused(place):
    folder = manifest_of(place).parent
    facts = folder / "rows.npy"
    rows, labels = np.load(facts), pd.read_parquet(folder / "labels_h5.parquet")
    twice = rows.copy()
    twice["known_at"][1] = twice["known_at"][0]
    many, unfinished = pd.concat([labels] * 2), np_header("{'descr': '<f4', 'shape': (3,")
    changes = [
        (facts, lambda: np.save(facts, rows[:-1])),
        (facts, lambda: np.save(facts, rows["close"])),
        (facts, lambda: np.save(facts, twice)),
        (facts, lambda: facts.write_bytes(unfinished)),
        (facts, lambda: facts.write_bytes(b"PK\x03\x04" + unfinished)),
        (folder / "splits_h5.json", lambda: (folder / "splits_h5.json").write_text('{"train": [[0, 999999999999]]}')),
        (folder / "splits_h5.json", lambda: (folder / "splits_h5.json").write_text('{"train": [["a", 2]]}')),
        (folder / "scaler_h5.json", lambda: (folder / "scaler_h5.json").write_text("[5]")),
        (folder / "labels_h5.parquet", lambda: many.to_parquet(folder / "labels_h5.parquet")),
        (folder / "labels_h5.parquet", lambda: (folder / "labels_h5.parquet").write_bytes(b"PAR1 no table PAR1")),
    ]
    whole = {path: path.read_bytes() for path in (facts, manifest_of(place), *folder.glob("*_h5.*"))}
    load_dataset(place, "DEMO", 5)
    for path, change in changes:
        change()
        assert seal_prepared(place, path)
        refused(place)
        for one, content in whole.items():
            one.write_bytes(content)
    load_dataset(place, "DEMO", 5)


def test_decode_position_runs_beyond_rows_raises_before_it_allocates():
    assert decode_position_runs([[0, 2], [5, 6]], 6).tolist() == [0, 1, 5]
    for runs in ([[0, 10**15]], [[-1, 2]], [[3, 2]], [[0, 6], [0, 6]], [[0]], [["a", "b"]]):
        with pytest.raises((ValueError, TypeError)):
            decode_position_runs(runs, 6)
