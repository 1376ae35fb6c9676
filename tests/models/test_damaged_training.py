"""A training's checkpoint with other values under a right hash: refused in one line, before a library stumbles."""

import re

import numpy as np
import pytest

from ml_factory.errors import CheckpointError
from ml_factory.models import tabular_catboost
from ml_factory.models.lightgbm_trees import LightGBMModelText
from ml_factory.models.registry import build_model, build_model_from_state
from tests.fuzz.kinds import MODELS, build_small_model, training_rows
from tests.interrupting_phase import InterruptingPhase


def saved_state(model: str) -> dict:
    """Return the state after the first block or epoch."""
    phase = InterruptingPhase(1)
    with pytest.raises(KeyboardInterrupt):
        build_small_model(model).fit(*training_rows(model), checkpoints=phase)
    return phase.state


def resume(model: str, state: dict) -> None:
    phase = InterruptingPhase(-1)
    phase.state = state
    build_small_model(model).fit(*training_rows(model), checkpoints=phase)


@pytest.fixture(scope="module")
def states() -> dict[str, dict]:
    return {model: saved_state(model) for model in MODELS}


@pytest.mark.parametrize("model", MODELS)
def test_resume_of_state_with_any_field_of_another_kind_is_refused(states, model):
    whole = states[model]
    resume(model, dict(whole))
    for name in whole:
        if name in ("scale", "offset", "done", "environment", "micro"):
            continue  # other values may be right, or are reported as those of another machine
        for odd in (None, -1, 10**18, "x", [None], {"a": 1}, [[]]):
            with pytest.raises(CheckpointError) as caught:
                resume(model, {**whole, name: odd})
            assert "\n" not in str(caught.value), (name, odd)


@pytest.mark.parametrize("model", ["linear", "xgboost", "lightgbm", "catboost"])
def test_resume_of_tabular_progress_of_other_sizes_is_refused(states, model):
    whole = states[model]
    changed = [
        {"rounds": 9}, {"rounds": 21}, {"train": whole["train"][:-1]}, {"val": [0.5]}, {"inexact": [1]},
        {"history": [{**whole["history"][0], "epoch": 2}]}, {"history": [1]}, {"environment": 5},
    ]  # fmt: skip
    for fields in changed:
        with pytest.raises(CheckpointError, match="damaged"):
            resume(model, {**whole, **fields})


def test_resume_of_linear_path_of_another_shape_is_refused(states):
    part = states["linear"]["part"]
    for fields in ({"path": part["path"][:, :-1]}, {"path": part["path"] * np.nan}, {"pairs": part["path"]}):
        with pytest.raises(CheckpointError, match="damaged"):
            resume("linear", {**states["linear"], "part": {**part, **fields}})


def test_lightgbm_text_is_whole_or_refused(states):
    data = states["lightgbm"]["part"]["text"]
    assert LightGBMModelText.checked(data).join().encode() == LightGBMModelText.split(data.decode()).join().encode()
    for old, new in {
        b"num_class=3": b"num_class=4", b"max_feature_idx=3": b"max_feature_idx=9", b"num_leaves=": b"num_leaves=1",
        b"[max_delta_step: 0]": b"[\x00\x00: 0]", b"pandas_categorical:null": b"pandas_categorical:[[",
        b"tree\n": b"t\n",
        b"num_tree_per_iteration=3": b"num_tree_per_iteration=1", b"Column_1 ": b"", b"split_gain=": b"split_gain=\xff",
    }.items():  # fmt: skip
        assert old in data
        with pytest.raises(CheckpointError) as caught:
            LightGBMModelText.checked(data.replace(old, new, 1))
        assert "\n" not in str(caught.value)
    for odd in (1 << 31, None, "text", [1], bytearray(data)):
        with pytest.raises(CheckpointError, match="no text in it"):
            LightGBMModelText.checked(odd)


def test_catboost_snapshot_that_ends_its_process_is_refused(states, monkeypatch):
    """CatBoost ends its process for some changed bytes; here for all that a fork reads first."""
    tried = []

    def try_call(call, **limits):
        tried.append(limits)
        return "SIGSEGV" if len(tried) > 1 else tabular_catboost_fork(call, **limits)

    tabular_catboost_fork = tabular_catboost.failure_in_fork
    monkeypatch.setattr(tabular_catboost, "failure_in_fork", try_call)
    resume("catboost", dict(states["catboost"]))
    assert len(tried) == 1
    with pytest.raises(CheckpointError, match="its process ended with SIGSEGV"):
        resume("catboost", dict(states["catboost"]))


