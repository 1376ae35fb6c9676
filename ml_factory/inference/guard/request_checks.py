"""Checks of the raw bars of a single request, without the state of a feed."""

from operator import itemgetter

import pandas as pd

from ml_factory.data.resample import to_bar_chunk
from ml_factory.errors import BarsError, SettingsError
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.bundle_checks import check_bars_on_tick
from ml_factory.inference.guard.bar_checks import check_clock
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
