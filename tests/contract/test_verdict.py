"""Verdicts on forecasts whose knowledge is known: of the touch, of the side, of the hour alone, of nothing."""

import json

import numpy as np
import pandas as pd
import pytest

from tests.contract import doors

N = 6000
TIMES = pd.date_range("2024-01-01", periods=N, freq="30min", tz="UTC")  # 125 days
PRIOR = np.tile([0.25, 0.5, 0.25], (N, 1))


def market(touch: float, side: float, seed: int = 0):
    """Labels, and the probabilities they are drawn from: an hour that everybody knows (the clock), a state of the
    touch and one of the side that only the model knows."""
    rng = np.random.default_rng(seed)
    hour = 0.15 * np.sin(np.arange(N) / 7)
    own_touch, own_side = touch * rng.choice([-1, 1], N), side * rng.choice([-1, 1], N)

    def shares(neutral, long):
        return np.stack([(1 - neutral) * (1 - long), neutral, (1 - neutral) * long], axis=1)

    truth = shares(0.5 + hour + own_touch, 0.5 + own_side)
    y = (truth.cumsum(axis=1) < rng.random((N, 1))).sum(axis=1) - 1
    return y, truth, shares(0.5 + hour, np.full(N, 0.5))


def verdict(y, p, clock, **options):
    gains = doors.verdict_gains_of_rows(y, p, {"prior": PRIOR, "clock": clock}, horizon=1, times_N=TIMES)
    options = {"rows": N, "effective_rows": N, **options}
    return doors.model_verdict("xgboost", gains, "clock", **options)


@pytest.mark.parametrize(
    ("touch", "side", "words"),
    [
        (0.2, 0.0, "it predicts how far the price will move, not which way."),
        (0.0, 0.2, "it predicts which way, not how far the price will move."),
        (0.2, 0.2, "it predicts how far the price will move, and which way."),
    ],
)
def test_verdict_of_informed_model_beats_baselines_and_names_touch_or_side(touch, side, words):
    found = verdict(*market(touch, side))
    assert found.status == doors.BEATS and found.reason == ""
    assert found.sentence == f"xgboost beats every baseline: {words}"
    assert found.edge == found.to_dict()["edge"] == (side > 0)
    assert found.answer == f"{'Edge' if side else 'No edge'} found: xgboost {words.removeprefix('it ')}"
    assert (found.predicts_touch, found.predicts_direction) == (touch > 0, side > 0)
    assert 0 < found.gain_best_low < found.gain_best < found.gain_best_high


def test_verdict_of_model_that_beats_prior_but_not_clock_is_does_not_beat():
    y, _, clock = market(0.0, 0.0)
    noise = np.random.default_rng(1).normal(0, 0.15, (N, 3))
    p = clock * np.exp(noise)
    p /= p.sum(axis=1, keepdims=True)
    gains = doors.verdict_gains_of_rows(y, p, {"prior": PRIOR, "clock": clock}, horizon=1, times_N=TIMES)
    assert gains.whole["prior"].low > 0 > gains.whole["clock"].mean
    found = verdict(y, p, clock)
    assert found.status == doors.DOES_NOT_BEAT and "clock" in found.reason and "prior" not in found.reason
    assert "the time of the session (clock)" in found.sentence and not found.predicts_touch


def test_row_gains_are_mean_loss_differences_and_touch_plus_side_is_whole():
    y, p, clock = market(0.2, 0.1)
    gains = doors.verdict_gains_of_rows(y, p, {"prior": PRIOR, "clock": clock}, horizon=1, times_N=TIMES)
    at = np.arange(N), y + 1
    assert gains.whole["clock"].mean == pytest.approx(np.mean(np.log(p[at] / clock[at])))
    for name in ("prior", "clock"):
        assert gains.whole[name].mean == pytest.approx(gains.touch[name].mean + gains.side[name].mean)
    sided = y != 0
    side = np.log(p[at] / (1 - p[:, 1])) - np.log(0.5)
    assert gains.side["prior"].mean == pytest.approx(np.where(sided, side, 0).mean())
    found = verdict(y, p, clock)
    assert (found.direction_gain, found.direction_low) == (gains.side["prior"].mean, gains.side["prior"].low)


def test_row_gains_ignore_rows_with_zero_weight():
    y, p, clock = market(0.2, 0.1)
    w = (np.arange(N) % 5 > 0).astype(float)
    broken = p.copy()
    broken[w == 0] = [1, 0, 0]
    counted = {"prior": PRIOR, "clock": clock}
    options = {"w": w, "horizon": 1, "times_N": TIMES}
    assert doors.verdict_gains_of_rows(y, p, counted, **options) == doors.verdict_gains_of_rows(
        y, broken, counted, **options
    )


# ---- which status ----------------------------------------------------------------------------------------------


def over(mean, low, high, enough=True):
    return doors.ConfidenceInterval(
        mean, low, high, 0.01, N, 1.0, enough, "" if enough else "3 weeks of rows, wanted at least 8"
    )


def by_intervals(best="clock", lacking="", **whole):
    gains = doors.VerdictGains(whole, whole, {"prior": over(0.0, -0.1, 0.1)} | whole)
    return doors.model_verdict("m", gains, best, rows=N, effective_rows=300.0, lacking=lacking)


