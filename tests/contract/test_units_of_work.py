"""Every unit of work, killed with SIGKILL before any durable operation, ends with the bytes of the uninterrupted one.

The real command line in a process of its own dies at a drawn operation. The disk is kept, lost in part (later
checkpoints, their descriptions, results) or holds a damaged newest checkpoint; then the same command runs to its end.
"""

import atexit
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ml_factory import pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.models.registry import available_models
from ml_factory.storage.workspace import Workspace
from tests.contract import doors
from tests.contract.profiles import examples

pytestmark = pytest.mark.slow  # so that it begins first
DATA = ("--symbol", "DEMO", "--horizon", "6", "--json")
TREES = {"rounds": 40, "block": 5, "depth": 3, "threads": 1, "patience": 0}
NETWORK = {"epochs": 3, "batch": 128, "lookback": 8, "threads": 1, "dropout": 0.2, "save_seconds": 0.0}
OWN = {
    "linear": {"depth": None}, "lstm": {"hidden": 16}, "gru": {"hidden": 8}, "tcn": {"width": 8, "lr": 1e-4},
    "tft": {"width": 8, "lr": 1e-4},
    "patchtst": {"patch": 4, "stride": 4, "width": 8, "inner": 8, "layers": 1, "lr": 1e-4},
    "itransformer": {"width": 8, "inner": 8, "layers": 1, "lr": 1e-4},
}  # fmt: skip


def train(model: str) -> list[str]:
    settings = (NETWORK if doors.find_model_spec(model).windowed else TREES) | OWN.get(model, {})
    chosen = [word for name, value in settings.items() if value is not None for word in ("--set", f"{name}={value}")]
    return ["train", *DATA, "--model", model, *chosen]


ON_CPU = ("--device", "cpu", "--threads", "1", "--json")
BARS, PREPARED, NOTHING = "bars", "prepared", "nothing"
# unit -> (words of the command line, what the workspace holds before, models trained before)
UNITS = {
    "prepare": (["prepare", *DATA, *doors.SMALL_DATA_WORDS], BARS, ()),
    **{model: (train(model), PREPARED, ()) for model in available_models()},
    "cross-validate": (["cross-validate", *DATA, "--model", "linear", "--folds", "3"], PREPARED, ()),
    "stack": (["stack", *DATA, "--base-model", "linear", "--base-model", "xgboost", "--folds", "2", "--quick"],
              PREPARED, ("linear", "xgboost")),
    "resnet50": (["recipe", "resnet50", "--fake-data", "--trainsize", "96", "--testsize", "24", "--width", "2",
                  "--classes", "3", "--image-size", "16", "--num-epochs", "2", "--batch-size", "16", *ON_CPU],
                 NOTHING, ()),
    "t5": (["recipe", "t5", "--data", "{workspace}/texts.tsv", "--vocabulary", "120", "--max-length", "24",
            "--num-epochs", "2", "--batch-size", "16", "--precision", "fp32", "--save-seconds", "0", *ON_CPU],
           NOTHING, ()),
    "sdce": (["recipe", "sdce", "--base-model", "builtin:tiny", "--surrogate-model", "builtin:tiny", "--dataset",
              "{workspace}/text.txt", "--max-seq-length", "32", "--max-tokens", "6000", "--num-epochs", "2",
              "--device", "cpu", "--mixed-precision", "no", "--surrogate-k", "8", "--probability-threshold", "0.001",
              "--output-dir", "{workspace}", "--json"], NOTHING, ()),
}  # fmt: skip
FACTS = ("artifact_hash", "predictions_hash", "fingerprint", "metrics", "fold_table", "weights", "label_balance",
         "loss", "accuracy", "macro_f1", "best_epoch", "exact")  # fmt: skip
# Boosters are interrupted in test_resume.py and killed in the folds of "stack", recipes in tests of their own.
IN_EVERY_TEST_RUN = ("prepare", "lstm", "stack")


def write_texts(folder: Path) -> None:
    """Write a table of labelled texts, and a text."""
    luck = np.random.default_rng(0)
    words = ["the", "king", "and", "queen", "of", "night", "see", "a", "cat", "on", "its", "mat", "while", "rain"]
    rows = [f"{row}\t{' '.join(luck.choice(words, 8))} {row % 2}\t{('bad', 'good')[row % 2]}" for row in range(160)]
    (folder / "texts.tsv").write_text("\n".join(["Id\tText\tLabel", *rows]) + "\n")
    (folder / "text.txt").write_text("\n".join(" ".join(luck.choice(words, 12)) + "." for _ in range(300)))


# Imported once; each run is a fork.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "sklearn.linear_model", "scipy.stats", "xgboost"])


def die_before(die_at: int) -> list[str]:
    """Kill this process, and all it starts, before its n-th durable operation on files (0: never); return those done.

    What a program has written survives a crash only after os.replace, os.rename, os.fsync or os.ftruncate: a process
    that dies before the n-th of these, for every n, meets every state that a crash can leave.
    """
    done, lock, main_process = [], threading.Lock(), os.getpid()

    def watched(name: str, operation):
        def call(*given, **more):
            with lock:
                done.append(name)
                if (len(done), os.getpid()) == (die_at, main_process):  # what children do is not counted
                    os.killpg(0, signal.SIGKILL)
            return operation(*given, **more)

        return call

    for name in ("replace", "rename", "fsync", "ftruncate"):
        setattr(os, name, watched(name, getattr(os, name)))
    return done


