"""Findings on a model: what a reader of its report should know before acting on it, each with advice.

Letters: N rows in time order, F features. Thresholds are those of the messages; docs/guide.md lists them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from ml_factory.evaluation.html_report import HtmlSection
from ml_factory.evaluation.verdict import BASELINE_WORDS, BEATS, NOT_ENOUGH, ModelVerdict
from ml_factory.lazy_module import LazyModule

stats = LazyModule("scipy.stats")
SEVERITIES = ("serious", "warning", "note")
LARGEST_GAIN = 0.10  # nats over the best baseline; real bars have shown at most 0.061 (docs/log.md)
OVERFIT_GAP = 0.05  # nats
VISIBLE_GAIN = 0.05  # nats; an edge on real bars is rarely larger
CALIBRATION_ERROR = 0.03
DRIFTED_PSI, DRIFTED_SHARE = 0.25, 0.1  # of a feature; of the features
MONTHS = 3  # least months of test rows for a finding on one of them
_DRIFT_ROWS, _DRIFT_BINS = 20_000, 10


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
    if verdict.status == NOT_ENOUGH:
        advice = "Add bars, or use a shorter horizon: labels that overlap count once."
        if "weeks" in verdict.reason:
            advice = "Add bars of more weeks; nothing else makes the test rows span longer."
        elif verdict.reason.startswith("no "):
            advice = "Prepare with nearer barriers or more bars, so that each part has each class."
        return Finding("few_rows", "warning", f"There is no verdict: {verdict.reason}.", advice)
    if not half > VISIBLE_GAIN:
        return None
    return Finding(
        "few_rows", "warning",
        f"{verdict.effective_rows:,.0f} effective test rows are few: only gains above {half:.3f} nats would show.",
        "Add bars, or use a shorter horizon: labels that overlap count once.",
    )  # fmt: skip


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


def month_finding(months: pd.DataFrame) -> Finding | None:
    """Find a gain over the best baseline that one calendar month carries; months : index month, column gain (sum)."""
    gain = months["gain"]
    if len(gain) < MONTHS or not gain.sum() > 0 or gain.sum() - gain.max() > 0:
        return None
    return Finding(
        "one_month", "warning",
        f"One month carries the gain: without {gain.idxmax()} nothing is left of it in the other {len(gain) - 1}.",
        "Look at what happened then; cross-validate, or wait for more months.",
    )  # fmt: skip


def fold_finding(gain_B: np.ndarray) -> Finding | None:
    """Find a gain that one block of a cross-validation carries.

    gain_B : gain of each block, nats per row.
    """
    gain_B = np.asarray(gain_B, dtype=float)[np.isfinite(gain_B)]
    if len(gain_B) < MONTHS or not gain_B.sum() > 0 or gain_B.sum() - gain_B.max() > 0:
        return None
    return Finding(
        "one_fold", "warning",
        f"One fold carries the gain: without block {int(gain_B.argmax())} the others have none on the mean.",
        "Look at what happened in that period; a gain that lasts shows in most folds.",
    )  # fmt: skip


def calibration_finding(by_class: pd.DataFrame) -> Finding | None:
    """Find a class whose mean probability is not its frequency; by_class : `calibration_by_class` of the test rows."""
    off = by_class[
        ((by_class["low"] > 0) | (by_class["high"] < 0)) & (by_class["difference"].abs() > CALIBRATION_ERROR)
    ]
    if not len(off):
        return None
    worst = off.loc[off["difference"].abs().idxmax()]
    return Finding(
        "miscalibrated", "warning",
        f"The probabilities of {worst['class']} are miscalibrated on test rows: {worst['predicted']:.3f} predicted, "
        f"{worst['observed']:.3f} observed (difference 95 % from {worst['low']:+.3f} to {worst['high']:+.3f}).",
        "Do not size positions by them; calibrate on newer rows, or retrain.",
    )  # fmt: skip


def population_stability_index(train_MF: np.ndarray, test_NF: np.ndarray, bins: int = _DRIFT_BINS) -> np.ndarray:
    """Return the population stability index of each feature, float64 (F,), over quantile bins of the training rows.

    Missing values are a bin of their own. Half a row is added to each bin.
    """
    found = np.zeros(train_MF.shape[1])
    for column, (train, test) in enumerate(zip(train_MF.T, test_NF.T, strict=True)):
        known = train[np.isfinite(train)]
        edges = np.unique(np.quantile(known, np.linspace(0, 1, bins + 1)[1:-1])) if len(known) else np.empty(0)
        shares = []
        for values in (train, test):
            codes = np.where(np.isfinite(values), np.searchsorted(edges, values, side="left"), len(edges) + 1)
            counts = np.bincount(codes, minlength=len(edges) + 2) + 0.5
            shares.append(counts / counts.sum())
        found[column] = ((shares[1] - shares[0]) * np.log(shares[1] / shares[0])).sum()
    return found


def drift_finding(train_MF: np.ndarray, test_NF: np.ndarray, names: Sequence[str]) -> Finding | None:
    """Find features whose distribution on test rows is not that of the training rows."""
    evenly = [np.linspace(0, len(rows) - 1, min(len(rows), _DRIFT_ROWS)).astype(int) for rows in (train_MF, test_NF)]
    index = population_stability_index(train_MF[evenly[0]], test_NF[evenly[1]])
    drifted = np.flatnonzero(index > DRIFTED_PSI)
    if len(drifted) <= DRIFTED_SHARE * len(names):
        return None
    worst = ", ".join(f"{names[column]} {index[column]:.2f}" for column in np.argsort(-index)[:3])
    return Finding(
        "drift", "warning",
        f"Test rows have drifted from training rows: {len(drifted)} of {len(names)} features have a population "
        f"stability index above {DRIFTED_PSI:g} (most {worst}).",
        "Train on newer rows; leave out features that follow the level of prices.",
    )  # fmt: skip


def trials_finding(verdict: ModelVerdict, trials: int) -> Finding | None:
    """Find a gain that the best of so many runs without skill would often reach.

    trials : finished runs on this symbol.
    """
    error = (verdict.gain_best_high - verdict.gain_best_low) / (2 * 1.96)
    if verdict.status != BEATS or trials < 2 or not error > 0:
        return None
    chance = 1 - stats.norm.cdf(verdict.gain_best / error) ** trials
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
    if not net > 0:
        sentence = (
            f"Nothing is left after costs: a round trip earns {break_even_ticks:.2f} ticks and costs {cost_ticks:.2f}."
        )
        return Finding("dies_of_costs", "serious", sentence, "Do not trade it; try a longer horizon or fewer trades.")
    sentence = f"The result dies at twice the costs: break-even at {break_even_ticks:.2f} ticks, paid {cost_ticks:.2f}."
    return Finding(
        "dies_of_costs", "warning", sentence, "Check spread and slippage of your broker, in the hours traded."
    )


# ---- in words ----------------------------------------------------------------------------------------------------


def next_step_sentence(findings: Sequence[Finding]) -> str:
    """Return what to do next: the advice of the most severe finding."""
    if findings and findings[0].severity != "note":
        return f"Next: {findings[0].advice[0].lower()}{findings[0].advice[1:]}"
    return "Next: confirm it on bars that came after this run, before anything is traded."


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
