"""Search barriers on training rows only: a grid over the distance of the barriers and the span of the volatility.

Off unless called. The objective is not a model's score, which would have seen the outcomes, but the information in the
labels: the entropy of the three classes, times the rows that remain after average uniqueness, each weighted by the part
of its barrier's distance that a round trip does not cost. Near barriers give more rows that do not overlap and cost
more; balance constraints exclude one-sided and all-neutral classes.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import pandas as pd

from ml_factory.argument_checks import LABEL_KINDS, check_field_types
from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MarketSpec
from ml_factory.errors import SettingsError, refuse_damaged_content
from ml_factory.storage.json_values import parse_json
from ml_factory.targets.label_table import average_uniqueness
from ml_factory.targets.labels import LabelSpec, label_classes, triple_barrier_labels

VERSION = 5  # of a label spec


@dataclass(frozen=True)
class BarrierSearchSpec:
    """Grid and constraints.

    labels : horizon, costs and session rule of the labels
    k : distances of both barriers, in units of sigma * sqrt(horizon)
    sigma_spans : spans of the volatility, in bars
    neutral : least and largest share of neutral rows
    lean : largest |long - short|, as a share of the rows; ambiguous rows are in no share
    """

    labels: LabelSpec = field(default_factory=LabelSpec)
    k: tuple[float, ...] = (0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.2, 1.4, 1.7, 2.0)
    sigma_spans: tuple[int, ...] = (50, 100, 200)
    neutral: tuple[float, float] = (0.2, 0.4)
    lean: float = 0.1

    def __post_init__(self):
        for name in ("k", "neutral", "sigma_spans"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON brings lists
        check_field_types(self)
        if self.labels.kind != LABEL_KINDS[0]:
            raise SettingsError(
                "Only barriers are searched for", where="BarrierSearchSpec.labels",
                got=f"labels of kind {self.labels.kind}", wanted=LABEL_KINDS[0],
                next_step=f"prepare with {LABEL_KINDS[0]} labels first, or leave the search out",
            )  # fmt: skip
        low, high = self.neutral if len(self.neutral) == 2 else (math.nan, math.nan)
        if not self.grid() or not 0 <= low < high <= 1 or not 0 < self.lean <= 1:  # each point checks itself
            raise SettingsError(
                "Barriers cannot be searched like this", where="BarrierSearchSpec",
                got=f"{len(self.k)} k, {len(self.sigma_spans)} spans, neutral={self.neutral}, lean={self.lean}",
                wanted="a k and a span or more, shares such as neutral=(0.2, 0.4) and lean=0.1",
            )  # fmt: skip

    def grid(self) -> list[LabelSpec]:
        """Return the label spec of each point: every k with every span."""
        return [
            replace(self.labels, k_up=k, k_down=k, sigma_span=sigma_span)
            for k in self.k
            for sigma_span in self.sigma_spans
        ]


@dataclass(frozen=True)
class BarrierSearchRows:
    """The rows that a search saw.

    first, last : known_at of the first and last row (ISO, UTC)
    until : the last label_end that it may have used
    count : number of rows
    fingerprint : hash of every bar up to `until` and of the market's facts; data with another one does not accept the
        spec
    """

    first: str
    last: str
    until: str
    count: int
    fingerprint: str


@dataclass(frozen=True)
class SearchedLabelSpec:
    """A label spec with the barriers found, the search, the rows it saw and the best point of its grid."""

    labels: LabelSpec
    search: BarrierSearchSpec
    seen_rows: BarrierSearchRows
    best: dict
    version: int = VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes, where: object = None) -> "SearchedLabelSpec":
        """Parse a label spec; raise SettingsError for another version, or a damaged one.

        where : the file, for messages
        """
        again = "search again: pipeline.search_barriers(workspace, symbol, horizon)"
        with refuse_damaged_content(SettingsError, "Not a searched label spec", where=where, next_step=again):
            stored = parse_json(text)
            if stored.get("version") != VERSION:
                raise SettingsError(
                    "A searched label spec of another version", where=where, got=stored.get("version"),
                    wanted=VERSION, next_step=again,
                )  # fmt: skip
            search = stored["search"] | {"labels": LabelSpec(**stored["search"]["labels"])}
            parts = {"labels": LabelSpec(**stored["labels"]), "search": BarrierSearchSpec(**search)}
            return cls(**(stored | parts | {"seen_rows": BarrierSearchRows(**stored["seen_rows"])}))


# ---- the search ------------------------------------------------------------------------------------------------------


def search_barriers_on_training_rows(
    base: ResampledBars,
    minute_bars: ResampledBars | None,
    market: MarketSpec,
    train_rows: pd.DatetimeIndex,
    spec: BarrierSearchSpec,
    *,
    evaluated: pd.DatetimeIndex,
    done: Callable[[int], None] = lambda count: None,
) -> tuple[SearchedLabelSpec, pd.DataFrame]:
    """Return the label spec with the most informative labels of the training rows, among those that keep the balance,
    and a table of the whole grid: k, sigma_span, value (bits a training row), rows, class shares, and `kept` where the
    balance is kept.

    Parameters
    ----------
    base : the base bars
    minute_bars : the bars inside them, None where there are none
    market : the market
    train_rows : known_at of the training rows, which are rows of `base`
    spec : the search
    evaluated : known_at of the evaluated rows (validation, test), none of which is a training row. Only labels with
        label_end strictly before the next of them are used, and none that ends after the last training row where no
        evaluated row follows. Later bars are removed first
    done : called with 1 after each point of the grid

    Raises
    ------
    SettingsError : no point keeps the balance (the message has the nearest one)
    """
    rows, others = (np.unique(moments.as_unit("ns").asi8) for moments in (train_rows, evaluated))
    by = np.append(others - 1, rows[-1])[np.searchsorted(others, rows)]
    until = int(by.max())
    moment = [pd.Timestamp(int(t), tz="UTC").isoformat() for t in (rows[0], rows[-1], until)]
    seen = BarrierSearchRows(*moment, len(rows), fingerprint_searched_bars(base, minute_bars, market, until))
    base, grid, points, sides = _up_to(base, until), spec.grid(), [], label_classes(spec.labels.kind)
    minute_bars = None if minute_bars is None else _up_to(minute_bars, until)
    for labels in grid:
        made = triple_barrier_labels(base, minute_bars, labels, market)
        known_at, ends = made.index.as_unit("ns").asi8, pd.DatetimeIndex(made["label_end"]).as_unit("ns").asi8
        at = np.minimum(np.searchsorted(rows, known_at), len(rows) - 1)
        clear = (made["barrier"] != "ambiguous").to_numpy()
        made = made[clear & (rows[at] == known_at) & (ends <= by[at])]
        value = _information(made, labels, base, market) / len(rows) if len(made) else 0.0
        shares = {name: float((made["label"] == side).mean()) for name, side in sides.items()}  # NaN without rows
        found = {"value": value, "rows": len(made), **shares}
        points.append({"k": labels.k_up, "sigma_span": labels.sigma_span} | found)
        done(1)
    table = pd.DataFrame(points)
    low, high = spec.neutral
    beyond = np.maximum(low - table["neutral"], table["neutral"] - high).clip(lower=0)
    beyond += ((table["long"] - table["short"]).abs() - spec.lean).clip(lower=0)
    table["kept"] = beyond == 0
    if not table["kept"].any():
        near = points[beyond.fillna(2.0).idxmin()]
        raise SettingsError(
            f"None of {len(points)} barriers keeps the required balance",
            where=f"barriers for {spec.labels.horizon} bars",
            got=", ".join(f"{name} {near[name]:.1%}" for name in sides)
            + f" at the nearest, k {near['k']:g} and sigma_span {near['sigma_span']}",
            wanted=f"neutral {low:.0%} to {high:.0%}, |long - short| at most {spec.lean:.0%}",
            next_step="widen neutral or lean, or give other k; without a search the given barriers stand",
        )
    best = table["value"].where(table["kept"]).idxmax()  # the first of equals
    return SearchedLabelSpec(grid[best], spec, seen, points[best]), table


def _information(table: pd.DataFrame, labels: LabelSpec, base: ResampledBars, market: MarketSpec) -> float:
    """Compute the entropy of the classes in bits, times the non-overlapping rows, net of round-trip costs."""
    entry = table["entry_bar"].to_numpy()
    unique = average_uniqueness(entry + 1, table["exit_bar"].to_numpy(), len(base))
    cost = np.log1p(labels.cost_ticks * (market.tick or 0.0) / base.close[entry])
    distance = 0.5 * (table["up"].to_numpy() + table["down"].to_numpy())
    shares = np.bincount(table["label"].to_numpy() + 1, unique, minlength=3) / unique.sum()
    entropy = -sum(p * math.log2(p) for p in shares.tolist() if p > 0)
    return float(entropy * (unique * np.maximum(1 - cost / distance, 0)).sum())


def _up_to(frame: ResampledBars, until: int) -> ResampledBars:
    """Return the bars known by `until`."""
    return frame.part(0, int(np.searchsorted(frame.known_at, until, side="right")))


def fingerprint_searched_bars(
    base: ResampledBars, minute_bars: ResampledBars | None, market: MarketSpec, until: int
) -> str:
    """Return the hex digest of the bars known by `until` (ns) and of the market's facts used for labels.

    The same whatever bars follow, so that a label spec can be matched with the data that it was searched on.
    """
    digest = hashlib.sha256(f"{market.calendar} {market.tick}".encode())
    for frame in (base, minute_bars):
        known = None if frame is None else _up_to(frame, until)
        names = ("known_at", "open", "high", "low", "close", "segment") if known is not None and len(known) else ()
        for name in names:
            digest.update(np.ascontiguousarray(getattr(known, name)))
    return digest.hexdigest()
