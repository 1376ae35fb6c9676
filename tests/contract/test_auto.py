"""`auto`: the best settings by purged folds before the test rows; what interrupts a search changes nothing."""

import importlib.util
import json
import shlex
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.errors import FactoryError, SettingsError
from ml_factory.models.registry import available_models, build_model
from ml_factory.storage.workspace import Workspace
from tests.contract import doors

OPTIONS = {
    "folds": 2, "mirror": "off",
    "model_settings": {"xgboost": {"rounds": 10, "threads": 1}, "linear": {"rounds": 10, "threads": 1}},
}  # fmt: skip
MODELS = ("linear", "xgboost")
# It kills itself before a fit.
KILLED = """
import json, os, signal, sys
from ml_factory import pipeline
from ml_factory.workflows import auto

fits, whole = [], auto.fold_gain
def dies(*given):
    fits.append(1)
    if len(fits) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*given)
auto.fold_gain = dies
print("began", flush=True)
pipeline.auto(sys.argv[1], "DEMO", 5, trials=4, models=("linear", "xgboost"), **json.loads(sys.argv[2]))
"""


def search(workspace: Workspace, trials: int | None = 4, models=MODELS, **more):
    return pipeline.auto(workspace, "DEMO", 5, trials=trials, models=models, **OPTIONS, **more)


@pytest.fixture(scope="module")
def searched(prepared_template, tmp_path_factory):
    """A workspace with a finished search of four trials, and its result."""
    root = shutil.copytree(prepared_template, tmp_path_factory.mktemp("auto") / "workspace")
    return Workspace(root), search(Workspace(root))


def fold_gains(data, settings: dict, model: str) -> list[float]:
    """The gains of these settings, fold by fold."""
    run = doors.make_run_settings(
        "DEMO", 5, model, task="folds", seed=0, quick=False, data=data.fingerprint, settings=settings
    )
    return [doors.fold_gain(data, run, doors.FoldSchemeSpec(folds=2), fold)[0] for fold in range(2)]


def test_search_trains_the_best_trial_and_its_command_finds_that_run(searched, call):
    workspace, found = searched
    table = found.trials
    assert list(table["trial"]) == [0, 1, 2, 3] and list(table["model"][:2]) == list(MODELS)
    assert [set(one) for one in table["settings"][:2]] == [{"rounds", "threads"}] * 2  # the defaults come first
    complete = table[table["state"] == "complete"]
    assert found.beats and found.best["gain"] == complete["gain"].max() > 0
    assert found.exact and found.verdict.model == found.best["model"] and found.command in found.summary()
    code, out, _ = call(*shlex.split(found.command)[3:], "--json")
    again = json.loads(out)
    assert code == 0 and again["reused"] and again["run_id"] == found.trained_run_id
    assert doors.count_trials(workspace, "DEMO") == len(table) + 1  # every trial, and the training


def test_gain_of_a_trial_is_that_of_cross_validate(searched):
    workspace, found = searched
    best = found.best
    folds = pipeline.cross_validate(
        workspace, "DEMO", 5, best["model"], folds=2, model_settings=best["settings"], mirror="off"
    ).folds
    assert folds.loc[folds["name"] == best["model"], "gain_best"].mean() == best["gain"]


def test_changed_test_rows_change_no_trial(searched):
    workspace, found = searched
    data = doors.load_dataset(workspace, "DEMO", 5)
    first = data.splits["test"][0]
    later = data.features.index >= data.labels.index[first]
    labels, features = data.labels.copy(), data.features.copy()
    labels.iloc[first:, labels.columns.get_loc("label")] *= -1
    labels.iloc[first:, labels.columns.get_loc("label_end")] += pd.Timedelta("1h")
    features.loc[later] = 1 - 3 * features.loc[later]
    close = np.where(later, data.close[::-1], data.close)
    changed = replace(data, labels=labels, features=features, close=close)
    for _, one in found.trials.iterrows():
        assert np.mean(fold_gains(changed, one["settings"], one["model"])) == one["gain"]


