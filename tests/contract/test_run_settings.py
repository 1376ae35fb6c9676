"""Settings together: run ids that change with what matters, attempts next to each other, what the environment says."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import ml_factory
from ml_factory import Workspace, pipeline
from ml_factory.errors import SettingsError
from tests.contract import doors

SPEC = doors.RunSettings("MES", 20, "xgboost", "train", 0, False, "0" * 64, (("depth", 3),))


@pytest.mark.parametrize(
    "change",
    [
        {"symbol": "MGC"}, {"horizon": 21}, {"model": "lightgbm"}, {"task": "folds"}, {"seed": 1}, {"quick": True},
        {"data": "1" * 64}, {"settings": (("depth", 4),)}, {"settings": ()},
    ],
)  # fmt: skip
def test_run_spec_run_id_changes_with_each_field(change):
    assert replace(SPEC, **change).run_id != SPEC.run_id == replace(SPEC).run_id


def test_run_spec_quick_limits_yield_to_given_settings():
    common = {"task": "train", "seed": 0, "quick": True, "data": "0" * 64}
    assert dict(doors.make_run_settings("MES", 20, "xgboost", settings=None, **common).settings) == {
        "rounds": doors.QuickLimits().rounds
    }
    assert dict(doors.make_run_settings("MES", 20, "lstm", settings={"hidden": 8}, **common).settings) == {
        "epochs": doors.QuickLimits().epochs,
        "hidden": 8,
    }
    assert dict(doors.make_run_settings("MES", 20, "lstm", settings={"epochs": 9}, **common).settings) == {"epochs": 9}


@pytest.mark.parametrize(
    ("check", "least", "says"),
    [
        (doors.check_horizon, 1, r"HORIZON.*wanted a whole number of bars, 1 or more\. Next: "),
        (doors.check_seed, 0, "SEED"),
    ],
)
def test_number_that_is_no_horizon_or_seed_raises(check, least, says):
    assert check(least) == least
    for value in (least - 1, 2.0, "20", True, None):
        with pytest.raises(SettingsError, match=says):
            check(value)


@pytest.mark.parametrize(
    ("text", "given", "wanted"), [("1", False, True), ("0", True, False), ("", True, True), ("maybe", False, False)]
)
def test_quick_from_environment_follows_variable_else_argument(text, given, wanted, monkeypatch):
    monkeypatch.setenv("ML_FACTORY_QUICK", text)
    assert doors.quick_from_environment(given) is wanted


def test_save_minutes_from_environment_sets_manager_interval_or_raises(tmp_path, monkeypatch):
    run = doors.newest_run_folder(tmp_path / "results", SPEC.run_id)
    monkeypatch.delenv("ML_FACTORY_SAVE_MINUTES", raising=False)
    assert doors.checkpoint_minutes_from_environment() == 30
    with doors.open_run_checkpoints(Workspace(tmp_path), run) as manager:
        assert (manager.auto_seconds, manager.run) == (1800, run.run_id)
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", " 0.5 ")
    with doors.open_run_checkpoints(Workspace(tmp_path), run) as manager:
        assert manager.auto_seconds == 30
    for text in ("often", "-1", "nan", "inf"):
        monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", text)
        with pytest.raises(SettingsError, match=r"ML_FACTORY_SAVE_MINUTES.*Next: "):
            doors.checkpoint_minutes_from_environment()


@pytest.mark.parametrize(
    ("model", "settings", "named"),
    [
        ("xgboost", {}, set()), ("xgboost", {"device": "cuda"}, {"gpu"}), ("lightgbm", {}, set()),
        ("linear", {}, {"processor"}), ("lstm", {}, {"gpu", "processor"}),
    ],
)  # fmt: skip
def test_machine_names_what_the_bits_of_a_model_depend_on(model, settings, named):
    """A booster that continues under another model of processor is equal to the bit, and not marked."""
    spec = doors.make_run_settings("ES", 5, model, task="train", seed=0, quick=False, data="d", settings=settings)
    assert {"gpu", "processor"} & set(doors.run_machine_facts(spec)) == named


@pytest.mark.parametrize("tick", [float("nan"), float("inf"), 0.0, -0.25])
def test_data_spec_with_tick_that_is_no_price_step_raises(tick):
    with pytest.raises(SettingsError, match="tick"):
        doors.DataSpec(tick=tick)


@pytest.mark.parametrize("name", ["seed", "folds", "scheme", "test_blocks", "window", "weights"])
def test_train_and_cross_validate_reject_run_arguments_in_model_settings(name, prepared):
    for work in (pipeline.train, pipeline.cross_validate):
        with pytest.raises(SettingsError, match=name):
            work(prepared, "DEMO", 5, "lightgbm", model_settings={name: 2})


CHANGES = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from ml_factory.settings import RunSettings, certified_code_hash
def run_id():
    return RunSettings("MES", 20, "xgboost", "train", 0, False, "0" * 64).run_id
for source in sys.argv[2:]:
    path = Path(sys.argv[1], "ml_factory", source)
    before, code, text = run_id(), certified_code_hash(), path.read_text()
    path.write_text(text + "CHANGED = 1\\n")
    print(source, run_id() != before, certified_code_hash() != code)
    path.write_text(text)
    assert run_id() == before
"""


def test_run_id_changes_with_code_that_fits_and_certificate_with_all_that_computes(tmp_path, spawn):
    """In a copy of the library; of each source: whether the run id changes, and whether the certificate does."""
    shutil.copytree(Path(ml_factory.__file__).parent, tmp_path / "ml_factory")
    fits = ("models/tabular.py", "training/loop.py", "workflows/folds.py", "inference/predict.py")
    wanted = {
        **dict.fromkeys(fits, "True"),
        **dict.fromkeys(("inference/guard.py", "leakage/proof.py", "data/resample.py"), "False"), "seeding.py": "True",
    }  # fmt: skip
    nothing = ("evaluation/plots.py", "notebook.py", "workflows/report.py")
    printed, _ = spawn(CHANGES, tmp_path, *wanted, *nothing).communicate()
    lines = [*(f"{source} {fits} True" for source, fits in wanted.items()), *(f"{one} False False" for one in nothing)]
    assert printed.splitlines() == lines
