"""What a cold start costs: how far a frame's columns are off by the number of bars since it, from many starts."""

import numpy as np
import pytest

from tests.contract.doors import FAMILIES, FIRST_BARS, MEMORY_BARS, FeatureEngine, FeatureSpec

SPEC = FeatureSpec()


@pytest.fixture(scope="module")
def apart(real_bars, real_frame):
    """(symbol, minutes) -> column -> float64[B], the worst distance at each bar since a cold start, in deviations."""

    def measured(symbol: str, minutes: int) -> dict[str, np.ndarray]:
        market, frame = real_bars(symbol)[1], real_frame(symbol, minutes)

        def columns(bars):
            engine = FeatureEngine(market, FAMILIES, coarse=True)
            return engine.names, engine.push(bars)

        names, whole = columns(frame)
        spread, count = whole[MEMORY_BARS["base"] :].std(axis=0), MEMORY_BARS["coarse"] + 40
        worst = np.zeros((count, len(names)))
        for start in range(MEMORY_BARS["base"], len(frame) - count, 61):
            cold = columns(frame.part(start, start + count))[1]
            worst = np.fmax(worst, np.abs(cold - whole[start : start + count]) / spread)
        assert worst[FIRST_BARS["coarse"]].max() > 0  # starts were tried, and they matter at first
        return dict(zip(names, worst.T, strict=True))

    return measured


@pytest.mark.parametrize(("symbol", "minutes"), [("ES", 60), ("NQ", 60), ("XAUUSD", 15)])
def test_frame_features_after_memory_bars_are_within_1e_6_of_full_history(apart, symbol, minutes):
    off = apart(symbol, minutes)
    memory = MEMORY_BARS["coarse"]
    assert max(values[memory:].max() for values in off.values()) <= 1e-6
    assert SPEC.warmup_bars >= (memory + 1) * 60 // 5
    # Rows are used sooner, from FIRST_BARS on: all but the filters are settled there, and these by bar 190.
    first = FIRST_BARS["coarse"]
    unsettled = {name for name, values in off.items() if values[first:].max() > 0.1}
    assert unsettled <= {"trend_probability", "wild_probability"}
    assert max(values[190:].max() for values in off.values()) < 1e-3
