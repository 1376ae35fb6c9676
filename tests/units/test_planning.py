"""The plan of a session: what it measures is what a run would do, what it leaves out is finished."""

import pytest

from ml_factory import pipeline
from ml_factory.errors import SettingsError
from ml_factory.experiment import open_checkpoints, open_run, run_spec
from ml_factory.units import planning
from ml_factory.units.preparation import load_dataset

SMALL = {"xgboost": {"rounds": 40, "depth": 2}, "lstm": {"epochs": 2, "hidden": 4, "lookback": 8, "batch": 64}}


@pytest.fixture
def data(prepared):
    return load_dataset(prepared, "DEMO", 5)


def plan(workspace, data, models):
    return planning.plan_models(workspace, data, models, quick=False, seed=0, settings=SMALL)


def test_every_unit_has_its_place_and_what_is_finished_has_none(prepared, data):
    result = plan(prepared, data, ["lstm", "xgboost"])
    assert set(result.table.index) == {"lstm", "xgboost"}
    assert (result.table["fits"] == "whole").all()
    assert result.table["starts_at_minute"].iloc[0] == 0 and result.table["minutes"].is_monotonic_increasing
    pipeline.train(prepared, "DEMO", 5, "xgboost", model_settings=SMALL["xgboost"], mirror="off")
    assert list(plan(prepared, data, ["lstm", "xgboost"]).table.index) == ["lstm"]


def test_a_session_that_ends_leaves_work_for_the_next(prepared, data, monkeypatch):
    monkeypatch.setattr(planning, "hours_left", lambda: 16 / 3600)  # one second more than the reserve
    monkeypatch.setattr(planning.CostModel, "forecast", lambda self, work: planning.Cost(0.7 if work < 100 else 900.0))
    table = plan(prepared, data, ["lstm", "xgboost"]).table
    assert table["fits"].to_dict() == {"xgboost": "whole", "lstm": "in part"}


def test_a_warm_up_learns_from_rows_of_the_training_split_alone_and_in_two_sizes(prepared, data, monkeypatch):
    seen = []
    fit_once = planning.fit_once

    def spy(data, name, settings, seed, size, whole):
        seen.append((name, size, whole))
        return fit_once(data, name, settings, seed, size, whole)

    monkeypatch.setattr(planning, "fit_once", spy)
    plan(prepared, data, ["lstm", "xgboost"])
    for name in SMALL:
        sizes = {size for one, size, _ in seen if one == name}
        assert len(sizes) == 2
        whole = next(whole for one, _, whole in seen if one == name)
        usable = planning._usable(data, 8 if name == "lstm" else 1, "train")
        assert whole.rows <= len(usable) and all(size.rows <= whole.rows for size in sizes)
        assert max(size.turns for size in sizes) <= 30


def test_the_checkpoint_it_weighs_is_the_one_a_run_saves(prepared, data, monkeypatch):
    weighed = []
    monkeypatch.setattr(planning._Scale, "save", lambda self, state, metrics=None, force=False: weighed.append(
        planning.lay_out(state).size))  # fmt: skip
    size = planning.full_size(data, "lstm", SMALL["lstm"], 0, False)
    planning.fit_once(data, "lstm", SMALL["lstm"], 0, size, size)
    spec = run_spec("DEMO", 5, "lstm", task="train", seed=0, quick=False, data=data.fingerprint, settings=SMALL["lstm"])
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    pipeline.train(prepared, "DEMO", 5, "lstm", model_settings=SMALL["lstm"], mirror="off")
    with open_checkpoints(prepared.checkpoints, open_run(prepared.results, "DEMO", spec, False)) as manager:
        real = [one["bytes"] for one in manager.list_checkpoints()]
    assert max(weighed) == pytest.approx(max(real), rel=0.15)


def test_an_unknown_model_is_refused(prepared, data):
    with pytest.raises(SettingsError, match="Unknown model"):
        plan(prepared, data, ["xgbost"])
