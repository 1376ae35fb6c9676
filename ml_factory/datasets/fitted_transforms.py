"""Transforms fitted for each fold on its training rows: PCA, fractional differences and a two-state HMM.

Each is fitted on a `TransformFitSample`, stores numbers only, and transforms every row from itself and earlier
rows: causal, and the same bits whatever comes after.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numba import njit

from ml_factory.errors import SettingsError
from ml_factory.features.fractional import fractional_difference_weights

SAME_RUN = 64  # training rows at most this far apart are one run: a few between them have no label
MOST_ROWS = 200_000  # of the training rows, to estimate a few hundred numbers


@dataclass(frozen=True)
class TransformFitSample:
    """Input of a fit: all rows, of which only the training rows may be used.

    x_NF : float32, all rows
    names : its columns
    rows : int64 positions of the training rows, increasing
    close : float64 (N,), for steps that use the price
    targets : the labels of the training rows, in their order, for steps that measure the value of a column
    """

    x_NF: np.ndarray
    names: tuple[str, ...]
    rows: np.ndarray
    close: np.ndarray | None = None
    targets: pd.DataFrame | None = None

    def subsample(self, most: int = MOST_ROWS) -> np.ndarray:
        """Return at most `most` of the training rows, evenly spread: positions into `rows`."""
        return np.linspace(0, len(self.rows) - 1, min(most, len(self.rows))).astype(np.int64)

    def log_close(self) -> np.ndarray:
        """Return log closes of the longest run of training rows. Raises SettingsError without closes."""
        _require_close(self.close, "a step that follows the price")
        runs = np.split(self.rows, np.flatnonzero(np.diff(self.rows) > SAME_RUN) + 1)
        return np.log(self.close[max(runs, key=len)])


@dataclass(frozen=True)
class PcaTransform:
    """The leading principal components instead of the columns; missing values count as the mean.

    center, scale : float64[F]
    loadings : float64 (F, K), the largest of each component positive
    """

    center: np.ndarray
    scale: np.ndarray
    loadings: np.ndarray

    kind = "pca"

    @classmethod
    def fit(cls, sample: TransformFitSample, share: float = 0.95, most: int = 1000) -> "PcaTransform":
        """Fit as many components as hold `share` of the variance of the standardised columns, at most `most`."""
        _check_share(share, "pca share")
        x = sample.x_NF[sample.rows[sample.subsample()]].astype(np.float64)
        x[~np.isfinite(x)] = np.nan
        present = ~np.isnan(x).all(axis=0)
        center, scale = np.zeros(x.shape[1]), np.ones(x.shape[1])
        center[present], scale[present] = np.nanmean(x[:, present], axis=0), np.nanstd(x[:, present], axis=0)
        scale[~(scale > 1e-12 * np.maximum(1.0, np.abs(center)))] = 1.0
        z = np.nan_to_num((x - center) / scale)
        values, vectors = np.linalg.eigh(z.T @ z / len(z))
        values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
        count = 1 + int(np.searchsorted(np.cumsum(values), share * values.sum()))
        loadings = vectors[:, : max(1, min(count, most, len(values)))]
        largest = loadings[np.abs(loadings).argmax(axis=0), np.arange(loadings.shape[1])]
        return cls(center, scale, np.ascontiguousarray(loadings * np.where(largest < 0, -1.0, 1.0)))

    def transform(self, x_NF: np.ndarray, close: np.ndarray | None = None) -> np.ndarray:
        """Return float32 (N, K)."""
        return _project(np.ascontiguousarray(x_NF, np.float32), self.center, self.scale, self.loadings)

    def names_out(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"component_{k + 1}" for k in range(self.loadings.shape[1]))

    def to_dict(self) -> dict:
        return {"kind": self.kind} | {name: getattr(self, name).tolist() for name in ("center", "scale", "loadings")}

    @classmethod
    def from_dict(cls, stored: dict) -> "PcaTransform":
        return cls(*(np.asarray(stored[name], np.float64) for name in ("center", "scale", "loadings")))


@dataclass(frozen=True)
class FractionalDifferenceTransform:
    """One additional column: the log price differenced `order` times, over a window of fixed width (AFML 5.5).

    NaN until the window is full; a scaler that follows makes that 0.
    """

    order: float
    window: int = 256

    kind = "fractional_difference"

    @classmethod
    def fit(cls, sample: TransformFitSample, window: int = 256, step: float = 0.05) -> "FractionalDifferenceTransform":
        """Fit the smallest order, in steps, that is stationary by an ADF test at 5 %; 1 where none is."""
        _check_share(step, "fractional_difference step")
        path = sample.log_close()[-MOST_ROWS:]
        if len(path) < 2 * window:
            raise SettingsError("Too few consecutive training rows", where=cls.kind, got=len(path), wanted=2 * window)
        path = path - path[0]
        for order in np.arange(step, 1.0, step).round(10):
            if adf_rejects_unit_root(_difference(path, fractional_difference_weights(order, window))[window - 1 :]):
                return cls(float(order), window)
        return cls(1.0, window)

    def transform(self, x_NF: np.ndarray, close: np.ndarray | None = None) -> np.ndarray:
        """Return float32 (N, F + 1)."""
        _require_close(close, self.kind)
        return np.column_stack([x_NF, self.difference_closes(close).astype(np.float32)])

    def difference_closes(self, close: np.ndarray) -> np.ndarray:
        """Return float64[N], the differences of the log closes; NaN until the window is full."""
        return _difference(np.log(close), fractional_difference_weights(self.order, self.window))

    def names_out(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return (*names, "log_price_differenced")

    def to_dict(self) -> dict:
        return {"kind": self.kind, "order": self.order, "window": self.window}

    @classmethod
    def from_dict(cls, stored: dict) -> "FractionalDifferenceTransform":
        return cls(float(stored["order"]), int(stored["window"]))


@dataclass(frozen=True)
class TwoStateHmmTransform:
    """One additional column: probability of the more volatile of two states, given returns up to the row itself.

    Gaussian returns, mean and deviation by state (calm, volatile), a Markov chain between them (Hamilton 1989); fitted
    by EM (Baum-Welch). Only filtered probabilities are returned: smoothed ones use the future.

    mean, deviation : float64[2]
    stay : float64[2], the probability of staying in each state
    """

    mean: np.ndarray
    deviation: np.ndarray
    stay: np.ndarray

    kind = "two_state_hmm"

    @classmethod
    def fit(cls, sample: TransformFitSample, rounds: int = 100) -> "TwoStateHmmTransform":
        """Run EM until the likelihood grows by less than a millionth a return, at most `rounds` times."""
        returns = np.diff(sample.log_close())
        spread = returns.std() if len(returns) > 100 else 0.0
        if not spread > 0:
            got = f"{len(returns)} returns of deviation {spread}"
            raise SettingsError("Too few moves to distinguish two states", where=cls.kind, got=got, wanted="over 100")
        mean, deviation, stay = _baum_welch(returns / spread, rounds)
        order = np.argsort(deviation)
        return cls(mean[order] * spread, deviation[order] * spread, stay[order])

    def transform(self, x_NF: np.ndarray, close: np.ndarray | None = None) -> np.ndarray:
        """Return float32 (N, F + 1)."""
        _require_close(close, self.kind)
        returns = np.diff(np.log(close), prepend=np.nan)
        return np.column_stack([x_NF, self.filter_returns(returns, self.initial_prior()).astype(np.float32)])

    def initial_prior(self) -> np.ndarray:
        """Return float64[2], the probability of each state before the first return."""
        leave = 1.0 - self.stay
        return np.array([leave[1], leave[0]]) / max(leave.sum(), 1e-300)

    def filter_returns(self, returns: np.ndarray, prior: np.ndarray) -> np.ndarray:
        """Return float64[N], the probability of the volatile state after each return; a missing one leaves the prior.

        prior : float64[2], before the first of these returns; set to that after the last one.
        """
        return _filtered(returns, self.mean, self.deviation, self.stay, prior)

    def names_out(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return (*names, "wild_state")

    def to_dict(self) -> dict:
        return {"kind": self.kind} | {name: getattr(self, name).tolist() for name in ("mean", "deviation", "stay")}

    @classmethod
    def from_dict(cls, stored: dict) -> "TwoStateHmmTransform":
        return cls(*(np.asarray(stored[name], np.float64) for name in ("mean", "deviation", "stay")))


def _require_close(close: np.ndarray | None, what: str) -> None:
    """Raise SettingsError where there are no closes."""
    if close is None:
        step = "pass the closes stored with the features"
        raise SettingsError("This needs the closes of the rows", where=what, got="none", next_step=step)


def adf_rejects_unit_root(x: np.ndarray) -> bool:
    """Return whether the augmented Dickey-Fuller test, with a constant and one lag, rejects a unit root at 5 %.

    Critical value: MacKinnon (2010), table 2, one variable, constant.
    """
    step = np.diff(x)
    design = np.column_stack([x[1:-1], step[:-1], np.ones(len(step) - 1)])
    beta, _, rank, _ = np.linalg.lstsq(design, step[1:], rcond=None)
    if rank < design.shape[1]:
        return False
    n = len(design)
    residual = step[1:] - design @ beta
    variance = residual @ residual / (n - design.shape[1]) * np.linalg.inv(design.T @ design)[0, 0]
    return bool(beta[0] / np.sqrt(variance) < -2.86154 - 2.8903 / n - 4.234 / n**2 - 40.04 / n**3)


def _check_share(value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise SettingsError("Not a share", where=where, got=repr(value), wanted="above 0, at most 1")


@njit(cache=True, nogil=True)
def _project(x_NF, center, scale, loadings):
    """Project row by row in one order of addition, so that a row's bits do not depend on other rows."""
    out = np.empty((len(x_NF), loadings.shape[1]), np.float32)
    total = np.empty(loadings.shape[1])
    for i in range(len(x_NF)):
        total[:] = 0.0
        for f in range(len(center)):
            z = (x_NF[i, f] - center[f]) / scale[f]
            if np.isfinite(z):
                for k in range(len(total)):
                    total[k] += z * loadings[f, k]
        out[i] = total
    return out


