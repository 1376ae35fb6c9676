"""The plan of a session: what it measures is what a run would do, what it leaves out is finished."""

import numpy as np
import pytest

from ml_factory import pipeline
from ml_factory.ensemble import out_of_fold
from ml_factory.errors import SettingsError
from ml_factory.run_folder import open_run_checkpoints, open_run_folder
from ml_factory.settings import make_run_settings
from ml_factory.workflows import fit_cost_model as cost_model
from ml_factory.workflows import plan as plan_module
from ml_factory.workflows.load_prepared import load_dataset

SMALL = {"xgboost": {"rounds": 40, "depth": 2}, "lstm": {"epochs": 2, "hidden": 4, "lookback": 8, "batch": 64}}


@pytest.fixture
def data(prepared):
    return load_dataset(prepared, "DEMO", 5)


def plan(workspace, data, models, **more):
    return plan_module.plan_models(workspace, data, models, **{"quick": False, "seed": 0, "settings": SMALL} | more)


def test_plan_lists_unfinished_models_in_order_of_time(prepared, data):
    result = plan(prepared, data, ["lstm", "xgboost"])
    assert set(result.table.index) == {"lstm", "xgboost"}
    assert (result.table["fits"] == "whole").all()
    assert result.table["starts_at_minute"].iloc[0] == 0 and result.table["minutes"].is_monotonic_increasing
    pipeline.train(prepared, "DEMO", 5, "xgboost", model_settings=SMALL["xgboost"], mirror="off")
    assert list(plan(prepared, data, ["lstm", "xgboost"]).table.index) == ["lstm"]


def test_plan_with_short_session_marks_unit_as_partly_fitting(prepared, data, monkeypatch):
    monkeypatch.setattr(
        plan_module, "expected_hours_left", lambda records: 16 / 3600
    )  # one second more than the reserve
    monkeypatch.setattr(
        cost_model.WorkCostModel, "forecast", lambda self, work: cost_model.WorkCost(0.7 if work < 100 else 900.0)
    )
    table = plan(prepared, data, ["lstm", "xgboost"]).table
    assert table["fits"].to_dict() == {"xgboost": "whole", "lstm": "in part"}


def test_plan_warm_up_fits_training_rows_in_two_sizes(prepared, data, monkeypatch):
    seen = []
    fit_once = cost_model.measure_fit_cost

    def spy(data, name, settings, seed, size, whole):
        seen.append((name, size, whole))
        return fit_once(data, name, settings, seed, size, whole)

    monkeypatch.setattr(cost_model, "measure_fit_cost", spy)
    plan(prepared, data, ["lstm", "xgboost"])
    for name in SMALL:
        sizes = {size for one, size, _ in seen if one == name}
        assert len(sizes) == 2
        whole = next(whole for one, _, whole in seen if one == name)
        usable = cost_model._usable(data, 8 if name == "lstm" else 1, "train")
        assert whole.rows <= len(usable) and all(size.rows <= whole.rows for size in sizes)
        assert max(size.iterations for size in sizes) <= 30


def test_warm_up_of_small_fit_uses_at_most_a_fifth_of_work(data, monkeypatch):
    """QUICK's few epochs: a fifth of them at most, where a batch is no more. A long fit is tried as far as ever."""
    seen = []
    monkeypatch.setattr(
        cost_model,
        "measure_fit_cost",
        lambda *given: seen.append(given[4].rows) or cost_model.WorkCost(float(seen[-1])),
    )
    settings = {**SMALL["lstm"], "batch": 8}
    whole = cost_model.full_fit_size(data, "lstm", settings, 0, True)
    cost_model.fit_cost_model(data, "lstm", settings, 0, whole)
    assert 8 <= min(seen) < max(seen) and sum(seen) <= 0.2 * whole.rows * whole.iterations
    seen.clear()
    cost_model.fit_cost_model(data, "lstm", settings, 0, cost_model.FitSize(whole.rows, 1000))
    assert seen == [96, 96, 384]


def test_fit_once_checkpoint_size_matches_checkpoint_of_real_run(prepared, data, monkeypatch):
    weighed = []
    recorder = cost_model._CheckpointSizeRecorder
    monkeypatch.setattr(recorder, "save", lambda self, state, metrics=None, force=False: weighed.append(
        cost_model.plan_state_layout(state).size))  # fmt: skip
    size = cost_model.full_fit_size(data, "lstm", SMALL["lstm"], 0, False)
    cost_model.measure_fit_cost(data, "lstm", SMALL["lstm"], 0, size, size)
    spec = make_run_settings(
        "DEMO", 5, "lstm", task="train", seed=0, quick=False, data=data.fingerprint, settings=SMALL["lstm"]
    )
    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    pipeline.train(prepared, "DEMO", 5, "lstm", model_settings=SMALL["lstm"], mirror="off")
    with open_run_checkpoints(prepared.checkpoints, open_run_folder(prepared.results, "DEMO", spec, False)) as manager:
        real = [one["bytes"] for one in manager.list_checkpoints()]
    assert max(weighed) == pytest.approx(max(real), rel=0.15)


