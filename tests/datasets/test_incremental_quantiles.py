"""Quantiles that go on with new rows are those of NumPy on all rows, to the bit, however the rows came."""

import numpy as np
import pytest

from ml_factory.datasets import incremental_quantiles
from ml_factory.datasets.incremental_quantiles import IncrementalQuantileState, update_incremental_quantiles
from ml_factory.storage.serialization import deserialize_state, serialize_state

SHARES = (0.25, 0.5, 0.75)
N = 12_000


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """A thousand rows are many here, and 20 of them are kept on each side of a rank."""
    monkeypatch.setattr(incremental_quantiles, "FEW_ROWS", 1_000)
    monkeypatch.setattr(incremental_quantiles, "LEAST_KEPT", 20)


def columns() -> np.ndarray:
    """Bells, a trend, ties at a quartile and beside it, flags; missing or infinite early, late, at times or always."""
    rng, n = np.random.default_rng(3), N
    x = rng.standard_normal((n, 14)).astype(np.float32)
    x[:, 1] += np.linspace(-4, 4, n)  # every new row is above nearly all before it
    x[:, 2] = np.where(np.arange(n) % 4 == 0, 0.0, x[:, 2])
    x[:, 3], x[:, 4] = rng.integers(0, 2, n), 7.0
    x[:, 5], x[: n // 2, 6], x[n // 2 :, 7] = np.nan, np.nan, np.nan
    x[::7, 8], x[::9, 9], x[::3, 10] = np.inf, -np.inf, np.nan
    x[:, 11] = np.round(x[:, 11], 2)  # a bracket's edges are values of which more come
    x[:8_000, 12][rng.random(8_000) < 0.28] = -5  # the quartile is one value, until it leaves it
    x[:, 13] = np.round(x[:, 13], 1)
    return x


def wanted(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    parts = [x[rows, f][np.isfinite(x[rows, f])].astype(float) for f in range(x.shape[1])]
    return np.array([np.quantile(part, SHARES) if len(part) else [np.nan] * len(SHARES) for part in parts])


def through_a_file(kept: IncrementalQuantileState) -> IncrementalQuantileState:
    return IncrementalQuantileState.from_state(deserialize_state(serialize_state(kept.to_state())), 1 << 40)


@pytest.mark.parametrize(("step", "most_alone"), [(1, 0), (7, 8), (150, 60)])
def test_update_quantiles_rows_in_small_steps_equal_numpy(step, most_alone, monkeypatch):
    x, passes, alone = columns(), [], []
    monkeypatch.setattr(
        incremental_quantiles,
        "_initialise",
        lambda *a, real=incremental_quantiles._initialise: passes.append(len(a[1])) or real(*a),
    )
    monkeypatch.setattr(
        incremental_quantiles,
        "_bracket_column",
        lambda *a, real=incremental_quantiles._bracket_column: alone.append(1) or real(*a),
    )
    kept, stop = None, 8_000
    for _ in range(60):
        # As a split by shares: the last rows of the training part are purged, and come in later.
        rows = np.concatenate([np.arange(40, stop - 300), np.arange(stop - 260, stop)])[: 8 * stop // 10]
        found, kept = update_incremental_quantiles(x[: stop + 50], rows, SHARES, kept and through_a_file(kept))
        np.testing.assert_array_equal(found, wanted(x, rows))
        np.testing.assert_array_equal(kept.rows, rows)
        stop = min(stop + step, N - 50)
    assert len(passes) == 1 and len(alone) <= most_alone
    assert sum(map(len, kept.values)) < 14 * 3 * 2 * 40


def test_update_quantiles_sorts_only_columns_outside_kept_brackets(monkeypatch):
    x, rows, sorted_alone = columns(), np.arange(8_000), []
    monkeypatch.setattr(
        incremental_quantiles,
        "_bracket_column",
        lambda *a, real=incremental_quantiles._bracket_column: sorted_alone.append(1) or real(*a),
    )
    _, kept = update_incremental_quantiles(x, rows, SHARES)
    assert max(map(len, kept.values)) <= 3 * (2 * max(20, 8_000 // 200) + 2)
    sorted_alone.clear()
    found, kept = update_incremental_quantiles(x, np.arange(9_000), SHARES, kept)  # an eighth more: the trend has left
    np.testing.assert_array_equal(found, wanted(x, np.arange(9_000)))
    assert 0 < len(sorted_alone) < 14
    found, _ = update_incremental_quantiles(x, np.arange(9_001), SHARES, kept)
    np.testing.assert_array_equal(found, wanted(x, np.arange(9_001)))
    sorted_alone.clear()
    monkeypatch.setattr(incremental_quantiles, "MOST_SORTED", 0)
    found, _ = update_incremental_quantiles(x, np.arange(10_000), SHARES, kept)
    np.testing.assert_array_equal(found, wanted(x, np.arange(10_000)))


@pytest.mark.parametrize("now", ["fewer rows", "other rows", "another matrix", "many more", "the same"])
def test_update_quantiles_state_of_other_rows_or_matrix_is_ignored(now):
    x = columns()
    before, kept = update_incremental_quantiles(x, np.arange(5_000), SHARES)
    if now == "another matrix":
        x = np.ascontiguousarray(x[:, :5])
    rows = {"fewer rows": np.arange(4_000), "other rows": np.arange(10, 5_010), "many more": np.arange(11_000)}
    rows = rows.get(now, np.arange(5_000))
    found, again = update_incremental_quantiles(x, rows, SHARES, kept)
    np.testing.assert_array_equal(found, wanted(x, rows))
    np.testing.assert_array_equal(again.rows, rows)
    if now == "the same":
        np.testing.assert_array_equal(found, before)


def test_update_quantiles_with_few_rows_returns_no_state():
    x = columns()
    found, kept = update_incremental_quantiles(x, np.arange(900), SHARES)
    np.testing.assert_array_equal(found, wanted(x, np.arange(900)))
    assert kept is None


def test_update_quantiles_single_value_bracket_equals_numpy():
    """Zeros reach from rank 2,000 to 4,080 of 8,000; of 8,700, with 200 more of them, to 4,280, below the median."""
    rng = np.random.default_rng(0)
    first = np.concatenate([-1 - rng.random(2_000), np.zeros(2_080), 1 + rng.random(3_920)])
    later = np.concatenate([np.zeros(200), 1 + rng.random(500)])
    x = np.concatenate([rng.permutation(first), rng.permutation(later)]).astype(np.float32)[:, None]
    found, kept = update_incremental_quantiles(x, np.arange(8_000), (0.5,))
    assert found[0, 0] == 0 == kept.low[0, 0] == kept.high[0, 0]
    found, _ = update_incremental_quantiles(x, np.arange(8_700), (0.5,), kept)
    np.testing.assert_array_equal(found, wanted(x, np.arange(8_700))[:, 1:2])
