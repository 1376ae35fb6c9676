"""Drift of a feed's bars, features and probabilities against the bundle's reference."""

from collections.abc import Iterator, Mapping

import numpy as np

from ml_factory.data.resample import BarChunk
from ml_factory.data.sessions import MarketSpec
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference.guard.alarms import Event
from ml_factory.inference.guard.bar_channels import CHANNELS, LOG_CHANNELS, MEANING, BarChannels
from ml_factory.inference.guard.block_martingale import BLOCK, BlockMartingale, BlockScores
from ml_factory.inference.guard.histograms import BINS, MovingCounts
from ml_factory.inference.guard.reference import ColumnReference, GuardReference

PART = 2000  # rows that are counted at once, which bounds memory and changes no number


class ColumnDrift:
    """Distances of the last window of C columns from their reference, at every step.

    `ratio` is the larger of PSI and KS of each column as multiples of their thresholds, in the newest window.
    """

    def __init__(self, reference: ColumnReference):
        self.reference = reference
        self._counts = MovingCounts(len(reference.psi), reference.window, reference.step)
        self.ratio = np.zeros(len(reference.psi))

    def push(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return (rows, counts, psi, ks): places in `codes` after which a window was compared, and [E, C] distances."""
        rows, counts = self._counts.push(codes)
        psi, ks = self.reference.bins.distances(counts, self.reference.window)
        if len(rows):
            self.ratio = self.ratios(psi[-1], ks[-1])
        return rows, counts, psi, ks

    def ratios(self, psi: np.ndarray, ks: np.ndarray) -> np.ndarray:
        """Return the larger of both distances as a multiple of its threshold, [..., C]; 0 where neither has one."""
        limits = (np.where(limit > 0, limit, np.inf) for limit in (self.reference.psi, self.reference.ks))
        return np.maximum(*(value / limit for value, limit in zip((psi, ks), limits, strict=True)))

    def get_state(self) -> dict:
        return {"counts": self._counts.get_state(), "ratio": self.ratio.copy()}

    def load_state(self, state: Mapping) -> None:
        self._counts.load_state(state["counts"])
        self.ratio = np.array(state["ratio"], np.float64).reshape(self.ratio.shape)


class BarDrift:
    """Drift of the bars' channels, and the martingale over blocks of them.

    scale : factor on all thresholds
    """

    def __init__(self, market: MarketSpec, reference: GuardReference, scale: float):
        self._channels, self.columns = BarChannels(market, reference.season), ColumnDrift(reference.bars)
        self._scores = BlockScores(reference.bars.bins, reference.follow, reference.scale)
        self._martingale, self._capital = BlockMartingale(reference.levels), reference.capital * scale
        self._scale = scale
        self.log_capital = 0.0

    def push(self, chunk: BarChunk, first: int) -> list[Event]:
        """Return the events of the next bars; `first` is the number of the first of them."""
        found: list[Event] = []
        for start in range(0, len(chunk.start), PART):
            codes = self.columns.reference.bins.codes(self._channels.push(chunk.part(start, start + PART)))
            found += [*self._distances(codes, first + start), *self._blocks(codes, first + start)]
        return found

    def _distances(self, codes: np.ndarray, first: int) -> Iterator[Event]:
        rows, counts, psi, ks = self.columns.push(codes)
        for place, column in np.argwhere(self.columns.ratios(psi, ks) > self._scale).tolist():
            name, reference = CHANNELS[column], self.columns.reference
            message = f"{MEANING[name]}, of the last {reference.window} bars, "
            message += _difference(reference, counts[place, column], column, name)
            message += f": PSI {psi[place, column]:.2f} and KS {ks[place, column]:.2f}, at most "
            message += f"{reference.psi[column] * self._scale:.2f} and {reference.ks[column] * self._scale:.2f} wanted"
            yield Event(first + int(rows[place]), f"drift:{name}", message)

    def _blocks(self, codes: np.ndarray, first: int) -> Iterator[Event]:
        rows, scores = self._scores.push(codes)
        capital = self._martingale.push(scores)
        self.log_capital = float(capital[-1]) if len(capital) else self.log_capital
        for place in np.flatnonzero(capital > self._capital).tolist():
            message = f"blocks of {BLOCK} bars are stranger than those of training: the log capital against them is "
            message += f"{capital[place]:.1f}, at most {self._capital:.1f} wanted"
            yield Event(first + int(rows[place]), "martingale", message)

    def get_state(self) -> dict:
        return {
            "channels": self._channels.get_state(), "columns": self.columns.get_state(),
            "scores": self._scores.get_state(), "martingale": self._martingale.get_state(),
            "log_capital": self.log_capital,
        }  # fmt: skip

    def load_state(self, state: Mapping) -> None:
        self._channels.load_state(state["channels"])
        self.columns.load_state(state["columns"])
        self._scores.load_state(state["scores"])
        self._martingale.load_state(state["martingale"])
        self.log_capital = float(state["log_capital"])


class RowDrift:
    """Drift of features, and of the probabilities predicted from them.

    names : of the features
    scale : factor on all thresholds
    """

    def __init__(self, names: list[str], reference: GuardReference, scale: float):
        self._names = [*names, *PROBABILITIES]
        self._strange, self._scale = reference.strange_features * scale, scale
        self._features, self._probabilities = (
            ColumnDrift(part) for part in split_columns(reference.rows, len(names))
        )  # fmt: skip

    def push_features(self, values: np.ndarray, bars: np.ndarray) -> list[Event]:
        """Return the events of the next feature rows, float (N, F); `bars`: the newest bar known at each."""
        reference, found = self._features.reference, []
        for start in range(0, len(values), PART):
            rows, _, psi, ks = self._features.push(reference.bins.codes(values[start : start + PART]))
            ratios = self._features.ratios(psi, ks)
            counts = (ratios > self._scale).sum(axis=1)
            for place in np.flatnonzero(counts > self._strange).tolist():
                worst = [self._names[column] for column in np.argsort(-ratios[place], kind="stable")[:3]]
                message = (
                    f"{counts[place]} features of the last {reference.window} rows are distributed otherwise than "
                )
                message += f"in training ({', '.join(worst)}, ...), at most {self._strange:.0f} wanted"
                found.append(Event(int(bars[start + rows[place]]), "drift:features", message))
        return found

    def push_probabilities(self, p_N3: np.ndarray, bars: np.ndarray) -> list[Event]:
        """Return the events of the next predictions, float (N, 3)."""
        reference, found = self._probabilities.reference, []
        for start in range(0, len(p_N3), PART):
            rows, _, psi, ks = self._probabilities.push(reference.bins.codes(p_N3[start : start + PART]))
            ratios = self._probabilities.ratios(psi, ks)
            for place in np.flatnonzero((ratios > self._scale).any(axis=1)).tolist():
                column = int(np.argmax(ratios[place]))
                message = (
                    f"{PROBABILITIES[column]} of the last {reference.window} rows is distributed otherwise than on "
                )
                message += f"validation rows: PSI {psi[place, column]:.2f} and KS {ks[place, column]:.2f}, at most "
                message += (
                    f"{reference.psi[column] * self._scale:.2f} and {reference.ks[column] * self._scale:.2f} wanted"
                )
                found.append(Event(int(bars[start + rows[place]]), "drift:probabilities", message))
        return found

    def ratios(self) -> dict[str, float]:
        """Return column -> distance in the newest window as a multiple of its threshold, the largest first."""
        ratio = np.concatenate([self._features.ratio, self._probabilities.ratio])
        return {self._names[place]: round(float(ratio[place]), 3) for place in np.argsort(-ratio, kind="stable")}

    def get_state(self) -> dict:
        return {"features": self._features.get_state(), "probabilities": self._probabilities.get_state()}

    def load_state(self, state: Mapping) -> None:
        self._features.load_state(state["features"])
        self._probabilities.load_state(state["probabilities"])


def split_columns(reference: ColumnReference, place: int) -> tuple[ColumnReference, ColumnReference]:
    """Return the reference of the columns before a place, and of those from it on."""
    bins = type(reference.bins)
    first, second = (
        ColumnReference(
            bins(reference.bins.edges[part], reference.bins.shares[part]), reference.psi[part], reference.ks[part],
            reference.window, reference.step,
        )
        for part in (slice(None, place), slice(place, None))
    )  # fmt: skip
    return first, second


def _difference(reference: ColumnReference, counts: np.ndarray, column: int, name: str) -> str:
    """Return in words how a window differs most."""
    edges, shares = reference.bins.edges[column], reference.bins.shares[column]
    if name in LOG_CHANNELS:
        ratio = float(np.exp(_median(edges, counts / max(counts.sum(), 1)) - _median(edges, shares)))
        return f"is {ratio:.2g} times the training's"
    place = int(np.argmax(np.abs(counts / reference.window - shares)))
    low = edges[place - 1] if 0 < place < BINS else -np.inf
    high = edges[place] if place < BINS - 1 else np.inf
    between = "is absent" if place == BINS else f"is between {low:.3g} and {high:.3g}"
    return f"{between} in {counts[place] / reference.window:.0%} (in training {shares[place]:.0%})"


def _median(edges: np.ndarray, shares: np.ndarray) -> float:
    """Return about the median of values in these bins, from the edges around it."""
    finite = edges[np.isfinite(edges)]
    if not len(finite):
        return 0.0
    return float(np.interp(0.5 * (1 - shares[-1]), np.cumsum(shares[: len(finite)]), finite))
