"""A bundle as the service predicts with it, and the tables of requests and answers."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.errors import BarsError, FactoryError, refuse_damaged_content
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.example import synthetic_example_bars
from ml_factory.inference.guard import DEFAULT_SETTINGS, GuardSettings
from ml_factory.inference.guarded_stream import SILENT, action_and_reason, check_request
from ml_factory.storage.json_values import fingerprint_json, to_json_value

_FACTS = ("symbol", "model", "run_id", "horizon", "lookback", "warmup_bars", "classes", "feature_names", "certified",
          "certificate", "metrics", "verdict", "versions", "split_times", "data", "file")  # fmt: skip
Bars = Sequence[Mapping] | Mapping[str, Sequence]


class ServedBundle:
    """A loaded bundle with its guard; its methods run in one thread at a time."""

    def __init__(self, bundle: Bundle, guard: GuardSettings = DEFAULT_SETTINGS):
        self.bundle, self.guard = bundle, guard
        self.id = fingerprint_json(bundle.description)[:16]
        self.symbol, self.run_id = str(bundle.description["symbol"]), str(bundle.description["run_id"])

    @classmethod
    def load(cls, path: str | Path, guard: GuardSettings = DEFAULT_SETTINGS) -> "ServedBundle":
        """Read and check the bundle, which predicts its example, and answer those bars once, so that the first request
        waits for no compiler.

        Raises as `Bundle.load`. Bars that features of the user's own refuse are named on stderr.
        """
        served = cls(Bundle.load(path), guard)
        bars = synthetic_example_bars(served.bundle.spec, served.bundle.description["warmup_bars"]).reset_index()
        try:
            served.predict(bars.astype({"timestamp": str}).to_dict("list"), 1, None)
        except FactoryError as error:
            print(f"{served.symbol}: no prediction of synthetic bars, the first request may wait for kernels: {error}",
                  file=sys.stderr, flush=True)  # fmt: skip
        return served

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts for `/info`."""
        named = {name: self.bundle.description.get(name) for name in _FACTS}
        own = {"bundle": self.id, "engine": self.bundle.engine, "guard": asdict(self.guard)}
        return to_json_value(named | own)

    @property
    def names(self) -> dict[str, str]:
        """What an answer names: symbol, run and id of the bundle."""
        return {"symbol": self.symbol, "run_id": self.run_id, "bundle": self.id}

    def predict(self, bars: Bars, last: int, now: pd.Timestamp | None) -> dict[str, Any]:
        """Return the answers for the newest `last` rows of these raw bars. Raises BarsError, SettingsError.

        bars : of a request
        now : the clock, to which the newest bar is compared; None: history
        """
        table = to_table(bars)
        check_symbol_column(table, self.symbol, "bars")
        with reading_bars():
            frame = self.bundle.predict(table, all_rows=True, warm_rows=True).iloc[-last:]
            findings = check_request(self.bundle, table, self.guard, now=now)
        action, reason = action_and_reason(findings)
        if action == "refuse":
            raise BarsError(f"The guard refuses these bars ({findings[0].kind})", where="bars", got=reason,
                            next_step="correct the feed")  # fmt: skip
        frame = frame.assign(guard=action, reason=reason)
        if action in SILENT:
            frame[PROBABILITIES] = np.nan
        return self.names | {"answers": to_answers(frame)}


@contextmanager
def reading_bars() -> Iterator[None]:
    """Raise BarsError where values of a client fail; a price of 1e308 is no failure."""
    refused = refuse_damaged_content(BarsError, "These bars cannot be read", where="bars", next_step="send others")
    with refused, np.errstate(over="ignore", invalid="ignore"):
        yield


def to_table(bars: Bars) -> pd.DataFrame:
    """Return the bars of a request as a table. Raises BarsError for columns of unequal lengths."""
    with reading_bars():
        return pd.DataFrame(bars)


def check_symbol_column(table: pd.DataFrame, symbol: str, where: object) -> None:
    """Raise BarsError for bars that name another symbol in a column of theirs."""
    for name in table:
        if str(name).strip().lower() == "symbol":
            others = [str(one) for one in table[name].dropna().unique() if str(one) != symbol]
            if others:
                raise BarsError("These are bars of another symbol", where=where, got=", ".join(others[:3]),
                                wanted=symbol, next_step=f"give bars of {symbol} alone")  # fmt: skip


def to_answers(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a prediction with `guard` and `reason` as JSON values; NaN becomes null."""
    columns = [name for name in (*PROBABILITIES, "split", "side", "guard", "reason") if name in frame]
    rows = zip(*(frame[name].tolist() for name in columns), strict=True)
    return [
        {"known_at": moment.isoformat()}
        | {name: None if isinstance(one, float) and not math.isfinite(one) else one
           for name, one in zip(columns, row, strict=True)}
        for moment, row in zip(frame.index, rows, strict=True)
    ]  # fmt: skip
