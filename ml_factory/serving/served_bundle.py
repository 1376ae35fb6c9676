"""A bundle as the service predicts with it."""

import sys
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.data.sessions import TRADING_HOURS
from ml_factory.data.synthetic import SyntheticSpec, synthetic_market
from ml_factory.errors import BarsError, FactoryError, refuse_damaged_content
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.guard import DEFAULT_SETTINGS, GuardSettings
from ml_factory.inference.guarded_stream import check_request
from ml_factory.serving.tables import (
    apply_findings,
    check_symbol_column,
    frame_to_answers,
    to_columns,
    to_frame,
)
from ml_factory.storage.json_values import fingerprint_json, to_json_value

_FACTS = ("symbol", "model", "run_id", "horizon", "lookback", "warmup_bars", "classes", "feature_names", "certified",
          "certificate", "metrics", "verdict", "versions", "split_times", "data")  # fmt: skip


class ServedBundle:
    """A loaded bundle with its guard; its methods run in one thread at a time."""

    def __init__(self, bundle: Bundle, guard: GuardSettings = DEFAULT_SETTINGS):
        self.bundle, self.guard = bundle, guard
        self.id = fingerprint_json(bundle.description)[:16]
        self.symbol, self.run_id = str(bundle.description["symbol"]), str(bundle.description["run_id"])

    @classmethod
    def load(cls, path: str | Path, guard: GuardSettings = DEFAULT_SETTINGS) -> "ServedBundle":
        """Read and check the bundle, and predict synthetic bars, so that its first request waits for no compiler.

        Raises as `Bundle.load`. Bars that features of the user's own refuse are named on stderr.
        """
        served = cls(Bundle.load(path), guard)
        try:
            served.predict_bars(served._synthetic_bars().to_dict("list"), 1, None)
        except FactoryError as error:
            print(f"{served.symbol}: no prediction of synthetic bars, the first request may wait for kernels: {error}",
                  file=sys.stderr, flush=True)  # fmt: skip
        return served

    def _synthetic_bars(self) -> pd.DataFrame:
        """Return raw bars on this bundle's calendar and tick, some sessions more than its warm-up."""
        spec, market = self.bundle.spec, self.bundle.spec.market
        _, opens, closes = TRADING_HOURS[market.calendar]
        minutes = self.lacking_bars * spec.features.base_minutes
        tick, days = market.tick or 0.25, 3 + minutes // (closes - opens)
        made = SyntheticSpec(days=days, calendar=market.calendar, tick=tick, price=20_000 * tick)
        bars = synthetic_market(made).bars
        rules = {"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"}
        bars = bars.resample(f"{market.bar_minutes}min").agg(rules).dropna().rename_axis("timestamp").reset_index()
        return (bars if market.has_volume else bars.drop(columns="volume")).astype({"timestamp": str})

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts for `/info`."""
        description = self.bundle.description
        named = {name: description.get(name) for name in _FACTS}
        return to_json_value(
            named
            | {
                "bundle": self.id,
                "engine": self.bundle.engine,
                "file": description.get("file"),
                "guard": asdict(self.guard),
            }
        )

    @property
    def lacking_bars(self) -> int:
        """Base bars that a feed without bars lacks for its first answer."""
        return self.bundle.description["warmup_bars"] + 1

    def named(self, answers: list[dict]) -> dict[str, Any]:
        """Return the answers with the names of what made them."""
        return {"symbol": self.symbol, "run_id": self.run_id, "bundle": self.id, "answers": answers}

    def predict_bars(self, bars: Any, last: int, now: pd.Timestamp | None) -> dict[str, Any]:
        """Return the answers for the newest `last` rows of these raw bars. Raises BarsError, SettingsError.

        bars : of a request
        now : the clock, to which the newest bar is compared; None: history
        """
        columns = to_columns(bars)
        check_symbol_column(columns, self.symbol, "bars")
        table = to_frame(columns)
        refused = refuse_damaged_content(BarsError, "These bars cannot be read", where="bars", next_step="send others")
        with refused, np.errstate(over="ignore", invalid="ignore"):  # a price of 1e308 is no failure
            frame = self.bundle.predict(table, all_rows=True, warm_rows=True).iloc[-last:]
            findings = check_request(self.bundle, table, self.guard, now=now)
        return self.named(frame_to_answers(apply_findings(frame, findings)))
