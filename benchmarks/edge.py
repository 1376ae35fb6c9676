"""Does a model find what is there, and nothing where nothing is? Made-up markets whose true probabilities are known.

    python -m benchmarks.edge                      # every model, 3 seeds, the planted and the null market
    python -m benchmarks.edge --models gru tft --seeds 0 --kinds planted --set hidden=32
    python -m benchmarks.edge --split validation   # while settings are chosen: no test row is looked at
    python -m benchmarks.edge --verdicts --models xgboost lstm --seeds 1 2 3   # DEMO, DEMO-NULL: answers of `make run`

One JSON line a model, market and seed; gains in log loss over the class prior, a test row, in nats. On the planted
market `share` is the part of the oracle's gain that the model recovers. The oracle knows every setting of the market
and all bars so far, no label; both gains are expectations under what it states, so luck in the outcomes is not in them.
`ece_true` is the calibration error of the model with temperature and class biases fitted on validation rows, against
the true probabilities instead of outcomes, `ece_true_raw` without them; `_debiased` less what chance adds to them.
On the null market no class can be reported: `errors` is the gain on what happened, in standard errors.

With --verdicts each line is a market of the length of DEMO, by the users' path: prepare, QUICK trainings, the model
chosen on validation rows, its verdict on test rows. `clock` is what a forecast by the time of the session alone gains
over the class prior, with its 95 % interval: by that measure it claims an edge wherever volatility has a daily pattern.
"""

import argparse
import itertools
import tempfile
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from benchmarks.measure import digits, print_json, setting, timed
from ml_factory import pipeline
from ml_factory.argument_checks import DEMO, DEMO_NULL
from ml_factory.data.sessions import resolve_market_spec
from ml_factory.data.synthetic import (
    SyntheticMarket,
    SyntheticSpec,
    ensure_synthetic_demo_market,
    oracle_probabilities,
    synthetic_market,
)
from ml_factory.datasets.row_selection import mask_rows_with_full_window
from ml_factory.datasets.scaling import RobustScaler
from ml_factory.datasets.windows import Windows
from ml_factory.evaluation.baselines import prior_baseline_probabilities
from ml_factory.evaluation.calibration import Calibration, floored_log_probabilities
from ml_factory.evaluation.intervals import gain_interval
from ml_factory.evaluation.metrics import row_log_loss
from ml_factory.features.build import FeatureSpec, build_features
from ml_factory.models.base import ModelBase
from ml_factory.models.registry import available_models, build_model, find_model_spec
from ml_factory.storage.workspace import Workspace
from ml_factory.targets.labels import LabelSpec, triple_barrier_labels
from ml_factory.targets.splits import SplitSpec, chronological_split

LOOKBACK = 32
PATHS, EVERY = 1600, 4  # the oracle's paths, and of which rows it is asked: neighbours' labels overlap
COLUMNS = FeatureSpec(families=("momentum", "volume"), frames=())
# Volatility is constant, barriers hardly move and no label is cut short: so on the null market not even the moment of
# a touch can be told.
MARKET = {"shape": 0.0, "weather": 0.0, "edge": 0.2}
LABELS = LabelSpec(horizon=20, sigma_span=2000, session_end="drop")


@dataclass(frozen=True)
class Rows:
    """A market's rows: x_NF scaled; labels, and for each its row and split; every row's window is whole."""

    market: SyntheticMarket
    x_NF: np.ndarray
    labels: pd.DataFrame
    row: np.ndarray
    splits: dict[str, np.ndarray]
    known: dict[str, np.ndarray] = field(default_factory=dict)

    def take(self, model: ModelBase, split: str):
        """(x, y) of one split as the model reads them."""
        positions = self.splits[split]
        rows, y = self.row[positions], self.labels["label"].to_numpy()[positions]
        return (
            Windows(self.x_NF, rows, model.lookback) if find_model_spec(model.name).windowed else self.x_NF[rows]
        ), y

    def truth(self, split: str) -> np.ndarray:
        """Return the oracle's probabilities of every `EVERY`-th row of a split, (N, 3); cached for all models."""
        if split not in self.known:
            labels = self.labels.iloc[self.splits[split][::EVERY]]
            at, up, down = labels.index.as_unit("ns").asi8, labels["up"].to_numpy(), labels["down"].to_numpy()
            truth = oracle_probabilities(self.market, at, up, down, 5 * LABELS.horizon, paths=PATHS)
            self.known[split] = (PATHS * truth + 1 / 3) / (PATHS + 1)  # one path more than were simulated ends anywhere
        return self.known[split]


def rows_of(kind: str, seed: int, days: int) -> Rows:
    """The made-up market, its features, labels and chronological split."""
    market = synthetic_market(SyntheticSpec(days=days, kind=kind, seed=seed, **MARKET))
    stored = resolve_market_spec("DEMO", market.bars)
    matrix = build_features(market.bars, stored, COLUMNS)
    labels = triple_barrier_labels(matrix.base, None, LABELS, stored)
    labels = labels[(labels["barrier"] != "ambiguous") & (labels["entry_bar"] >= matrix.first)]
    row = labels["entry_bar"].to_numpy() - matrix.first
    whole = mask_rows_with_full_window(matrix.segment, row, LOOKBACK)
    labels, row = labels[whole], row[whole]
    splits = chronological_split(labels, SplitSpec())
    scaler = RobustScaler.fit(matrix.values, row[splits["train"]])
    return Rows(market, scaler.transform(matrix.values), labels, row, splits)


