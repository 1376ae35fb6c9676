"""Gain of models over the baseline `clock` on real bars: what a model adds to the time of the session.

    python -m benchmarks.clock_gain --data-root ../shared/data/bars --models xgboost lightgbm linear --split validation
    python -m benchmarks.clock_gain --split test --workspace /tmp/clock   # keeps what was prepared and trained

Each file is prepared and each model trained by `pipeline`, as a user does, with the defaults. One JSON line a file and
model, and one a model; gains in log loss, in nats, with 95 % intervals. Defaults are chosen on validation rows; test
rows are read once.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.measure import digits, print_json, setting, timed
from ml_factory import pipeline
from ml_factory.evaluation.calibration import calibration_by_class
from ml_factory.evaluation.intervals import gain_interval
from ml_factory.evaluation.metrics import (
    PROBABILITIES,
    expected_calibration_error,
    row_log_loss,
)
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.evaluation import prepared_dataset_baselines
from ml_factory.workflows.prepared_dataset import PreparedDataset, load_dataset

HORIZON = 20
# name -> file of bars, its symbol, first day and the day after the last one
FILES = {
    "ES": ("ES", None, None),
    "NQ 2021H2": ("NQ", "2021-07-01", "2022-01-01"),
    "NQ 2022H1": ("NQ", "2022-01-01", "2022-07-01"),
    "SPY": ("SPY", None, None),
    "XAUUSD": ("XAUUSD", None, None),
    "BTCUSD 2017H2": ("BTCUSD", "2017-07-01", "2018-01-01"),
    "ETHUSD 2018H1": ("ETHUSD", "2018-01-01", "2018-07-01"),
    "FILUSDT": ("FILUSDT", None, None),
}


def prepared(folder: Path, root: Path, name: str) -> tuple[Workspace, PreparedDataset]:
    """A workspace of this file's rows alone, and its data set."""
    symbol, first, after = FILES[name]
    workspace = Workspace(folder / name.replace(" ", "_"))
    bars = pd.read_parquet(root / f"{symbol}_1m.parquet")
    at = bars["timestamp"]
    if first is not None:
        bars = bars[(at >= pd.Timestamp(first, tz="UTC")) & (at < pd.Timestamp(after, tz="UTC"))]
    part = folder / f"{name.replace(' ', '_')}.parquet"
    bars.reset_index(drop=True).to_parquet(part)
    pipeline.prepare(workspace, symbol, (HORIZON,), data=part)
    return workspace, load_dataset(workspace, symbol, HORIZON)


def evaluated(workspace: Workspace, data: PreparedDataset, model: str, split: str, settings: Mapping) -> dict:
    """Metrics of the trained model and the baselines on the clear rows of a split."""
    result = pipeline.train(
        workspace, data.symbol, HORIZON, model, mirror="off", model_settings=settings, uncertified=True
    )
    frame = pipeline.load_predictions(workspace, data.symbol, HORIZON, model, run=result.run_id)
    frame = frame[frame["split"] == split]
    rows = data.labels.index.get_indexer(frame.index)
    clear = data.unambiguous_mask[rows]
    rows, p, y = rows[clear], frame[PROBABILITIES].to_numpy()[clear], data.y[rows[clear]]
    forecasts = prepared_dataset_baselines(data, data.splits["train"], rows)
    losses = {name: row_log_loss(y, q) for name, q in forecasts.items()}
    ours = row_log_loss(y, p)
    gain = gain_interval(losses["clock"] - ours, horizon=HORIZON, times_N=data.labels.index[rows])
    line = {f"loss_{name}": digits(loss.mean()) for name, loss in losses.items()} | {"loss": digits(ours.mean())}
    line |= {"gain_clock": digits(gain.mean, 3), "low": digits(gain.low, 3), "high": digits(gain.high, 3)}
    line["gain_clock_volatility"] = digits((losses["clock_volatility"] - ours).mean(), 3)
    for row in calibration_by_class(y, p, horizon=HORIZON).to_dict("records"):
        line |= {f"{row['class']}_{of}": digits(row[of], 3) for of in ("predicted", "observed")}
    line["ece"] = digits(expected_calibration_error(y, p), 3)
    return line | {"rows": len(y), "best_epoch": int(result.best_epoch)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path("../shared/data/bars"))
    parser.add_argument("--models", nargs="*", default=["xgboost", "lightgbm", "linear", "lstm"])
    parser.add_argument("--files", nargs="*", default=list(FILES), choices=list(FILES))
    parser.add_argument("--split", choices=["validation", "test"], default="validation", help="the evaluated rows")
    parser.add_argument("--workspace", type=Path, help="folder that keeps what was done; default: a temporary one")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings over the defaults")
    chosen = parser.parse_args()
    settings, lines = dict(map(setting, chosen.set)), []
    with tempfile.TemporaryDirectory(prefix="clock_gain_") as folder:
        for name in chosen.files:
            workspace, data = prepared(chosen.workspace or Path(folder), chosen.data_root, name)
            for model in chosen.models:
                found, taken = timed(lambda model=model: evaluated(workspace, data, model, chosen.split, settings))  # noqa: B023
                line = {"bench": "clock_gain", "file": name, "model": model, "split": chosen.split, **found}
                lines.append(line | {"cpu_s": digits(taken.cpu, 3)})
                print_json(**lines[-1])
    for model in chosen.models:
        gains = np.array([line["gain_clock"] for line in lines if line["model"] == model])
        highs = np.array([line["high"] for line in lines if line["model"] == model])
        facts = {"at_least_-0.002": int((gains >= -0.002).sum()), "wholly_below_0": int((highs < 0).sum())}
        print_json(bench="clock_gain mean", model=model, files=len(gains), mean_gain=digits(gains.mean(), 3), **facts)


if __name__ == "__main__":
    main()
