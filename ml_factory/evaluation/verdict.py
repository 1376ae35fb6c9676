"""Verdict on a model: whether its forecasts of unseen rows are better than those of every baseline.

A model "beats" only where the lower 95 % bounds of its gains over all baselines are above zero. A log loss is the sum
of a part about touch (neutral or not) and a part about the side (`metrics.direction_loss_by_class`), so the gain is
tested in both parts too. An edge is a gain in the side: how far a price will move can be forecast in any market whose
volatility lasts, and no position earns by it. A gain over the class prior alone is a line of the metrics table, never a
verdict.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd

from ml_factory.evaluation.baselines import BASELINES
from ml_factory.evaluation.intervals import ConfidenceInterval, fold_gain_interval, gain_interval_by_class
from ml_factory.evaluation.metrics import direction_loss_by_class, negative_log_probabilities

BEATS, DOES_NOT_BEAT, NOT_ENOUGH = ("beats", "does not beat", "not enough data")
ROUNDING = 1e-9  # nats; a gain below this is the rounding of equal probabilities
BASELINE_LINES = {  # how each forecast is made, all counted on training rows
    "prior": "the share of each class, the same for every row",
    "last_move": "the shares after a last bar that rose, fell or stood still",
    "clock": "the shares at this time of the session",
    "clock_volatility": "the shares at this time of the session with volatility as it was lately",
}
BASELINE_WORDS = {
    "prior": "the class shares",
    "last_move": "the last move",
    "clock": "the time of the session",
    "clock_volatility": "the time of the session with the volatility",
}
# kind of labels -> meaning of the touch part of a gain
TOUCH_WORDS = {
    "triple_barrier": "how far the price will move",
    "direction": "when the price leaves the neutral band",
    "trend_scanning": "when there is a trend",
}


@dataclass(frozen=True)
class ModelVerdict:
    """Verdict on a model: whether it beats every baseline, and in which part of the labels.

    status : BEATS, DOES_NOT_BEAT or NOT_ENOUGH.
    reason : why it is not "beats"; "" where it is.
    best_baseline : the one with the smallest log loss on rows chosen for that, not on test rows.
    gain_best, gain_best_low, gain_best_high : log loss of the best baseline less the model's, with its 95 % interval;
        nats per row.
    direction_gain, direction_low, direction_high : the same of the directional part, over the class prior.
    predicts_touch, predicts_direction : True where the lower bounds of that part's gains over all baselines are above
        zero.
    rows, effective_rows : test rows, and the number of non-overlapping rows with the same information.
    kind : of the labels, one of `argument_checks.LABEL_KINDS`.
    """

    model: str
    status: str
    reason: str
    best_baseline: str
    gain_best: float
    gain_best_low: float
    gain_best_high: float
    direction_gain: float
    direction_low: float
    direction_high: float
    predicts_touch: bool
    predicts_direction: bool
    rows: int
    effective_rows: float
    kind: str = "triple_barrier"

    @property
    def edge(self) -> bool:
        """True where the model beats every baseline in which way the price moves, or in which bets are good."""
        return self.status == BEATS and (self.predicts_direction or self.kind == "meta")

    @property
    def sentence(self) -> str:
        """Verdict in one sentence."""
        if self.status == NOT_ENOUGH:
            return f"{self.model}: not enough data for a verdict: {self.reason}."
        if self.status == BEATS:
            return f"{self.model} beats every baseline: it {self._parts_sentence()}."
        return self._shortfall_sentence()

    @property
    def answer(self) -> str:
        """Headline of a report: edge or not, in one sentence."""
        if self.status == BEATS:
            return f"{'Edge' if self.edge else 'No edge'} found: {self.model} {self._parts_sentence()}."
        if self.status == NOT_ENOUGH and not self.gain_best_high < 0:
            return f"No verdict yet: {self.reason}."
        return f"No edge found: {self._shortfall_sentence()}"

    def _shortfall_sentence(self) -> str:
        verb = "is worse than" if self.gain_best_high < 0 else "does not beat"
        if self.gain_best_low > 0:
            return f"{self.model} does not beat every baseline: {self.reason}."
        also = ", but it predicts the side" if self.predicts_direction else ""
        return f"{self.model} {verb} {BASELINE_WORDS[self.best_baseline]} ({self.best_baseline}){also}."

    @property
    def numbers(self) -> str:
        """Gain over the best baseline, directional gain (nats per row, 95 % intervals), rows and effective rows."""
        gain = format_verdict_bounds(self.gain_best, self.gain_best_low, self.gain_best_high)
        gain = f"gain over {self.best_baseline} {gain}"
        side = (
            f", directional gain {format_verdict_bounds(self.direction_gain, self.direction_low, self.direction_high)}"
        )
        return f"{gain}{'' if self.kind == 'meta' else side}; {self.rows:,} rows, {self.effective_rows:,.0f} effective"

    def _parts_sentence(self) -> str:
        if self.kind == "meta":
            return "separates good bets from bad ones"
        touch = TOUCH_WORDS[self.kind]
        return {
            (True, True): f"predicts {touch}, and which way",
            (True, False): f"predicts {touch}, not which way",
            (False, True): f"predicts which way, not {touch}",
            (False, False): "gains in both parts together, neither part alone is significant",
        }[self.predicts_touch, self.predicts_direction]

    def to_dict(self) -> dict:
        """Return plain values, with the edge, the sentence and the answer."""
        return asdict(self) | {"edge": self.edge, "sentence": self.sentence, "answer": self.answer}


@dataclass(frozen=True)
class VerdictGains:
    """A model's gains over every baseline: name -> interval, of the whole log loss and of its two parts."""

    whole: Mapping[str, ConfidenceInterval]
    touch: Mapping[str, ConfidenceInterval]
    side: Mapping[str, ConfidenceInterval]


