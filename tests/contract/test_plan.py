"""The plan of a session: what it measures is what a run would do, what it leaves out is finished."""

import pytest

from ml_factory import pipeline
from ml_factory.errors import SettingsError
from tests.contract.doors import RESERVE_SECONDS, FitCost, build_untrained_model, load_dataset, make_run_settings
from tests.contract.doors import folds as folds_workflow
from tests.contract.doors import plan as plan_workflow

SMALL = {"xgboost": {"rounds": 40, "depth": 2}, "lstm": {"epochs": 2, "hidden": 4, "lookback": 8, "batch": 64}}


@pytest.fixture
def data(prepared):
    return load_dataset(prepared, "DEMO", 5)


@pytest.fixture
def costs(monkeypatch):
    """Costs that are known instead of measured: a minute to begin and one a round, or one for all epochs of a row."""

    def known(data, spec):
        rows = len(build_untrained_model(data, spec)[1])
        return FitCost(rows, dict(spec.settings)["rounds"], 60.0, 60.0, windowed=False)

    monkeypatch.setattr(plan_workflow, "fit_cost", known)


def plan(workspace, models, **more):
    own = {name: SMALL[name] for name in models if name in SMALL}
    return pipeline.plan(workspace, "DEMO", 5, models, **{"model_settings": own} | more)


def trained(workspace, model, **more):
    return pipeline.train(workspace, "DEMO", 5, model, mirror="off", **{"model_settings": SMALL[model]} | more)


@pytest.mark.parametrize("name", SMALL)
def test_fit_cost_is_a_line_through_two_short_fits_on_training_rows(data, name, monkeypatch):
    sizes = []

    def known(data, spec, size):
        sizes.append(size)
        return 3.0 + 0.5 * (size[0] * size[1] if name == "lstm" else size[1])

    monkeypatch.setattr(plan_workflow, "fit_seconds", known)
    settings = SMALL[name] | ({"epochs": 20} if name == "lstm" else {})
    spec = make_run_settings("DEMO", 5, name, task="train", seed=0, quick=False, data="0", settings=settings)
    cost = plan_workflow.fit_cost(data, spec)
    assert (cost.fixed, cost.slope) == (pytest.approx(3.0), pytest.approx(0.5)) and len(set(sizes)) == 2
    assert cost.rows <= len(build_untrained_model(data, spec)[1])
    assert sum(rows * times for rows, times in sizes[1:]) <= 0.2 * cost.rows * cost.iterations


@pytest.mark.parametrize(
    ("minutes", "fits"), [(42, ["whole", "in part"]), (20, ["in part", "later"]), (90, ["whole"] * 2)]
)
def test_plan_of_short_session_says_what_fits(minutes, fits, prepared, data, costs, monkeypatch):
    monkeypatch.setattr(plan_workflow, "expected_hours_left", lambda: (60 * minutes + RESERVE_SECONDS) / 3600)
    settings = {"xgboost": {"rounds": 40}, "lightgbm": {"rounds": 45}}
    table = plan(prepared, ["lightgbm", "xgboost"], model_settings=settings).table
    assert table["fits"].tolist() == fits and list(table.index) == ["xgboost", "lightgbm"]


def test_plan_with_unknown_model_task_or_unusable_rate_raises_before_warm_up(prepared, data):
    with pytest.raises(SettingsError, match="Unknown model"):
        plan(prepared, ["xgbost"])
    with pytest.raises(SettingsError, match="not used here"):
        plan(prepared, ["linear"], model_settings={"lstm": {"hidden": 4}})
    with pytest.raises(SettingsError, match="Unknown task"):
        plan(prepared, ["xgboost"], tasks=["fold"])
    for rate in (-1.0, float("nan"), float("inf"), "1.76", True):
        with pytest.raises(SettingsError, match="units_per_hour"):
            plan(prepared, ["no such model"], units_per_hour=rate)


def test_plan_of_checkpointed_run_counts_remaining_minutes_only(prepared, data, costs, monkeypatch):
    class Killed(Exception):
        pass

    def kill(block, metrics):
        if block == 2:
            raise Killed

    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    before = plan(prepared, ["xgboost"]).table.loc["xgboost"]
    assert (before["minutes"], before["done_percent"]) == (41.0, 0.0)
    with pytest.raises(Killed):
        trained(prepared, "xgboost", callbacks=[kill])
    after = plan(prepared, ["xgboost"]).table.loc["xgboost"]
    assert (after["minutes"], after["done_percent"]) == (21.0, 50.0)  # 20 of 40 rounds, and the fixed part once more


def test_plan_of_folds_counts_minutes_of_unfinished_folds(prepared, data, costs, monkeypatch):
    row = plan(prepared, ["xgboost"], tasks=["folds"], folds=3).table.loc["folds of xgboost"]
    folds = folds_workflow.plan_folds(data, data.development_rows(), folds_workflow.FoldSchemeSpec(folds=3), 1)
    learned = sum(0.85 * len(train) for train, _ in folds.folds)
    whole = len(data.splits["train"])
    assert row["minutes"] == pytest.approx(41 * learned / whole, abs=0.1)
    seen, fit_inside = [], folds_workflow.fit_on_rows

    def killed(*asked, **options):
        seen.append(asked)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return fit_inside(*asked, **options)

    monkeypatch.setattr(folds_workflow, "fit_on_rows", killed)
    with pytest.raises(KeyboardInterrupt):
        pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=3, model_settings=SMALL["xgboost"])
    monkeypatch.setattr(folds_workflow, "fit_on_rows", fit_inside)
    left = plan(prepared, ["xgboost"], tasks=["folds"], folds=3).table.loc["folds of xgboost"]
    assert left["minutes"] == pytest.approx(row["minutes"] / 3, abs=0.1) and left["done_percent"] == 66.7
    pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=3, model_settings=SMALL["xgboost"])
    assert plan(prepared, ["xgboost"], tasks=["folds"], folds=3).table.empty


def test_plan_lists_stack_after_bases_and_omits_finished_stack(prepared, data, costs):
    own = {"xgboost": {"rounds": 20, "depth": 2}}
    names, how = ["linear", "xgboost"], {"quick": True, "model_settings": own, "folds": 2}
    table = plan(prepared, names, tasks=["stack"], **how).table
    assert set(table.index) == {*names, "stack"} and table.index[-1] == "stack"
    pipeline.stack(prepared, "DEMO", 5, names, folds=2, quick=True, mirror="off", model_settings=own)
    assert plan(prepared, names, tasks=["stack"], **how).table.empty
    others = plan(prepared, names, tasks=["stack"], **how | {"model_settings": {}}).table
    assert set(others.index) == {"xgboost", "stack"}  # of other settings neither is finished


def test_plan_with_rate_prices_remaining_time_in_compute_units(prepared, data, costs):
    settings = {"xgboost": {"rounds": 59}, "lightgbm": {"rounds": 14}}
    result = plan(prepared, ["xgboost", "lightgbm"], model_settings=settings, units_per_hour=1.76)
    assert result.table["compute_units"].to_dict() == {"lightgbm": 0.44, "xgboost": 1.76}
    assert "xgboost: 60.0 min, 1.760 units, whole" in result.summary()
    assert "all of it: 2.200 compute units at 1.76 an hour" in result.summary()
    unpriced = plan(prepared, ["xgboost"])
    assert "compute_units" not in unpriced.table and "unit" not in unpriced.summary()