@njit(cache=True, nogil=True)
def _difference(x, weights):
    """Return the sum of weights[k] * x k rows ago, in one order of addition; NaN until the window is full."""
    out = np.full(len(x), np.nan)
    for i in range(len(weights) - 1, len(x)):
        total = 0.0
        for k in range(len(weights)):
            total += weights[k] * x[i - k]
        out[i] = total
    return out


@njit(cache=True, nogil=True)
def _weigh(r, mean, deviation, prior, posterior):
    """Update prior probabilities of the two states to posterior ones, given one return; return its density."""
    for k in range(2):
        z = (r - mean[k]) / deviation[k]
        posterior[k] = prior[k] * np.exp(-0.5 * z * z) / deviation[k]
    density = posterior[0] + posterior[1]
    if density <= 1e-300:  # beyond both densities: the wider one
        posterior[0], posterior[1] = (0.0, 1.0) if deviation[1] >= deviation[0] else (1.0, 0.0)
        return 1e-300
    posterior /= density
    return density


@njit(cache=True, nogil=True)
def _filtered(returns, mean, deviation, stay, prior):
    """Return float64[N]: probability of state 1 given the returns so far; a missing return leaves the prior."""
    out = np.empty(len(returns))
    leave = 1.0 - stay
    posterior = np.empty(2)
    for i in range(len(returns)):
        posterior[:] = prior
        if np.isfinite(returns[i]):
            _weigh(returns[i], mean, deviation, prior, posterior)
        out[i] = posterior[1]
        prior[0] = posterior[0] * stay[0] + posterior[1] * leave[1]
        prior[1] = posterior[1] * stay[1] + posterior[0] * leave[0]
    return out


