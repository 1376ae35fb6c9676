"""`auto`: the best settings by purged folds before the test rows; what interrupts a search changes nothing."""

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.errors import CheckpointError, FactoryError, SettingsError
from ml_factory.models.registry import available_models, build_model
from ml_factory.storage.workspace import Workspace
from tests.contract import doors

OPTIONS = {
    "folds": 2, "mirror": "off",
    "model_settings": {"xgboost": {"rounds": 10, "threads": 1}, "linear": {"rounds": 10, "threads": 1}},
}  # fmt: skip
MODELS = ("linear", "xgboost")
# Runs a search in one process after another. Each has a fault: a function of auto, the number of its call (0: each),
# what happens there or the gains that it returns, other options.
FAULTY = """
import json, os, resource, signal, sys
import optuna, scipy.optimize, scipy.stats, xgboost  # once for all processes
from ml_factory import pipeline
from ml_factory.errors import FactoryError
from ml_factory.workflows import auto

def search(name, number, how, more):
    place, calls = auto._Study if hasattr(auto._Study, name) else auto, []
    whole = getattr(place, name)
    def faulty(*given):
        calls.append(1)
        is_now = number in (0, len(calls))
        if is_now and how == "fails":
            raise FactoryError("made to fail")
        if isinstance(how, list):
            return how[len(calls) - 1], []
        if is_now and how == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, -1))
            return whole(*given)
        if is_now and how == "stays":
            print(os.getpid(), flush=True)
            signal.pause()
        if is_now and how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        done = whole(*given)
        if is_now:
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    setattr(place, name, faulty)
    options = {"trials": 4, "models": ("linear", "xgboost"), **json.loads(sys.argv[2]), **more}
    try:
        return pipeline.auto(sys.argv[1], "DEMO", 5, **options) and 0
    except FactoryError as error:
        return 1

for fault in json.loads(sys.argv[3]):
    if not (child := os.fork()):
        try:
            os._exit(search(*fault))
        finally:
            os._exit(9)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

FAULTS = [  # and the exit codes
    (("_phase", 3, "dies", {}), -9),  # between the choice of the second trial and its lock
    (("fold_gain", 4, "dies", {}), -9),  # before the second fold of the third
    (("_run", 2, "dies after", {}), -9),  # between the end of the last and the file of the trials
    (("fold_gain", 2, "fails", {"trials": 2, "models": MODELS[::-1]}), 0),
    (("fold_gain", 0, "fails", {"seed": 1}), 1),
    (("_run", 1, "full disk", {"seed": 3, "trials": 1}), 1),  # the code of an error in one line
    (("fold_gain", 0, [-1.0] * 15 + [1.0, -4.0], {"seed": 2, "trials": 6, "folds": 3}), 0),
]


def search(workspace: Workspace, trials: int | None = 4, models=MODELS, **more):
    own = {name: OPTIONS["model_settings"][name] for name in models}
    return pipeline.auto(
        workspace, "DEMO", 5, trials=trials, models=models, **{**OPTIONS, "model_settings": own} | more
    )


@pytest.fixture(scope="module")
def searched(prepared_template, tmp_path_factory):
    """A workspace with a finished search of four trials, and its result."""
    root = shutil.copytree(prepared_template, tmp_path_factory.mktemp("auto") / "workspace")
    return Workspace(root), search(Workspace(root))


def fold_gains(data, settings: dict, model: str, folds: int = 2) -> list[float]:
    """The gains of these settings, fold by fold."""
    run = doors.make_run_settings(
        "DEMO", 5, model, task="folds", seed=0, quick=False, data=data.fingerprint, settings=settings
    )
    return [doors.fold_gain(data, run, doors.FoldSchemeSpec(folds=folds), fold)[0] for fold in range(folds)]


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


@pytest.fixture(scope="module")
def faulted(prepared_template, tmp_path_factory):
    """A workspace with a search for each seed and order of models above."""
    root = shutil.copytree(prepared_template, tmp_path_factory.mktemp("faulted") / "workspace")
    words = [sys.executable, "-W", "error", "-c", FAULTY, root, *map(json.dumps, (OPTIONS, [one for one, _ in FAULTS]))]
    done = subprocess.run([*map(str, words)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.split() == [str(code) for _, code in FAULTS]
    return Workspace(root)


def test_killed_and_started_again_search_ends_as_an_uninterrupted_one(searched, faulted):
    lines: list[str] = []
    counted = doors.count_trials(faulted, "DEMO")
    found = search(faulted, on_status=lines.append)
    pd.testing.assert_frame_equal(found.trials, searched[1].trials)
    assert found.trained_run_id == searched[1].trained_run_id and not any("folds" in one for one in lines)
    assert lines[0] == f"Found auto on DEMO, horizon 5: 4 trials finished ({found.run_id}). Resumes from there."
    assert doors.count_trials(faulted, "DEMO") == counted + 2  # the last trial, and the training
    assert not [*faulted.checkpoints.rglob(f"{found.run_id}--trial_*"), *faulted.checkpoints.glob(f"{found.run_id}/*")]
    journal, content = found.path.with_name("journal.log"), found.path.read_bytes()
    journal.write_bytes(journal.read_bytes() + b'{"op_code":4,"wor')  # a full disk cut it off
    assert search(faulted).trials.equals(found.trials)
    other = b'"optuna":"4'  # of another version than the trials after the first one
    journal.write_bytes(journal.read_bytes().replace(b'"optuna":"', other, 3))
    assert [one[:6] for one in search(faulted).inexact_because] == ["optuna"] and found.exact
    found.path.write_bytes(b"[")
    with pytest.raises(FactoryError, match=r"not JSON.*trials\.json"):
        doors.count_trials(faulted, "DEMO")
    search(faulted)
    written = found.path.stat().st_mtime_ns
    search(faulted)  # which changes nothing
    assert found.path.read_bytes() == content and found.path.stat().st_mtime_ns == written


def test_trial_that_fails_is_recorded_and_the_search_continues_unless_all_fail(faulted):
    counted = doors.count_trials(faulted, "DEMO")
    found = search(faulted, 2, MODELS[::-1])
    assert list(found.trials["state"]) == ["failed", "complete"] and list(found.trials["folds"]) == [1, 2]
    assert list(found.trials["reason"]) == ["made to fail.", ""] and "1 failed" in found.summary()
    with pytest.raises(FactoryError, match=r"Every trial failed .*got made to fail"):
        search(faulted, seed=1)  # neither again, nor with other settings
    assert len(search(faulted, 1, seed=1, fresh=True).trials) == 1
    assert doors.count_trials(faulted, "DEMO") == counted  # attempts are one


def test_trial_that_began_well_stops_early_where_its_mean_is_below_the_median(faulted):
    stopped = search(faulted, 6, seed=2, folds=3).trials
    assert list(stopped["state"]) == ["complete"] * 5 + ["pruned"] and list(stopped["folds"]) == [3] * 5 + [2]


def test_search_that_a_full_disk_ended_continues(faulted):
    assert list(search(faulted, 1, seed=3).trials["state"]) == ["complete"]


@pytest.mark.soak
def test_trials_below_the_median_stop_early_and_a_longer_search_continues_a_shorter_one(searched, prepared):
    whole = search(prepared, 14)
    assert set(whole.trials["state"]) == {"complete"}  # of two folds none is left out
    assert search(searched[0], 14).trials.equals(whole.trials)
    stopped = pipeline.auto(prepared, "DEMO", 5, trials=14, models=MODELS, **{**OPTIONS, "folds": 3}).trials
    data = doors.load_dataset(prepared, "DEMO", 5)
    means = [np.mean(fold_gains(data, one["settings"], one["model"], 3)[:2]) for _, one in stopped.iterrows()]
    below = [number >= 5 and mean < np.median(means[:number]) for number, mean in enumerate(means)]
    assert any(below) and list(stopped["folds"]) == [2 if one else 3 for one in below]
    assert list(stopped["state"]) == ["pruned" if one else "complete" for one in below]


@pytest.mark.soak
def test_search_on_a_mount_has_one_process_and_another_machine_continues_it(
    searched, prepared_template, tmp_path, monkeypatch, spawn
):
    drive = shutil.copytree(prepared_template, tmp_path / "drive" / "workspace")
    settings = {"XDG_CACHE_HOME": tmp_path / "first", "ML_FACTORY_MOUNTS": drive.parent, "ML_FACTORY_SAVE_MINUTES": 0}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    # It has saved the second fold of the third trial, which its journal has not.
    first = spawn(FAULTY, drive, json.dumps(OPTIONS), json.dumps([["_mean_gain", 6, "stays", {}]]))
    process = int(first.stdout.readline())
    with pytest.raises(CheckpointError, match="Another process is working on run auto-study"):
        search(Workspace(drive))
    while len([*drive.glob("checkpoints/auto-*/trial_*")]) < 2:
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    assert first.wait() == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    for lease in drive.glob("checkpoints/leases/*.json"):  # of a quarter of an hour ago
        record = json.loads(lease.read_text())
        lease.write_text(json.dumps({**record, "seen": record["seen"] - 1000}))
    found = search(Workspace(drive))
    assert found.trials.equals(searched[1].trials) and found.exact


@pytest.mark.soak
def test_two_processes_share_a_search(prepared, spawn):
    faultless = json.dumps([["fold_gain", -1, "", {}]])
    others = [spawn(FAULTY, prepared.root, json.dumps(OPTIONS), faultless) for _ in range(2)]
    assert [one.communicate()[0] for one in others] == ["0\n", "0\n"]
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
    assert set(space) - {"lr", "weight_decay"}  # its own, with those of every network
    for (low, high, *_), default in space.values():
        assert low <= default <= high and low < high
    for end in (0, 1):
        build_model(name, **{setting: bounds[end] for setting, (bounds, _) in space.items()})


@pytest.mark.parametrize(
    "given, message",
    [
        ({"models": ("xgbost",)}, "Unknown model"),
        ({"models": ()}, r"no model to search \[models\]"),
        ({"model_settings": {"xgbost": {"rounds": 1}}}, "not used here .*did you mean 'xgboost'"),
        ({"trials": None, "hours": "2"}, r"after hours \[trials, hours\]"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(given, message, prepared):
    with pytest.raises(SettingsError, match=message):
        pipeline.auto(prepared, "DEMO", 5, **{"trials": 1, "models": MODELS} | given)