def test_verdict_gain_over_one_baseline_not_certain_is_does_not_beat():
    found = by_intervals(prior=over(0.2, 0.1, 0.3), clock=over(0.1, 0.05, 0.15), last_move=over(0.1, -0.01, 0.2))
    assert found.status == doors.DOES_NOT_BEAT and "last_move" in found.reason and found.gain_best_low > 0
    assert found.sentence == "m does not beat every baseline: the gain over last_move may be 0 or less."
    assert by_intervals(prior=over(0.2, 0.1, 0.3), clock=over(0.1, 0.05, 0.15)).status == doors.BEATS


def test_verdict_lower_bound_of_zero_is_does_not_beat():
    assert by_intervals(prior=over(0.2, 0.1, 0.3), clock=over(0.1, 0.0, 0.2)).status == doors.DOES_NOT_BEAT


def test_verdict_negative_gain_sentence_states_worse_than_baseline():
    found = by_intervals(prior=over(0.2, 0.1, 0.3), clock=over(-0.1, -0.15, -0.05))
    assert found.sentence.startswith("m is worse than the time of the session (clock)")


@pytest.mark.parametrize("short", ["prior", "clock"])
def test_verdict_too_few_weeks_for_one_baseline_is_not_enough_data(short):
    whole = {name: over(0.1, 0.05, 0.15, enough=name != short) for name in ("prior", "clock")}
    found = by_intervals(**whole)
    assert found.status == doors.NOT_ENOUGH and found.reason == "3 weeks of rows, wanted at least 8"
    assert found.sentence == "m: not enough data for a verdict: 3 weeks of rows, wanted at least 8."


def test_verdict_absent_class_is_not_enough_data():
    found = by_intervals(lacking="no test row is long", prior=over(0.2, 0.1, 0.3), clock=over(0.1, 0.05, 0.15))
    assert found.status == doors.NOT_ENOUGH and "no test row is long" in found.sentence


def test_verdict_answer_is_one_sentence_with_the_edge_first():
    prior = over(0.2, 0.1, 0.3)
    lacking = over(-0.0275, -0.04, -0.015, enough=False)
    for clock, answer in (
        (over(0.1, 0.05, 0.15), "Edge found: m predicts how far the price will move, and which way."),
        (over(0.1, -0.05, 0.15), "No edge found: m does not beat the time of the session (clock)."),
        (over(0.1, -0.05, 0.15, enough=False), "No verdict yet: 3 weeks of rows, wanted at least 8."),
        (lacking, "No edge found: m is worse than the time of the session (clock)."),
    ):
        assert by_intervals(prior=prior, clock=clock).answer == answer


def test_verdict_of_meta_labels_has_no_direction():
    y, p, clock = market(0.2, 0.0)
    found = verdict(y, p, clock, kind="meta")
    assert found.sentence == "xgboost beats every baseline: it separates good bets from bad ones."
    assert not found.predicts_direction and "side" not in found.numbers
    assert found.edge and found.answer == "Edge found: xgboost separates good bets from bad ones."


def test_verdict_numbers_and_dict_equal_fields():
    found = by_intervals(prior=over(0.2, 0.1, 0.3), clock=over(0.1, 0.05, 0.15))
    assert found.numbers == (
        "gain over clock +0.1000 (+0.0500 to +0.1500), directional gain +0.2000 (+0.1000 to +0.3000); "
        "6,000 rows, 300 effective"
    )
    reported = json.loads(json.dumps(found.to_dict()))
    assert (
        reported["status"] == "beats" and reported["gain_best_low"] == 0.05 and reported["sentence"] == found.sentence
    )


def test_missing_classes_returns_part_and_class_names():
    classes = {"short": -1, "neutral": 0, "long": 1}
    parts = {"validation": np.array([-1, 0, 1]), "test": np.zeros(5)}
    assert doors.describe_missing_classes(parts, classes) == "no test row is short or long"
    assert doors.describe_missing_classes({"test": np.array([0, 1])}, {"pass": 0, "act": 1}) == ""


# ---- folds -----------------------------------------------------------------------------------------------------


def test_block_gains_average_folds_of_a_block_per_baseline():
    """Blocks 0 and 1; block 0 was judged by two folds. Gains over the prior by hand."""
    assessed = {(0, 0): 0.30, (1, 0): 0.10, (2, 1): 0.40}
    less = {"m": 0.0, "last_move": 0.05, "clock": 0.1, "clock_volatility": 0.2}
    rows = [
        {"fold": fold, "block": block, "name": name, "log_loss_gain": gain - cost, "direction_gain": gain / 2 - cost}
        for (fold, block), gain in assessed.items()
        for name, cost in (less | {"prior": gain}).items()
    ]
    table = pd.DataFrame(rows)
    table.loc[table["name"] == "prior", "direction_gain"] = 0.0
    gains = doors.verdict_gains_of_folds(table, "m")
    wanted = doors.fold_gain_interval([0.2, 0.4])
    assert (gains.whole["prior"].low, gains.whole["prior"].rows) == (pytest.approx(wanted.low), 2)
    assert gains.whole["clock"].mean == pytest.approx(0.1)
    assert gains.side["prior"].mean == pytest.approx(0.15)
    assert gains.touch["prior"].mean == pytest.approx(0.15) and gains.touch["clock"].mean == pytest.approx(0.0)
