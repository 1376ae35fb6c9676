"""The search for barriers: equal after a kill, blind to what it may not see, honest when the balance cannot be kept."""

import json
import math
import sys
from dataclasses import fields, replace

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.resample import resample_bars
from ml_factory.data.sessions import MarketSpec
from ml_factory.errors import MissingPackageError, SettingsError
from ml_factory.targets.barrier_search import fingerprint_searched_bars, search_barriers_on_training_rows
from ml_factory.targets.barrier_search_spec import BarrierSearchSpec, SearchedLabelSpec
from ml_factory.targets.labels import LabelSpec, triple_barrier_labels
from ml_factory.targets.splits import purged_kfold
from ml_factory.targets.weights import average_uniqueness
from tests.targets.markets import absurd, gappy

MES = MarketSpec("MES", "cme", 0.25, False)
LABELS = LabelSpec(horizon=12, sigma_span=40)
SPEC = BarrierSearchSpec(LABELS, trials=16, sigma_spans=(20, 40), neutral=(0.1, 0.4), lean=0.3)
BARS = gappy(5, 0.25)
BASE, FINE = resample_bars(BARS, MES, 5), resample_bars(BARS, MES, 1)
ROWS = triple_barrier_labels(BASE, FINE, LABELS, MES)
TRAIN, TEST = ROWS.index[:500], ROWS.index[520:]


def search(spec: BarrierSearchSpec = SPEC, **options) -> SearchedLabelSpec:
    return search_barriers_on_training_rows(BASE, FINE, MES, TRAIN, spec, **{"evaluated": TEST} | options)


@pytest.fixture(scope="module")
def found() -> SearchedLabelSpec:
    return search()


class Killed(Exception):
    pass


@pytest.mark.parametrize("after", [1, 7, 13])
def test_search_barriers_resumed_after_kill_equals_uninterrupted_search(found, after):
    left = []

    def save(record: dict) -> None:
        left.append(json.dumps(record, allow_nan=False))
        if len(record["trials"]) == after:
            raise Killed

    with pytest.raises(Killed):
        search(save=save)
    records = []
    again = search(record=json.loads(left[-1]), save=lambda record: records.append(json.dumps(record)))
    assert again == found and len(records) == SPEC.trials - after
    whole = []
    search(save=lambda record: whole.append(json.dumps(record)))
    assert records[-1] == whole[-1]  # every trial, not only the best
    assert search(record=json.loads(whole[-1])) == found


def test_search_barriers_trial_figures_equal_plain_count(found):
    """The best trial's shares and value, row by row from the labels of the whole file."""
    record = []
    search(save=record.append)
    assert found.best in record[-1]["trials"]
    for trial in [*record[-1]["trials"][:3], found.best]:
        labels = triple_barrier_labels(BASE, FINE, SPEC.label_spec_of_trial(trial["params"]), MES)
        labels = labels[labels.index.isin(TRAIN) & (labels["label_end"] < TEST[0]) & (labels["barrier"] != "ambiguous")]
        assert trial["rows"] == len(labels) > 300
        for name, side in (("short", -1), ("neutral", 0), ("long", 1)):
            assert trial[name] == pytest.approx((labels["label"] == side).mean(), abs=1e-12)
        unique = average_uniqueness(labels["entry_bar"].to_numpy() + 1, labels["exit_bar"].to_numpy(), len(BASE))
        shares = [unique[labels["label"] == side].sum() / unique.sum() for side in (-1, 0, 1)]
        entropy = -sum(share * math.log2(share) for share in shares)
        cost = np.log1p(LABELS.cost_ticks * 0.25 / BASE.close[labels["entry_bar"]])
        left = np.maximum(1 - cost / labels[["up", "down"]].mean(axis=1).to_numpy(), 0)
        assert trial["value"] == pytest.approx(entropy * (unique * left).sum() / len(TRAIN), rel=1e-12)


