"""Every kind of file that is read, damaged: the same value, or one line that names the file. Nothing runs or hangs.

A file is changed in a byte, cut, replaced by other bytes, by nothing, by a link, a pipe or a pickle.
"""

import os
import pickle
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml_factory import CheckpointManager, pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.errors import FactoryError
from ml_factory.storage.workspace import Workspace
from tests.contract import doors
from tests.contract.profiles import examples

CPU_SECONDS, MEGABYTES, HANGS_AFTER = 2.0, 300.0, 20


@dataclass(frozen=True)
class FileKind:
    """One kind of file.

    pattern : of its paths below the workspace's root.
    read : what it gives, from the root.
    sealed : a hash protects it, so that another value is a failure.
    also : further values that are right, such as the checkpoint before.
    """

    pattern: str
    read: Callable[[Path], object]
    sealed: bool = True
    also: Callable[[Path], list] = lambda root: []


def prepared(root: Path) -> object:
    labels = pipeline.load_labels(root, "DEMO", 5)
    splits = pipeline.load_splits(root, "DEMO", 5)
    return [pipeline.load_features(root, "DEMO").to_numpy(), labels.astype(str).to_numpy(), splits["train"]]


def scaled(root: Path) -> object:
    return doors.scaled_rows(root, "DEMO", 5)


def predicted(root: Path) -> object:
    """The registered model, loaded and applied to the workspace's bars."""
    return pipeline.predict(root, "DEMO", 5, "linear").frame.iloc[:, :3].to_numpy()


def stored_predictions(root: Path) -> object:
    return pipeline.load_predictions(root, "DEMO", 5, "linear").astype(str).to_numpy()


def checkpoint(root: Path) -> object:
    with CheckpointManager(root / "checkpoints", run="mine") as manager:
        found = manager.load_latest_checkpoint("phase")
    return None if found is None else found["state"]["weights"]


def bundle(root: Path) -> object:
    bars = doors.load_bars(Workspace(root), "DEMO")[0]
    return doors.Bundle.load(next(root.glob("results/DEMO/*/*.bundle"))).predict(bars)["p_long"].to_numpy()


def listed(root: Path) -> object:
    return pipeline.leaderboard(root).summary()


def imported(name: str) -> Callable[[Path], object]:
    return lambda root: doors.import_bars(root / name, Workspace(root / "other"), "MES").fingerprint


KINDS = {
    "raw bars": FileKind("brought/bars.parquet", imported("brought/bars.parquet"), sealed=False),
    "raw CSV": FileKind("brought/bars.csv", imported("brought/bars.csv"), sealed=False),
    "features": FileKind("data/processed/DEMO/*/features.npy", prepared),
    "rows": FileKind("data/processed/DEMO/*/rows.npy", prepared),
    "labels": FileKind("data/processed/DEMO/*/labels_h5.parquet", prepared),
    "splits": FileKind("data/processed/DEMO/*/splits_h5.json", prepared),
    "scaler": FileKind("data/processed/DEMO/*/scaler_h5.json", scaled),
    "manifest": FileKind("data/processed/DEMO/*/manifest.json", prepared),
    "current data set": FileKind("data/processed/DEMO/current.json", prepared),
    "certificate": FileKind("data/processed/DEMO/certificates/*/h5.json", doors.certificate_text),
    "model": FileKind("models/DEMO/*/state.safetensors", predicted),
    "model's record": FileKind("models/DEMO/*/artifact.json", predicted, sealed=False),
    "predictions": FileKind("results/DEMO/*/predictions.parquet", stored_predictions),
    "checkpoint": FileKind(
        "checkpoints/mine/*.ckpt", checkpoint, also=lambda root: [np.full(40, 1.0), np.full(40, 2.0)]
    ),
    "bundle": FileKind("results/DEMO/*/*.bundle", bundle),
    # run, report, done, backtest
    "run's records": FileKind("results/DEMO/*/[bdr]*.json", listed, sealed=False),
}
# Written for people and for other programs, or locks without content: nothing here reads them.
NOT_READ = (
    "*.md",
    "*.html",
    "*.csv",
    "*.lock",
    "*.onnx",
    "*/raw/*",
    "*/log/*",
    "*/leases/*",
    "*/predictions.json",
    "*/predictions-*.parquet",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    made = Workspace(tmp_path_factory.mktemp("files") / "workspace")
    ensure_synthetic_demo_market(made, "DEMO", days=8)
    pipeline.prepare(made, "DEMO", (5,), settings=doors.SMALL_DATA)
    pipeline.train(made, "DEMO", 5, "linear", quick=True, mirror="off")
    pipeline.export(made, "DEMO", 5, "linear", formats=("bundle", "onnx"))
    with CheckpointManager(made.checkpoints, run="mine") as manager:
        for value in (1.0, 2.0):
            manager.save_checkpoint("phase", {"weights": np.full(40, value)}, force=True)
    (made.root / "brought").mkdir()
    bars = doors.load_bars(made, "DEMO")[0].head(800).reset_index()
    bars.to_parquet(made.root / "brought" / "bars.parquet", index=False)
    bars.to_csv(made.root / "brought" / "bars.csv", index=False)
    return made.root


class Command:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return subprocess.call, (["touch", os.environ["MARKER"]],)


def replaced_by_link(path: Path) -> None:
    copy = path.with_name(f"{path.name}.elsewhere")
    shutil.copy(path, copy)
    path.unlink()
    path.symlink_to(copy)


def replaced_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "bit": lambda data, at, part: data[:at] + bytes([data[at] ^ (1 << part[0] % 8)]) + data[at + 1 :],
    "cut": lambda data, at, part: data[:at],
    "overwritten": lambda data, at, part: data[:at] + part + data[at + len(part) :],
    "inserted": lambda data, at, part: data[:at] + part + data[at:],
    "removed": lambda data, at, part: data[:at] + data[at + len(part) :],
    "zeros": lambda data, at, part: data[:at] + bytes(len(part)) + data[at + len(part) :],
    "number": lambda data, at, part: data[:at] + b"1e999" + data[at + 5 :],
    "nesting": lambda data, at, part: data[:at] + b"[" * 5_000 + data[at:],
    "empty": lambda data, at, part: b"",
    "pickle": lambda data, at, part: pickle.dumps(Command()),
    "link": replaced_by_link,
    "pipe": replaced_by_pipe,
}


