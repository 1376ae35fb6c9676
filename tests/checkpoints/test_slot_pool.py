"""One pool of slots for everything in a workspace: bounded, shared, never deleted from."""

import errno
import json
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from xxhash import xxh3_128

from ml_factory.checkpoints import file_format, slot_pool
from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.checkpoints.slot_pool import CheckpointUnit, SlotPool, SlotWriterId
from ml_factory.checkpoints.slots import Slots
from ml_factory.checkpoints.store import StorageTiers
from ml_factory.errors import CheckpointError, FileError, WorkspaceError
from ml_factory.storage.serialization import deserialize_state, serialize_state

MODELS = ("xgboost", "lightgbm", "catboost", "linear", "lstm", "tcn", "patchtst", "itransformer", "tft")


def state(value: int, size: int = 4_000) -> dict:
    return {"value": value, "a": np.full(size, value % 251, np.uint8)}


def written(folder, run="r", **tiers):
    return CheckpointManager(folder, run=run, background=False, tiers=StorageTiers(**tiers))


def intact(slots, unit):
    """Return the descriptions of the unit's slots, each of them read through."""
    return [slots.verify(info["path"]) for info in slots.list_unverified(unit)]


def test_write_container_on_full_disk_truncates_file_and_keeps_inode(tmp_path, disk_full_beyond):
    path = tmp_path / "slot"
    file_format.write_checkpoint_file(Disk(), path, {"sequence": 1}, b"old")
    inode = path.stat().st_ino
    with disk_full_beyond(1000), pytest.raises(WorkspaceError, match="No space left"):
        file_format.write_checkpoint_file(Disk(), path, {"sequence": 2}, bytes(2000))
    assert path.stat().st_size == 0
    file_format.write_checkpoint_file(Disk(), path, {"sequence": 3}, bytes(5000))
    short = file_format.write_checkpoint_file(Disk(), path, {"sequence": 4}, b"new")
    assert path.stat().st_ino == inode and path.stat().st_size == short["bytes"] < 1000


class Reading(Disk):
    """Counts the bytes that were read."""

    count = 0

    def read(self, descriptor, buffer, offset) -> int:
        came = super().read(descriptor, buffer, offset)
        self.count += came
        return came


def test_latest_info_reads_no_checkpoint_payload(tmp_path):
    disk, size = Reading(), 1_000_000
    for local in (None, tmp_path / "local"):
        with written(tmp_path / "drive", disk=disk, local=local) as manager:
            assert manager.phase("p").latest_info() is None
            for value in range(3):
                manager.save_checkpoint("p", state(value, size), force=True, metrics={"reached": value, "loss": np.nan})
            disk.count = 0
            observed = manager.phase("p").latest_info()
            assert observed["metrics"]["reached"] == 2 and np.isnan(observed["metrics"]["loss"])
            assert disk.count < size / 10
            assert manager.list_checkpoints("p")[-1]["hash"] == observed["hash"]
            assert (disk.count > size) is (local is None)  # what lies here too is read here
        shutil.rmtree(tmp_path / "drive")


class Drive(Disk):
    """A folder with Drive's quota: what is deleted, or replaced by a rename, stays in the Trash and counts."""

    def __init__(self, folder, quota: int):
        self.folder, self.quota, self.trash, self.peak = folder, quota, 0, 0
        self.sizes: dict[int, int] = {}

    def used(self) -> int:
        return self.trash + sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    def free(self, folder) -> int:
        return self.quota - self.used()

    def delete(self, path) -> None:
        self.trash += path.stat().st_size
        path.unlink()

    def write(self, descriptor, data, offset) -> int:
        grows = max(0, offset + len(data) - self.size(descriptor))
        if self.used() + grows > self.quota:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        count = super().write(descriptor, data, offset)
        self.peak = max(self.peak, self.used())
        return count


