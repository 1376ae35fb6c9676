"""Verdicts on class probabilities: (name, value) pairs, two baselines, and how sure a gain is.

Letters: N rows in time order, 3 classes in the order short, neutral, long (-1, 0, +1).
Everywhere `w` is a weight per row (None: all ones); rows of weight 0 count for nothing.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pandas as pd

from ml_factory.errors import FactoryError, SettingsError, did_you_mean
from ml_factory.models.contract import CLASSES

CLASS_NAMES = ("short", "neutral", "long")
PROBABILITIES = [f"p_{name}" for name in CLASS_NAMES]  # columns of every table of predictions
FLOOR = float(np.finfo(np.float64).eps)  # a probability of 0 costs -log(2.2e-16) = 36 nats, as in scikit-learn


def checked_rows(y, p_N3, w=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Class codes 0..2 (int64), probabilities and weights as float64, all checked.

    Raises
    ------
    FactoryError for other labels than -1, 0, +1, shapes that do not fit, probabilities that are not finite, are
    negative or do not sum to 1 within 1e-4, negative weights, or no weight at all.
    """
    y, p_N3 = np.asarray(y), np.asarray(p_N3, dtype=np.float64)
    w = np.ones(len(y)) if w is None else np.asarray(w, dtype=np.float64)
    if p_N3.ndim != 2 or p_N3.shape[1] != 3 or y.shape != (len(p_N3),) or w.shape != y.shape:
        raise FactoryError(
            "Labels, probabilities and weights do not fit together",
            got=f"shapes {y.shape}, {p_N3.shape}, {w.shape}",
            wanted="(N,), (N, 3), (N,)",
        )
    if not np.isin(y, CLASSES).all():
        strange = y[~np.isin(y, CLASSES)][0]
        raise FactoryError("A label is none of the three classes", got=strange, wanted="-1, 0 or 1")
    if not np.isfinite(p_N3).all() or (p_N3 < 0).any() or (np.abs(p_N3.sum(axis=1) - 1) > 1e-4).any():
        bad = ~np.isfinite(p_N3).all(axis=1) | (p_N3 < 0).any(axis=1) | ~(np.abs(p_N3.sum(axis=1) - 1) <= 1e-4)
        row = int(np.argmax(bad))
        raise FactoryError(
            f"{int(bad.sum())} of {len(bad)} rows hold no probabilities",
            where=f"row {row}",
            got=p_N3[row].tolist(),
            wanted="three numbers from 0 to 1 that sum to 1",
            next_step="leave out the rows without a prediction",
        )
    if not np.isfinite(w).all() or (w < 0).any() or not w.sum() > 0:
        raise FactoryError(
            "No rows to judge", got=f"{len(w)} rows, weights summing to {w.sum():g}", wanted="weights ≥ 0, some > 0"
        )
    return y.astype(np.int64) + 1, p_N3, w


def among(p_N3, classes: Iterable[int] = CLASSES) -> np.ndarray:
    """Probabilities given that the outcome is one of `classes`: 0 for the others, rows summing to 1."""
    p_N3 = np.asarray(p_N3, dtype=np.float64)
    if set(classes) == set(CLASSES):
        return p_N3
    asked = np.where(np.isin(CLASSES, list(classes)), p_N3, 0.0)
    return asked / asked.sum(axis=1, keepdims=True)


def row_log_loss(y, p_N3) -> np.ndarray:
    """-log of the probability given to what happened, per row: float64 (N,), in nats."""
    code, p_N3, _ = checked_rows(y, p_N3)
    return -np.log(np.clip(p_N3[np.arange(len(code)), code], FLOOR, 1.0))


def row_direction_loss(y, p_N3) -> np.ndarray:
    """The part of `row_log_loss` that is about the side: -log P(side | not neutral), 0 in neutral rows; nats.

    -log p(label) = -log P(neutral or not) - log P(side | not neutral), by the chain rule. When a barrier is touched at
    all follows the hour and the volatility, and is easy; which one, is what a position needs to know.
    """
    code, p_N3, _ = checked_rows(y, p_N3)
    side = np.clip(p_N3[np.arange(len(code)), code], FLOOR, 1.0) / np.maximum(p_N3[:, 0] + p_N3[:, 2], FLOOR)
    return np.where(code == 1, 0.0, -np.log(np.clip(side, FLOOR, 1.0)))