def verdict_gains_of_rows(
    y, p_N3, baselines: Mapping[str, np.ndarray], w=None, *, horizon: int, times_N=None
) -> VerdictGains:
    """Return the gains of the forecasts over each baseline's on the same N rows, in time order.

    baselines : name -> (N, 3).
    w, horizon, times_N : as of `intervals.gain_interval`.
    """
    loss, side_loss = negative_log_probabilities(p_N3), direction_loss_by_class(p_N3)
    found: dict[str, dict[str, ConfidenceInterval]] = {"whole": {}, "touch": {}, "side": {}}
    for name, other in baselines.items():
        whole, side = negative_log_probabilities(other) - loss, direction_loss_by_class(other) - side_loss
        for part, gain_N3 in {"whole": whole, "touch": whole - side, "side": side}.items():
            found[part][name] = gain_interval_by_class(gain_N3, y, w, horizon=horizon, times_N=times_N)
    return VerdictGains(**found)


def verdict_gains_of_folds(table: pd.DataFrame, model: str) -> VerdictGains:
    """Return gains over each baseline from a table of folds: a row per fold, block and forecast.

    A block that several folds test counts once, with the mean of their gains.
    """
    whole = table.pivot(index=["fold", "block"], columns="name", values="log_loss_gain")
    side = table.pivot(index=["fold", "block"], columns="name", values="direction_gain")
    found = {}
    for part, gains in {"whole": whole, "touch": whole - side, "side": side}.items():
        over = {name: (gains[model] - gains[name]).groupby("block").mean() for name in BASELINES}
        found[part] = {name: fold_gain_interval(blocks.to_numpy()) for name, blocks in over.items()}
    return VerdictGains(**found)


def model_verdict(
    model: str, gains: VerdictGains, best: str | ConfidenceInterval, *, best_name: str = "", rows: int,
    effective_rows: float,
    kind: str = "triple_barrier", lacking: str = "",
) -> ModelVerdict:  # fmt: skip
    """Return the verdict that these gains support.

    Parameters
    ----------
    best : name of the best baseline; or, of folds that each chose one, the interval of the gains over these, whose
        names are `best_name`.
    lacking : classes or weeks that the data lack for any verdict, as of `describe_missing_classes`; "" for nothing.
    """
    gain = gains.whole[best] if isinstance(best, str) else best
    unbeaten = [name for name, over in gains.whole.items() if not over.low > ROUNDING]
    unsure = next((over.reason for over in gains.whole.values() if not over.enough), "")
    side, sided = gains.side["prior"], kind != "meta"
    if lacking or not gain.enough or (unsure and not unbeaten):
        status, reason = NOT_ENOUGH, lacking or gain.reason or unsure
    elif unbeaten:
        status, reason = DOES_NOT_BEAT, f"the gain over {', '.join(unbeaten)} may be 0 or less"
    else:
        status, reason = BEATS, ""
    return ModelVerdict(
        model, status, reason, best if isinstance(best, str) else best_name, gain.mean, gain.low, gain.high,
        side.mean, side.low, side.high, sided and _shown(gains.touch), sided and _shown(gains.side), rows,
        effective_rows, kind,
    )  # fmt: skip


def _shown(over: Mapping[str, ConfidenceInterval]) -> bool:
    """Return True where the gain is above zero over every baseline, on enough rows."""
    return all(one.low > ROUNDING and one.enough for one in over.values())


def describe_missing_classes(parts: Mapping[str, np.ndarray], classes: Mapping[str, int]) -> str:
    """Describe the classes that the labels of each part lack; "" for none.

    parts : name -> labels of its evaluated rows.
    classes : name -> label.
    """
    absent = {
        part: [name for name, label in classes.items() if not (np.asarray(y) == label).any()]
        for part, y in parts.items()
    }
    return "; ".join(f"no {part} row is {' or '.join(names)}" for part, names in absent.items() if names)


def format_verdict_bounds(value: float, low: float, high: float) -> str:
    """Format a value with the bounds of its interval."""
    return f"{value:+.4f} ({low:+.4f} to {high:+.4f})"
