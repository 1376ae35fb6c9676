"""Slots that anyone may have put there: pipes, sparse files, forged descriptions; none hangs a load or is followed."""

import json
import math
import os
import random
from pathlib import Path

import pytest
from xxhash import xxh3_128

from ml_factory.checkpoints import file_format
from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.file_format import read_checkpoint_file, read_checkpoint_file_header
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.slot_description import (
    LARGEST_COUNT,
    check_container_info,
    check_lease_record,
    check_slot_manifest,
)
from ml_factory.errors import WorkspaceError
from ml_factory.storage import serialization
from tests.limited_reading import read_with_limits

INFO = {
    "run": "train-a-1", "phase": "p", "saved_at": "2026-01-02T03:04:05+00:00", "sequence": 3,
    "lease": {"session": "0a", "fence": 2}, "metrics": {"val_loss": 0.5, "best": {"float": "inf"}, "at": None, "t": ""},
}  # fmt: skip
WRONG = {
    "run": ["", "../x", "a/b", "a" * 300, 1, None, [], {}, "a\nb", "-a"],
    "phase": ["", "..", "a/b", 1, None, []],
    "saved_at": ["a" * 41, "a\nb", "\x00", 1, None, [], {}],
    "sequence": [-1, LARGEST_COUNT + 1, 1.0, "1", True, None, [], 10**19, "NaN"],
    "lease": [1, [], "a", {"fence": -1}, {"fence": 1.5}, {"fence": True}, {"fence": 10**19}, {"session": 1}, {"x": 1}],
    "metrics": [
        1, [], "a", {"a": []}, {"a": {}}, {"a": {"float": "1"}}, {"a": {"float": 1}}, {"a": {"float": "nan", "b": 1}},
        {"a": math.nan}, {"a": math.inf}, {"a": 10**19}, {"a": {"float": []}},
    ],
    "status": ["returned"], "hash": ["0" * 32], "path": ["x"], "returned_at": [0], "": [1],
}  # fmt: skip


def save(manager, value):
    return manager.save_checkpoint("p", {"value": value}, force=True)


def load(folder: Path):
    """Load the newest value; called in a child too."""
    with CheckpointManager(folder, run="r", background=False) as manager:
        found = manager.load_latest_checkpoint("p")
        return found and found["state"]["value"], found and found["skipped"]


def load_first_value(folder: Path) -> None:
    value, skipped = load(folder)
    assert value == 1 and all("\n" not in reason for reason in skipped), (value, skipped)


def put_pipe(path):
    path.unlink()
    os.mkfifo(path)


def put_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def put_sparse(path):
    """64 GB with both ends of the checkpoint, whose content is then zeros."""
    whole, size = path.read_bytes(), 64 << 30
    seal = file_format._SEAL
    digest, sequence, _, end = seal.unpack(whole[-seal.size :])
    with open(path, "r+b") as file:
        file.truncate(size)
        file.seek(size - seal.size)
        file.write(seal.pack(digest, sequence, size, end))


@pytest.mark.parametrize("put", [put_pipe, put_device, put_sparse])
@pytest.mark.parametrize("suffix", [".ckpt", ".json"])
def test_load_beside_slot_or_manifest_that_is_no_stored_file_is_quick(tmp_path, put, suffix):
    if (put, suffix) == (put_sparse, ".json"):
        return  # a manifest has no two ends
    with CheckpointManager(tmp_path, run="r", background=False) as manager:
        save(manager, 1)
        newest = Path(save(manager, 2 if suffix == ".ckpt" else 1)["path"])
    put(newest.with_suffix(suffix))
    reader = "tests.checkpoints.test_slot_description:load_first_value"
    (outcome,) = read_with_limits(reader, [tmp_path])
    assert not outcome.error, outcome
    outcome.check_costs()
    with CheckpointManager(tmp_path, run="r", background=False) as manager:  # and it does not stop the saves
        assert save(manager, 5)["sequence"] >= 2
    assert load(tmp_path)[0] == 5


def test_load_of_checkpoint_larger_than_memory_is_refused_unread(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path, run="r", background=False) as manager:
        save(manager, 1)
        path = Path(save(manager, 2)["path"])
    monkeypatch.setattr(file_format, "half_of_memory", lambda: path.stat().st_size - 1)
    with pytest.raises(WorkspaceError, match="larger than half of this machine's memory"):
        read_checkpoint_file(Disk(), path, bytearray())
    read_checkpoint_file(Disk(), path)  # only checked, piece by piece


@pytest.mark.parametrize("short", ["arrays", "file"])
def test_load_without_enough_memory_raises_and_keeps_checkpoint(tmp_path, monkeypatch, short):
    """An older checkpoint, or none, must not be taken instead: the next saves would overwrite the newest."""
    with CheckpointManager(tmp_path, run="r", background=False) as manager:
        save(manager, 1)
        path = Path(save(manager, 2)["path"])
    with monkeypatch.context() as patch:
        if short == "file":
            patch.setattr(file_format, "half_of_memory", lambda: path.stat().st_size - 1)
        else:
            patch.setattr(serialization, "_unpack", lambda *_: bytes(1 << 62))
        manager = CheckpointManager(tmp_path, run="r", background=False)
        with manager, pytest.raises(WorkspaceError, match=r"memory.*Next: close other programs"):
            manager.load_latest_checkpoint("p")
    with CheckpointManager(tmp_path, run="r", background=False) as manager:
        assert manager.load_latest_checkpoint("p")["sequence"] == 2


