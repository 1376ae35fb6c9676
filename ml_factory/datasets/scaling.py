"""Feature scalers, fitted on training rows only: robust, standard and quantile."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from ml_factory.background import map_on_cores
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import LazyModule

special = LazyModule("scipy.special")  # only quantile scaling reads it
IQR_OF_NORMAL = 1.3489795003921634  # quartile distance of a standard normal: a scaled bell has deviation 1
QUARTILES = (0.25, 0.5, 0.75)
KNOTS = 257  # quantiles of a column
DEVIATE = 5.2  # limit of a deviate: that of one row in ten million, as in scikit-learn
COLUMNS_AT_ONCE = 16  # columns copied for their quantiles: as fast as many, and little memory
TRANSPOSED_ROWS = 8_192
BLOCK_ROWS = 65_536
SCALED_ROWS = 512  # a block of some 200 float64 columns stays in the processor's cache


class FittedStep:
    """A fitted scaler or transform, stored as the JSON values of its arrays and numbers."""

    kind: str

    def to_dict(self) -> dict:
        return {"kind": self.kind} | {name: np.asarray(value).tolist() for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, stored: dict) -> Self:
        arrays = {one.name: np.asarray(stored[one.name]) for one in fields(cls)}
        return cls(**{name: array.astype(np.float64, casting="same_kind")[()] for name, array in arrays.items()})


@dataclass(frozen=True)
class LinearScaler(FittedStep):
    """(x - center) / scale, clipped to [-clip, clip].

    center, scale : float64[F]
    """

    center: np.ndarray
    scale: np.ndarray
    clip: float = 8.0

    @classmethod
    def fit(cls, x_NF: np.ndarray, rows: np.ndarray | None = None, clip: float = 8.0) -> "LinearScaler":
        """Estimate center and scale from these rows, without non-finite values; an empty column gives (0, 1)."""
        if not 0 < clip < np.inf:
            raise SettingsError("Values cannot be clipped like this", where="clip", got=clip, wanted="a number above 0")
        center, scale = cls._center_and_scale(np.asarray(x_NF, np.float32), rows)
        # A spread at the level's own rounding error is a constant column: dividing would amplify noise.
        scale = np.where(scale > 1e-12 * np.maximum(1.0, np.abs(center)), scale, 1.0)
        return cls(np.where(np.isfinite(center), center, 0.0), scale, float(clip))

    def transform(self, x_NF: np.ndarray) -> np.ndarray:
        """Return float32 (N, F)."""

        def scaled(block: np.ndarray) -> np.ndarray:
            block = (block.astype(np.float64) - self.center) / self.scale
            return np.clip(block, -self.clip, self.clip, out=block)

        return _by_blocks(scaled, x_NF, len(self.center), type(self).__name__)


class RobustScaler(LinearScaler):
    """Center: the median. Scale: the interquartile range over that of a normal, so that a normal gets deviation 1.

    Where half the rows or more share one value that range is 0, and the standard deviation is used, or 1 where that is
    0 too. Quantiles are exact (`column_quantiles`).
    """

    kind = "robust"

    @staticmethod
    def _center_and_scale(x_NF: np.ndarray, rows: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        low, center, high = column_quantiles(x_NF, QUARTILES, rows).T
        scale = (high - low) / IQR_OF_NORMAL
        for f in np.flatnonzero(~(scale > 0) & np.isfinite(center)):
            values = x_NF[:, f] if rows is None else x_NF[rows, f]
            scale[f] = values[np.isfinite(values)].astype(np.float64).std()
        return center, scale


def column_quantiles(x_NF: np.ndarray, shares: Sequence[float], rows: np.ndarray | None = None) -> np.ndarray:
    """Compute np.quantile(column, shares) of the finite values of each column; float64 (F, Q), NaN without one.

    x_NF : float32
    rows : int64 positions of the rows to use; None: all
    """
    found = np.full((x_NF.shape[1], len(shares)), np.nan)
    if rows is not None and len(rows) and (np.diff(rows) == 1).all():
        x_NF, rows = x_NF[rows[0] : rows[-1] + 1], None  # without an index
    count = len(x_NF) if rows is None else len(rows)
    columns = np.empty((COLUMNS_AT_ONCE, count), np.float32)
    for first in range(0, x_NF.shape[1], COLUMNS_AT_ONCE):
        group = columns[: x_NF.shape[1] - first]

        def transpose(begin: int, first: int = first, group: np.ndarray = group) -> None:
            some = slice(begin, begin + TRANSPOSED_ROWS)
            block = x_NF[some if rows is None else rows[some], first : first + len(group)]
            group[:, some] = block.T

        def select(column: np.ndarray) -> object:
            finite = column if np.isfinite(column).all() else column[np.isfinite(column)]
            return _quantiles(finite, shares) if len(finite) else np.nan

        map_on_cores(transpose, range(0, count, TRANSPOSED_ROWS))
        for f, made in enumerate(map_on_cores(select, group), first):
            found[f] = made
    return found + 0.0  # a zero has no sign


def _quantiles(x: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Return the bits of np.quantile of float64, for float32: it selects among half the bytes. x is reordered."""
    place = (len(x) - 1) * np.asarray(shares, np.float64)
    low = np.floor(place).astype(np.int64)
    high = np.minimum(low + 1, len(x) - 1)
    x.partition(sorted({*low.tolist(), *high.tolist()}))
    below, above, share = x[low].astype(np.float64), x[high].astype(np.float64), place - low
    step = above - below
    return np.where(share >= 0.5, above - step * (1 - share), below + step * share)


