"""Check the user's own features on every row of sampled days: with and without the bars that follow the row.

A look ahead at one fixed hour of the week or one minute of the month is in too few rows for cuts to detect. Days are
sampled so that each weekday, day of the month, week of the month and month of the year is among them, and each of their
rows is computed from a past that ends with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from ml_factory.data.resample import ResampledBars, apply_roll_adjustment, resample_bars
from ml_factory.data.sessions import DAY_NS, MarketSpec, distinct_in_order
from ml_factory.features import custom
from ml_factory.features.build import FeatureSpec
from ml_factory.leakage.tables import RAISED, Findings, Leak, bitwise_equal
from ml_factory.progress import progress_phase
from ml_factory.seeding import seeded_generator

FULL_DAYS = 60
QUICK_DAYS, QUICK_ROWS = 7, 2_500
LATER_BARS = 30_000  # bars behind a sampled day that its rows must not depend on


def check_custom_features(
    bars: pd.DataFrame, facts: dict, spec: FeatureSpec, *, quick: bool, found: Findings | None = None
) -> Findings:
    """Compare the rows of all own features of `spec`.

    Parameters
    ----------
    bars : checked bars
    facts : facts of the market, as stored
    spec : the features
    quick : the days of one week, at most 2,500 rows; otherwise up to 60 days, all of their rows
    found : to be added to and returned
    """
    found = found or Findings()
    if not spec.custom:
        return found
    base = apply_roll_adjustment(resample_bars(bars, MarketSpec.from_dict(facts), spec.base_minutes))
    days = sample_calendar_days(base.known_at, QUICK_DAYS if quick else FULL_DAYS, weekdays_only=quick)
    for name in spec.custom:
        made = custom.get_custom_feature(name)
        rows = np.flatnonzero(np.isin(base.known_at // DAY_NS, days))
        rows = rows[rows > made.memory]  # before, a feature has no value yet
        if quick and len(rows) > QUICK_ROWS:
            rows = np.sort(seeded_generator(0, "sampled rows", made.name).choice(rows, QUICK_ROWS, replace=False))
        with progress_phase(f"rows of {made.name}", len(rows)) as done:
            try:
                wrong = list(_rows_that_look_ahead(made, base, rows, done))
            except Exception as error:  # noqa: BLE001 - fails closed: what cannot be computed is not proven
                found.add([_leak(f"{RAISED} {type(error).__name__}: {error}", base, rows[:1])])
                continue
        found.count("features, rows of sampled days", len(rows))
        if wrong:
            found.add([_leak(made.name, base, np.array(wrong))])
    return found


def sample_calendar_days(known_at: np.ndarray, count: int, *, weekdays_only: bool = False) -> np.ndarray:
    """Sample at most `count` days (int64, since 1970, UTC) with as many different calendar facts as possible.

    The facts of a day: its weekday, and unless `weekdays_only` its day of the month, its month, and its weekday
    together with the week of the month. Days with new facts come first, the others are random.
    """
    days = seeded_generator(0, "sampled days").permutation(distinct_in_order(known_at // DAY_NS))
    dates = pd.DatetimeIndex((days * DAY_NS).astype("M8[ns]"))
    sets = [{("weekday", day.weekday())} for day in dates]
    if not weekdays_only:
        for own, day in zip(sets, dates, strict=True):
            own |= {("day", day.day), ("month", day.month), ("week", day.weekday(), (day.day - 1) // 7)}
            own |= {("last day of a month",)} if day.is_month_end else set()
    chosen, seen = [], set()
    while len(chosen) < min(count, len(days)):
        gains = [-1 if k in chosen else len(own - seen) for k, own in enumerate(sets)]
        best = int(np.argmax(gains))
        chosen.append(best)
        seen |= sets[best]
    return np.sort(days[chosen])


def _rows_that_look_ahead(made: custom.CustomFeature, base: ResampledBars, rows: np.ndarray, done) -> Iterator[int]:
    """Yield rows whose value from the bars up to the row differs in any bit from the value with later bars.

    Both begin at the same bar, and each is computed by a copy of the function that has not been called before.
    """
    for run in np.split(rows, np.flatnonzero(np.diff(rows) > made.memory) + 1) if len(rows) else ():
        low = max(0, int(run[0]) - 2 * made.memory)
        heads, fresh = np.empty(len(run)), _fresh_instance(made)
        for k, row in enumerate(run):
            heads[k] = custom.compute_custom_feature(fresh, base.part(low, int(row) + 1))[-1]
            done(1)
        whole = custom.compute_custom_feature(_fresh_instance(made), base.part(low, int(run[-1]) + 1 + LATER_BARS))
        yield from run[~bitwise_equal(heads, np.ascontiguousarray(whole[run - low]))].tolist()


def _fresh_instance(made: custom.CustomFeature) -> custom.CustomFeature:
    return replace(made, function=custom.clone_function_without_state(made.original))


def _leak(column: str, base: ResampledBars, rows: Sequence[int]) -> Leak:
    first = str(pd.Timestamp(int(base.known_at[rows[0]]), tz="UTC")) if len(rows) else "none"
    return Leak("features", column, len(rows), first, first, "its own row", "truncate", "rows of sampled days")
