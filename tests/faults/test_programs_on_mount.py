"""Compiled programs are uploaded to a mount and downloaded from it, and no compiler works on the mount itself."""

import logging
import os
from pathlib import Path

import pytest

from ml_factory.run_folder import RunFolder, open_run_checkpoints
from ml_factory.storage import compile_cache, mounts
from ml_factory.storage.mounts import mount_of


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(name) : from now on this process is on that machine, with a local disk of its own."""

    def move(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        monkeypatch.delenv("ML_FACTORY_PROGRAMS", raising=False)
        compile_cache._downloaded.cache_clear()

    monkeypatch.setattr(mounts, "DEADLINE", 2.0)
    move("first")
    yield move
    os.environ.pop("ML_FACTORY_PROGRAMS", None)


def compiled(root: Path, work=lambda folder: None) -> Path:
    """A training's folder of programs, after one save and some work of its compiler."""
    with open_run_checkpoints(root / "checkpoints", RunFolder("run", root / "results" / "run")) as manager:
        folder = compile_cache.compile_cache_folder(Path(os.environ["ML_FACTORY_PROGRAMS"]))  # as on a GPU
        work(folder)
        manager.save_checkpoint("p", {"value": 1}, force=True)
        assert manager.store.wait_home()
        assert compile_cache._background(os.getpid()).wait(60)
    return folder


def test_compile_cache_on_mount_is_shared_between_machines(mount, machine):
    def compile_one(folder: Path) -> None:
        (folder / "inductor" / "ab").mkdir(parents=True)
        (folder / "inductor" / "ab" / "kernel.so").write_bytes(b"program" * 100_000)
        os.utime(folder / "inductor" / "ab" / "kernel.so", (0, 0))  # compiled long ago

    root = mount().path / "ml_factory"
    first = compiled(root, compile_one)
    machine("second")
    second = compiled(root)
    assert first != second and mount_of(first) is None is mount_of(second)
    assert (second / "inductor" / "ab" / "kernel.so").read_bytes() == b"program" * 100_000


def test_compile_cache_on_hanging_mount_is_skipped_with_warning(mount, machine, caplog):
    drive = mount()
    folder = drive.path / "ml_factory" / "compiled" / "inductor"
    folder.mkdir(parents=True)
    (folder / "kernel.so").write_bytes(b"program")
    drive.fault("hang", path="*compiled*")
    assert mount_of(compiled(drive.path / "ml_factory")) is None
    assert "Compiled programs are not downloaded from the workspace" in caplog.text
    drive.heal()


def test_compile_cache_on_local_disk_lies_in_workspace(tmp_path, machine, caplog):
    caplog.set_level(logging.WARNING)
    assert compiled(tmp_path / "ml_factory") == tmp_path / "ml_factory" / "compiled"
    assert not list(tmp_path.glob("*/ml_factory/compiled"))  # no copy in this machine's cache
