"""Boosters trained in blocks against their own libraries' training.

    python -m benchmarks.boosters                 # 300,000 rows x 150 columns, 100 rounds: a quarter of an hour
    python -m benchmarks.boosters --rows 20000 --columns 50

Both sides take turns, so whatever else the machine does, it does to both; ratios are medians over the turns, of wall
and of processor seconds. The straight side is the library's own training call with the same settings, its matrices and
the losses of both parts included.
"""

import argparse
import tempfile

import catboost
import lightgbm as lgb
import numpy as np
import xgboost as xgb

from benchmarks.measure import digits, in_turns, median_ratio, print_json, seconds
from ml_factory.models.registry import build_model

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


def market(rows: int, columns: int, seed: int = 0) -> tuple[Rows, Rows]:
    """Training and validation rows: x with missing values, three classes with a weak interaction, weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    y = np.digitize(x[:, 0] + x[:, 1] * x[:, 2] + 2 * rng.normal(size=rows), [-0.9, 0.9]) - 1
    x[rng.random(x.shape) < 0.02] = np.nan
    whole, cut = (x, y, rng.uniform(0.2, 2, rows)), rows * 5 // 6
    return tuple(part[:cut] for part in whole), tuple(part[cut:] for part in whole)


def straight(name: str, settings: dict, train: Rows, valid: Rows) -> None:
    """Train once by the library itself."""
    model = build_model(name, **settings)
    rounds = model.settings.rounds
    (x, y, w), (held_x, held_y, held_w) = train, valid
    if name == "xgboost":
        threads = {"nthread": model.settings.thread_count}
        bins = xgb.QuantileDMatrix(x, y + 1, weight=w, **threads)
        held = xgb.QuantileDMatrix(held_x, held_y + 1, weight=held_w, ref=bins, **threads)
        xgb.train(model._params(model.settings), bins, rounds, evals=[(bins, "train"), (held, "valid")], verbose_eval=0)
    elif name == "lightgbm":
        params = model._params(model.settings)
        bins = lgb.Dataset(x, y + 1, weight=w, params=params)
        held = bins.create_valid(held_x, held_y + 1, weight=held_w)
        lgb.train(params, bins, rounds, valid_sets=[bins, held])
    else:
        with tempfile.TemporaryDirectory() as folder:
            booster = catboost.CatBoost({
                "loss_function": "MultiClass", "classes_count": 3, "iterations": rounds, "train_dir": folder,
                "learning_rate": model.settings.learning_rate, "depth": model.settings.depth,
                "bootstrap_type": "Bernoulli", "subsample": model.settings.row_sample,
                "rsm": model.settings.column_sample, "l2_leaf_reg": model.settings.l2, "logging_level": "Silent",
                "thread_count": model.settings.thread_count, "use_best_model": False,
            })  # fmt: skip
            booster.fit(catboost.Pool(x, y + 1, weight=w), eval_set=catboost.Pool(held_x, held_y + 1, weight=held_w))


def compare(name: str, rows: int, columns: int, rounds: int, repeats: int) -> None:
    """Print the line of training in blocks against straight training."""
    train, valid = market(rows, columns)
    settings = {"rounds": rounds, "patience": 0}
    runs = in_turns({
        "blocks": lambda: build_model(name, **settings).fit(*train, validation=valid),
        "straight": lambda: straight(name, settings, train, valid),
    }, repeats)  # fmt: skip
    wall, cpu = (digits(median_ratio(runs["blocks"], runs["straight"], clock), 3) for clock in ("wall", "cpu"))
    print_json(
        bench="boosters.blocks", model=name, rows=len(train[0]), columns=columns, rounds=rounds,
        **seconds(runs["blocks"]), times_straight_wall=wall, times_straight_cpu=cpu, wanted="at most 1.05",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--columns", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=["xgboost", "lightgbm", "catboost"])
    args = parser.parse_args()
    for name in args.models:
        compare(name, args.rows, args.columns, args.rounds, args.repeats)


if __name__ == "__main__":
    main()
