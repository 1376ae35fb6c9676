"""A bundle as the service predicts with it: raw bars, and feature rows of several requests in one call."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.data.sessions import TRADING_HOURS
from ml_factory.data.synthetic import SyntheticSpec, synthetic_market
from ml_factory.datasets.row_selection import mask_rows_with_full_window
from ml_factory.errors import BarsError, FactoryError, SettingsError, refuse_damaged_content
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.guard.request_checks import check_feature_rows, check_predict_bars
from ml_factory.inference.guard.settings import DEFAULT_SETTINGS, Finding, GuardSettings
from ml_factory.inference.onnx_models import OnnxModels
from ml_factory.inference.split_times import split_by_times
from ml_factory.serving.tables import (
    apply_findings,
    check_symbol_column,
    frame_to_answers,
    refuse_findings,
    to_columns,
    to_frame,
)
from ml_factory.storage.json_values import fingerprint_json, to_json_value

_FACTS = ("symbol", "model", "run_id", "horizon", "lookback", "warmup_bars", "classes", "feature_names", "certified",
          "certificate", "metrics", "verdict", "versions", "split_times", "data")  # fmt: skip


@dataclass(frozen=True)
class FeatureTable:
    """Feature rows of one request.

    features : float, index known_at (UTC, increasing)
    segment : int (N,)
    timed : the request named the moments
    """

    features: pd.DataFrame
    segment: np.ndarray
    timed: bool


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
            findings = check_predict_bars(self.bundle, table, self.guard, now=now)
        return self.named(frame_to_answers(apply_findings(frame, findings, "bars")))

    # ---- feature rows ----------------------------------------------------------------------------------------------

    @cached_property
    def is_rowwise(self) -> bool:
        """True where the rows of several requests can be predicted in one call, with the same result for each."""
        fitted = self.bundle.fitted
        return isinstance(fitted, OnnxModels) or fitted.stack is None

    def predict_rows(self, tables: Sequence[FeatureTable]) -> list[dict[str, Any] | FactoryError]:
        """Return the answers, or the error, of each request: each as if it were alone."""
        found: list[Any] = [self._check_rows(table) for table in tables]
        good = [number for number, checked in enumerate(found) if not isinstance(checked, FactoryError)]
        for group in [good] if self.is_rowwise else [[number] for number in good]:
            if not group:
                continue
            try:
                frames: list[Any] = self._predict_tables([tables[number] for number in group])
            except FactoryError as error:
                frames = [error] if len(group) == 1 else [self.predict_rows([tables[number]])[0] for number in group]
            for number, frame in zip(group, frames, strict=True):
                found[number] = frame if not isinstance(frame, pd.DataFrame) else self._answer_rows(
                    frame, tables[number], found[number]
                )  # fmt: skip
        return found

    def _check_rows(self, table: FeatureTable) -> list[Finding] | FactoryError:
        """Return the findings on the rows, or the error of rows that this bundle cannot read."""
        if not table.timed and self._reads_moments:
            return SettingsError(
                "This model reads the moments of the rows", where="rows.known_at", got="none",
                wanted="a moment of each row", next_step="send known_at",
            )  # fmt: skip
        findings = check_feature_rows(self.bundle, table.features, self.guard)
        try:
            refuse_findings(findings, "rows")
        except FactoryError as error:
            return error
        return findings

    @cached_property
    def _reads_moments(self) -> bool:
        fitted = self.bundle.fitted
        return not isinstance(fitted, OnnxModels) and any(
            getattr(model.estimator, "covariates", {}) for model in fitted.models.values()
        )

    def _predict_tables(self, tables: Sequence[FeatureTable]) -> list[pd.DataFrame]:
        """Return the predictions of requests in one call."""
        sizes = [len(table.features) for table in tables]
        features = pd.concat([table.features for table in tables]) if len(tables) > 1 else tables[0].features
        segment, rows = _joined_segments([table.segment for table in tables]), np.arange(len(features))
        lookback = self.bundle.description["lookback"]
        with refuse_damaged_content(BarsError, "These rows cannot be predicted", where="rows", next_step="see /info"):
            frame = self.bundle.fitted.predict_features(features, segment=segment)
        if len(tables) == 1:
            return [frame]
        kept = mask_rows_with_full_window(segment, rows, lookback) if lookback else np.ones(len(rows), bool)
        ends = np.cumsum(kept)[np.cumsum(sizes) - 1]
        return [frame.iloc[first:end] for first, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _answer_rows(self, frame: pd.DataFrame, table: FeatureTable, findings: Sequence[Finding]) -> dict[str, Any]:
        if table.timed:
            frame = frame.assign(split=split_by_times(frame.index, self.bundle.description["split_times"]))
        answers = frame_to_answers(apply_findings(frame, findings, "rows"))
        return self.named(answers if table.timed else [answer | {"known_at": None} for answer in answers])


def _joined_segments(segments: Sequence[np.ndarray]) -> np.ndarray:
    """Return one segment for all rows, which changes wherever that of a request does, and between requests."""
    changes = [np.append(True, np.diff(segment) != 0) for segment in segments]
    return np.cumsum(np.concatenate(changes)).astype(np.int32)


def rows_to_table(rows: Any, largest: int) -> FeatureTable:
    """Return the feature rows of a request (`schemas.FeatureRows`) as a table. Raises BarsError, SettingsError."""
    count = len(rows.values)
    if count > largest:
        raise BarsError("Too many feature rows at once", where="rows", got=count, wanted=f"at most {largest}",
                        next_step="send them in several requests")  # fmt: skip
    with refuse_damaged_content(BarsError, "These rows cannot be read", where="rows", next_step="see the OpenAPI page"):
        values = np.array(rows.values, dtype=np.float64)
        if np.isinf(values.astype(np.float32)).any():
            raise BarsError("A value is too large", where="rows.values", wanted="numbers of 32 bits")
        index = pd.to_datetime(rows.known_at, utc=True) if rows.known_at else pd.to_datetime(np.arange(count), utc=True)
        index = pd.DatetimeIndex(index).as_unit("ns")
    if not index.is_monotonic_increasing or not index.is_unique:
        raise BarsError("Feature rows are out of order", where="rows.known_at", wanted="increasing moments",
                        next_step="sort the rows by time, each once")  # fmt: skip
    segment = np.zeros(count, np.int32) if rows.segment is None else np.array(rows.segment, np.int32)
    return FeatureTable(
        pd.DataFrame(values, index.rename("known_at"), rows.columns, dtype=np.float32),
        segment,
        bool(rows.known_at),
    )
