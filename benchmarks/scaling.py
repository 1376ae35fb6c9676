"""Exact robust fit compared with scikit-learn, and writing feature rows compared with pyarrow, interleaved in one run.

    python -m benchmarks.scaling [--rows 3500000] [--columns 85] [--repeats 3] [--skip-write]

One JSON line a measurement: wall and CPU seconds (the best of the repeats), values a second, how many times ours. Both
sides may use all cores and start from the same row-major float32 matrix, a mixture of bells, heavy tails, ties and
constants as features are; pyarrow starts from its own table of columns, made before the clock runs. Ours hashes what it
writes, as `prepare` does. Neither waits for the disk. Both sides are first compared: the medians and
quartiles to the bit with NumPy's, the written rows with what comes back.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.preprocessing import RobustScaler as Reference

from benchmarks.measure import best, digits, in_turns, print_json, seconds, times
from ml_factory.datasets.scaling import QuantileScaler, RobustScaler, StandardScaler, column_quantiles
from ml_factory.storage.files import files

QUARTILES = (0.25, 0.5, 0.75)


def matrix(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x_NF = rng.standard_normal((rows, columns), dtype=np.float32)
    for column in range(columns):
        kind = column % 8
        if kind == 5:
            x_NF[:, column] = np.round(x_NF[:, column] * 20)  # ties
        elif kind == 6:
            x_NF[:, column] = np.exp(2 * x_NF[:, column])  # a heavy tail
        elif kind == 7:
            x_NF[:, column] *= x_NF[:, column] > 0  # half of it zero
    return x_NF


def report_sides(what: str, sides: dict[str, Callable[[], object]], repeats: int, values: int) -> None:
    """One line a side, the first of them being ours."""
    runs = in_turns(sides, repeats)
    ours = next(iter(runs.values()))
    for name, clocks in runs.items():
        rate = {"million_values_per_s": digits(values / best(clocks).wall / 1e6)}
        print_json(bench=what, side=name, values=values, **seconds(clocks), **rate, **times(clocks, ours))


def fit(x_NF: np.ndarray, repeats: int) -> None:
    few = x_NF[: min(len(x_NF), 200_000)]
    wanted = np.quantile(few.astype(np.float64), QUARTILES, axis=0).T
    assert np.array_equal(column_quantiles(few, QUARTILES), wanted), "not NumPy's quantiles"
    column_quantiles(x_NF[:100_000], QUARTILES)  # compiled
    rows = np.arange(len(x_NF) * 7 // 10)
    sides = {"ours": lambda: RobustScaler.fit(x_NF), "scikit-learn": lambda: Reference().fit(x_NF)}
    report_sides("robust fit", sides, repeats, x_NF.size)
    sides = {"ours": lambda: RobustScaler.fit(x_NF, rows), "scikit-learn": lambda: Reference().fit(x_NF[rows])}
    report_sides("robust fit of 70 % of the rows", sides, repeats, len(rows) * x_NF.shape[1])
    small = x_NF[:200_000]
    sides = {"standard": lambda: StandardScaler.fit(small), "quantile": lambda: QuantileScaler.fit(small)}
    report_sides("other scalers", sides, 1, small.size)


def write(x_NF: np.ndarray, repeats: int) -> None:
    names = [f"column_{number}" for number in range(x_NF.shape[1])]
    table = pa.table([pa.array(np.ascontiguousarray(column)) for column in x_NF.T], names=names)
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "rows.npy", Path(folder) / "rows.parquet"

        def write_ours() -> None:
            # pyarrow empties the file it finds and has its pages back; ours keeps the old one until the new is whole.
            ours.unlink(missing_ok=True)
            np.save(ours, x_NF)
            files.sha256(ours)

        sides = {
            "ours (hashed)": write_ours,
            "pyarrow": lambda: pq.write_table(table, theirs, **plain),
            "pyarrow, defaults": lambda: pq.write_table(table, theirs, compression="none"),
        }
        report_sides("write", sides, repeats, x_NF.size)
        assert np.array_equal(np.load(ours, mmap_mode="r"), x_NF), "not what was written"
        sides = {
            "ours (mapped, first verified)": lambda: verified(ours),
            "ours (mapped)": lambda: np.load(ours, mmap_mode="r"),
            "pyarrow": lambda: pq.read_table(theirs),
        }
        report_sides("read", sides, repeats, x_NF.size)


def verified(path: Path) -> np.ndarray:
    rows = np.load(path, mmap_mode="r")
    files.sha256(path)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=3_500_000)
    parser.add_argument("--columns", type=int, default=85)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-write", action="store_true")
    chosen = parser.parse_args()
    made = matrix(chosen.rows, chosen.columns)
    fit(made, chosen.repeats)
    if not chosen.skip_write:
        write(made, chosen.repeats)