def test_search_barriers_best_trial_keeps_balance_and_matches_grid_search():
    record = []
    best = search(replace(SPEC, trials=40), save=record.append).best
    trials = record[-1]["trials"]
    assert trials[0]["params"] == {"k": 0.8, "sigma_span": 40}  # where we stand is the first to be tried
    kept = [t for t in trials if 0.1 <= t["neutral"] <= 0.4 and abs(t["long"] - t["short"]) <= 0.3]
    assert 3 < len(kept) < len(trials) and best == max(kept, key=lambda trial: trial["value"])
    grid = []
    for k in np.geomspace(0.3, 2.0, 60):
        for span in (20, 40):
            one = replace(SPEC, trials=1, labels=replace(LABELS, k_up=float(k), k_down=float(k), sigma_span=span))
            try:
                grid.append(search(one).best["value"])
            except SettingsError:
                continue
    assert 10 < len(grid) < 110 and best["value"] > 0.98 * max(grid)


def test_search_barriers_ignores_bars_from_first_evaluated_row_on(found):
    cut = int(np.searchsorted(BARS.index.as_unit("ns").asi8, TEST[0].value - 60_000_000_000))
    for bars in (BARS.iloc[:cut], absurd(BARS, cut, np.random.default_rng(0))):
        base, minute_bars = resample_bars(bars, MES, 5), resample_bars(bars, MES, 1)
        assert search_barriers_on_training_rows(base, minute_bars, MES, TRAIN, SPEC, evaluated=TEST) == found
    before = BARS.copy()
    before.iloc[cut - 400 : cut, :] *= 1.0005  # training bars do count
    other = search_barriers_on_training_rows(
        resample_bars(before, MES, 5), resample_bars(before, MES, 1), MES, TRAIN, SPEC, evaluated=TEST
    )
    assert other.seen_rows.fingerprint != found.seen_rows.fingerprint
    assert other.seen_rows.moments == found.seen_rows.moments
    until = pd.Timestamp(found.seen_rows.until).value
    assert fingerprint_searched_bars(BASE, FINE, MES, until) == found.seen_rows.fingerprint
    assert fingerprint_searched_bars(BASE, FINE, replace(MES, tick=0.5), until) != found.seen_rows.fingerprint


def test_search_barriers_without_evaluated_rows_stops_at_last_training_row():
    alone = search(evaluated=None)
    assert alone.seen_rows.until == alone.seen_rows.last == TRAIN[-1].isoformat()
    cut = int(np.searchsorted(BARS.index.as_unit("ns").asi8, TRAIN[-1].value))
    bars = BARS.iloc[:cut]
    assert (
        search_barriers_on_training_rows(resample_bars(bars, MES, 5), resample_bars(bars, MES, 1), MES, TRAIN, SPEC)
        == alone
    )


def test_search_barriers_of_each_fold_uses_training_rows_of_fold_only():
    folds, small, seen = purged_kfold(ROWS, 3, 10), replace(SPEC, trials=4), set()
    for train, test in folds:
        kept, rows = {}, {"train_rows": ROWS.index[train], "spec": small, "evaluated": ROWS.index[test]}
        one = search_barriers_on_training_rows(BASE, FINE, MES, **rows, save=kept.update)
        seen.add(one.seen_rows.moments)
        assert one == search_barriers_on_training_rows(BASE, FINE, MES, **rows, record=json.loads(json.dumps(kept)))
        assert one.seen_rows.count == len(train) and one.seen_rows.first == ROWS.index[train[0]].isoformat()
        # no label that a trial used lives while a judging row does: count them again
        trial = kept["trials"][1]
        labels = triple_barrier_labels(BASE, FINE, small.label_spec_of_trial(trial["params"]), MES)
        labels = labels[labels.index.isin(ROWS.index[train]) & (labels["barrier"] != "ambiguous")]
        first, last = ROWS.index[test[0]], ROWS.index[train[-1]]
        by = np.where(labels.index < first, first - pd.Timedelta(1), last)
        assert trial["rows"] == (labels["label_end"] <= by).sum()
    assert len(seen) == 3


