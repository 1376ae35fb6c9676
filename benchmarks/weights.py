"""Weights of overlapping labels: ours compared with the forms of the book and of NumPy, interleaved in one run.

    python -m benchmarks.weights [--rows 3500000] [--horizons 20 240 2000] [--repeats 3]

One JSON line a measurement, best of the repeats, one thread. Labels start at random bars and live up to the horizon.
  uniqueness  ours      average_uniqueness: a difference array, then one compiled pass over the lives
              prefix    NumPy: the same array, then differences of prefix sums of 1/concurrency
              snippet   AFML snippets 4.1 and 4.2, pandas `.loc` label by label; on --few labels, since it takes so long
  effective   ours      effective_rows of as many rows
Before the clock runs, all forms must agree to 1e-9.
"""

import argparse
from collections.abc import Callable

import numpy as np
import pandas as pd

from benchmarks.measure import best, digits, in_turns, print_json, seconds
from ml_factory.targets.weights import average_uniqueness, effective_sample_size, label_concurrency


def labels(n: int, horizon: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """int64[n] first and last bar of labels on n bars and what follows."""
    rng = np.random.default_rng(seed)
    start = np.sort(rng.integers(0, n, n))
    return start, start + rng.integers(0, horizon, n)


def ours(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    return average_uniqueness(start, end, int(end.max()) + 1)


def prefix(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    share = 1.0 / np.maximum(label_concurrency(start, end, int(end.max()) + 1), 1)
    lived = np.concatenate([[0.0], np.cumsum(share)])
    return (lived[end + 1] - lived[start]) / (end - start + 1)


def snippet(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """AFML 4.1 and 4.2: count on the bars of each label, then average on them."""
    alive = pd.Series(0, index=np.arange(end.max() + 1))
    for first, last in zip(start, end, strict=True):
        alive.loc[first:last] += 1
    return np.array([(1.0 / alive.loc[first:last]).mean() for first, last in zip(start, end, strict=True)])


def measure(forms: dict[str, tuple[int, Callable[[], object]]], repeats: int, **facts) -> None:
    """One line a form: `name -> (labels, call)`, the forms in turn within each repeat."""
    runs = in_turns({name: call for name, (_, call) in forms.items()}, repeats)
    for name, (n, _) in forms.items():
        print_json(
            **facts, form=name, labels=n, **seconds(runs[name]), us_per_label=digits(best(runs[name]).wall / n * 1e6)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_500_000)
    parser.add_argument("--few", type=int, default=500)
    parser.add_argument("--horizons", type=int, nargs="+", default=[20, 240, 2000])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for horizon in options.horizons:
        many, few = (labels(n, horizon) for n in (options.rows, options.few))
        np.testing.assert_allclose(ours(*few), snippet(*few), rtol=1e-9)
        np.testing.assert_allclose(ours(*many), prefix(*many), rtol=1e-9)
        rows = pd.DataFrame({"barrier": "upper", "entry_bar": many[0] - 1, "exit_bar": many[1]})
        effective_sample_size(rows.iloc[:10])
        uniqueness = {
            "ours": (options.rows, lambda many=many: ours(*many)),
            "prefix": (options.rows, lambda many=many: prefix(*many)),
            "snippet": (options.few, lambda few=few: snippet(*few)),
        }
        measure(uniqueness, options.repeats, bench="uniqueness", horizon=horizon)
        measure({"ours": (options.rows, lambda rows=rows: effective_sample_size(rows))}, options.repeats,
                bench="effective", horizon=horizon)  # fmt: skip


if __name__ == "__main__":
    main()
