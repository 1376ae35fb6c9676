"""Findings on a model: what a reader of its report should know before acting on it, each with advice.

Thresholds are those of the messages; docs/guide.md lists them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist

import pandas as pd

from ml_factory.evaluation.html_report import HtmlSection
from ml_factory.evaluation.verdict import BASELINE_WORDS, BEATS, NOT_ENOUGH, ModelVerdict

SEVERITIES = ("serious", "warning", "note")
LARGEST_GAIN = 0.10  # nats over the best baseline; real bars have shown at most 0.050 (docs/log.md)
OVERFIT_GAP = 0.05  # nats
VISIBLE_GAIN = 0.05  # nats; an edge on real bars is rarely larger
CALIBRATION_ERROR = 0.03
PARTS = 3  # least months or folds for a finding on one of them


@dataclass(frozen=True)
class Finding:
    """A finding on a model.

    code : its kind, such as "overfit".
    severity : one of SEVERITIES.
    """

    code: str
    severity: str
    sentence: str
    advice: str

    def to_dict(self) -> dict[str, str]:
        """Return plain values."""
        return asdict(self)


def unchecked_note(reasons: Mapping[str, str]) -> Finding | None:
    """Return the note of the checks that were not made; reasons : check -> why, "" for one that was made."""
    listed = "; ".join(f"{name} ({why})" for name, why in reasons.items() if why)
    return Finding("not_checked", "note", f"Not checked: {listed}.", "") if listed else None


def sort_findings(found: Iterable[Finding | None]) -> tuple[Finding, ...]:
    """Return the findings, the most severe first."""
    return tuple(sorted((one for one in found if one), key=lambda one: SEVERITIES.index(one.severity)))


def baseline_finding(verdict: ModelVerdict) -> Finding | None:
    """Find a model that is no better than the best baseline; on too few rows for a verdict, one that is worse."""
    worse = verdict.gain_best_high < 0
    if not worse and (verdict.status == NOT_ENOUGH or not verdict.gain_best <= 0):
        return None
    other = f"{BASELINE_WORDS[verdict.best_baseline]} ({verdict.best_baseline})"
    return Finding(
        "worse_than_baseline", "serious" if worse else "warning",
        f"The model is {'worse' if worse else 'no better'} than {other}: {verdict.gain_best:+.4f} nats per row.",
        "Use the baseline; try fewer features, more rows, a longer horizon.",
    )  # fmt: skip


def no_side_finding(verdict: ModelVerdict) -> Finding | None:
    """Find a model that beats every baseline, but not measurably in which way the price moves."""
    if verdict.status != BEATS or verdict.edge:
        return None
    return Finding(
        "no_side", "warning",
        "That the model predicts which way the price moves is not shown; its gain may be in how far alone.",
        "Use the forecast for stops and position sizes, not for a side.",
    )  # fmt: skip


def too_good_finding(verdict: ModelVerdict) -> Finding | None:
    """Find a gain that is larger than real bars have shown: a leak is likelier than an edge."""
    if not verdict.gain_best_low > LARGEST_GAIN:
        return None
    return Finding(
        "too_good", "serious",
        f"The gain over the best baseline is at least {verdict.gain_best_low:.3f} nats per row: too good to be true on "
        f"real bars ({LARGEST_GAIN:g}).",
        "Look for the future in your own features, in the time stamps and in the file; run `audit --fresh`.",
    )  # fmt: skip


def few_rows_finding(verdict: ModelVerdict) -> Finding | None:
    """Find test rows that are too few for a verdict, or for gains of a realistic size."""
    half = (verdict.gain_best_high - verdict.gain_best_low) / 2
    sentence = (
        f"{verdict.effective_rows:,.0f} effective test rows are few: only gains above {half:.3f} nats would show."
    )
    advice = "Add bars, or use a shorter horizon: labels that overlap count once."
    if verdict.status == NOT_ENOUGH:
        sentence = f"There is no verdict: {verdict.reason}."
        if "weeks" in verdict.reason:
            advice = "Add bars of more weeks; nothing else makes the test rows span longer."
        elif verdict.reason.startswith("no "):
            advice = "Prepare with nearer barriers or more bars, so that each part has each class."
    elif not half > VISIBLE_GAIN:
        return None
    return Finding("few_rows", "warning", sentence, advice)


def overfit_finding(train_gain: float, validation_gain: float) -> Finding | None:
    """Find a training far from validation; both gains over the class prior in nats per row."""
    lost = train_gain - validation_gain
    if not lost > max(OVERFIT_GAP, validation_gain):
        return None
    return Finding(
        "overfit", "warning",
        f"Training is far from validation: {train_gain:+.4f} nats per row over the class prior on training rows, "
        f"{validation_gain:+.4f} on validation rows.",
        "Fewer rounds, shallower trees, more regularisation or fewer features.",
    )  # fmt: skip


def concentration_finding(unit: str, gains: pd.Series) -> Finding | None:
    """Find a gain that one month of the test rows, or one block of a cross-validation, carries.

    unit : "month" or "fold". gains : of each over the best baseline or the class prior; NaN for none.
    """
    gains = gains.dropna()
    if len(gains) < PARTS or not gains.sum() > 0 or gains.sum() - gains.max() > 0:
        return None
    return Finding(
        f"one_{unit}", "warning",
        f"One {unit} carries the gain: without {gains.idxmax()} nothing is left of it in the other {len(gains) - 1}.",
        f"Look at what happened in that {unit}; a gain that lasts shows in most.",
    )  # fmt: skip


def calibration_finding(by_class: pd.DataFrame) -> Finding | None:
    """Find a class whose mean probability is not its frequency; by_class : `calibration_by_class` of the test rows."""
    significant = (by_class["low"] > 0) | (by_class["high"] < 0)
    size = by_class["difference"].abs().where(significant, 0.0)
    if not size.max() > CALIBRATION_ERROR:
        return None
    worst = by_class.loc[size.idxmax()]
    return Finding(
        "miscalibrated", "warning",
        f"The probabilities of {worst['class']} are miscalibrated on test rows: {worst['predicted']:.3f} predicted, "
        f"{worst['observed']:.3f} observed (difference 95 % from {worst['low']:+.3f} to {worst['high']:+.3f}).",
        "Do not size positions by them; calibrate on newer rows, or retrain.",
    )  # fmt: skip


def trials_finding(verdict: ModelVerdict, trials: int) -> Finding | None:
    """Find a gain that the best of so many runs without skill would often reach.

    trials : finished runs on this symbol.
    """
    error = (verdict.gain_best_high - verdict.gain_best_low) / (2 * 1.96)
    if verdict.status != BEATS or trials < 2 or not error > 0:
        return None
    chance = 1 - NormalDist().cdf(verdict.gain_best / error) ** trials
    if not chance > 0.05:
        return None
    return Finding(
        "many_trials", "warning",
        f"Tried often: the best of {trials} runs without skill shows this gain with a probability of {chance:.0%}.",
        "Confirm it on bars that came after the last run, before anything is traded.",
    )  # fmt: skip


def cost_finding(net: float, break_even_ticks: float, cost_ticks: float) -> Finding | None:
    """Find trades that earn nothing after costs, or nothing at twice the costs.

    break_even_ticks, cost_ticks : of a round trip.
    """
    if not break_even_ticks < 2 * cost_ticks:
        return None
    ticks = f"a round trip earns {break_even_ticks:.2f} ticks and costs {cost_ticks:.2f}."
    if not net > 0:
        return Finding(
            "dies_of_costs", "serious", f"Nothing is left after costs: {ticks}",
            "Do not trade it; try a longer horizon or fewer trades.",
        )  # fmt: skip
    return Finding(
        "dies_of_costs", "warning", f"The result dies at twice the costs: {ticks}",
        "Check spread and slippage of your broker, in the hours traded.",
    )  # fmt: skip


# ---- in words ----------------------------------------------------------------------------------------------------


def next_step_sentence(findings: Sequence[Finding], *, synthetic: bool = False, quick: bool = False) -> str:
    """Return what to do next: the advice of the most severe finding.

    synthetic, quick : True for a built-in market, and where QUICK limited a training.
    """
    if synthetic:
        return "Next: the same with your own bars: make run DATA=bars.csv SYMBOL=MES, or the notebooks' forms."
    if findings and findings[0].severity != "note":
        return f"Next: {findings[0].advice[0].lower()}{findings[0].advice[1:]}"
    full = "repeat it with the full training (QUICK off), then " if quick else ""
    return f"Next: {full}confirm it on bars that came after this run, before anything is traded."


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return a line for each finding, numbered, for a summary."""
    return [f"  finding {number}, {one.severity}: {one.sentence}" for number, one in enumerate(findings, 1)]


def findings_section(findings: Sequence[Finding]) -> HtmlSection:
    """Return the section of the report with the numbered findings."""
    listed = [
        f"{number}. {one.severity.capitalize()}: {one.sentence} {one.advice}".strip()
        for number, one in enumerate(findings, 1)
    ]
    return HtmlSection("Findings", text="\n\n".join(listed) or "Every check was made, and none found anything.")
