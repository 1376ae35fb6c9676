"""Artifacts are written aside and renamed; on a mount whose renames copy, and whose uploads come in any order."""

import logging
import shutil

import numpy as np
import pytest

from ml_factory.errors import FactoryError
from ml_factory.storage.artifact_registry import ArtifactRegistry

SIZES = {"old": 10, "new": 30_000}  # the new state is copied in four pieces


def register(registry: ArtifactRegistry, which: str) -> None:
    registry.register("DEMO", "model", "toy", {"weights": np.full(SIZES[which], 1.5)}, {"which": which})


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("pieces", range(6))
def test_registry_after_death_during_rename_keeps_old_artifact(mount, pieces, caplog):
    caplog.set_level(logging.CRITICAL, "ml_factory")
    drive = mount(seed=pieces, uploads=0.5)
    registry = ArtifactRegistry(drive.path / "models")
    register(registry, "old")
    drive.upload()
    drive.fault("copy", "rename")
    drive.fault("die", "copy", after=pieces)
    register(registry, "new")
    # four pieces of the state, one of its description
    assert bool(registry.local_fallback.list("DEMO")) == (pieces < 5)
    shutil.rmtree(registry.local_fallback.folder, ignore_errors=True)  # the machine is gone with its disk
    drive.remount()
    seen = {}
    for artifact in registry.list("DEMO"):
        try:
            seen[artifact.facts["which"]] = len(artifact.load_state()["weights"])
        except FactoryError:
            assert not artifact.is_intact()  # told as torn; whoever can makes it again
    assert seen["old"] == SIZES["old"]
    assert seen.get("new", SIZES["new"]) == SIZES["new"]
    register(registry, "new")
    assert registry.find("DEMO", which="new").is_intact()


def test_registry_fills_trash_only_when_replacing_files(mount):
    drive = mount()
    registry = ArtifactRegistry(drive.path / "models")
    register(registry, "old")
    assert drive.facts()["trash"] == 0
    register(registry, "old")  # the same content again: its files are replaced
    assert 0 < drive.facts()["trash"] < 2000
