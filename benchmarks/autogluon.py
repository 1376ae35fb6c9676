"""`auto` compared with AutoGluon-Tabular: log loss of the same test rows after the same minutes on the same cores.

    pip install 'autogluon.tabular[lightgbm,catboost,xgboost]'      # in an environment of its own
    python -m benchmarks.autogluon --python OTHER/bin/python --data-root ../shared/data/bars [--minutes 3]

Both get the prepared columns of the same training, validation and test rows, AutoGluon without our weights and with
ambiguous rows. `auto` searches its default models.
AutoGluon runs twice: with its bagging (`best_quality`), whose random folds mix rows of overlapping labels, on training
and validation rows; and with our validation rows (`medium_quality`). Where `auto` finds that nothing beats the
baselines its forecast is the clock's. `xgboost` and `lightgbm` are our defaults, one training each, and take less.
Losses are those of the unambiguous test rows; differences have 95 % intervals.
"""

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.clock_gain import HORIZON, prepared
from benchmarks.measure import digits, print_json, timed
from ml_factory import pipeline
from ml_factory.evaluation.intervals import gain_interval
from ml_factory.evaluation.metrics import PROBABILITIES, row_log_loss
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.evaluation import prepared_dataset_baselines
from ml_factory.workflows.prepared_dataset import PreparedDataset, load_dataset

FILES = ("ES", "SPY", "XAUUSD", "BTCUSD 2017H2", "DEMO")
DEFAULTS = ("xgboost", "lightgbm")
SIDES = {"autogluon, bagging": "best_quality", "autogluon, our validation": "medium_quality"}
FIT = """
import sys, numpy as np, pandas as pd
from autogluon.tabular import TabularPredictor
given, folder, preset, seconds, cores = np.load(sys.argv[1]), *sys.argv[2:]
part = {name: pd.DataFrame(given[name]).assign(label=given["y_" + name]) for name in ("train", "validation")}
own = preset == "medium_quality"
fitted = TabularPredictor("label", problem_type="multiclass", eval_metric="log_loss", path=folder, verbosity=0).fit(
    part["train"] if own else pd.concat([*part.values()]), tuning_data=part["validation"] if own else None,
    presets=preset, time_limit=float(seconds), num_cpus=int(cores), num_gpus=0)
p = fitted.predict_proba(pd.DataFrame(given["test"]))
np.save(folder + "/p.npy", np.stack([p[c] if c in p else np.zeros(len(p)) for c in (-1, 0, 1)], axis=1))
print(fitted.model_best)
"""


def with_autogluon(python: str, rows: Path, folder: Path, preset: str, seconds: float) -> tuple[np.ndarray, str]:
    """Probabilities of the test rows, and the name of the model that it chose."""
    words = [python, "-c", FIT, rows, folder, preset, seconds, os.cpu_count()]
    done = subprocess.run([*map(str, words)], check=True, capture_output=True, text=True)
    return np.load(folder / "p.npy"), done.stdout.split()[-1]


def ours(workspace: Workspace, data: PreparedDataset, model: str, run: str, rows: np.ndarray) -> np.ndarray:
    """Probabilities of a trained run on these rows."""
    frame = pipeline.load_predictions(workspace, data.symbol, HORIZON, model, run=run)
    return frame.loc[data.labels.index[rows], list(PROBABILITIES)].to_numpy()


def compare(name: str, folder: Path, given: argparse.Namespace) -> dict[str, float]:
    """Print a line for each side of one file; return the gain of `auto` over the others."""
    if name == "DEMO":
        workspace = Workspace(folder / name)
        pipeline.prepare(workspace, name, (HORIZON,))
        data = load_dataset(workspace, name, HORIZON)
    else:
        workspace, data = prepared(folder, given.data_root, name)
    test = data.splits["test"][data.unambiguous_mask[data.splits["test"]]]
    clock = prepared_dataset_baselines(data, data.splits["train"], test)["clock"]
    options = {"mirror": "off", "uncertified": True}
    found, taken = timed(lambda: pipeline.auto(workspace, data.symbol, HORIZON, hours=given.minutes / 60, **options))
    forecasts = {"clock": clock, "auto": clock}
    if found.trained_run_id:
        forecasts["auto"] = ours(workspace, data, found.best["model"], found.trained_run_id, test)
    chosen = {"auto": f"{found.best['model'] if found.beats else 'clock'} of {len(found.trials)} trials"}
    minutes = {"auto": taken.wall / 60}
    for model in DEFAULTS:
        trained, taken = timed(lambda model=model: pipeline.train(workspace, data.symbol, HORIZON, model, **options))
        forecasts[model], minutes[model] = ours(workspace, data, model, trained.run_id, test), taken.wall / 60
    matrices = {"test": data.x_NF[data.row[test]]}
    for part in ("train", "validation"):
        matrices |= {part: data.x_NF[data.row[data.splits[part]]], f"y_{part}": data.y[data.splits[part]]}
    np.savez(folder / "rows.npz", **matrices)
    for side, preset in SIDES.items():
        made, taken = timed(
            lambda preset=preset: with_autogluon(given.python, folder / "rows.npz", folder / preset, preset,
                                                 60 * given.minutes)
        )  # fmt: skip
        forecasts[side], chosen[side], minutes[side] = *made, taken.wall / 60
    losses = {side: row_log_loss(data.y[test], p) for side, p in forecasts.items()}
    gains = {}
    for side, loss in losses.items():
        line = {"loss": digits(loss.mean()), "minutes": digits(minutes.get(side, 0.0), 3)}
        for other in ("clock", "auto"):
            gain = gain_interval(losses[other] - loss, horizon=HORIZON, times_N=data.labels.index[test])
            line[f"gain_over_{other}"] = [digits(one, 3) for one in (gain.mean, gain.low, gain.high)]
        gains[side] = float((losses["auto"] - loss).mean())
        print_json(bench="autogluon", file=name, side=side, rows=len(test), chosen=chosen.get(side, ""), **line)
    return gains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="of the environment with AutoGluon")
    parser.add_argument("--data-root", type=Path, default=Path("../shared/data/bars"))
    parser.add_argument("--files", nargs="*", default=FILES)
    parser.add_argument("--minutes", type=float, default=3.0, help="of each side and file")
    given, gains = parser.parse_args(), []
    for name in given.files:
        with tempfile.TemporaryDirectory(prefix="autogluon_") as folder:
            gains.append(compare(name, Path(folder), given))
    for side in gains[0]:
        mean = np.mean([one[side] for one in gains])
        print_json(bench="autogluon mean", side=side, files=len(gains), gain_over_auto=digits(mean, 3))


if __name__ == "__main__":
    main()
