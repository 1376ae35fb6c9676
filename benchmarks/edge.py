"""Does a model find what is there, and nothing where nothing is? Made-up markets whose true probabilities are known.

    python -m benchmarks.edge                      # every model, 3 seeds, the planted and the null market
    python -m benchmarks.edge --models gru tft --seeds 0 --kinds planted --set hidden=32

One JSON line a model, market and seed; gains in log loss over the class prior, a test row, in nats. On the planted
market `share` is the part of the oracle's gain that the model recovers. The oracle knows every setting of the market
and all bars so far, no label; both gains are expectations under what it says, so luck in the outcomes is not in them.
On the null market no class can be told: `errors` is the gain on what happened, in standard errors.
"""

import argparse
from dataclasses import dataclass

import numpy as np
import pandas as pd

from benchmarks.measure import digits, tell, timed
from ml_factory.data.sessions import market_for
from ml_factory.data.synthetic import SyntheticMarket, SyntheticSpec, oracle_probabilities, synthetic_market
from ml_factory.datasets.rows import rows_with_window
from ml_factory.datasets.scaling import RobustScaler
from ml_factory.datasets.windows import Windows
from ml_factory.evaluation.metrics import mean_with_error, prior_probabilities, row_log_loss
from ml_factory.features.build import FeatureSpec, build_features
from ml_factory.models.contract import Estimator
from ml_factory.models.registry import available_models, build_model, spec_of
from ml_factory.targets.labels import LabelSpec, triple_barrier
from ml_factory.targets.splits import SplitSpec, holdout

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

    def take(self, model: Estimator, split: str):
        """(x, y) of one split as the model reads them."""
        positions = self.splits[split]
        rows, y = self.row[positions], self.labels["label"].to_numpy()[positions]
        return (Windows(self.x_NF, rows, model.lookback) if spec_of(model.name).windowed else self.x_NF[rows]), y


def rows_of(kind: str, seed: int, days: int) -> Rows:
    """The made-up market, its features, labels and chronological split."""
    market = synthetic_market(SyntheticSpec(days=days, kind=kind, seed=seed, **MARKET))
    stored = market_for("DEMO", market.bars)
    matrix = build_features(market.bars, stored, COLUMNS)
    labels = triple_barrier(matrix.base, None, LABELS, stored)
    labels = labels[(labels["barrier"] != "ambiguous") & (labels["entry_bar"] >= matrix.first)]
    row = labels["entry_bar"].to_numpy() - matrix.first
    whole = rows_with_window(matrix.segment, row, LOOKBACK)
    labels, row = labels[whole], row[whole]
    splits = holdout(labels, SplitSpec())
    scaler = RobustScaler.fit(matrix.values, row[splits["train"]])
    return Rows(market, scaler.transform(matrix.values), labels, row, splits)


def judged(rows: Rows, model: Estimator) -> dict[str, float]:
    """The model, fitted, beside class prior and oracle on test rows."""
    result = model.fit(*rows.take(model, "train"), validation=rows.take(model, "validation"))
    x, y = rows.take(model, "test")
    p, prior = model.predict_proba(x), prior_probabilities(rows.take(model, "train")[1], None, len(y))
    mean, error, _ = mean_with_error(row_log_loss(y, prior) - row_log_loss(y, p), horizon=LABELS.horizon)
    facts = {"rows": len(y), "gain": digits(mean), "errors": digits(mean / error, 3), "epochs": len(result.history)}
    if rows.market.spec.kind == "null":
        return facts
    truth, asked = oracle_of(rows), slice(None, None, EVERY)
    said, known = (float((truth * np.log(q / prior[asked])).sum(1).mean()) for q in (p[asked], truth))
    return facts | {"expected": digits(said), "oracle": digits(known), "share": digits(said / known, 3)}


def oracle_of(rows: Rows) -> np.ndarray:
    """What can be known of every `EVERY`-th test row, (N, 3); one path more than were simulated ends anywhere."""
    labels = rows.labels.iloc[rows.splits["test"][::EVERY]]
    at, up, down = labels.index.as_unit("ns").asi8, labels["up"].to_numpy(), labels["down"].to_numpy()
    truth = oracle_probabilities(rows.market, at, up, down, 5 * LABELS.horizon, paths=PATHS)
    return (PATHS * truth + 1 / 3) / (PATHS + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=available_models())
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="*", default=["planted", "null"])
    parser.add_argument("--days", type=int, default=200)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="settings over the defaults")
    chosen = parser.parse_args()
    pairs = (pair.split("=") for pair in chosen.set)
    settings = {name: float(value) if "." in value or "e" in value else int(value) for name, value in pairs}
    for kind in chosen.kinds:
        for seed in chosen.seeds:
            rows = rows_of(kind, seed, chosen.days)
            for name in chosen.models:
                model = build_model(name, seed=seed, threads=chosen.threads, **settings)
                found, taken = timed(lambda rows=rows, model=model: judged(rows, model))
                tell(benchmark="edge", market=kind, model=name, seed=seed, **found, cpu_s=digits(taken.cpu, 3))


if __name__ == "__main__":
    main()
