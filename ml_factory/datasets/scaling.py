"""Columns of very different spread made comparable, by numbers read off training rows only."""

from dataclasses import dataclass

import numpy as np

from ml_factory.errors import FactoryError, SettingsError

IQR_OF_NORMAL = 1.3489795003921634  # quartile distance of a standard normal: a scaled bell has deviation 1
BLOCK_ROWS = 65_536


@dataclass(frozen=True)
class RobustScaler:
    """(x - median) / spread, clipped to [-clip, clip], float32; NaN becomes 0, the median.

    center, scale : float64[F]. The spread is the quartile distance over that of a normal; where half the rows or more
    share one value it is 0, and the standard deviation stands in, and 1 where that is 0 too.
    """

    center: np.ndarray
    scale: np.ndarray
    clip: float = 8.0

    @classmethod
    def fit(cls, x_NF: np.ndarray, clip: float = 8.0) -> "RobustScaler":
        """Read center and scale off these rows alone. Non-finite values are left out; an empty column gives (0, 1)."""
        if x_NF.ndim != 2 or not len(x_NF):
            raise SettingsError(
                "A scaler needs rows to be fitted on",
                where="RobustScaler.fit",
                got=f"an array of shape {x_NF.shape}",
                wanted="(rows, features) with at least one row",
                next_step="check that the training part of the split is not empty",
            )
        if not 0 < clip < np.inf:
            raise SettingsError("Values cannot be clipped like this", where="clip", got=clip, wanted="a number above 0")
        fitted = [_center_and_scale(x_NF[:, column]) for column in range(x_NF.shape[1])]
        center, scale = np.array(fitted, dtype=np.float64).reshape(-1, 2).T.copy()
        return cls(center, scale, float(clip))

    def transform(self, x_NF: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """float32 (N, F); `out` takes the result where memory is short. Column by column the same for any rows."""
        if x_NF.ndim != 2 or x_NF.shape[1] != len(self.center):
            raise SettingsError(
                "These features are not the ones the scaler was fitted on",
                where="RobustScaler.transform",
                got=f"an array of shape {x_NF.shape}",
                wanted=f"{len(self.center)} columns",
                next_step="build the features with the settings the scaler was stored with",
            )
        out = np.empty(x_NF.shape, np.float32) if out is None else out
        for first in range(0, len(x_NF), BLOCK_ROWS):
            block = (x_NF[first : first + BLOCK_ROWS].astype(np.float64) - self.center) / self.scale
            np.clip(block, -self.clip, self.clip, out=block)
            out[first : first + BLOCK_ROWS] = np.nan_to_num(block, copy=False, nan=0.0)
        return out

    def to_dict(self) -> dict:
        """Numbers only; JSON keeps them exactly."""
        return {"kind": "robust", "center": self.center.tolist(), "scale": self.scale.tolist(), "clip": self.clip}

    @classmethod
    def from_dict(cls, stored: dict) -> "RobustScaler":
        try:
            center, scale = (np.asarray(stored[name], np.float64) for name in ("center", "scale"))
            clip = float(stored["clip"])
            sound = stored["kind"] == "robust" and center.ndim == 1 and center.shape == scale.shape
            sound = sound and bool(np.isfinite(center).all() and np.isfinite(scale).all() and (scale > 0).all())
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound or not 0 < clip < np.inf:
            raise FactoryError(
                "A stored scaler cannot be read",
                where="scaler",
                got=sorted(stored) if isinstance(stored, dict) else type(stored).__name__,
                wanted="kind 'robust', center and positive scale of one length, clip",
                next_step="run prepare again",
            )
        return cls(center, scale, clip)


def _center_and_scale(column: np.ndarray) -> tuple[float, float]:
    values = column[np.isfinite(column)].astype(np.float64)
    if not len(values):
        return 0.0, 1.0
    low, center, high = np.quantile(values, (0.25, 0.5, 0.75))
    scale = (high - low) / IQR_OF_NORMAL
    if not scale > 0:
        scale = values.std()
    # A spread at the rounding of the level itself is a constant column: dividing would blow noise up.
    floor = 1e-12 * max(1.0, abs(center))
    return float(center), float(scale) if scale > floor else 1.0
