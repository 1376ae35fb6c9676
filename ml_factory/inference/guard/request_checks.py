"""Checks of a single request, without the state of a feed: raw bars, or feature rows."""

from operator import itemgetter

import numpy as np
import pandas as pd

from ml_factory.data.resample import to_bar_chunk
from ml_factory.errors import BarsError, SettingsError
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.bundle_checks import check_bars_on_tick
from ml_factory.inference.guard.bar_checks import check_clock
from ml_factory.inference.guard.feature_range import FeatureRange
from ml_factory.inference.guard.guarded_stream import BarGuard
from ml_factory.inference.guard.settings import DEFAULT_SETTINGS, Finding, GuardSettings


def check_predict_bars(
    bundle: Bundle, bars: pd.DataFrame, settings: GuardSettings = DEFAULT_SETTINGS, *, now: pd.Timestamp | None = None
) -> list[Finding]:
    """Return the findings on raw bars of one request, as they stand at its last bar.

    Bars that `Bundle.predict` refuses give one finding of the kind "schema".
    """
    try:
        checked, report = bundle.spec.check_bars(bars)
        check_bars_on_tick(report, bundle.spec.market, bundle.off_tick_share)
        chunk = to_bar_chunk(checked, bundle.spec.market)
        guard = BarGuard(bundle, settings)
        guard.check_order(chunk)
    except (BarsError, SettingsError) as error:
        return [Finding("schema", "refuse", str(error))]
    for event in sorted(guard.push(chunk), key=itemgetter(0)):
        guard.alarms.add(event)
    found = [one for one in guard.alarms.findings(guard.bars - 1) if one.action != "ok"]
    clock = [] if now is None else check_clock(guard.last_end, now, bundle.spec.market, settings)
    return found + [one for one in clock if one.action != "ok"]


def check_feature_rows(bundle: Bundle, rows: pd.DataFrame, settings: GuardSettings = DEFAULT_SETTINGS) -> list[Finding]:
    """Return the findings on feature rows of one request: names, order, values."""
    wanted, got = list(bundle.description["feature_names"]), [str(name) for name in rows.columns]
    if got != wanted:
        absent = [name for name in wanted if name not in got]
        other = [name for name in got if name not in wanted]
        text = f"no {', '.join(absent[:5])}" if absent else f"unknown {', '.join(other[:5])}" if other else "the order"
        message = f"the columns are not the model's: got {text}, wanted its {len(wanted)} features in its order"
        return [Finding("schema", "refuse", message)]
    wrong = [name for name, dtype in zip(wanted, rows.dtypes, strict=True) if dtype.kind not in "fiu"]
    if wrong:
        return [Finding("schema", "refuse", f"no numbers in the features {', '.join(wrong[:5])}, wanted numbers")]
    infinite = np.isinf(rows.to_numpy(np.float64)).any(axis=0)
    if infinite.any():
        names = ", ".join(np.array(wanted)[infinite][:5])
        return [Finding("schema", "refuse", f"infinite values in the features {names}, wanted finite ones or NaN")]
    reference = bundle.guard_reference
    if reference is None or settings.range == "ok":
        return []
    messages = FeatureRange(wanted, reference).messages(rows.to_numpy(np.float64))
    return [Finding("range", settings.range, message) for message in messages]
