"""Answer of the suite: edge or not, how sure, what is left after costs, and on DEMO what could be known at most."""

import numpy as np
import pandas as pd

from ml_factory.argument_checks import DEMO
from ml_factory.data.bar_files import read_bars_table
from ml_factory.data.sessions import assign_sessions
from ml_factory.data.synthetic import SyntheticSpec, oracle_probabilities, synthetic_market
from ml_factory.evaluation.metrics import PROBABILITIES, row_log_loss
from ml_factory.evaluation.verdict import format_verdict_bounds
from ml_factory.result import Result
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.evaluation import baseline_training_rows, prepared_dataset_baselines
from ml_factory.workflows.predictions import load_predictions
from ml_factory.workflows.prepared_dataset import load_dataset

EVERY, PATHS = 8, 400  # test rows the oracle forecasts, whose neighbours' labels overlap, and its paths for each


def suite_answer(workspace: Workspace, found: Result) -> list[str]:
    """Return the lines that the suite ends with."""
    verdict = found.verdicts[found.chosen]
    gain = format_verdict_bounds(verdict.gain_best, verdict.gain_best_low, verdict.gain_best_high)
    lines = [verdict.answer, f"How sure: gain over {verdict.best_baseline} {gain} nats per row, 95 %."]
    traded = found.traded  # a reason for meta-labels, and for a market whose costs are not known
    lines.append(f"After costs: {f'not known. {traded}' if isinstance(traded, str) else traded.net_sentence}")
    if found.symbol == DEMO and (share := _oracle_share(workspace, found)):
        lines.append(share)
    return lines


def _oracle_share(workspace: Workspace, found: Result) -> str:
    """Return a sentence with the share of the oracle's gain over the best baseline that the chosen model has.

    "" where the bars are not those of the made-up market, and for labels without barriers.
    """
    data = load_dataset(workspace, found.symbol, found.horizon)
    bars = read_bars_table(workspace.raw_bars(found.symbol))
    sessions = assign_sessions(pd.DatetimeIndex(bars["timestamp"]).as_unit("ns").asi8, SyntheticSpec.calendar).id
    market = synthetic_market(SyntheticSpec(days=len(np.unique(sessions))))
    if data.kind != "triple_barrier" or not np.array_equal(bars["close"], market.bars["close"]):
        return ""
    stored = load_predictions(workspace, found.symbol, found.horizon, found.chosen, found.run_ids[found.chosen])
    train = baseline_training_rows(data, data.labels.index.get_indexer(stored.index))  # those of the gain that is shown
    stored = stored[stored["split"] == "test"]
    rows = data.labels.index.get_indexer(stored.index)
    sampled = np.flatnonzero(data.unambiguous_mask[rows])[::EVERY]
    rows, p_N3 = rows[sampled], stored[PROBABILITIES].to_numpy()[sampled]
    labels, base_minutes = data.labels.iloc[rows], data.settings["data"]["features"]["base_minutes"]
    times, up, down = labels.index.as_unit("ns").asi8, labels["up"].to_numpy(), labels["down"].to_numpy()
    truth = oracle_probabilities(market, times, up, down, found.horizon * base_minutes, paths=PATHS)
    truth = (PATHS * truth + 1 / 3) / (PATHS + 1)  # one path more than were simulated ends anywhere
    best = prepared_dataset_baselines(data, train, rows)[found.verdicts[found.chosen].best_baseline]
    loss = row_log_loss(data.y[rows], best).mean()
    own, known = (loss - row_log_loss(data.y[rows], p).mean() for p in (p_N3, truth))
    return (
        f"Of what can be known: the oracle, which knows how {DEMO} is made and all bars so far, gains {known:+.4f}, "
        f"and {found.chosen} {own / known:.0%} of that (every {EVERY}th test row)."
    )