@contextmanager
def damaged(path: Path, how: str, place: float, part: bytes):
    whole = path.read_bytes()
    try:
        if how in ("link", "pipe"):
            DAMAGE[how](path)
        else:
            path.write_bytes(DAMAGE[how](whole, min(int(place * len(whole)), len(whole) - 1), part))
        yield
    finally:
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.elsewhere").unlink(missing_ok=True)
        path.write_bytes(whole)


def outcome(kind: FileKind, root: Path) -> object:
    """The value, or the error; a hang ends the test."""

    def hangs(*_):
        raise TimeoutError(f"no answer in {HANGS_AFTER} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANGS_AFTER)
    try:
        return kind.read(root)
    except FactoryError as error:
        return error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def reset_peak_memory() -> None:
    """Let the peak begin again at what is in memory now."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_megabytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024


def equal(one: object, other: object) -> bool:
    if isinstance(one, list):
        return isinstance(other, list) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


@cache
def right_values(name: str, root: Path) -> list:
    """What a file of this kind gives while nothing is damaged."""
    return [KINDS[name].read(root), *KINDS[name].also(root)]


@pytest.mark.parametrize("name", KINDS)
@examples(dev=4, ci=15, campaign=400)
@given(data=st.data())
def test_damaged_file_gives_same_value_or_one_line_that_names_it(root, name, data, monkeypatch, tmp_path_factory):
    kind = KINDS[name]
    marker = tmp_path_factory.mktemp("marker") / "ran"
    monkeypatch.setenv("MARKER", str(marker))
    path = data.draw(st.sampled_from(sorted(root.glob(kind.pattern))), label="file")
    how = data.draw(st.sampled_from(sorted(DAMAGE)), label="damage")
    place = data.draw(st.floats(0, 1), label="place")
    part = data.draw(st.binary(min_size=1, max_size=64), label="part")
    known = right_values(name, root)
    with damaged(path, how, place, part):
        reset_peak_memory()
        idle, began = peak_megabytes(), time.process_time()
        found = outcome(kind, root)
        seconds, grown = time.process_time() - began, peak_megabytes() - idle
    assert not marker.exists(), "code in the file ran"
    assert seconds < CPU_SECONDS and grown < MEGABYTES, (seconds, grown)
    if isinstance(found, FactoryError):
        assert "\n" not in str(found).strip() and len(str(found)) < 1500, str(found)
    elif kind.sealed and found is not None:
        assert any(equal(found, value) for value in known)


def test_every_file_of_a_workspace_is_of_a_kind(root):
    """A new kind of file needs a case here, or a line that says why nothing reads it."""
    covered = {path for kind in KINDS.values() for path in root.glob(kind.pattern)}
    left = [path.relative_to(root) for path in root.rglob("*") if path.is_file() and path not in covered]
    unknown = [path for path in left if not any(Path("/", path).match(pattern) for pattern in NOT_READ)]
    assert [path for path in unknown if path.parts[0] != "other"] == []
