"""Forecasts of ETTh1 under the papers' protocol, compared with published errors (data: github.com/zhouhaoyi/ETDataset).

    python -m benchmarks.ett --data ../shared/data/ett         # everything, three seeds each: half an hour of one core
    python -m benchmarks.ett --models itransformer dlinear --seeds 0

Months of 30 days: 12 to train, 4 to validate, 4 to test; the two later blocks begin `lookback` rows early. Seven
columns in and out, standardised by the training block; squared and absolute error over all windows at stride 1, all
steps and columns. The epoch is chosen on validation; the test block is read once, when every seed has been trained.
One JSON line a seed, then one with their mean and the published figure (None: none was found).
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.forecaster import NeuralForecaster
from benchmarks.measure import digits, print_json, setting, timed
from ml_factory.models.heads import ForecastTask
from ml_factory.models.sequence import LSTM, TCN
from ml_factory.models.tft import TFT
from ml_factory.models.transformer import ITransformer, PatchTST

HOURS = 30 * 24
TRAIN, VALIDATION, TEST = 12 * HOURS, 16 * HOURS, 20 * HOURS  # where each block ends
REPEAT_LAST = {96: (1.295, 0.713), 192: (1.325, 0.733), 336: (1.323, 0.744), 720: (1.339, 0.756)}


@dataclass(frozen=True)
class Series:
    """The standardised series of a file, read no further than asked."""

    path: Path

    def until(self, end: int) -> np.ndarray:
        """x_NF float32 of its first `end` rows; mean and deviation are those of the training block."""
        table = pq.read_table(self.path)
        columns = [name for name in table.column_names if name != "date"]
        x_NF = np.stack([table[name].slice(0, end).to_numpy() for name in columns], axis=1)
        train_NF = x_NF[:TRAIN]
        return ((x_NF - train_NF.mean(axis=0)) / train_NF.std(axis=0)).astype(np.float32)


def last_rows(begin: int, end: int, lookback: int, steps: int) -> np.ndarray:
    """The last rows of all windows whose targets lie in rows [begin, end)."""
    return np.arange(max(begin, lookback) - 1, end - steps)


def errors(y_BSC: np.ndarray, x_NF: np.ndarray, rows: np.ndarray) -> dict[str, float]:
    """Mean squared and mean absolute error of the forecasts after each row."""
    steps = y_BSC.shape[1]
    after_BSC = np.lib.stride_tricks.sliding_window_view(x_NF, steps, axis=0)[rows + 1].transpose(0, 2, 1)
    error = y_BSC.astype(np.float64) - after_BSC
    return {"mse": digits((error**2).mean()), "mae": digits(np.abs(error).mean())}


def repeat_last(series: Series, steps: int, batch: int = 1) -> dict[str, float]:
    """Every step ahead is what the last row was. batch : leave out the windows that do not fill the last one."""
    x_NF, rows = series.until(TEST), last_rows(VALIDATION, TEST, 1, steps)
    rows = rows[: len(rows) // batch * batch]
    return {"windows": len(rows), **errors(np.repeat(x_NF[rows, None], steps, axis=1), x_NF, rows)}


def reproduce(series: Series) -> None:
    """The published table of repeat-last, number by number, before anything is trained."""
    for steps, (mse, mae) in REPEAT_LAST.items():
        # The published ones come from a loader that left out the last incomplete batch of 32.
        same = repeat_last(series, steps, batch=32)
        about = {"bench": "ett", "data": series.path.stem, "model": "repeat", "steps": steps, "published": (mse, mae)}
        print_json(**about, **repeat_last(series, steps), whole_batches=(same["mse"], same["mae"]))
        if (round(same["mse"], 3), round(same["mae"], 3)) != (mse, mae):
            raise SystemExit(f"Not the papers' data or protocol: repeat-last gives {same}, published {mse}, {mae}")


@dataclass(frozen=True)
class DLinearSpec:
    """kernel : steps of the moving average that is the trend."""

    kernel: int = 25


class DLinear(nn.Module):
    """Are transformers effective for time series forecasting? (Zeng et al. 2023): x_BTF -> y_BSF.

    Trend, a centred moving average, and the rest are each mapped to the steps ahead by one matrix for all columns.
    """

    Spec = DLinearSpec

    def __init__(self, features: int, lookback: int, task: ForecastTask, spec: DLinearSpec):
        super().__init__()
        self.kernel = spec.kernel
        self.trend, self.rest = nn.Linear(lookback, task.steps), nn.Linear(lookback, task.steps)

    def forward(self, x_BTF: Tensor) -> Tensor:
        x_BFT, half = x_BTF.transpose(1, 2), self.kernel // 2
        padded = functional.pad(x_BFT, (half, self.kernel - 1 - half), mode="replicate")
        trend_BFT = functional.avg_pool1d(padded, self.kernel, stride=1)
        return (self.trend(trend_BFT) + self.rest(x_BFT - trend_BFT)).transpose(1, 2)


@dataclass(frozen=True)
class Recipe:
    """A network, its settings, and MSE and MAE as published for horizon 96."""

    network: type[nn.Module]
    lookback: int
    settings: dict
    published: tuple[float, float] | None = None


# Sizes, dropout and batch are the papers' for ETTh1. PatchTST's rate is ten times its paper's, and its epochs a tenth.
_PATCH = {
    "patch": 16, "stride": 8, "pad": True, "norm": "batch", "width": 16, "heads": 4, "layers": 3, "inner": 128,
    "dropout": 0.3, "batch": 128, "eval_batch": 128, "lr": 1e-3, "epochs": 8,
}  # fmt: skip
_PLAIN = {"batch": 64, "lr": 1e-3, "epochs": 4}
RECIPES = {
    "dlinear": Recipe(DLinear, 336, {"batch": 32, "lr": 1e-3, "epochs": 10}, (0.375, 0.399)),
    "itransformer": Recipe(
        ITransformer,
        96,
        {"width": 256, "heads": 8, "layers": 2, "inner": 256, "batch": 32, "lr": 1e-4, "epochs": 10},
        (0.386, 0.405),
    ),
    "patchtst": Recipe(PatchTST, 96, _PATCH, (0.414, 0.419)),
    "patchtst64": Recipe(PatchTST, 512, {**_PATCH, "epochs": 5}, (0.370, 0.400)),
    "lstm": Recipe(LSTM, 96, _PLAIN),
    "tcn": Recipe(TCN, 96, _PLAIN),
    "tft": Recipe(TFT, 96, _PLAIN),
}


def trained(name: str, recipe: Recipe, series: Series, steps: int, **settings) -> tuple[NeuralForecaster, dict]:
    """Fitted on the training block, its epoch chosen on the validation block; no row after it is read."""
    x_NF = series.until(VALIDATION)
    given = {"weight_decay": 0.0, "patience": 3, **recipe.settings, **settings}
    model = NeuralForecaster(name, recipe.network, ForecastTask(steps), lookback=recipe.lookback, **given)
    blocks = ((0, TRAIN), (TRAIN, VALIDATION))
    rows, held = (last_rows(*block, recipe.lookback, steps) for block in blocks)
    result, taken = timed(lambda: model.fit(x_NF, rows, validation=held))
    best = result.history[result.best_epoch - 1]
    epochs = {"epoch": result.best_epoch, "epochs": len(result.history)}
    return model, {**epochs, "validation_mse": digits(best["val_loss"]), "cpu_s": digits(taken.cpu, 3)}


def judge(name: str, series: Series, steps: int, seeds: list[int], **settings) -> None:
    """Train every seed, then evaluate on the test block and print a line a seed."""
    recipe = RECIPES[name]
    about = {"bench": "ett", "data": series.path.stem, "model": name, "lookback": recipe.lookback, "steps": steps}
    fitted = [trained(name, recipe, series, steps, seed=seed, **settings) for seed in seeds]
    x_NF, rows = series.until(TEST), last_rows(VALIDATION, TEST, recipe.lookback, steps)
    found = [errors(model.predict(x_NF, rows), x_NF, rows) for model, _ in fitted]
    for seed, (_, facts), figures in zip(seeds, fitted, found, strict=True):
        print_json(**about, seed=seed, **figures, **facts)
    mean = {key: digits(np.mean([figures[key] for figures in found])) for key in ("mse", "mae")}
    published = recipe.published if steps == 96 else None
    print_json(**about, seeds=len(seeds), windows=len(rows), **mean, published=published)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/ett"), help="folder with ETTh1.parquet")
    parser.add_argument("--models", nargs="*", default=["repeat", *RECIPES], choices=["repeat", *RECIPES])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=96, help="horizon")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings over the recipes'")
    chosen = parser.parse_args()
    series = Series(chosen.data / "ETTh1.parquet")
    if not series.path.exists():
        print_json(bench="ett", skipped=f"no {series.path}: get ETTh1 and name its folder with --data")
        return
    settings = dict(map(setting, chosen.set))
    if "repeat" in chosen.models:
        reproduce(series)
    for name in RECIPES:
        if name in chosen.models:
            judge(name, series, chosen.steps, chosen.seeds, threads=chosen.threads, **settings)


if __name__ == "__main__":
    main()