def test_killed_and_started_again_search_ends_as_an_uninterrupted_one(searched, prepared, spawn):
    process = spawn(KILLED, prepared.root, json.dumps(OPTIONS), 6)  # before the second fold of the third trial
    assert process.stdout.readline() == "began\n" and process.wait() == -9
    lines: list[str] = []
    found = search(prepared, on_status=lines.append)
    pd.testing.assert_frame_equal(found.trials, searched[1].trials)
    assert found.trained_run_id == searched[1].trained_run_id and sum("folds" in one for one in lines) == 2
    assert doors.count_trials(prepared, "DEMO") == 5
    journal = found.path.with_name("journal.log")
    journal.write_bytes(journal.read_bytes() + b'{"op_code":4,"wor')  # a full disk cut it off
    assert search(prepared).trials.equals(found.trials)


@pytest.mark.soak
def test_trials_below_the_median_stop_early_and_a_longer_search_continues_a_shorter_one(searched, prepared):
    whole = search(prepared, 14)
    assert set(whole.trials["state"]) == {"complete"}  # of two folds none is left out
    assert search(searched[0], 14).trials.equals(whole.trials)
    stopped = pipeline.auto(prepared, "DEMO", 5, trials=14, models=MODELS, **{**OPTIONS, "folds": 3}).trials
    assert set(stopped.loc[stopped["state"] == "pruned", "folds"]) == {2} and stopped.loc[:4, "folds"].eq(3).all()


@pytest.mark.soak
def test_two_processes_share_a_search(prepared, spawn):
    others = [spawn(KILLED, prepared.root, json.dumps(OPTIONS), 0) for _ in range(2)]
    assert [one.wait() for one in others] == [0, 0]
    found = search(prepared)
    assert list(found.trials["trial"]) == [0, 1, 2, 3] and doors.count_trials(prepared, "DEMO") == 5


def test_hours_end_a_search_and_are_marked(searched, prepared):
    workspace, found = searched
    ended = pipeline.auto(workspace, "DEMO", 5, hours=1e-9, models=MODELS, **OPTIONS)
    assert ended.best == found.best and not ended.exact and ended.inexact_because == ["hours"]
    assert "another machine ends elsewhere" in ended.summary()
    with pytest.raises(FactoryError, match=r"No trial ended in this time.*give more hours"):
        pipeline.auto(prepared, "DEMO", 5, hours=1e-9, models=MODELS, **OPTIONS)


def test_nothing_beats_the_baselines_in_plain_words_and_nothing_is_trained(prepared):
    found = search(prepared, 1, ("linear",))
    assert not found.beats and found.best["gain"] < 0 and found.command is found.verdict is None
    assert "Nothing beats the time of the session" in found.summary()
    assert not doors.ArtifactRegistry(prepared.models).list("DEMO") and doors.count_trials(prepared, "DEMO") == 1


@pytest.mark.parametrize("words", [(), ("--trials", 4, "--hours", 1), ("--trials", 0), ("--hours", "nan")])
def test_search_without_one_limit_is_refused(words, prepared, call):
    code, out, err = call("auto", "--workspace", prepared.root, *words)
    assert code == 2 and out == "" and "A search ends after a number of trials, or after hours [trials, hours]" in err
    assert not list(prepared.results.rglob("journal.log"))


@pytest.mark.parametrize("name", available_models())
def test_every_model_has_a_search_space_of_legal_settings_around_its_defaults(name):
    if doors.find_model_spec(name).windowed and not importlib.util.find_spec("torch"):
        pytest.skip("torch is absent")
    space = doors.search_space(name)
    assert set(space) - {"lr", "weight_decay"}  # its own, beside those of every network
    for (low, high, *_), default in space.values():
        assert low <= default <= high and low < high
    for end in (0, 1):
        build_model(name, **{setting: bounds[end] for setting, (bounds, _) in space.items()})


def test_unknown_model_is_refused(prepared):
    with pytest.raises(SettingsError, match="Unknown model"):
        search(prepared, models=("xgbost",))
