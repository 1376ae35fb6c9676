"""Hostile and damaged files in slots, manifests, bundles and the registry: refused with a reason, and no code runs."""

import dataclasses
import json
import logging
import os
import pickle
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ml_factory.checkpoints import file_format
from ml_factory.checkpoints.disk import Disk
from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import FactoryError
from ml_factory.inference.trained_model import TrainedModel
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.serialization import serialize_state
from tests.faults.hostile import bombs, damages, manifests, oversized_containers, oversized_states
from tests.faults.world import KEEP, PHASE, check_state, state_at

# Whole files of something else: left to their owner, never written over.
STRANGERS = {"pickle 2", "pickle 5", "torch.save", "zip-slip", "tar-slip", "gzipped pickle", "a later version",
             "an earlier version"}  # fmt: skip


@pytest.fixture
def place(tmp_path):
    """A folder two levels down, so that a path out of it would be seen; no code may have run, nothing slipped out."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    yield inner
    strangers = list(tmp_path.rglob("marker*"))
    assert not strangers, f"code ran or a file slipped out: {strangers}"


def saved(place: Path, steps: int = KEEP + 2) -> tuple[CheckpointManager, list[Path]]:
    """A manager with so many checkpoints, and the paths of those that are kept, oldest first."""
    manager = CheckpointManager(place / "checkpoints", run="run", keep_last=KEEP, background=False)
    for step in range(1, steps + 1):
        assert manager.save_checkpoint(PHASE, state_at(step), force=True)
    return manager, [Path(info["path"]) for info in manager.list_checkpoints(PHASE)]


def slot_contents(place: Path, data: bytes) -> dict[str, bytes]:
    return {**bombs(place / "marker"), **damages(data), **oversized_containers(data)}


def test_pickle_bomb_fixture_executes_code_when_loaded(tmp_path):
    pickle.loads(bombs(tmp_path / "marker")["pickle 5"])  # noqa: S301 - that it would write, were it opened
    assert (tmp_path / "marker").read_text() == "code ran"


def test_manager_refuses_hostile_slot_contents_with_reason(place, caplog):
    caplog.set_level(logging.CRITICAL, "ml_factory")
    manager, slots = saved(place)
    whole = slots[-1].read_bytes()
    contents = slot_contents(place, whole)
    assert len(contents) > 60
    for name, content in contents.items():
        slots[-1].write_bytes(content)
        with CheckpointManager(place / "checkpoints", run="run", background=False) as other:
            found = other.load_latest_checkpoint(PHASE)
        step = check_state(found["state"])
        assert step == KEEP + 1, name  # the one before
        assert any(slots[-1].name in reason and len(reason) > 20 for reason in found["skipped"]), (
            name,
            found["skipped"],
        )
    slots[-1].write_bytes(whole)
    assert check_state(manager.load_latest_checkpoint(PHASE)["state"]) == KEEP + 2
    manager.close()


def test_manager_saves_despite_hostile_slots_and_keeps_foreign_files(place, caplog):
    caplog.set_level(logging.CRITICAL, "ml_factory")
    manager, slots = saved(place)
    contents = slot_contents(place, slots[-1].read_bytes())
    manager.close()
    for number, (name, content) in enumerate(contents.items()):
        if name.startswith(("cut", "flipped")) and number % 7:
            continue
        folder = place / f"case-{number}"
        manager, slots = saved(folder, 3)
        slots[-1].write_bytes(content)
        assert manager.save_checkpoint(PHASE, state_at(4), force=True), name
        assert check_state(manager.load_latest_checkpoint(PHASE)["state"]) == 4
        if name in STRANGERS:
            assert slots[-1].read_bytes() == content, f"{name} was written over"
        manager.close()


def test_manager_refuses_valid_container_with_foreign_payload(place, caplog):
    caplog.set_level(logging.CRITICAL, "ml_factory")
    manager, slots = saved(place)
    newest = manager.load_latest_checkpoint(PHASE)
    look = file_format.read_checkpoint_file_header(Disk(), slots[-1])
    inside = {**bombs(place / "marker"), **oversized_states(serialize_state(state_at(KEEP + 2))), "nothing": b""}
    for name, content in inside.items():
        info = {**look.info, "sequence": newest["sequence"] + 5}
        file_format.write_checkpoint_file(Disk(), slots[-1], info, content)
        found = manager.load_latest_checkpoint(PHASE)
        assert check_state(found["state"]) == KEEP + 1, name
        assert any(slots[-1].name in reason for reason in found["skipped"]), name
    manager.close()


@pytest.mark.parametrize("name", manifests())
def test_manager_repairs_hostile_manifests(place, name, caplog):
    caplog.set_level(logging.CRITICAL, "ml_factory")
    manager, slots = saved(place)
    manager.close()
    for bare in (False, True):  # beside whole slots, and beside one that says nothing itself
        for file in (place / "checkpoints").glob("slot-*.json"):
            file.write_bytes(manifests()[name])
        if bare:
            slots[0].write_bytes(b"")
        with CheckpointManager(place / "checkpoints", run="run", background=False) as other:
            before = check_state(other.load_latest_checkpoint(PHASE)["state"])
            assert before == KEEP + 2 + bare
            assert other.save_checkpoint(PHASE, state_at(before + 1), force=True)
            assert check_state(other.load_latest_checkpoint(PHASE)["state"]) == before + 1
            notes = [json.loads(path.with_suffix(".json").read_bytes()) for path in slots[-2:]]
            assert all(note["status"] == "held" for note in notes), "a manifest was not repaired"


def test_manager_skips_slots_that_are_directories_devices_or_oversized(place, caplog):
    caplog.set_level(logging.CRITICAL, "ml_factory")
    manager, slots = saved(place)
    with open(slots[-1], "r+b") as file:
        file.truncate(1 << 40)  # sparse: a terabyte to read, nothing on the disk
    (place / "checkpoints" / "slot-abcdef.ckpt").mkdir()
    os.symlink("/dev/zero", place / "checkpoints" / "slot-abcde0.ckpt")
    found = manager.load_latest_checkpoint(PHASE)
    assert check_state(found["state"]) == KEEP + 1
    assert manager.save_checkpoint(PHASE, state_at(9), force=True)
    assert check_state(manager.load_latest_checkpoint(PHASE)["state"]) == 9
    manager.close()


def refused(call, name: str) -> None:
    with pytest.raises(FactoryError) as caught:
        call()
    assert len(str(caught.value)) > 30, name


def test_bundle_load_of_hostile_or_damaged_file_raises(place):
    file = place / "model.bundle"
    TrainedModel({"weights": np.arange(50.0)}, {"center": [0.0]}, ("a", "b")).save(file)
    whole = file.read_bytes()
    for name, content in {**bombs(place / "marker"), **oversized_states(whole)}.items():
        file.write_bytes(content)
        refused(lambda: TrainedModel.load(file), name)
    for name, content in damages(whole).items():
        file.write_bytes(content)
        if not name.startswith("flipped"):  # a number inside may flip: a bundle alone has no hash, the registry has
            refused(lambda: TrainedModel.load(file), name)
            continue
        with suppress(FactoryError):
            TrainedModel.load(file)
    file.write_bytes(whole)
    later = dataclasses.asdict(TrainedModel.load(file)) | {"format": "ml_factory.bundle/99"}
    refused(lambda: TrainedModel.from_state(later), "a later version")


def test_registry_refuses_hostile_or_damaged_artifacts(place, caplog):
    registry = ArtifactRegistry(place / "models")
    old = registry.register("DEMO", "model", "toy", {"weights": np.arange(50.0)}, {"horizon": 5})
    new = registry.register("DEMO", "model", "toy", {"weights": np.arange(51.0)}, {"horizon": 5})
    state, description = new.path / "state.safetensors", new.path / "artifact.json"
    whole, observed = state.read_bytes(), description.read_bytes()
    for name, content in {**bombs(place / "marker"), **damages(whole), **oversized_states(whole)}.items():
        state.write_bytes(content)
        assert not new.is_intact(), name
        refused(new.load_state, name)
    state.write_bytes(whole)
    later = json.dumps({**json.loads(observed), "version": 99}).encode()
    strange = {"a later version": later, "version as text": later.replace(b"99", b'"x"'), **manifests()}
    cuts = {name: content for name, content in damages(observed.rstrip()).items() if not name.startswith("flipped")}
    for name, content in {**bombs(place / "marker"), **cuts, **strange}.items():
        description.write_bytes(content)
        caplog.clear()
        assert registry.find("DEMO", 5, "toy").hash == old.hash, name
        assert "skipped" in caplog.text, name
    description.write_bytes(json.dumps({**json.loads(observed), "version": 2, "hash": "../../../etc/passwd"}).encode())
    assert [one.hash for one in registry.list("DEMO")] == [old.hash], "a hash that is a path"
