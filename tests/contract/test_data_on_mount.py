"""Bars, prepared data and what is made of them on a real mount: no process of ours asks it itself, and none waits."""

import subprocess
import threading
import time

import pytest

from ml_factory import pipeline
from ml_factory.errors import UnresponsiveMountError
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import remotes

SYMBOL, HORIZON = "DEMO", 5
TREES = {"rounds": 20, "block": 5, "depth": 3, "threads": 1, "patience": 0}
_RELEASE = 300.0  # seconds after which what hangs goes on: who waited for it then fails, and hangs no longer


@pytest.fixture
def drive(mount, tmp_path, monkeypatch):
    """A drive with a deadline of a second; the cache is the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remotes, "SILENCE_SECONDS", 1.0)
    late = threading.Timer(_RELEASE, mount.heal)
    late.daemon = True
    late.start()
    yield mount
    late.cancel()


@pytest.fixture
def workspace(drive, prepared_template) -> Workspace:
    """Prepared data of the made-up market on the drive."""
    subprocess.run(["cp", "-r", prepared_template, drive.path / "ml_factory"], check=True)  # a drive keeps no modes
    return Workspace(drive.path / "ml_factory")


def test_prepare_with_hanging_data_file_raises_with_file_name(prepared_template, prepared, drive):
    theirs = drive.path / "bars.parquet"
    theirs.write_bytes(Workspace(prepared_template).raw_bars(SYMBOL).read_bytes())
    drive.hang()
    with pytest.raises(UnresponsiveMountError, match=r"does not answer.*bars\.parquet.*mount it again"):
        pipeline.prepare(prepared, "MES", (HORIZON,), data=theirs)
    drive.wait_struck()
    assert not prepared.raw_bars("MES").exists()


@pytest.mark.parametrize("fault", ["hang", "disconnect"])
@pytest.mark.parametrize("words", [["train"], ["prepare", "--data", "bars.csv"]])
def test_command_on_drive_that_is_gone_ends_with_one_line(words, fault, drive, call):
    folder = drive.path / "ml_factory"
    folder.mkdir()
    drive.strike(fault)
    words = [str(drive.path / word) if "." in word else word for word in words]
    code, _, err = call(*words, "--workspace", folder, "--symbol", "MES")
    assert code == 1 and "does not answer" in err, err


def test_train_on_drive_that_hangs_in_the_middle_ends_and_copies_later(workspace, drive, caplog):
    def train(**more):
        return pipeline.train(
            workspace, SYMBOL, HORIZON, "xgboost", seed=3, quick=True, model_settings=TREES, mirror="off", **more
        )

    observed = []

    def hang(block: int, _) -> None:
        observed.append(block)
        if len(observed) == 2:
            drive.hang()

    result = train(callbacks=[hang])
    assert len(observed) == TREES["rounds"] // TREES["block"]
    assert "The newest files are on this machine alone" in caplog.text and "mount it again" in caplog.text
    drive.heal()
    place, until = drive.path / "ml_factory", time.monotonic() + 30
    copied = place / result.artifact.relative_to(workspace.root) / "state.safetensors"
    while not copied.is_file() and time.monotonic() < until:  # what hung until now must end first
        workspace.push()
    assert copied.is_file() and train().reused  # a save that hung may stay there: never seen whole, never deleted