@pytest.mark.parametrize(("rows", "columns", "depth"), [(8000, 30, 6), (150, 4, 14)])
def test_catboost_trial_of_whole_snapshot_takes_at_most_half_of_its_limit(monkeypatch, rows, columns, depth):
    generator, phase = np.random.default_rng(0), InterruptingPhase(1)
    x, y = generator.normal(size=(rows, columns)).astype(np.float32), generator.integers(-1, 2, rows)
    settings = {"rounds": 10, "block": 5, "threads": 2, "depth": depth}
    with pytest.raises(KeyboardInterrupt):
        build_model("catboost", **settings).fit(x, y, checkpoints=phase)
    limit = tabular_catboost._Trainer._trial_bytes
    monkeypatch.setattr(tabular_catboost._Trainer, "_trial_bytes", lambda trainer: limit(trainer) // 2)
    phase.until = -1
    build_model("catboost", **settings).fit(x, y, checkpoints=phase)


def test_catboost_snapshot_that_takes_far_more_memory_than_its_rows_is_refused(states, monkeypatch):
    """A number of the snapshot that CatBoost takes for a length lets it allocate gigabytes before it finds no data."""

    def fit_and_allocate(*given, **named):
        _ = bytearray(600 << 20).count(1)

    monkeypatch.setattr(tabular_catboost.catboost.CatBoost, "fit", fit_and_allocate)
    with pytest.raises(CheckpointError, match=r"far more memory .* at most \d+ MB"):
        resume("catboost", dict(states["catboost"]))


@pytest.mark.parametrize(
    ("old", "new"),
    [(rb"internal_weight=(\d)", rb"internal_weight=\1v"), (rb"split_gain=\S+ ", b"split_gain=null"),
     (rb"\nnum_cat=", b"\nnumcat="), (rb"\nleaf_count=\d+", rb"\nleaf_count=1.5"),
     (rb"\nshrinkage=", b"\nshrinkage=1 "),
     (rb"\[data: \]", rb'[data: "a"]'), (rb"\[learning_rate: ", b"[learning_rate: x")],
)  # fmt: skip
def test_resume_of_lightgbm_text_that_would_end_the_process_is_refused(states, old, new):
    """LightGBM ends its process for a text in the place of some numbers."""
    part = states["lightgbm"]["part"]
    text = re.sub(old, new, part["text"], count=1)
    assert text != part["text"]
    with pytest.raises(CheckpointError, match="damaged"):
        resume("lightgbm", {**states["lightgbm"], "part": {**part, "text": text}})


@pytest.mark.parametrize("ended", ["SIGKILL", "SIGXCPU", "SIGTERM"])
def test_catboost_snapshot_whose_reading_was_stopped_is_no_damage(states, monkeypatch, ended):
    """The machine may lack memory or time; the training itself then shows whether the snapshot is whole."""
    monkeypatch.setattr(tabular_catboost, "failure_in_fork", lambda call, **limits: ended)
    resume("catboost", dict(states["catboost"]))


def test_catboost_snapshot_with_changed_bytes_is_refused_or_read(states):
    part = states["catboost"]["part"]
    for number in range(25):
        generator = np.random.default_rng(number)
        data = bytearray(part["snapshot"])
        place = int(generator.integers(3000, len(data) - 8))
        data[place : place + 8] = b"\xff\xff\xff\x7f\xff\xff\xff\x7f"
        try:
            resume("catboost", {**states["catboost"], "part": {**part, "snapshot": bytes(data)}})
        except CheckpointError as error:
            assert "\n" not in str(error)


def test_resume_of_network_with_history_of_another_training_is_refused(states):
    """One epoch too many would never be the last one: the training would not end."""
    whole = states["gru"]
    (first,) = whole["memory"]["history"]
    histories = [
        [first, first], [first, {**first, "epoch": 2}], [{**first, "epoch": 2}], [{**first, "train_loss": None}],
        [{**first, "epoch": number} for number in range(1, 4)], [],
    ]  # fmt: skip
    for history in histories:
        with pytest.raises(CheckpointError, match="damaged"):
            resume("gru", {**whole, "memory": {**whole["memory"], "history": history}})


@pytest.mark.parametrize("model", ["linear", "xgboost", "lightgbm", "catboost"])
def test_load_state_of_tabular_model_with_other_numbers_is_refused(model):
    """Trees that split on a column beyond the rows' last would read memory that is not theirs."""
    x, y = training_rows(model)
    fitted = build_small_model(model)
    fitted.fit(x, y)
    state = fitted.get_state()
    build_model_from_state(state)
    columns = [{"n_features": odd} for odd in (2.5, 1e308, -1, 10**30, "4", None)]
    for fields in [*columns, {"n_features": 1}, {"best_round": -1}, {"best_round": 0.5}, {"offset": {"column": 9}}]:
        with pytest.raises(CheckpointError, match="damaged"):
            build_model_from_state({**state, **fields})
    for odd in (1, None, "text", [1]):
        with pytest.raises(CheckpointError):
            build_model_from_state(odd)