def evaluated(rows: Rows, model: ModelBase, split: str = "test") -> dict[str, float]:
    """Fit the model and compare it with class prior and oracle on the rows of `split`."""
    result = model.fit(*rows.take(model, "train"), validation=rows.take(model, "validation"))
    x, y = rows.take(model, split)
    p, prior = model.predict_proba(x), prior_baseline_probabilities(rows.take(model, "train")[1], None, len(y))
    gain = gain_interval(row_log_loss(y, prior) - row_log_loss(y, p), horizon=LABELS.horizon)
    facts = {"rows": len(y), "gain": digits(gain.mean), "errors": digits(gain.mean / gain.standard_error, 3)}
    facts |= {"epochs": len(result.history), "best_epoch": result.best_epoch}
    if rows.market.spec.kind == "null":
        return facts
    truth, sampled = rows.truth(split), slice(None, None, EVERY)
    expected, oracle = (float((truth * np.log(q / prior[sampled])).sum(1).mean()) for q in (p[sampled], truth))
    facts |= {"expected": digits(expected), "oracle": digits(oracle), "share": digits(expected / oracle, 3)}
    held, y_held = rows.take(model, "validation")
    calibration = Calibration.fit(floored_log_probabilities(model.predict_proba(held)), y_held, horizon=LABELS.horizon)
    for name, q in {"ece_true": calibration.apply(p[sampled]), "ece_true_raw": p[sampled]}.items():
        plain, debiased = true_calibration_error(truth, q)
        facts |= {name: digits(plain, 3), f"{name}_debiased": digits(debiased, 3)}
    return facts


def true_calibration_error(truth_N3: np.ndarray, p_N3: np.ndarray, bins: int = 15) -> tuple[float, float]:
    """Calibration error of the top class with its true probability in the place of its outcome: (plain, debiased).

    plain : as `expected_calibration_error`.  debiased : root of the mean squared error of the bins, each less the
    squared standard error of its mean, since neighbouring rows depend on each other.  N rows in time order.
    """
    top, confidence = p_N3.argmax(axis=1), p_N3.max(axis=1)
    which = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    miss = truth_N3[np.arange(len(top)), top] - confidence
    plain = np.abs(np.bincount(which, weights=miss, minlength=bins)).sum() / len(top)
    squared = 0.0
    for one in np.unique(which):
        mean = gain_interval(miss, (which == one).astype(np.float64), horizon=LABELS.horizon)
        squared += np.mean(which == one) * (mean.mean**2 - np.nan_to_num(mean.standard_error) ** 2)
    return float(plain), float(np.sqrt(max(squared, 0.0)))


def verdict_of(kind: str, seed: int, models: list[str]) -> dict:
    """Return what the suite would answer on this market, from these models."""
    symbol = DEMO_NULL if kind == "null" else DEMO
    with tempfile.TemporaryDirectory() as root:
        workspace = Workspace(root)
        ensure_synthetic_demo_market(workspace, symbol, seed)
        pipeline.prepare(workspace, symbol, (LABELS.horizon,))
        for model in models:
            pipeline.train(workspace, symbol, LABELS.horizon, model, quick=True, mirror="off")
        found = pipeline.evaluate(workspace, symbol, LABELS.horizon)
    verdict, clock = found.verdict, found.metrics.set_index("name").loc["clock"]
    gain = (verdict.gain_best, verdict.gain_best_low, verdict.gain_best_high)
    return {
        "chosen": found.chosen, "found": verdict.edge, "status": verdict.status,
        "best": verdict.best_baseline, "when": verdict.predicts_touch, "which_way": verdict.predicts_direction,
        "gain": list(map(digits, gain)), "rows": verdict.rows, "effective_rows": round(verdict.effective_rows),
        "clock": [digits(clock[name]) for name in ("log_loss_gain", "gain_low", "gain_high")],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=available_models())
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="*", default=["planted", "null"])
    parser.add_argument("--days", type=int, default=100)
    parser.add_argument("--split", choices=["validation", "test"], default="test", help="the evaluated rows")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings over the defaults")
    parser.add_argument("--verdicts", action="store_true", help="answers of the suite on DEMO and DEMO-NULL")
    chosen = parser.parse_args()
    seeds_of_kinds = list(itertools.product(chosen.kinds, chosen.seeds))
    if chosen.verdicts:
        for kind, seed in seeds_of_kinds:
            line, taken = timed(lambda kind=kind, seed=seed: verdict_of(kind, seed, chosen.models))
            print_json(bench="verdict", market=kind, seed=seed, **line, cpu_s=digits(taken.cpu, 3))
        return
    settings = dict(map(setting, chosen.set))
    for kind, seed in seeds_of_kinds:
        rows = rows_of(kind, seed, chosen.days)
        for name in chosen.models:
            model = build_model(name, seed=seed, threads=chosen.threads, **settings)
            found, taken = timed(lambda rows=rows, model=model: evaluated(rows, model, chosen.split))
            facts = {"market": kind, "model": name, "seed": seed, "days": chosen.days, "split": chosen.split}
            print_json(bench="edge", **facts, settings=settings, **found, cpu_s=digits(taken.cpu, 3))


if __name__ == "__main__":
    main()