@pytest.mark.parametrize(
    "impossible", [{"neutral": (0.9, 0.99), "k": (0.3, 0.5)}, {"neutral": (0.0, 0.001)}, {"lean": 1e-9}]
)
def test_search_barriers_unreachable_balance_raises_settings_error(impossible):
    with pytest.raises(SettingsError, match="None of 6 trials keeps the balance") as reported:
        search(replace(SPEC, trials=6, **impossible))
    assert "at the nearest, with {'k'" in str(reported.value) and "Next: widen" in str(reported.value)


def test_searched_labels_from_json_equals_original_and_names_rows(found):
    stored = json.loads(found.to_json())
    assert stored["version"] == 3 and stored["seen_rows"]["count"] == 500
    assert stored["seen_rows"]["first"] == TRAIN[0].isoformat() and stored["seen_rows"]["last"] == TRAIN[-1].isoformat()
    assert pd.Timestamp(stored["seen_rows"]["until"]) < TEST[0]
    assert SearchedLabelSpec.from_json(found.to_json()) == found
    assert found.labels == replace(LABELS, k_up=found.best["params"]["k"], k_down=found.best["params"]["k"],
                                   sigma_span=found.best["params"]["sigma_span"])  # fmt: skip
    with pytest.raises(SettingsError, match="another version"):
        SearchedLabelSpec.from_json(json.dumps(stored | {"version": 2}))


def test_search_barriers_asymmetric_searches_k_up_and_k_down():
    record = []
    found = search(replace(SPEC, symmetric=False, trials=8), save=record.append)
    assert found.labels.k_up != found.labels.k_down or found.best["number"] == 0
    assert all(set(trial["params"]) == {"k_up", "k_down", "sigma_span"} for trial in record[-1]["trials"])


def test_search_barriers_invalid_input_raises_error(monkeypatch, found):
    records = []
    search(replace(SPEC, trials=2), save=records.append)
    with pytest.raises(SettingsError, match="another search"):
        search(replace(SPEC, trials=3, seed=1), record=records[-1])
    with pytest.raises(SettingsError, match="1 of them evaluated"):
        search(evaluated=TRAIN[-1:])
    with pytest.raises(SettingsError, match="without a bar"):
        search_barriers_on_training_rows(BASE, FINE, MES, TRAIN + pd.Timedelta("1s"), SPEC)
    with pytest.raises(SettingsError, match="0 rows"):
        search_barriers_on_training_rows(BASE, FINE, MES, TRAIN[:0], SPEC)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingPackageError, match="optuna is not installed"):
        search()


@pytest.mark.parametrize(
    "bad",
    [{"trials": 0}, {"trials": 2.0}, {"seed": -1}, {"k": (1.0, 0.5)}, {"k": (0.0, 1.0)}, {"k": (0.5,)},
     {"sigma_spans": ()}, {"sigma_spans": (1,)}, {"neutral": (0.4, 0.2)}, {"neutral": (0, math.nan)}, {"lean": 0},
     {"symmetric": 1}, {"labels": {}}],
)  # fmt: skip
def test_search_spec_invalid_values_raise_settings_error(bad):
    with pytest.raises(SettingsError, match=rf"SearchSpec\.{next(iter(bad))}"):
        BarrierSearchSpec(**bad)


@pytest.mark.parametrize("field", ["k", "sigma_spans", "neutral", "lean"])
def test_barrier_search_spec_with_wrong_field_shows_default_of_that_field(field):
    default = {one.name: one.default for one in fields(BarrierSearchSpec)}[field]
    with pytest.raises(SettingsError) as caught:
        BarrierSearchSpec(LABELS, **{field: "x"})
    assert f"something like {default!r}" in str(caught.value)