def classification_metrics(y, p_N3, w=None) -> Iterator[tuple[str, float]]:
    """Yield (name, value): log_loss, brier, accuracy, balanced_accuracy, mcc, auc_ovr, ece.

    Equal to scikit-learn's where it has them; a class absent from `y` is left out of the averages over classes
    (balanced_accuracy, auc_ovr), and a mean over no class is NaN. log_loss in nats; brier is the sum of squares
    over the three classes (Brier 1950), from 0 to 2; ece as in `expected_calibration_error`.
    """
    code, p_N3, w = checked_rows(y, p_N3, w)
    total, hit = w.sum(), np.eye(3)[code]
    guess = p_N3.argmax(axis=1)
    yield "log_loss", float(w @ row_log_loss(y, p_N3) / total)
    yield "brier", float(w @ ((p_N3 - hit) ** 2).sum(axis=1) / total)
    yield "accuracy", float(w @ (guess == code) / total)
    confusion = np.bincount(3 * code + guess, weights=w, minlength=9).reshape(3, 3)  # rows: what happened
    happened, guessed = confusion.sum(axis=1), confusion.sum(axis=0)
    there = happened > 0
    yield "balanced_accuracy", float(np.mean(np.diag(confusion)[there] / happened[there]))
    yield "mcc", _matthews(confusion, happened, guessed)
    areas = [_auc(code == k, p_N3[:, k], w) for k in range(3) if 0 < happened[k] < total]
    yield "auc_ovr", float(np.mean(areas)) if areas else float("nan")
    yield "ece", expected_calibration_error(y, p_N3, w)


def _matthews(confusion: np.ndarray, happened: np.ndarray, guessed: np.ndarray) -> float:
    """Matthews' correlation for several classes (Gorodkin 2004, eq. 8); 0 where one side is constant."""
    total = confusion.sum()
    between = total * np.trace(confusion) - happened @ guessed
    spread = (total**2 - happened @ happened) * (total**2 - guessed @ guessed)
    return float(between / np.sqrt(spread)) if spread > 1e-12 * total**4 else 0.0


def _auc(positive: np.ndarray, score: np.ndarray, w: np.ndarray) -> float:
    """Weighted share of (positive, negative) pairs in the right order, ties counting half."""
    _, level = np.unique(score, return_inverse=True)
    above = np.bincount(level, weights=w * positive)
    below = np.bincount(level, weights=w * ~positive)
    won = above * (np.cumsum(below) - below / 2)
    return float(won.sum() / (above.sum() * below.sum()))


def expected_calibration_error(y, p_N3, w=None, bins: int = 15) -> float:
    """Weighted mean over confidence bins of |accuracy - confidence| of the top class (Guo et al. 2017, eq. 3)."""
    code, p_N3, w = checked_rows(y, p_N3, w)
    confidence = p_N3.max(axis=1)
    which = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)  # bins (low, high], as there
    miss = np.bincount(which, weights=w * ((p_N3.argmax(axis=1) == code) - confidence), minlength=bins)
    return float(np.abs(miss).sum() / w.sum())


# ---- baselines -------------------------------------------------------------------------------------------------


def class_shares(y, w=None) -> np.ndarray:
    """Weighted share of each class, float64 (3,). Where one is absent half a row is added to each (Jeffreys):
    never seen is not impossible."""
    y = np.asarray(y)
    w = np.ones(len(y)) if w is None else np.asarray(w, dtype=np.float64)
    if not len(y) or not w.sum() > 0 or not np.isin(y, CLASSES).all():
        raise FactoryError(
            "No class shares without labels", got=f"{len(y)} rows", wanted="labels -1, 0, 1 of weight > 0"
        )
    counts = np.bincount(y.astype(np.int64) + 1, weights=w * (np.count_nonzero(w) / w.sum()), minlength=3)
    if (counts == 0).any():
        counts = counts + 0.5
    return counts / counts.sum()


def prior_probabilities(y_train, w, n: int) -> np.ndarray:
    """Baseline `prior`: the training rows' class shares, for each of n rows. Float64 (n, 3)."""
    return np.tile(class_shares(y_train, w), (n, 1))


def last_move_probabilities(last_move_train, y_train, last_move, w=None) -> np.ndarray:
    """Baseline `last_move`: class shares given the sign of the last base bar's return, counted on training rows.

    Parameters
    ----------
    last_move_train, y_train, w : (M,) the training rows' last returns, labels and weights.
    last_move : (N,) last returns of the rows to predict; NaN where there is none.

    Returns
    -------
    float64 (N, 3). Each sign's counts are joined by one row spread like the class shares, so a sign seen rarely
    leans on the prior, and one never seen (or NaN) gets the prior itself.
    """
    moves, last_move = np.sign(np.asarray(last_move_train, dtype=np.float64)), np.sign(np.asarray(last_move, float))
    y_train = np.asarray(y_train)
    w = np.ones(len(y_train)) if w is None else np.asarray(w, dtype=np.float64)
    prior = class_shares(y_train, w)
    w = w * (np.count_nonzero(w) / w.sum())
    p_N3 = np.tile(prior, (len(last_move), 1))
    for sign in (-1.0, 0.0, 1.0):
        seen = moves == sign
        counts = np.bincount(y_train[seen].astype(np.int64) + 1, weights=w[seen], minlength=3) + prior
        p_N3[last_move == sign] = counts / counts.sum()
    return p_N3


