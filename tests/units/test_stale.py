"""What was finished before is found again only where it is the same work, and whole."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ml_factory import experiment, pipeline
from ml_factory.data.sources import import_bars
from ml_factory.data.synthetic import synthetic_bars
from ml_factory.errors import SettingsError
from ml_factory.experiment import QuickLimits, RunSpec, run_spec
from ml_factory.runs.workspace import Workspace

SPEC = RunSpec("MES", 10, "lightgbm", "train", 0, False, "0" * 64, (("rounds", 20),))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Workspace:
    workspace = Workspace(tmp_path_factory.mktemp("stale"))
    import_bars(synthetic_bars(days=8, seed=2).reset_index(), workspace, "MES")
    pipeline.prepare(workspace, "MES", (5,))
    return workspace


@pytest.fixture
def copied(tmp_path, monkeypatch) -> Path:
    """The library's sources, copied; run ids are computed from the copy."""
    shutil.copytree(experiment.PACKAGE, tmp_path / "ml_factory", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(experiment, "PACKAGE", tmp_path / "ml_factory")
    return tmp_path / "ml_factory"


@pytest.mark.parametrize(
    "source",
    ["models/tabular.py", "training/loop.py", "ensemble/stacking.py", "ensemble/out_of_fold.py", "units/holdout.py",
     "units/folds.py", "units/stacked.py", "units/dataset.py", "targets/weights.py", "evaluation/calibration.py",
     "datasets/scaling.py", "inference/predict.py", "seeding.py"],
)  # fmt: skip
def test_a_changed_computation_is_another_run(copied, source):
    before = SPEC.run_id
    with open(copied / source, "a") as file:
        file.write("# changed\n")
    assert SPEC.run_id != before


def test_a_changed_picture_is_not(copied):
    before = SPEC.run_id
    for source in ("evaluation/report.py", "evaluation/figures.py", "units/pages.py", "notebook.py"):
        with open(copied / source, "a") as file:
            file.write("# changed\n")
    assert SPEC.run_id == before


def test_other_limits_are_another_quick_run(monkeypatch):
    quick = replace(SPEC, quick=True)
    full_id, quick_id = SPEC.run_id, quick.run_id
    monkeypatch.setattr(experiment, "QuickLimits", lambda: replace(QuickLimits(), train_rows=17))
    assert quick.run_id != quick_id and SPEC.run_id == full_id


@pytest.mark.parametrize("name", ["seed", "folds"])
def test_what_has_an_argument_of_its_own_is_no_setting_of_the_model(name, prepared):
    for work in (pipeline.train, pipeline.cross_validate):
        with pytest.raises(SettingsError, match=f"model_settings.*{name}"):
            work(prepared, "MES", 5, "lightgbm", model_settings={name: 2})


def test_a_numpy_number_is_a_number():
    def run_id(rounds):
        return run_spec(
            "MES", 10, "lightgbm", task="train", seed=0, quick=False, data="0", settings={"rounds": rounds}
        ).run_id

    assert run_id(np.int64(20)) == run_id(20) != run_id(21)


def test_a_torn_model_is_made_again(prepared):
    workspace = prepared
    options = {"mirror": "off", "model_settings": {"rounds": 10, "depth": 2, "threads": 1}}
    first = pipeline.train(workspace, "MES", 5, "lightgbm", **options)
    state = first.artifact / "state.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[:1000])
    again = pipeline.train(workspace, "MES", 5, "lightgbm", **options)
    assert not again.reused and again.artifact == first.artifact and state.read_bytes() == whole
    assert again.predictions_hash == first.predictions_hash
    assert pipeline.train(workspace, "MES", 5, "lightgbm", **options).reused
