"""Each finding is found where it is planted, and nowhere else."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.evaluation import findings
from ml_factory.evaluation.findings import Finding
from ml_factory.evaluation.verdict import BEATS, DOES_NOT_BEAT, NOT_ENOUGH, ModelVerdict


def verdict(gain: float = 0.02, half: float = 0.01, status: str = BEATS) -> ModelVerdict:
    return ModelVerdict(
        "model", status, "", "clock", gain, gain - half, gain + half, 0.0, 0.0, 0.0, True, False, 9_000, 1_500.0
    )


def code(found: Finding | None) -> tuple[str, str]:
    return (found.code, found.severity) if found else ("", "")


@pytest.mark.parametrize(
    ("gain", "half", "status", "expected"),
    [
        (-0.02, 0.01, DOES_NOT_BEAT, ("worse_than_baseline", "serious")),
        (-0.02, 0.03, DOES_NOT_BEAT, ("worse_than_baseline", "warning")),
        (0.02, 0.03, DOES_NOT_BEAT, ("", "")),
        (-0.02, 0.01, NOT_ENOUGH, ("", "")),
    ],
)
def test_baseline_finding_names_model_no_better_than_clock(gain, half, status, expected):
    found = findings.baseline_finding(verdict(gain, half, status))
    assert code(found) == expected
    assert not found or ("the time of the session (clock)" in found.sentence and f"{gain:+.4f}" in found.sentence)


def test_too_good_finding_needs_a_lower_bound_above_what_real_bars_show():
    assert code(findings.too_good_finding(verdict(0.15, 0.04))) == ("too_good", "serious")
    assert findings.too_good_finding(verdict(0.15, 0.06)) is None


def test_few_rows_finding_names_smallest_visible_gain():
    found = findings.few_rows_finding(verdict(0.02, 0.08, DOES_NOT_BEAT))
    assert code(found) == ("few_rows", "warning") and "above 0.080 nats" in found.sentence
    assert findings.few_rows_finding(verdict(0.02, 0.04)) is None
    assert code(findings.few_rows_finding(verdict(0.02, 0.04, NOT_ENOUGH))) == ("few_rows", "warning")
    assert "for an interval" in findings.few_rows_finding(verdict(0.02, float("nan"), NOT_ENOUGH)).sentence


@pytest.mark.parametrize(("train", "validation", "found"), [
    (0.30, 0.04, True), (0.30, 0.16, False), (0.06, 0.02, False), (0.09, -0.01, True), (0.02, float("nan"), False),
])  # fmt: skip
def test_overfit_finding_needs_a_gap_above_limit_and_above_the_gain_left(train, validation, found):
    assert code(findings.overfit_finding(train, validation)) == (("overfit", "warning") if found else ("", ""))


def test_month_finding_names_month_that_carries_the_gain():
    times = pd.date_range("2025-01-01", "2025-04-30", freq="6h", tz="UTC")
    gain = np.where(times.month == 3, 0.9, -0.1)
    found = findings.month_finding(gain, times)
    assert code(found) == ("one_month", "warning") and "without 2025-03" in found.sentence
    assert findings.month_finding(np.where(times.month == 3, 0.9, 0.001), times) is None, "the others gain as well"
    assert findings.month_finding(gain[times.month < 3], times[times.month < 3]) is None, "two months are too few"
    assert findings.month_finding(gain - 1, times) is None, "there is no gain that one month could carry"


def test_fold_finding_names_block_that_carries_the_gain():
    assert "block 2" in findings.fold_finding(np.array([-0.01, 0.0, 0.05, -0.01, np.nan])).sentence
    assert findings.fold_finding(np.array([-0.01, 0.01, 0.05, 0.01])) is None
    assert findings.fold_finding(np.array([-0.01, 0.05])) is None


def test_calibration_finding_is_of_the_debiased_error():
    assert code(findings.calibration_finding(0.05)) == ("miscalibrated", "warning")
    assert findings.calibration_finding(0.01) is None and findings.calibration_finding(float("nan")) is None


def test_population_stability_index_equals_sum_over_bins_counted_by_hand():
    train, test = np.repeat(np.arange(1.0, 11), 10)[:, None], np.repeat([1.0, 10.0, np.nan], [50, 30, 20])[:, None]
    # Ten quantile bins of ten training rows; the eleventh bin is of missing values. Half a row is added to each.
    before, after = np.r_[np.full(10, 10.5), 0.5] / 105.5, np.r_[50.5, np.full(8, 0.5), 30.5, 20.5] / 105.5
    expected = ((after - before) * np.log(after / before)).sum()
    assert findings.population_stability_index(train, test) == pytest.approx([expected])


def test_drift_finding_names_features_that_moved():
    generator = np.random.default_rng(0)
    train, test = generator.normal(size=(30_000, 10)), generator.normal(size=(8_000, 10))
    names = [f"feature{number}" for number in range(10)]
    assert findings.drift_finding(train, test, names) is None
    found = findings.drift_finding(train, test + 2 * np.isin(np.arange(10), [3, 7]), names)
    assert code(found) == ("drift", "warning") and "2 of 10" in found.sentence
    assert "feature3" in found.sentence and "feature7" in found.sentence
    assert findings.drift_finding(train, test + 2 * (np.arange(10) == 3), names) is None, "one in ten is let pass"


def test_trials_finding_counts_the_best_of_many():
    assert findings.trials_finding(verdict(0.02, 0.019), 1) is None
    found = findings.trials_finding(verdict(0.02, 0.019), 10)  # 2.06 standard errors: 1 - 0.9805^10
    assert code(found) == ("many_trials", "warning") and "best of 10" in found.sentence and "18%" in found.sentence
    assert findings.trials_finding(verdict(0.02, 0.005), 10) is None
    assert findings.trials_finding(verdict(0.02, 0.03, DOES_NOT_BEAT), 10) is None


@pytest.mark.parametrize(
    ("net", "even", "cost", "severity"), [(-5, 1.0, 3.0, "serious"), (5, 4.0, 3.0, "warning"), (5, 7.0, 3.0, "")]
)
def test_cost_finding_compares_break_even_with_twice_the_costs(net, even, cost, severity):
    assert code(findings.cost_finding(net, even, cost)) == (("dies_of_costs", severity) if severity else ("", ""))


def test_sort_findings_puts_serious_ones_first_and_answer_takes_its_advice():
    found = findings.sort_findings([
        findings.calibration_finding(0.05), None, findings.baseline_finding(verdict(-0.02, 0.01, DOES_NOT_BEAT)),
    ])  # fmt: skip
    assert [one.code for one in found] == ["worse_than_baseline", "miscalibrated"]
    answer = findings.answer_sentences(verdict(-0.02, 0.01, DOES_NOT_BEAT), found)
    assert answer.startswith(
        "No edge found: model is worse than the time of the session (clock) (gain over clock -0.02"
    )
    assert answer.endswith("Next: use the baseline; try fewer features, more rows, a longer horizon.")
    good = findings.answer_sentences(verdict(), ())
    assert good.startswith("Edge found: model beats every baseline") and good.endswith("a backtest after your costs.")
    text = findings.findings_section(found).text
    assert text.startswith("1. Serious: ") and "\n\n2. Warning: " in text
    assert findings.finding_lines(found)[1].startswith("  finding 2, warning: The probabilities are miscalibrated")