# ---- how sure is a gain ----------------------------------------------------------------------------------------


def mean_with_error(values, w=None, horizon: int = 1) -> tuple[float, float, float]:
    """Weighted mean of a dependent series, its standard error, and the factor of a 95 % interval.

    Labels overlap and volatility clusters, so neighbouring rows say the same thing twice. The error is Newey and
    West's (1987, Bartlett kernel) of the linearised ratio Σwv/Σw, with the truncation 1.3·√N that Lazarus, Lewis,
    Stock and Watson (2018) recommend, at least twice the horizon; the factor is Kiefer and Vogelsang's (2005,
    table 1, Bartlett, 97.5 %) for that truncation, 1.96 where it is a small part of N.

    Parameters
    ----------
    values : (N,) in time order.  horizon : rows over which one label reaches.

    Returns
    -------
    (mean, standard error, factor); the last two are NaN below 8 rows of weight.
    """
    values = np.asarray(values, dtype=np.float64)
    w = np.ones(len(values)) if w is None else np.asarray(w, dtype=np.float64)
    values, w = values[w > 0], w[w > 0]
    n = len(values)
    mean = float(w @ values / w.sum())
    if n < 8:
        return mean, float("nan"), float("nan")
    lags = min(max(2 * int(horizon), int(np.ceil(1.3 * np.sqrt(n)))), n - 1)
    influence = w * (values - mean) / w.mean()
    width = 1 << int(2 * n - 1).bit_length()  # room enough that the circular correlation does not wrap
    spectrum = np.fft.rfft(influence, width)
    covariance = np.fft.irfft(spectrum.real**2 + spectrum.imag**2, width)[: lags + 1] / n
    kernel = 1 - np.arange(1, lags + 1) / (lags + 1)
    variance = max(covariance[0] + 2 * kernel @ covariance[1:], 0.0)
    b = lags / n
    return mean, float(np.sqrt(variance / n)), 1.96 + 2.9694 * b + 0.4160 * b**2 - 0.5324 * b**3


def metrics_table(
    probabilities: Mapping[str, np.ndarray], y, w=None, *, reference: str = "prior", horizon: int = 1,
    effective_rows: float | None = None,
) -> pd.DataFrame:  # fmt: skip
    """All metrics of all forecasts on the same rows, and each one's gain in log loss over the reference.

    Parameters
    ----------
    probabilities : name -> (N, 3), all on the rows of `y`, in time order.
    horizon : rows over which one label reaches; see `mean_with_error`.
    effective_rows : what `targets.weights.effective_rows` says of these rows; default: as if no two labels overlapped.

    Returns
    -------
    DataFrame indexed by name: those of `classification_metrics`, then `log_loss_gain` (reference minus this one:
    positive is better), `gain_se`, `gain_low` and `gain_high` (95 %); `direction_gain`, the part of it that is about
    the side (`row_direction_loss`), `direction_low` and `direction_high`; `rows` (of weight > 0) and `effective_rows`.
    """
    if reference not in probabilities:
        raise SettingsError(
            "Nothing to compare with", got=reference, next_step=did_you_mean(reference, probabilities or ["prior"])
        )
    weights = np.ones(len(np.asarray(y))) if w is None else np.asarray(w, dtype=np.float64)
    if effective_rows is None:
        effective_rows = float(weights.sum() ** 2 / (weights**2).sum())  # Kish (1965)
    base, base_side = row_log_loss(y, probabilities[reference]), row_direction_loss(y, probabilities[reference])
    table = {}
    for name, p_N3 in probabilities.items():
        row = dict(classification_metrics(y, p_N3, weights))
        gain, error, factor = mean_with_error(base - row_log_loss(y, p_N3), weights, horizon)
        row |= {"log_loss_gain": gain, "gain_se": error, "gain_low": gain - factor * error}
        row["gain_high"] = gain + factor * error
        gain, error, factor = mean_with_error(base_side - row_direction_loss(y, p_N3), weights, horizon)
        row |= {"direction_gain": gain, "direction_low": gain - factor * error, "direction_high": gain + factor * error}
        row["rows"] = int((weights > 0).sum())
        row["effective_rows"] = effective_rows
        table[name] = row
    return pd.DataFrame.from_dict(table, orient="index").rename_axis("name")