@njit(cache=True, nogil=True)
def _baum_welch(r, rounds):
    """Estimate mean, deviation and stay probability by EM from returns of deviation 1 (Rabiner 1989, III.C)."""
    n = len(r)
    mean, deviation, stay = np.zeros(2), np.array([0.6, 1.6]), np.array([0.97, 0.95])
    ahead, post = np.empty((n, 2)), np.empty((n, 2))
    before = -np.inf
    for _ in range(rounds):
        leave = 1.0 - stay
        prior = np.array([leave[1], leave[0]]) / leave.sum()
        likelihood = 0.0
        for i in range(n):
            ahead[i] = prior
            likelihood += np.log(_weigh(r[i], mean, deviation, prior, post[i]))
            prior[0] = post[i, 0] * stay[0] + post[i, 1] * leave[1]
            prior[1] = post[i, 1] * stay[1] + post[i, 0] * leave[0]
        stayed, visits = np.zeros(2), np.zeros(2)
        for i in range(n - 2, -1, -1):  # Kim's smoother: post becomes the chance given all returns
            a, b = post[i + 1, 0] / max(ahead[i + 1, 0], 1e-300), post[i + 1, 1] / max(ahead[i + 1, 1], 1e-300)
            calm, wild = post[i, 0], post[i, 1]
            stayed[0] += calm * stay[0] * a
            stayed[1] += wild * stay[1] * b
            post[i, 0] = calm * (stay[0] * a + leave[0] * b)
            post[i, 1] = wild * (stay[1] * b + leave[1] * a)
            visits += post[i]
        for k in range(2):
            weight = post[:, k].sum()
            mean[k] = (post[:, k] * r).sum() / weight
            deviation[k] = max(np.sqrt((post[:, k] * (r - mean[k]) ** 2).sum() / weight), 1e-3)
            stay[k] = min(max(stayed[k] / visits[k], 1e-6), 1.0 - 1e-6)
        if likelihood - before < 1e-6 * n:
            break
        before = likelihood
    return mean, deviation, stay