@pytest.mark.soak
def test_slot_pool_for_nine_models_of_five_folds_stays_in_quota(tmp_path):
    """A megabyte stands for a gigabyte: 45 units of work of 40 to 140 kB, eight saves each, one after the other.

    Keep-last-3 by deletion is run on the same sizes for comparison: it runs out of space.
    """
    chance, quota = random.Random(4), 1_000_000
    sizes = {name: chance.randrange(40_000, 140_000) for name in MODELS}
    drive = Drive(tmp_path / "pool", quota)
    for name in MODELS:
        with written(tmp_path / "pool", f"cv-{name}", disk=drive) as manager:
            for fold in range(5):
                unit = manager.phase(f"fold_{fold}")
                for step in range(8):
                    loss = {"val_loss": 1 / (1 + min(step, 3))}  # the fourth is the best
                    assert unit.save(state(step, sizes[name]), metrics=loss, force=True)
                unit.release_slots()
    slots = list((tmp_path / "pool").glob("slot-*.ckpt"))
    assert len(slots) <= 6 and not drive.trash
    print(f"\n{len(slots)} slots, 360 saves of up to {max(sizes.values()):,} bytes: peak {drive.peak / quota:.1%}")

    naive, kept = Drive(tmp_path / "naive", quota), []
    naive.folder.mkdir()
    with pytest.raises(OSError, match="quota"):
        for number in range(360):
            path = naive.folder / f"{number}.ckpt"
            descriptor = naive.open(path, write=True)
            naive.write(descriptor, bytes(sizes[MODELS[number // 40]]), 0)
            naive.close(descriptor)
            kept.append(path)
            if len(kept) > 3:
                naive.delete(kept.pop(0))
    assert number < 30


def test_slot_pool_after_thousand_saves_has_five_slots(tmp_path):
    with written(tmp_path) as manager:
        for value in range(1000):
            manager.save_checkpoint("p", state(value, 50), force=True, metrics={"val_loss": abs(value - 400)})
        paths = sorted(tmp_path.glob("slot-*.ckpt"))
        assert len(paths) == 5  # three last, the best, the one being written
        good = intact(manager.store.home, CheckpointUnit("r", "p"))
        assert {401, 998, 999, 1000} <= {info["sequence"] for info in good}
        assert manager.load_latest_checkpoint("p")["state"]["value"] == 999


def test_slot_pool_keeps_best_finite_val_loss(tmp_path):
    losses = [float("inf"), 3.0, 1.0, None, float("nan"), 2.0, 1.0, 5.0, 4.0, 4.0]
    with written(tmp_path) as manager:
        for loss in losses:
            manager.save_checkpoint("p", state(0), force=True, metrics={"val_loss": loss})
        good = [info["sequence"] for info in intact(manager.store.home, CheckpointUnit("r", "p"))]
        assert 3 in good and {8, 9, 10} <= set(good)
        assert manager.list_checkpoints("p")[-1]["metrics"] == {"val_loss": 4.0}


def test_checkpoint_metrics_round_trip_non_finite_values(tmp_path):
    with written(tmp_path) as manager:
        given = {"a": float("inf"), "b": float("-inf"), "c": float("nan"), "d": None, "e": 1.5, "f": "x"}
        manager.save_checkpoint("p", {}, force=True, metrics=given)
        assert repr(manager.load_latest_checkpoint("p")["metrics"]) == repr(given)


def test_released_slots_stay_loadable_until_overwritten_by_other_unit(tmp_path):
    with written(tmp_path) as manager:
        for value in range(4):
            manager.save_checkpoint("one", state(value), force=True)
        inodes = {path.stat().st_ino for path in tmp_path.glob("slot-*.ckpt")}
        manager.phase("one").release_slots()
        assert manager.load_latest_checkpoint("one")["state"]["value"] == 3  # an artifact that was lost after all
        for value in range(10, 14):
            manager.save_checkpoint("two", state(value), force=True)
        assert {path.stat().st_ino for path in tmp_path.glob("slot-*.ckpt")} == inodes
        assert manager.load_latest_checkpoint("one") is None
        assert manager.load_latest_checkpoint("two")["state"]["value"] == 13


def test_phase_saving_after_release_reclaims_slots(tmp_path):
    with written(tmp_path) as manager:
        for value in range(3):
            manager.save_checkpoint("one", state(value), force=True)
        manager.phase("one").release_slots()
        manager.save_checkpoint("one", state(3), force=True)
        for value in range(8):
            manager.save_checkpoint("two", state(value), force=True)
        assert [info["sequence"] for info in manager.list_checkpoints("one")] == [2, 3, 4]


def test_released_slots_free_space_for_larger_state(tmp_path):
    with written(tmp_path, quota_bytes=60_000) as manager:
        for value in range(4):
            manager.save_checkpoint("small", state(value, 8_000), force=True)
        assert manager.save_checkpoint("large", state(1, 30_000), force=True) is None  # nothing to take: refused
        manager.phase("small").release_slots()
        assert manager.save_checkpoint("large", state(2, 30_000), force=True)
        assert manager.load_latest_checkpoint("large")["state"]["value"] == 2


def test_slot_pool_on_two_machines_takes_different_released_slots(tmp_path, monkeypatch):
    """Each machine scans a copy of its own, as two mounts of one Drive do until both are up to date.

    The machines have one host name and one kernel, as two containers may.
    """
    here = Slots(SlotPool(tmp_path / "one"))
    for value in range(3):
        here.write(CheckpointUnit("r", "old"), 3, {"metrics": {}}, bytes([value]))
    here.release(CheckpointUnit("r", "old"))
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    taken = {}
    for machine in ("one", "two"):
        slots = Slots(SlotPool(tmp_path / machine))
        taken[machine] = {
            slots.write(CheckpointUnit("r", machine), 3, {"metrics": {}}, b"x")["path"][-16:] for _ in range(3)
        }
    assert len(taken["one"]) == len(taken["two"]) == 3 and not taken["one"] & taken["two"]
    monkeypatch.setattr(slot_pool, "_REST_SECONDS", -1.0)  # long ago: by now everybody has seen what became of it
    slots = Slots(SlotPool(tmp_path / "two"))
    slots.write(CheckpointUnit("r", "later"), 3, {"metrics": {}}, b"x")
    assert len(list((tmp_path / "two").glob("slot-*.ckpt"))) == 6


def test_free_space_skips_slot_taken_since_scan(tmp_path):
    """Another machine took one between the look and the deed."""
    there = Slots(SlotPool(tmp_path))
    for value in "123":
        there.write(CheckpointUnit("r", "old"), 3, {"metrics": {}, "saved_at": value}, bytes(5000))
    there.release(CheckpointUnit("r", "old"))
    stale = there.pool.scan()
    first = there.pool.list_free_slots(stale)[0].path
    taken = there.write(CheckpointUnit("r", "new"), 3, {"metrics": {}}, bytes(5000))
    assert Path(taken["path"]) == first
    SlotPool(tmp_path, quota=16_000).make_free_space(stale, tmp_path / "slot-ffffff.ckpt", 9_000)
    assert there.verify(taken["path"])["hash"] == taken["hash"]


def test_slot_pool_is_shared_by_concurrent_sessions_without_loss(tmp_path):
    """Three sessions at once, each with its own unit, while others return their slots."""
    failures = []

    def session(name):
        with written(tmp_path, name) as manager:
            for fold in range(3):
                unit = manager.phase(f"fold_{fold}")
                for value in range(12):
                    if unit.save(state(value), force=True) is None or unit.latest()["state"]["value"] != value:
                        failures.append((name, fold, value))
                unit.release_slots()

    threads = [threading.Thread(target=session, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(list(tmp_path.glob("slot-*.ckpt"))) <= 15


def test_slots_write_of_superseded_session_raises_and_changes_no_slot(tmp_path):
    old, new = (Slots(SlotPool(tmp_path), SlotWriterId(name, fence)) for name, fence in (("old", 1), ("new", 2)))
    unit, info = CheckpointUnit("r", "p"), {"metrics": {}}
    assert old.write(unit, 3, info, b"1")["lease"] == {"session": "old", "fence": 1}
    new.write(unit, 3, info, b"2")
    before = {path: path.read_bytes() for path in tmp_path.glob("slot-*.ckpt")}
    with pytest.raises(CheckpointError, match="taken"):
        old.write(unit, 3, info, b"3")
    assert {path: path.read_bytes() for path in tmp_path.glob("slot-*.ckpt")} == before
    old.write(CheckpointUnit("r", "q"), 3, info, b"4")  # other work is its own


def test_slots_copy_in_gives_same_bytes_and_rejects_changed_source(tmp_path):
    here, there = Slots(SlotPool(tmp_path / "here")), Slots(SlotPool(tmp_path / "there"))
    unit = CheckpointUnit("r", "p")
    saved = here.write(unit, 3, {"metrics": {}}, b"x" * 10_000)
    copied = there.copy_from_pool(unit, 3, saved["path"])
    paths = [next((tmp_path / name).glob("slot-*.ckpt")) for name in ("here", "there")]
    assert copied["hash"] == saved["hash"] and paths[0].read_bytes() == paths[1].read_bytes()
    paths[0].write_bytes(paths[0].read_bytes()[:5000] + b"?" + paths[0].read_bytes()[5001:])
    with pytest.raises(CheckpointError, match="hash"):
        there.copy_from_pool(unit, 3, saved["path"])
    assert [one["sequence"] for one in intact(there, unit)] == [1]


def test_container_hash_is_equal_in_chunks_and_whole(tmp_path, monkeypatch):
    """By hand: XXH3 of everything before the seal's 40 bytes."""
    monkeypatch.setattr(file_format, "_CHUNK", 300)
    disk, info = Disk(), {"sequence": 1}
    for size in (0, 1, 235, 236, 237, 936, 20_000):
        given = {"a": random.Random(size).randbytes(size)}
        saved = file_format.write_checkpoint_file(disk, tmp_path / "a", info, serialize_state(given))
        content = (tmp_path / "a").read_bytes()[:-40]
        by_hand = xxh3_128(content).hexdigest()
        into = bytearray()
        assert saved["hash"] == by_hand == file_format.read_checkpoint_file(disk, tmp_path / "a", into)["hash"]
        assert into[:-40] == content and deserialize_state(into) == given
        assert deserialize_state((tmp_path / "a").read_bytes()) == given
        assert file_format.copy_checkpoint_file(disk, tmp_path / "b", disk, tmp_path / "a")["hash"] == by_hand


def test_copy_container_of_unreadable_source_names_source_and_empties_slot(tmp_path, monkeypatch):
    disk = Disk()
    file_format.write_checkpoint_file(disk, tmp_path / "a", {"sequence": 1}, serialize_state({"a": bytes(1_000)}))
    monkeypatch.setattr(file_format, "_CHUNK", 300)
    whole, reads = Disk.read, []

    def read(disk, file, buffer, offset):
        reads.append(offset)
        if offset == 300:
            raise OSError(errno.EIO, "Input/output error")
        return whole(disk, file, buffer, offset)

    monkeypatch.setattr(Disk, "read", read)
    with pytest.raises(FileError) as caught:
        file_format.copy_checkpoint_file(disk, tmp_path / "b", disk, tmp_path / "a")
    assert caught.value.where == tmp_path / "a" and 300 in reads and (tmp_path / "b").stat().st_size == 0


def test_another_reader_of_safetensors_finds_the_state_and_its_description(tmp_path):
    weights = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    given = {
        "network": {"0.weight": weights, "0.bias": weights[0].double()},
        "p": [np.arange(6, dtype=np.uint16).reshape(2, 3), np.float32(2.5), "text"],
        3: {"it's": np.zeros((0, 4))},
    }
    with written(tmp_path) as manager:
        saved = manager.save_checkpoint("fold_1", given, force=True, metrics={"val_loss": 0.25, "best": np.inf})
    expected = {
        "['network']['0.weight']": weights.numpy(), "['network']['0.bias']": weights[0].double().numpy(),
        "['p'][0]": given["p"][0], "['p'][1]": np.array(2.5, np.float32), """[3]["it's"]""": given[3]["it's"],
    }  # fmt: skip
    arrays = load_file(saved["path"])
    assert set(arrays) == {*expected, "tree", "__seal__"}
    for name, array in expected.items():
        assert arrays[name].dtype == array.dtype and np.array_equal(arrays[name], array), name
    with safe_open(saved["path"], "pt") as file:
        assert torch.equal(file.get_tensor("['network']['0.weight']"), weights)
        described = file.metadata()
    assert [described[key] for key in ("format", "run", "phase", "sequence", "saved_at")] == [
        "ml_factory.checkpoint/4", "r", "fold_1", "1", saved["saved_at"],
    ]  # fmt: skip
    assert json.loads(described["metrics"])["val_loss"] == 0.25
    with open(saved["path"], "rb") as file:
        assert (8 + int.from_bytes(file.read(8), "little")) % 64 == 0


def test_a_file_overwritten_in_place_and_cut_at_any_byte_fails_and_names_its_owner(tmp_path):
    disk, path = Disk(), tmp_path / "slot"
    first = file_format.write_checkpoint_file(disk, path, {"run": "a", "sequence": 1}, serialize_state(state(1, 300)))
    old = path.read_bytes()
    file_format.write_checkpoint_file(disk, path, {"run": "b", "sequence": 2}, serialize_state(state(2, 300)))
    new = path.read_bytes()
    described = new.index(b"}") + 1  # the end of the metadata
    assert len(old) == len(new) == first["bytes"]
    for cut in range(len(new)):
        for content in (new[:cut], new[:cut] + old[cut:], new[:cut] + bytes([new[cut] ^ 1]) + new[cut + 1 :]):
            if content in (old, new):
                continue
            path.write_bytes(content)
            with pytest.raises(CheckpointError):
                file_format.read_checkpoint_file(disk, path)
            if cut >= described and len(content) == len(new):
                assert file_format.read_checkpoint_file_header(disk, path).info == {"run": "b", "sequence": 2}
