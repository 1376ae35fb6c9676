"""Probabilities that mean what they say: temperature, and the table behind a reliability plot."""

from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
from scipy.optimize import brentq

from ml_factory.errors import SettingsError
from ml_factory.evaluation.metrics import CLASSES, checked_rows

SMALLEST = 1e-12  # a probability below this is taken for this, so that its logarithm stays a number


def log_probabilities(p_N3) -> np.ndarray:
    """log p, float64 (N, 3), with p floored at 1e-12."""
    return np.log(np.clip(np.asarray(p_N3, dtype=np.float64), SMALLEST, 1.0))


def softmax(z_N3: np.ndarray) -> np.ndarray:
    """Rows of exp(z) scaled to sum to 1, without overflow."""
    e = np.exp(z_N3 - z_N3.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class Temperature:
    """p ∝ p^(1/T): above 1 softens, below 1 sharpens; the order of the classes never changes (Guo et al. 2017, §4.2).

    Fit it on validation rows alone: on training rows it learns the model's overfit, on test rows it cheats.
    """

    temperature: float = 1.0

    LOWEST, HIGHEST = 0.2, 20.0  # sharper than that is a broken model, and could not be undone above the floor of 1e-12

    def __post_init__(self):
        if not (np.isfinite(self.temperature) and self.temperature > 0):
            raise SettingsError("A temperature must be positive", got=self.temperature, wanted="a number above 0")

    @classmethod
    def fit(cls, logp_N3, y, w=None) -> "Temperature":
        """The T that makes the weighted log loss of softmax(logp / T) least on these rows.

        Parameters
        ----------
        logp_N3 : log-probabilities (or logits) of the validation rows.  y : their labels.  w : their weights.
        """
        logp_N3 = np.asarray(logp_N3, dtype=np.float64)
        code, _, w = checked_rows(y, softmax(logp_N3), w)
        chosen = logp_N3[np.arange(len(code)), code]

        def slope(sharpness: float) -> float:
            # The loss is convex in 1/T: its derivative is the mean over rows of E_p[z] - z of what happened.
            return float(w @ ((softmax(sharpness * logp_N3) * logp_N3).sum(axis=1) - chosen))

        soft, sharp = 1 / cls.HIGHEST, 1 / cls.LOWEST
        if slope(soft) >= 0:  # the model knows nothing here, or less: as flat as allowed
            flat = np.ptp(logp_N3, axis=1).max() == 0
            return cls(1.0 if flat else cls.HIGHEST)
        if slope(sharp) <= 0:
            return cls(cls.LOWEST)
        return cls(1 / brentq(slope, soft, sharp, xtol=1e-12, rtol=1e-12))

    def apply(self, p_N3) -> np.ndarray:
        """Calibrated probabilities, float64 (N, 3)."""
        if self.temperature == 1.0:
            return np.asarray(p_N3, dtype=np.float64)
        return softmax(log_probabilities(p_N3) / self.temperature)

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, facts: dict) -> "Temperature":
        return cls(float(facts["temperature"]))


def reliability(y, p_N3, bins: int = 10, w=None, *, strategy: str = "quantile", horizon: int = 1) -> pd.DataFrame:
    """Said against happened, per class and bin of the said probability.

    Parameters
    ----------
    bins : how many.  strategy : "quantile" (equal numbers of rows) or "uniform" (equal widths of [0, 1]).
    horizon : rows over which one label reaches. Overlapping labels are not separate witnesses, so the standard
        error counts (Σw)²/Σw²/horizon of them, which is cautious.

    Returns
    -------
    DataFrame with a row per class and non-empty bin: class (-1, 0, 1), low, high (the bin's edges), probability
    (mean said), frequency (weighted share that happened), error (binomial standard error), rows.
    """
    code, p_N3, w = checked_rows(y, p_N3, w)
    if bins < 1 or strategy not in ("quantile", "uniform"):
        raise SettingsError("No such bins", got=f"{bins} {strategy}", wanted="1 or more, quantile or uniform")
    pieces = []
    for k, name in enumerate(CLASSES):
        said, happened = p_N3[w > 0, k], (code == k)[w > 0].astype(np.float64)
        weight = w[w > 0]
        grid = np.linspace(0, 1, bins + 1)
        edges = np.unique(np.quantile(said, grid)) if strategy == "quantile" else grid
        which = np.searchsorted(edges[1:-1], said)
        inside = np.unique(which)
        total = np.bincount(which, weights=weight)[inside]
        share = np.bincount(which, weights=weight * happened)[inside] / total
        witnesses = total**2 / np.bincount(which, weights=weight**2)[inside] / max(1, horizon)
        # One witness more of each kind (Agresti and Coull 1998): a bin without a single hit is not a sure thing.
        guarded = (share * witnesses + 2) / (witnesses + 4)
        pieces.append(
            pd.DataFrame(
                {
                    "class": name,
                    "low": edges[inside],
                    "high": edges[np.minimum(inside + 1, len(edges) - 1)],
                    "probability": np.bincount(which, weights=weight * said)[inside] / total,
                    "frequency": share,
                    "error": np.sqrt(guarded * (1 - guarded) / (witnesses + 4)),
                    "rows": np.bincount(which)[inside],
                }
            )
        )
    return pd.concat(pieces, ignore_index=True)