def test_plan_with_unknown_model_raises(prepared, data):
    with pytest.raises(SettingsError, match="Unknown model"):
        plan(prepared, data, ["xgbost"])


def trained(workspace, model, **more):
    return pipeline.train(workspace, "DEMO", 5, model, mirror="off", **{"model_settings": SMALL[model]} | more)


def test_plan_omits_runs_finished_with_same_settings_seed_and_quick(prepared, data):
    trained(prepared, "xgboost", model_settings={"rounds": 10, "depth": 2})
    trained(prepared, "xgboost", seed=1)
    trained(prepared, "xgboost", quick=True)
    assert list(plan(prepared, data, ["xgboost"]).table.index) == ["xgboost"]
    for others in ({"seed": 1}, {"quick": True}, {"settings": {"xgboost": {"rounds": 10, "depth": 2}}}):
        assert plan(prepared, data, ["xgboost"], **others).table.empty


def test_plan_of_checkpointed_run_counts_remaining_minutes_only(prepared, data, monkeypatch):
    class Killed(Exception):
        pass

    def kill(block, metrics):
        if block == 2:
            raise Killed

    monkeypatch.setenv("ML_FACTORY_SAVE_MINUTES", "0")
    monkeypatch.setattr(
        plan_module,
        "fit_cost_model",
        lambda *asked: cost_model.WorkCostModel(cost_model.WorkCost(60.0), cost_model.WorkCost(60.0)),
    )
    before = plan(prepared, data, ["xgboost"]).table.loc["xgboost"]
    assert (before["minutes"], before["done_percent"]) == (41.0, 0.0)
    with pytest.raises(Killed):
        trained(prepared, "xgboost", callbacks=[kill])
    after = plan(prepared, data, ["xgboost"]).table.loc["xgboost"]
    assert (after["minutes"], after["done_percent"]) == (21.0, 50.0)  # 20 of 40 rounds, and the fixed part once more


def test_plan_of_folds_takes_memory_of_largest_fold(prepared, data, monkeypatch):
    grows = cost_model.WorkCostModel(cost_model.WorkCost(60.0), cost_model.WorkCost(0.0, memory_bytes=1e6))
    monkeypatch.setattr(plan_module, "fit_cost_model", lambda *asked: grows)
    scheme = plan_module.FoldSchemeSpec(folds=3)
    row = plan(prepared, data, ["lstm"], tasks=["folds"], scheme=scheme).table.loc["folds of lstm"]
    folds = plan_module.plan_folds(data, data.development_rows(), scheme, 8, False)
    rows = [round(0.85 * np.count_nonzero(folds.usable[train])) for train, _ in folds.folds]
    epochs = cost_model.full_fit_size(data, "lstm", SMALL["lstm"], 0, False).iterations
    assert len(set(rows)) > 1 and row["memory_mb"] == max(rows) * epochs


def test_plan_of_folds_counts_minutes_of_unfinished_folds(prepared, data, monkeypatch):
    monkeypatch.setattr(
        plan_module,
        "fit_cost_model",
        lambda *asked: cost_model.WorkCostModel(cost_model.WorkCost(60.0), cost_model.WorkCost(60.0)),
    )
    scheme = plan_module.FoldSchemeSpec(folds=3)
    row = plan(prepared, data, ["xgboost"], tasks=["folds"], scheme=scheme).table.loc["folds of xgboost"]
    folds = plan_module.plan_folds(data, data.development_rows(), scheme, 1, False)
    learned = sum(0.85 * len(train) for train, _ in folds.folds)
    whole = cost_model.full_fit_size(data, "xgboost", SMALL["xgboost"], 0, False).rows
    assert row["minutes"] == pytest.approx(41 * learned / whole, abs=0.1)
    seen, fit_inside = [], out_of_fold.inner_validation_split

    def killed(*asked):
        seen.append(asked)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return fit_inside(*asked)

    monkeypatch.setattr(out_of_fold, "inner_validation_split", killed)
    with pytest.raises(KeyboardInterrupt):
        pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=3, model_settings=SMALL["xgboost"])
    monkeypatch.setattr(out_of_fold, "inner_validation_split", fit_inside)
    left = plan(prepared, data, ["xgboost"], tasks=["folds"], scheme=scheme).table.loc["folds of xgboost"]
    assert left["minutes"] == pytest.approx(row["minutes"] / 3, abs=0.1) and left["done_percent"] == 66.7
    pipeline.cross_validate(prepared, "DEMO", 5, "xgboost", folds=3, model_settings=SMALL["xgboost"])
    assert plan(prepared, data, ["xgboost"], tasks=["folds"], scheme=scheme).table.empty


