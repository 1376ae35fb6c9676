"""Predictions of a live feed: raw bars pushed singly or in chunks give the rows of `Bundle.predict`."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from ml_factory.data.resample import BarChunk, known_at_index, to_bar_chunk
from ml_factory.data.sessions import MINUTE_NS
from ml_factory.data.validation import parse_bars
from ml_factory.errors import BarsError, CheckpointError, SettingsError, refuse_damaged_content
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.features.build import FeatureRows, FeatureStream
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.predict import split_by_times
from ml_factory.targets.make_labels import primary_rule_features, primary_side_of_rows

START_AGAIN = "start the stream again from the history"


class PredictionStream:
    """Predictions of a bundle, bar by bar.

    Rows are returned when their base bar is complete. Features and boosters equal `Bundle.predict` on the bars pushed
    so far to the bit, networks and linear models within 1e-6.

    cold : the first bar pushed is not the first of the history that the model knows: no row before the bundle's
        `warmup_bars`, after which features are within 1e-6 of a deviation. Without it the stream answers as the batch
        on the same bars.
    """

    def __init__(self, bundle: Bundle, *, cold: bool = False):
        self.bundle, spec = bundle, bundle.spec
        self._format = replace(spec.bars, minutes=spec.market.bar_minutes)  # of single bars
        self._features = FeatureStream(spec.market, spec.features, cold=cold)
        meta = spec.labels.kind == "meta"
        rule = primary_rule_features(spec.market, spec.features, spec.labels) if meta else None
        self._side = FeatureStream(spec.market, rule, dtype="float64") if meta else None
        self._rows = {  # the last ones, for the windows of models
            "known_at": np.empty(0, np.int64), "segment": np.empty(0, np.int32),
            "values": np.empty((0, len(bundle.description["feature_names"])), np.float32),
        }  # fmt: skip
        self._waiting = bundle.description["warmup_bars"] - bundle.spec.features.warmup_bars if cold else 0

    @property
    def lacking_bars(self) -> int:
        """Base bars that must still be complete, at least, before the first prediction of a cold stream."""
        return self._features.lacking_bars(self.bundle.description["warmup_bars"] + 1)

    def push(self, bars: pd.DataFrame) -> pd.DataFrame:
        """Return the predictions that these bars complete: the columns of `Bundle.predict`, perhaps no row.

        bars : raw bars in the format of the training's, in time order, all later than those before.
        Raises BarsError for bars that cannot be, SettingsError for other columns than the market has.
        """
        return predictions_table(self.predict_rows(self.feature_rows(self.check_bars(bars))))

    def advance(self, now: pd.Timestamp) -> pd.DataFrame:
        """Return the predictions of bars that are complete by the clock, once all raw bars up to `now` are pushed."""
        return predictions_table(self.predict_rows(self.clock_rows(now)))

    def feature_rows(self, bars: pd.DataFrame | BarChunk) -> FeatureRows:
        """Return the feature rows that bars of `check_bars` complete, for `predict_rows`."""
        chunk = bars if isinstance(bars, BarChunk) else to_bar_chunk(bars, self._features.market)
        return self._with_side(self._features.push(chunk), self._side and self._side.push(chunk))

    def clock_rows(self, now: pd.Timestamp) -> FeatureRows:
        """Return the feature rows that are complete by the clock, for `predict_rows`."""
        now_ns = pd.Timestamp(now).tz_convert("UTC").as_unit("ns").value
        return self._with_side(self._features.advance(now_ns), self._side and self._side.advance(now_ns))

    def _with_side(self, rows: FeatureRows, of_rule: FeatureRows | None) -> FeatureRows:
        return rows if of_rule is None else replace(rows, side=primary_side_of_rows(of_rule, self.bundle.spec.labels))

    def get_state(self) -> dict:
        """Return plain numbers and arrays; `load_state` on a stream of the same bundle continues from them exactly."""
        return {
            "bundle": self.bundle.fingerprint, "features": self._features.get_state(),
            "rows": dict(self._rows), "waiting": self._waiting,
            "side": self._side and self._side.get_state(),
        }  # fmt: skip

    def load_state(self, state: Mapping) -> None:
        """Restore a state of `get_state`. Raises SettingsError for the state of another bundle, CheckpointError for a
        damaged one.
        """
        with refuse_damaged_content(CheckpointError, "This state of a stream is damaged", next_step=START_AGAIN):
            if state["bundle"] != self.bundle.fingerprint:
                raise SettingsError(
                    "The state is of the stream of another bundle", where=self.bundle.where,
                    got=str(state["bundle"])[:12], wanted=self.bundle.fingerprint[:12],
                    next_step=START_AGAIN,
                )  # fmt: skip
            self._features.load_state(state["features"])
            self._rows = {name: np.array(state["rows"][name], one.dtype) for name, one in self._rows.items()}
            self._waiting = int(state["waiting"])
            if self._side:
                self._side.load_state(state["side"])

    def check_bars(self, bars: pd.DataFrame, where: object = "bars of the stream") -> pd.DataFrame:
        """Return the next bars in canonical form; the stream is not changed. Raises BarsError."""
        spec = self.bundle.spec
        if not len(bars):
            return pd.DataFrame(
                index=pd.DatetimeIndex([], tz="UTC"), columns=["open", "high", "low", "close", "volume"]
            )
        start_ns, values, _, _ = parse_bars(bars, self._format, where)
        index = pd.DatetimeIndex(start_ns.view("M8[ns]"), tz="UTC", name="timestamp")
        length = spec.market.bar_minutes
        if (np.diff(start_ns) < length * MINUTE_NS).any():
            raise BarsError("Bars overlap", where=where, got="bars out of order, or twice",
                            wanted=f"times that rise by at least {length} min",
                            next_step="sort them; a bar that was pushed cannot be pushed again")  # fmt: skip
        if "volume" in values:
            values["volume"] = np.where(np.isnan(values["volume"]), 0.0, values["volume"])
        checked = pd.DataFrame(values, index=index)
        if "contract" in bars:
            chain = pd.to_numeric(bars.get("chain", np.nan), errors="coerce")
            if not np.all((chain > 0) & (chain < np.inf)):
                raise BarsError(
                    "The price step of a roll is not known to a stream", where=where, got="contracts without a chain",
                    wanted="the columns contract and chain, ratios of prices above 0",
                    next_step="push the bars that prepare wrote, or those of one contract",
                )  # fmt: skip
            checked["contract"], checked["chain"] = bars["contract"].to_numpy(), bars["chain"].to_numpy(float)
        return checked

    def predict_rows(self, rows: FeatureRows) -> dict[str, np.ndarray]:
        """Return the predictions of the next feature rows, each predicted once; of meta-labels those where the primary
        side bets, with their `side`.

        Returns
        -------
        known_at (UTC ns) and the columns of `Bundle.predict`, texts as objects.
        """
        before, fitted, facts = len(self._rows["values"]), self.bundle.fitted, self.bundle.description
        own = {name: np.concatenate([one, getattr(rows, name)]) for name, one in self._rows.items()}
        places, p_N3 = np.arange(before, before + len(rows)), np.empty((0, 3))
        if len(rows):
            places, p_N3 = fitted.predict_rows(own["values"], places, own["segment"])
        kept = min(max(fitted.lookback - 1, 0), len(own["values"]))
        self._rows = {name: one[len(one) - kept :].copy() for name, one in own.items()}
        chosen = places >= before + self._waiting
        self._waiting = max(self._waiting - len(rows), 0)
        index = pd.DatetimeIndex(own["known_at"][places].view("M8[ns]"), tz="UTC")
        side = None if rows.side is None else rows.side.reindex(index).to_numpy()
        if side is not None:
            chosen &= side != 0
        known_at = own["known_at"][places[chosen]]
        found = {"known_at": known_at, **dict(zip(PROBABILITIES, p_N3[chosen].T, strict=True))}
        if side is not None:
            found["side"] = side[chosen]
        run = np.full(len(known_at), facts["run_id"], object)
        return found | {"split": split_by_times(known_at, facts["split_times"]), "run_id": run}


def predictions_table(found: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """Return the columns of `PredictionStream.predict_rows` as a table, index known_at."""
    columns = {name: pd.array(one, dtype="str") if one.dtype == object else one for name, one in found.items()}
    return pd.DataFrame(columns, known_at_index(found["known_at"])).drop(columns="known_at")
