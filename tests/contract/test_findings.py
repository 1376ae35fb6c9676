"""Each finding is found where it is planted, and nowhere else."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.contract.doors import BEATS, DOES_NOT_BEAT, NOT_ENOUGH, Finding, ModelVerdict, findings

WEEKS_LACK = "7.6 weeks of rows, wanted at least 8"


def verdict(gain: float = 0.02, half: float = 0.01, status: str = BEATS, reason: str = "") -> ModelVerdict:
    return ModelVerdict(
        "model", status, reason, "clock", gain, gain - half, gain + half, 0.0, 0.0, 0.0, True, False, 9_000, 1_500.0
    )


def code(found: Finding | None) -> tuple[str, str]:
    return (found.code, found.severity) if found else ("", "")


@pytest.mark.parametrize(
    ("gain", "half", "status", "expected"),
    [
        (-0.02, 0.01, DOES_NOT_BEAT, ("worse_than_baseline", "serious")),
        (-0.02, 0.03, DOES_NOT_BEAT, ("worse_than_baseline", "warning")),
        (0.02, 0.03, DOES_NOT_BEAT, ("", "")),
        (-0.0275, 0.0125, NOT_ENOUGH, ("worse_than_baseline", "serious")),
        (-0.02, 0.03, NOT_ENOUGH, ("", "")),
    ],
)
def test_baseline_finding_names_model_no_better_than_clock(gain, half, status, expected):
    found = findings.baseline_finding(verdict(gain, half, status))
    assert code(found) == expected
    assert not found or ("the time of the session (clock)" in found.sentence and f"{gain:+.4f}" in found.sentence)


def test_no_side_finding_is_of_a_model_that_beats_every_baseline_without_the_side():
    assert code(findings.no_side_finding(verdict())) == ("no_side", "warning")
    for other in (
        verdict(status=DOES_NOT_BEAT),
        replace(verdict(), predicts_direction=True),
        replace(verdict(), kind="meta"),
    ):
        assert findings.no_side_finding(other) is None


def test_too_good_finding_needs_a_lower_bound_above_what_real_bars_show():
    assert code(findings.too_good_finding(verdict(0.15, 0.04))) == ("too_good", "serious")
    assert findings.too_good_finding(verdict(0.15, 0.06)) is None


def test_few_rows_finding_names_smallest_visible_gain():
    found = findings.few_rows_finding(verdict(0.02, 0.08, DOES_NOT_BEAT))
    assert code(found) == ("few_rows", "warning") and "above 0.080 nats" in found.sentence
    assert findings.few_rows_finding(verdict(0.02, 0.04)) is None
    assert "shorter horizon" in found.advice


@pytest.mark.parametrize(("reason", "advice"), [
    (WEEKS_LACK, "Add bars of more weeks"), ("no test row is long", "each part has each class"),
    ("9 rows are 2.0 memories (autocorrelation lengths) of 5 rows, wanted at least 22", "shorter horizon"),
])  # fmt: skip
def test_few_rows_finding_advises_by_what_is_lacking(reason, advice):
    found = findings.few_rows_finding(verdict(0.02, float("nan"), NOT_ENOUGH, reason))
    assert reason in found.sentence and advice in found.advice
    assert ("horizon" in found.advice) == ("memories" in reason), "no horizon makes the rows span more weeks"


@pytest.mark.parametrize(("train", "validation", "found"), [
    (0.30, 0.04, True), (0.30, 0.16, False), (0.06, 0.02, False), (0.09, -0.01, True), (0.02, float("nan"), False),
])  # fmt: skip
def test_overfit_finding_needs_a_gap_above_limit_and_above_the_gain_left(train, validation, found):
    assert code(findings.overfit_finding(train, validation)) == (("overfit", "warning") if found else ("", ""))


def test_concentration_finding_names_month_or_fold_that_carries_the_gain():
    months = pd.Series([-0.1, np.nan, 0.5, -0.2], ["2025-01", "2025-02", "2025-03", "2025-04"])
    found = findings.concentration_finding("month", months)
    assert code(found) == ("one_month", "warning") and "without 2025-03 nothing is left of it in the other 2" in (
        found.sentence
    )
    assert code(findings.concentration_finding("fold", pd.Series([-0.01, 0.0, 0.05]))) == ("one_fold", "warning")
    for gains in ([-0.01, 0.02, 0.05], [-0.01, 0.05], [-0.5, -0.5, 0.9]):  # others gain too, too few, no gain
        assert findings.concentration_finding("month", pd.Series(gains)) is None


def by_class(*differences: float, half: float = 0.02) -> pd.DataFrame:
    off = np.array(differences)
    return pd.DataFrame({
        "class": ["short", "neutral", "long"], "predicted": 1 / 3 + off, "observed": 1 / 3, "difference": off,
        "low": off - half, "high": off + half,
    })  # fmt: skip


def test_calibration_finding_names_class_whose_interval_is_off():
    found = findings.calibration_finding(by_class(0.05, -0.07, 0.02))
    assert code(found) == ("miscalibrated", "warning") and "of neutral" in found.sentence
    assert "0.263 predicted, 0.333 observed (difference 95 % from -0.090 to -0.050)" in found.sentence
    assert findings.calibration_finding(by_class(0.05, -0.07, 0.02, half=0.08)) is None
    assert findings.calibration_finding(by_class(0.025, -0.025, 0.0)) is None, "significant, but small"


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


def test_sort_findings_puts_serious_ones_first_and_next_step_takes_its_advice():
    found = findings.sort_findings([
        findings.unchecked_note({"drift": "too few test rows", "months": ""}),
        findings.calibration_finding(by_class(0.05, -0.07, 0.02)), None,
        findings.baseline_finding(verdict(-0.02, 0.01, DOES_NOT_BEAT)),
    ])  # fmt: skip
    assert [one.code for one in found] == ["worse_than_baseline", "miscalibrated", "not_checked"]
    step = findings.next_step_sentence(found)
    assert step == "Next: use the baseline; try fewer features, more rows, a longer horizon."
    assert "bars that came after" in findings.next_step_sentence(found[2:]) == findings.next_step_sentence(())
    assert "full training" in findings.next_step_sentence((), quick=True)
    assert "your own bars" in findings.next_step_sentence(found, synthetic=True)
    assert found[2].sentence == "Not checked: drift (too few test rows)."
    assert findings.unchecked_note({"months": ""}) is None
    text = findings.findings_section(found).text
    assert text.startswith("1. Serious: ") and "\n\n2. Warning: " in text
    assert findings.finding_lines(found)[1].startswith("  finding 2, warning: The probabilities of neutral are")