def test_plan_lists_stack_after_bases_and_omits_finished_stack(prepared, data, monkeypatch):
    monkeypatch.setattr(
        plan_module,
        "fit_cost_model",
        lambda *asked: cost_model.WorkCostModel(cost_model.WorkCost(60.0), cost_model.WorkCost(60.0)),
    )
    own = {"xgboost": {"rounds": 20, "depth": 2}}
    names, how = ["linear", "xgboost"], {"quick": True, "settings": own, "scheme": plan_module.FoldSchemeSpec(folds=2)}
    table = plan(prepared, data, names, tasks=["stack"], **how).table
    assert set(table.index) == {*names, "stack"} and table.index[-1] == "stack"
    pipeline.stack(prepared, "DEMO", 5, names, folds=2, quick=True, mirror="off", model_settings=own)
    assert plan(prepared, data, names, tasks=["stack"], **how).table.empty
    others = plan(prepared, data, names, tasks=["stack"], **how | {"settings": {}}).table
    assert set(others.index) == {"xgboost", "stack"}  # of other settings neither is finished


def test_stack_and_plan_with_settings_of_unused_model_raise(prepared):
    own = {"lstm": {"hidden": 4}}
    with pytest.raises(SettingsError, match="not used here"):
        pipeline.stack(prepared, "DEMO", 5, ["linear", "xgboost"], model_settings=own)
    with pytest.raises(SettingsError, match="not used here"):
        pipeline.plan(prepared, "DEMO", 5, ["linear"], model_settings=own)


def test_plan_marks_unit_exceeding_device_memory(prepared, data, monkeypatch):
    class Gpu:
        kind, peak = "cuda", 0

        def free_bytes(self):
            return 1_000_000_000

        def reset_peak_memory(self):
            Gpu.peak = 2_000_000_000

        def peak_memory_bytes(self):
            return Gpu.peak

        def release_freed_memory(self):
            pass

    chosen = lambda name, settings: Gpu() if name == "lstm" else None  # noqa: E731
    monkeypatch.setattr(plan_module, "accelerator_of_model", chosen)
    monkeypatch.setattr(cost_model, "accelerator_of_model", chosen)
    table = plan(prepared, data, ["lstm", "xgboost"]).table
    assert table["fits"].to_dict() == {"xgboost": "whole", "lstm": "device memory"}
    assert table["device_mb"].to_dict() == {"xgboost": 0.0, "lstm": 2000.0}


def test_plan_reserves_measured_save_duration(prepared, data, monkeypatch):
    asked = []
    order = plan_module.plan_session_work
    monkeypatch.setattr(
        plan_module,
        "plan_session_work",
        lambda units, capacity, save: asked.append((capacity, save)) or order(units, capacity, save),
    )
    plan(prepared, data, ["xgboost"])
    assert asked[-1][1].seconds > 0 and asked[-1][0].pool_bytes == 0
    trained(prepared, "xgboost", seed=3)
    plan_module.save_durations(prepared.checkpoints).copied = 77.0
    plan(prepared, data, ["xgboost"])
    assert asked[-1][1].seconds == 77.0
    assert asked[-1][0].pool_bytes > 0  # the slots of what is finished serve the next
    plan_module.save_durations(prepared.checkpoints).copied = 0.0


def test_plan_with_unknown_task_raises(prepared, data):
    with pytest.raises(SettingsError, match="Unknown task"):
        plan(prepared, data, ["xgboost"], tasks=["fold"])


def test_plan_with_rate_prices_remaining_time_in_compute_units(prepared, data, monkeypatch):
    monkeypatch.setattr(
        cost_model.WorkCostModel, "forecast", lambda self, work: cost_model.WorkCost(3600.0 if work < 100 else 900.0)
    )
    result = plan(prepared, data, ["lstm", "xgboost"], units_per_hour=1.76)
    assert result.table["compute_units"].to_dict() == {"lstm": 0.44, "xgboost": 1.76}
    assert "xgboost: 60.0 min, 1.760 units, whole" in result.summary()
    assert "all of it: 2.200 compute units at 1.76 an hour" in result.summary()
    unpriced = plan(prepared, data, ["lstm", "xgboost"])
    assert "compute_units" not in unpriced.table and "unit" not in unpriced.summary()


@pytest.mark.parametrize("rate", [0, -1.0, float("nan"), float("inf"), "1.76", True])
def test_plan_with_unusable_rate_raises_before_warm_up(rate, prepared, data):
    with pytest.raises(SettingsError, match="units_per_hour"):
        plan(prepared, data, ["no such model"], units_per_hour=rate)


def test_cli_plan_passes_rate_to_planner_and_refuses_zero(call, prepared):
    plan_words = ("plan", "--workspace", prepared.root, "--horizon", 5, "--model", "linear", "--quick")
    code, out, _ = call(*plan_words, "--units-per-hour", 12.5)
    assert code == 0 and "compute units at 12.5 an hour" in out
    code, _, err = call(*plan_words, "--units-per-hour", 0)
    assert code == 2 and "units_per_hour" in err
