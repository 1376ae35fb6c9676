"""Example of a bundle: synthetic raw bars and what it predicted for them, by which a loaded bundle proves itself."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ml_factory.data.sessions import TRADING_HOURS
from ml_factory.data.synthetic import SyntheticSpec, synthetic_market
from ml_factory.errors import SettingsError
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference.prediction_spec import PredictionSpec
from ml_factory.storage.serialization import deserialize_state, serialize_state

if TYPE_CHECKING:
    from ml_factory.inference.bundle import Bundle

ROWS = 50
LARGEST_DIFFERENCE = 1e-5  # of a probability: other machines and versions of the libraries round otherwise


def synthetic_example_bars(spec: PredictionSpec, warmup_bars: int) -> pd.DataFrame:
    """Return raw bars on the calendar and tick of these settings, some sessions more than the warm-up."""
    market = spec.market
    _, opens, closes = TRADING_HOURS[market.calendar]
    minutes = (warmup_bars + 1) * spec.features.base_minutes
    tick, days = market.tick or 0.25, 3 + minutes // (closes - opens)
    made = SyntheticSpec(days=days, calendar=market.calendar, tick=tick, price=20_000 * tick)
    bars = synthetic_market(made).bars
    rules = {"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"}
    bars = bars.resample(f"{market.bar_minutes}min").agg(rules).dropna().rename_axis("timestamp")
    return bars if market.has_volume else bars.drop(columns="volume")


def make_example(bundle: "Bundle") -> bytes:
    """Return the bars and the bundle's newest predictions of them. Raises BarsError where a feature refuses them."""
    bars = synthetic_example_bars(bundle.spec, bundle.description["warmup_bars"])
    known_at, p_N3 = _predict(bundle, bars)
    return serialize_state({
        "time": bars.index.as_unit("ns").asi8, "columns": {name: bars[name].to_numpy() for name in bars},
        "known_at": known_at, "p": p_N3,
    })  # fmt: skip


def check_example(bundle: "Bundle") -> None:
    """Raise SettingsError where the bundle predicts its example otherwise than when it was exported."""
    state = deserialize_state(bundle.example)
    index = pd.DatetimeIndex(state["time"].view("M8[ns]"), tz="UTC", name="timestamp")
    known_at, p_N3 = _predict(bundle, pd.DataFrame(state["columns"], index=index))
    same = np.array_equal(known_at, state["known_at"])
    difference = float(np.abs(p_N3 - state["p"]).max()) if same else np.inf
    if not difference <= LARGEST_DIFFERENCE:
        got = f"probabilities that differ by {difference:.1e}" if same else "other rows"
        versions = bundle.description["versions"]
        raise SettingsError(
            "This bundle predicts its example otherwise here", where=bundle.where, got=got,
            wanted=f"those of ml_factory {versions['ml_factory']} within {LARGEST_DIFFERENCE:g}",
            next_step="use that version and its libraries, or prepare, train and export again",
        )  # fmt: skip


def _predict(bundle: "Bundle", bars: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return known_at int64 ns and probabilities float64 (rows, 3) of the newest rows."""
    frame = bundle.predict(bars.reset_index(), all_rows=True, warm_rows=True).iloc[-ROWS:]
    return frame.index.as_unit("ns").asi8, frame[PROBABILITIES].to_numpy(np.float64)