def command(words: list[str], folder: Path, die_at: int) -> None:
    """The command line in this process, a group of its own; its output, and its durable operations, are in files."""
    os.setsid()
    os.chdir(folder)
    for number, name in enumerate(("out", "err"), 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    warnings.simplefilter("error")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ML_FACTORY_", "WANDB_"))}
    os.environ.clear()
    os.environ |= kept | {"ML_FACTORY_WANDB": "off", "ML_FACTORY_SAVE_MINUTES": "0"}
    sys.argv, done = ["ml_factory", *words], die_before(die_at)
    try:
        doors.cli.main()
    finally:
        atexit._run_exitfuncs()  # which a fork of multiprocessing leaves out
        Path("count").write_text(str(len(done)))


def run(words: list[str], workspace: Path, folder: Path, die_at: int) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    words = [word.format(workspace=workspace) for word in words]
    if "--output-dir" not in words:
        words += ["--workspace", str(workspace)]
    process = FORKS.Process(target=command, args=(words, folder, die_at))
    process.start()
    process.join(300)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
    return process.exitcode, (folder / "out").read_text(), (folder / "err").read_text()


def facts(done: tuple[int, str, str], workspace: Path) -> dict:
    """What the command reports of its results, and the bytes of what is prepared and proved."""
    code, out, err = done
    assert code == 0, err[-2000:]
    printed = json.loads(out)
    kinds = ("data/processed/DEMO/*/*_h6.*", "data/processed/*/*/*.npy", "results/*/*/model/model.safetensors",
             "results/*/*/weights.state")  # fmt: skip
    files = [path for kind in kinds for path in sorted(workspace.glob(kind))]
    assert files, f"no result: {out}"
    return {name: printed[name] for name in FACTS if name in printed} | {path.name: path.read_bytes() for path in files}


def slots(workspace: Path) -> list[Path]:
    return sorted(workspace.glob("checkpoints/*/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def damage_newest_checkpoint(workspace: Path, moment: float) -> None:
    for newest in slots(workspace)[-1:]:
        data = bytearray(newest.read_bytes())
        data[int(moment * (len(data) - 1))] ^= 1
        newest.write_bytes(data)


def lose_part_of_disk(workspace: Path, moment: float) -> None:
    luck = np.random.default_rng(int(moment * 2**32))
    results = workspace.glob("results/DEMO/**/*")
    for paths, share in ((slots(workspace)[1:], 0.4), (sorted(results), 0.3)):
        for path in paths:
            if path.is_file() and luck.random() < share:
                path.unlink()


DISKS = {"kept": lambda *_: None, "lost": lose_part_of_disk, "damaged": damage_newest_checkpoint}


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """unit -> a workspace in which it can start, the facts of an uninterrupted run, and its durable operations."""
    kept, folder = {}, tmp_path_factory.mktemp("units")

    def of(unit: str):
        if unit not in kept:
            words, held, models = UNITS[unit]
            place = Workspace(folder / unit / "start")
            if held == NOTHING:
                write_texts(place.root)
            else:
                ensure_synthetic_demo_market(place, "DEMO", days=10)
            if held == PREPARED:
                pipeline.prepare(place, "DEMO", (6,), settings=doors.SMALL_DATA)
            for model in models:
                pipeline.train(place, "DEMO", 6, model, quick=True, mirror="off")
            whole = Path(shutil.copytree(place.root, folder / unit / "whole"))
            done = run(words, whole, folder / unit, 0)
            assert not any(noise in done[2] for noise in ("torchao", "Writing model"))  # of libraries
            # What an epoch after the best one does shows nowhere.
            assert "epochs=3" not in words or json.loads(done[1])["best_epoch"] == 3
            kept[unit] = place.root, facts(done, whole), int((folder / unit / "count").read_text())
        return kept[unit]

    return of


@pytest.mark.soak_except(*IN_EVERY_TEST_RUN)
@pytest.mark.parametrize("unit", UNITS)
@examples(dev=0, ci=1, campaign=19)
@example(moments=[0.6], disk="damaged")
@given(moments=st.lists(st.floats(0, 1), min_size=1, max_size=2), disk=st.sampled_from(sorted(DISKS)))
def test_killed_before_any_durable_operation_ends_with_same_bytes(unit, moments, disk, templates, tmp_path_factory):
    words = UNITS[unit][0]
    start, whole, operations = templates(unit)
    folder = tmp_path_factory.mktemp("killed")
    workspace = Path(shutil.copytree(start, folder / "workspace"))
    assert operations > 5
    for moment in moments:
        code, _, err = run(words, workspace, folder, 1 + int(moment * (operations - 1)))
        if code == 0:  # resumed near its end: fewer operations were left
            break
        assert code == -signal.SIGKILL, err[-2000:]
        DISKS[disk](workspace, moment)
    assert facts(run(words, workspace, folder, 0), workspace) == whole
    shutil.rmtree(folder)
