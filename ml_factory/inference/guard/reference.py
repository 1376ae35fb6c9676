"""Reference of a bundle: what its training rows looked like, and how far validation rows were from them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ml_factory.errors import CheckpointError, refuse_damaged_content
from ml_factory.inference.guard.histograms import ReferenceBins
from ml_factory.storage.serialization import deserialize_state, serialize_state


@dataclass(frozen=True)
class ColumnReference:
    """Bins of C columns, and thresholds of the distances of a window from them.

    bins : of training rows
    psi, ks : float64 [C], thresholds
    window, step : rows of a window, and rows from one window to the next
    """

    bins: ReferenceBins
    psi: np.ndarray
    ks: np.ndarray
    window: int
    step: int

    def to_state(self) -> dict:
        return {
            "edges": self.bins.edges, "shares": self.bins.shares, "psi": self.psi, "ks": self.ks,
            "window": self.window, "step": self.step,
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping) -> "ColumnReference":
        bins = ReferenceBins(np.array(state["edges"]), np.array(state["shares"]))
        return cls(bins, np.array(state["psi"]), np.array(state["ks"]), int(state["window"]), int(state["step"]))


@dataclass(frozen=True)
class GuardReference:
    """The reference of a bundle.

    season : of `bar_channels.BarChannels`
    limits : "gap_minutes", "unit_jump", "stuck_bars" of `bar_checks.BarChecks`, and "off_tick", the share of training
        bars with prices off the tick, which older references are without
    bars : channels of the bars
    follow, scale, levels, capital : of `block_martingale`, and the threshold of the log capital
    rows : features, and after them the three probabilities
    low, high : float64 [F], the range of each feature on training rows
    strange_features : threshold of the number of features whose window is beyond its own
    outcomes : threshold of the log capital of `outcomes.OutcomeCheck`
    """

    season: Mapping
    limits: Mapping[str, float]
    bars: ColumnReference
    follow: np.ndarray
    scale: np.ndarray
    levels: np.ndarray
    capital: float
    rows: ColumnReference
    low: np.ndarray
    high: np.ndarray
    strange_features: float
    outcomes: float

    def to_bytes(self) -> bytes:
        return serialize_state({
            "season": {name: np.asarray(value, np.float64) for name, value in self.season.items()},
            "limits": {name: float(value) for name, value in self.limits.items()},
            "bars": self.bars.to_state(), "rows": self.rows.to_state(), "follow": self.follow, "scale": self.scale,
            "levels": self.levels, "capital": self.capital, "low": self.low, "high": self.high,
            "strange_features": self.strange_features, "outcomes": self.outcomes,
        })  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes, where: object = None) -> "GuardReference":
        """Read the bytes of `to_bytes`. Raises CheckpointError for another form."""
        again = "export it again (python -m ml_factory export)"
        with refuse_damaged_content(
            CheckpointError, "The guard's reference in this bundle is damaged", where=where, next_step=again
        ):
            state = deserialize_state(data)
            numbers = ("capital", "strange_features", "outcomes")
            return cls(
                season={name: np.array(value) for name, value in state["season"].items()},
                limits={name: float(value) for name, value in state["limits"].items()},
                bars=ColumnReference.from_state(state["bars"]), rows=ColumnReference.from_state(state["rows"]),
                **{name: np.array(state[name]) for name in ("follow", "scale", "levels", "low", "high")},
                **{name: float(state[name]) for name in numbers},
            )  # fmt: skip