def sealed(texts: dict, repeated: str = "") -> bytes:
    """Return a checkpoint with this metadata and a right hash. repeated : text before the other fields."""
    fields = {"format": "ml_factory.checkpoint/4", **texts}
    table = b'{"__metadata__":' + (json.dumps(fields, separators=(",", ":"))[:-1] + repeated + "}}").encode()
    content = len(table).to_bytes(8, "little") + table
    sequence = texts.get("sequence", "1")
    number = int(sequence) if sequence.isdigit() and len(sequence) < 19 else 1
    size = len(content) + file_format._SEAL.size
    return content + file_format._SEAL.pack(xxh3_128(content).digest(), number, size, file_format._END)


def texts_of(info: dict) -> dict:
    """Return the fields as the metadata holds them."""
    texts = file_format._TEXTS
    return {key: one if key in texts and isinstance(one, str) else json.dumps(one) for key, one in info.items()}


def test_container_header_with_any_wrong_field_under_right_hash_is_refused(tmp_path):
    path = tmp_path / "slot-000000.ckpt"
    path.write_bytes(sealed(texts_of(INFO)))
    assert read_checkpoint_file(Disk(), path) == {
        **INFO,
        "bytes": path.stat().st_size,
        "hash": path.read_bytes()[-40:-24].hex(),
    }
    for name, values in WRONG.items():
        for value in values:
            info = {**INFO, name: value}
            with pytest.raises(ValueError, match=r"^(the description|\w+ in)"):
                check_container_info(info)
            path.write_bytes(sealed(texts_of(info)))
            if name in file_format._TEXTS and not isinstance(value, str):
                continue  # as a text it may be a name
            header = read_checkpoint_file_header(Disk(), path)
            assert header.fault is not None and "\n" not in str(header.fault), info
    for repeated in (',"run":"other"', ',"sequence":"9"'):
        path.write_bytes(sealed(texts_of(INFO), repeated))
        assert "twice" in str(read_checkpoint_file_header(Disk(), path).fault)
    for text in ("9" * 4300, "[" * 10_000, "1e999", "NaN", "{" * 50, "", "-3"):
        path.write_bytes(sealed({**texts_of(INFO), "sequence": text}))
        assert read_checkpoint_file_header(Disk(), path).fault is not None, text
    path.write_bytes(sealed({name: one for name, one in texts_of(INFO).items() if name != "sequence"}))
    assert "no sequence" in str(read_checkpoint_file_header(Disk(), path).fault)


def test_save_of_metric_that_reading_refuses_is_refused_and_harms_nothing(tmp_path, caplog):
    with CheckpointManager(tmp_path, run="r", background=False) as manager:
        save(manager, 1)
        assert manager.save_checkpoint("p", {"value": 2}, force=True, metrics={"a": 10**30}) is None
        assert "a metric" in caplog.text or "metrics in the description" in caplog.text
    assert load(tmp_path)[0] == 1


def test_manifests_and_leases_with_wrong_fields_count_as_none():
    manifest = {**INFO, "status": "held", "hash": "0" * 32, "bytes": 100}
    lease = {"run": "r", "phase": "p", "session": "a", "fence": 1, "host": "h", "beat": 2, "seen": 1.5, "kept": True}
    assert check_slot_manifest(manifest) == manifest and check_lease_record({**lease, "new": [1]})
    for name, value in {
        "status": "x", "hash": "../x", "bytes": -1, "session": 5, "host": [], "returned_at": "1", "reason": {}, "no": 1,
        "sequence": -5, "lease": {"fence": "1"},
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=r"^(the manifest|\w+ in the manifest)"):
            check_slot_manifest({**manifest, name: value})
    for name, value in {
        "fence": -1, "seen": "1", "beat": 1.5, "kept": 1, "released": "no", "host": {}, "session": None,
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match="in the lease"):
            check_lease_record({**lease, name: value})
    for value in (None, [], 1, "a", {"fence": 1}):
        with pytest.raises(ValueError, match="lease"):
            check_lease_record(value)


def test_forged_descriptions_at_random_are_refused_or_whole(tmp_path):
    """Descriptions with fields of any kind, each under a right hash."""
    draw = random.Random(0)
    kinds = [
        lambda: None, lambda: draw.randrange(-5, 5), lambda: draw.random(), lambda: "a" * draw.randrange(400),
        lambda: [], lambda: {}, lambda: True, lambda: 1 << draw.randrange(80), lambda: {"fence": -1}, lambda: "../a",
    ]  # fmt: skip
    path = tmp_path / "slot-000000.ckpt"
    for _ in range(300):
        info = {**INFO, draw.choice([*WRONG, "other"]): draw.choice(kinds)()}
        path.write_bytes(sealed(texts_of(info)))
        with CheckpointManager(tmp_path, run="train-a-1", background=False) as manager:
            for entry in manager.list_checkpoints("p") + manager.store.list_trainings("p"):
                check_container_info({**{name: entry[name] for name in INFO if name in entry}, "metrics": {}})
