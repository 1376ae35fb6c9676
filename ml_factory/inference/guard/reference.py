"""Reference of a bundle: what its training rows looked like, and how far validation rows were from them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ml_factory.errors import CheckpointError, refuse_damaged_content
from ml_factory.inference.guard.bar_channels import CHANNELS, STRATA
from ml_factory.inference.guard.block_martingale import TAILS
from ml_factory.inference.guard.histograms import BINS, ReferenceBins
from ml_factory.storage.serialization import deserialize_state, serialize_state

LARGEST_WINDOW = 10_000
LARGEST_REFERENCE = 32 * 2**20  # bytes
_AGAIN = "export it again (python -m ml_factory export)"


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
    def from_state(cls, state: Mapping, columns: int) -> "ColumnReference":
        edges = _array(state["edges"], (columns, BINS - 1), infinite=True)
        shares = _array(state["shares"], (columns, BINS + 1), least=0.0)
        rising = edges[:, 1:] > edges[:, :-1]
        _require(bool((rising | np.isposinf(edges[:, 1:])).all()), "edges of bins out of order")
        _require(bool((np.abs(shares.sum(axis=1) - 1) < 1e-6).all()), "shares of bins that do not sum to 1")
        window, step = _number(state["window"], LARGEST_WINDOW), _number(state["step"], LARGEST_WINDOW)
        psi, ks = (_array(state[name], (columns,), least=0.0) for name in ("psi", "ks"))
        return cls(ReferenceBins(edges, shares), psi, ks, window, step)


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
    def from_bytes(cls, data: bytes, features: int, where: object = None) -> "GuardReference":
        """Read and check the bytes of `to_bytes`.

        features : number of features of the model
        Raises CheckpointError for a damaged or foreign reference.
        """
        with refuse_damaged_content(
            CheckpointError, "The guard's reference in this bundle is damaged", where=where, next_step=_AGAIN
        ):
            _require(len(data) <= LARGEST_REFERENCE, "a reference larger than any")
            return cls._from_state(_read_state(data, where), features)

    @classmethod
    def _from_state(cls, state: Mapping, features: int) -> "GuardReference":
        season, limits, both = state["season"], state["limits"], (2 * len(CHANNELS),)
        levels = _array(state["levels"], (len(TAILS),), infinite=True)
        _require(bool((levels[1:] >= levels[:-1]).all()), "levels of scores out of order")
        low, high = (_array(state[name], (features,)) for name in ("low", "high"))
        _require(bool((low <= high).all()), "ranges of features upside down")
        scale = _array(state["scale"], both, least=0.0, infinite=True)
        _require(bool((scale > 0).all()), "deviations of 0")
        return cls(
            season={
                **{name: _array(season[name], (STRATA,)) for name in ("range", "volume")},
                **{name: _positive(season[name]) for name in ("least_range", "least_volume")},
                "slope": float(_array(season["slope"], ())),
            },
            limits={
                **{name: _positive(limits[name]) for name in ("gap_minutes", "unit_jump", "stuck_bars")},
                **({"off_tick": _share(limits["off_tick"])} if "off_tick" in limits else {}),
            },
            bars=ColumnReference.from_state(state["bars"], len(CHANNELS)), follow=_array(state["follow"], both),
            scale=scale, levels=levels, capital=_positive(state["capital"]),
            rows=ColumnReference.from_state(state["rows"], features + 3), low=low, high=high,
            strange_features=_positive(state["strange_features"]), outcomes=_positive(state["outcomes"]),
        )  # fmt: skip


def _read_state(data: bytes, where: object) -> Mapping:
    try:
        return deserialize_state(data)
    except CheckpointError as error:
        raise CheckpointError(
            "The guard's reference in this bundle is damaged", where=where, got=error.got, next_step=_AGAIN
        ) from error


def _array(value: object, shape: tuple[int, ...], *, least: float = -np.inf, infinite: bool = False) -> np.ndarray:
    """Return a float64 array of this shape. Raises ValueError for another shape, NaN, or values outside."""
    array = np.array(value, np.float64)
    _require(array.shape == shape, f"an array of shape {array.shape} instead of {shape}")
    _require(not np.isnan(array).any() and (infinite or bool(np.isfinite(array).all())), "numbers that are not finite")
    _require(bool((array >= least).all()), "numbers out of range")
    return array


def _positive(value: object) -> float:
    number = float(_array(value, ()))
    _require(0 < number < 1e12, "numbers out of range")
    return number


def _share(value: object) -> float:
    share = float(_array(value, (), least=0.0))
    _require(share <= 1, "a share above 1")
    return share


def _number(value: object, most: int) -> int:
    _require(isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most, "a window out of range")
    return int(value)  # type: ignore[call-overload]


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)