class StandardScaler(LinearScaler):
    """Center: the mean. Scale: the standard deviation (of the population)."""

    kind = "standard"

    @staticmethod
    def _center_and_scale(x_NF: np.ndarray, rows: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        total, squares, count = np.zeros((3, x_NF.shape[1]))
        for block in _blocks(x_NF, rows):
            finite = np.isfinite(block)
            count += finite.sum(axis=0)
            total += np.where(finite, block, 0.0).sum(axis=0)
        mean = total / np.maximum(count, 1)
        for block in _blocks(x_NF, rows):
            squares += np.square(np.where(np.isfinite(block), block - mean, 0.0)).sum(axis=0)
        return mean, np.sqrt(squares / np.maximum(count, 1))


@dataclass(frozen=True)
class QuantileScaler(FittedStep):
    """The normal deviate of each value's rank among the training rows, by interpolation between stored quantiles.

    knots : float64 (F, 257), the quantiles at even shares from 0 to 1; among equal knots the middle rank holds
    """

    knots: np.ndarray

    kind = "quantile"

    @classmethod
    def fit(cls, x_NF: np.ndarray, rows: np.ndarray | None = None) -> "QuantileScaler":
        """Store quantiles of each column over these rows; an empty column gives 0 everywhere."""
        shares = tuple(np.linspace(0, 1, KNOTS).tolist())
        return cls(np.nan_to_num(column_quantiles(np.asarray(x_NF, np.float32), shares, rows), nan=0.0))

    def transform(self, x_NF: np.ndarray) -> np.ndarray:
        """Return deviates as float32 (N, F), 0 for a missing value.

        A value beyond the outer knots has their rank. Raises SettingsError for another number of columns.
        """
        shares = np.linspace(0, 1, KNOTS)

        def ranked(block: np.ndarray) -> np.ndarray:
            made = np.empty(block.shape)
            for f, knots in enumerate(self.knots):
                column = block[:, f].astype(np.float64)
                # From below and from above: equal knots give the middle of their shares.
                below, above = np.interp(column, knots, shares), np.interp(-column, -knots[::-1], 1 - shares[::-1])
                made[:, f] = (below + 1 - above) / 2
            return np.clip(special.ndtri(made), -DEVIATE, DEVIATE)

        return _by_blocks(ranked, x_NF, len(self.knots), type(self).__name__)


SCALERS = {scaler.kind: scaler for scaler in (RobustScaler, StandardScaler, QuantileScaler)}


def _blocks(x_NF: np.ndarray, rows: np.ndarray | None) -> Iterator[np.ndarray]:
    """Yield the rows as float64, a block at a time."""
    for first in range(0, len(x_NF) if rows is None else len(rows), BLOCK_ROWS):
        block = slice(first, first + BLOCK_ROWS)
        yield x_NF[block if rows is None else rows[block]].astype(np.float64)


def _by_blocks(scaled, x_NF: np.ndarray, features: int, name: str) -> np.ndarray:
    if x_NF.ndim != 2 or x_NF.shape[1] != features:
        raise SettingsError(
            "These features are not the ones the scaler was fitted on",
            where=f"{name}.transform",
            got=f"an array of shape {x_NF.shape}",
            wanted=f"{features} columns",
            next_step="build the features with the settings the scaler was stored with",
        )
    out = np.empty(x_NF.shape, np.float32)
    for first in range(0, len(x_NF), SCALED_ROWS):
        block = scaled(x_NF[first : first + SCALED_ROWS])
        out[first : first + SCALED_ROWS] = np.nan_to_num(block, copy=False, nan=0.0)
    return out
