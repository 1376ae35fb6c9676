"""Evaluation of finished models on the rows that all of them predict, compared with the baselines.

Everything fitted here (class prior, clock) sees the training rows that the caller names, and no other. The baselines
are counted once; every table, verdict, finding and figure reads the same forecasts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.argument_checks import DEMO
from ml_factory.data.bar_files import read_bars_table
from ml_factory.data.sessions import MINUTE_NS, assign_sessions
from ml_factory.ensemble.stacking import equal_weight_probabilities
from ml_factory.evaluation.baselines import (
    BASELINES,
    last_move_baseline_probabilities,
    prior_baseline_probabilities,
)
from ml_factory.evaluation.calibration import calibration_by_class, condition_on_classes
from ml_factory.evaluation.findings import (
    PARTS,
    Finding,
    baseline_finding,
    calibration_finding,
    concentration_finding,
    few_rows_finding,
    no_side_finding,
    overfit_finding,
    sort_findings,
    too_good_finding,
    trials_finding,
    unchecked_note,
)
from ml_factory.evaluation.metrics import (
    PROBABILITIES,
    compute_forecast_metrics,
    row_log_loss,
)
from ml_factory.evaluation.verdict import (
    ModelVerdict,
    describe_missing_classes,
    format_verdict_bounds,
    model_verdict,
    verdict_gains_of_rows,
)
from ml_factory.inference.predict import common_prediction_index
from ml_factory.lazy_module import LazyModule
from ml_factory.models.session_clock import SessionClock
from ml_factory.result import Result
from ml_factory.runs import count_trials
from ml_factory.storage.artifact_registry import Artifact
from ml_factory.storage.workspace import Workspace
from ml_factory.targets.labels import expected_label_classes
from ml_factory.targets.weights import effective_sample_size
from ml_factory.workflows import predictions
from ml_factory.workflows.prepared_dataset import PreparedDataset, dataset_rows_with_weight, load_dataset

EQUAL_POOL = "equal_pool"
synthetic = LazyModule("ml_factory.data.synthetic")  # the answer about the made-up market alone reads it
EVERY, PATHS = 8, 400  # test rows the oracle forecasts, whose neighbours' labels overlap, and its paths for each


@dataclass(frozen=True)
class Evaluation:
    """Finished models on N test rows, and on validation rows.

    rows : int64 (N,), positions of the test rows into the labels.
    forecasts : model -> float64 (N, 3) probabilities of the test rows.
    metrics : a row per split (validation, test) and forecast, the baselines among them.
    verdicts : model -> its verdict on the test rows, over every baseline; the best one was chosen on validation rows.
    chosen : the model with the smallest log loss on validation rows.
    months, findings : of the chosen model: rows and gain over the best baseline, summed nats, by calendar month (UTC),
        and the most severe finding first.
    calibration : predicted and observed frequency by class on test rows, `dataset_calibration_by_class`.
    prior_loss : weighted loss of the class prior on validation rows, comparable with a history's validation losses.
    reference_gains : reference forecast -> gain over it on test rows, in nats, with its 95 % interval.
    artifacts : model -> its artifact.
    """

    rows: np.ndarray
    forecasts: Mapping[str, np.ndarray]
    metrics: pd.DataFrame
    verdicts: Mapping[str, ModelVerdict]
    chosen: str
    months: pd.DataFrame
    findings: tuple[Finding, ...]
    calibration: pd.DataFrame
    prior_loss: float
    reference_gains: Mapping[str, tuple[float, float, float]]
    artifacts: Mapping[str, Artifact]

    @property
    def verdict(self) -> ModelVerdict:
        """Verdict on the chosen model."""
        return self.verdicts[self.chosen]

    @property
    def test_metrics(self) -> pd.DataFrame:
        """Metrics of the test rows, by name of the forecast."""
        test = self.metrics[self.metrics["split"] == "test"]
        return test.drop(columns=["split", "used_for_choosing"]).set_index("name")


def evaluate_artifacts(workspace: Workspace, data: PreparedDataset, artifacts: Mapping[str, Artifact]) -> Evaluation:
    """Predict every labelled row that all of these models can read, and compare the predictions with the baselines.

    artifacts : model -> its artifact. A stack alone is compared with the plain mean of its models too.
    """
    frames = {name: predictions.load_or_make_predictions(workspace, data, one) for name, one in artifacts.items()}
    index = common_prediction_index(frames)
    parts = {name: rows[data.labels.index[rows].isin(index)] for name, rows in data.splits.items()}
    train_rows = baseline_training_rows(data, np.concatenate([*parts.values()]))
    given = {part: _probabilities(data, frames, rows) for part, rows in parts.items()}
    counted = {part: prepared_dataset_baselines(data, train_rows, rows) for part, rows in parts.items()}
    references = _equal_pool(workspace, data, artifacts, parts)
    best, tables = best_baseline(data, parts["validation"], counted["validation"]), []
    for part in ("validation", "test"):
        forecasts = given[part] | references.get(part, {}) | counted[part]
        table = prepared_dataset_metrics(data, parts[part], forecasts, best).reset_index()
        # Epoch, calibration and best baseline were chosen on validation rows: their figures flatter.
        tables.append(table.assign(split=part, used_for_choosing=part == "validation"))
    losses, rows = tables[0].set_index("name").loc[list(artifacts), "log_loss"], parts["test"]
    chosen = str(losses.idxmin()) if len(losses) > 1 else next(iter(artifacts))
    clear, times = data.unambiguous_mask[rows], data.labels.index[rows]
    labels = {name: data.y[at[data.unambiguous_mask[at]]] for name, at in (parts | {"train": train_rows}).items()}
    lacking = describe_missing_classes(labels, expected_label_classes(data.kind))
    effective, weight = effective_sample_size(data.labels.iloc[rows], clear.astype(float)), clear.astype(float)
    verdicts, options = {}, {"horizon": data.horizon, "times_N": times}
    for name, p_N3 in given["test"].items():
        gains = verdict_gains_of_rows(data.y[rows], p_N3, counted["test"], weight, **options)
        verdicts[name] = model_verdict(
            name, gains, best, rows=int(clear.sum()), effective_rows=effective, kind=data.kind, lacking=lacking
        )
    own = {part: given[part][chosen] for part in parts}
    over = verdict_gains_of_rows(data.y[rows], own["test"], references.get("test", {}), weight, **options)
    gain_N = _row_gains(data, rows, own["test"], counted["test"][best])
    months = pd.Series(gain_N).groupby(np.asarray(times[clear].strftime("%Y-%m"))).agg(rows="size", gain="sum")
    calibration = dataset_calibration_by_class(data, rows, given["test"])
    over_prior = {
        part: float(gains.mean()) if len(gains) else float("nan")
        for part in ("train", "validation")
        for gains in [_row_gains(data, parts[part], own[part], counted[part]["prior"])]
    }
    return Evaluation(
        rows=rows, forecasts=given["test"], metrics=pd.concat(tables, ignore_index=True), verdicts=verdicts,
        chosen=chosen, months=months.rename_axis("month"), calibration=calibration,
        findings=_findings(
            verdicts[chosen], months, calibration[calibration["name"] == chosen], over_prior,
            count_trials(workspace, data.symbol),
        ),
        prior_loss=dataset_weighted_prior_loss(data, train_rows, parts["validation"]),
        reference_gains={name: (one.mean, one.low, one.high) for name, one in over.whole.items()},
        artifacts=dict(artifacts),
    )  # fmt: skip


def _findings(
    verdict: ModelVerdict, months: pd.DataFrame, calibration: pd.DataFrame, over_prior: Mapping[str, float],
    trials: int,
) -> tuple[Finding, ...]:  # fmt: skip
    """Return the findings on a model, the most severe first, and a note of what was not checked.

    over_prior : mean gain over the class prior on the training and validation rows; NaN without rows.
    """
    return sort_findings([
        baseline_finding(verdict), no_side_finding(verdict), too_good_finding(verdict), few_rows_finding(verdict),
        overfit_finding(over_prior["train"], over_prior["validation"]), concentration_finding("month", months["gain"]),
        calibration_finding(calibration), trials_finding(verdict, trials),
        unchecked_note({
            "overfitting": "" if np.isfinite(over_prior["train"]) else "QUICK predicted no training row",
            "one month that carries the gain": "" if len(months) >= PARTS else f"the test rows are of {len(months)}",
        }),
    ])  # fmt: skip


def _row_gains(data: PreparedDataset, rows: np.ndarray, p_N3: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the gain over another forecast of each unambiguous one of `rows`, in nats."""
    clear = data.unambiguous_mask[rows]
    y = data.y[rows[clear]]
    return row_log_loss(y, other[clear]) - row_log_loss(y, p_N3[clear])


def _probabilities(
    data: PreparedDataset, frames: Mapping[str, pd.DataFrame], rows: np.ndarray
) -> dict[str, np.ndarray]:
    index = data.labels.index[rows]
    return {name: frame.loc[index, PROBABILITIES].to_numpy() for name, frame in frames.items()}


def _equal_pool(
    workspace: Workspace, data: PreparedDataset, artifacts: Mapping[str, Artifact], parts: Mapping[str, np.ndarray]
) -> dict[str, dict[str, np.ndarray]]:
    """Return, for a stack alone, the plain mean of its calibrated base models by part: a pool without weights."""
    if list(artifacts) != [predictions.STACK]:
        return {}
    bases = predictions.base_model_artifacts(workspace, artifacts[predictions.STACK])
    frames = {name: predictions.load_or_make_predictions(workspace, data, base) for name, base in bases.items()}
    return {
        part: {EQUAL_POOL: equal_weight_probabilities(_probabilities(data, frames, rows))}
        for part, rows in parts.items()
    }


# ---- baselines, metrics and calibration of rows --------------------------------------------------------------------


def prepared_dataset_baselines(
    data: PreparedDataset, train_rows: np.ndarray, rows: np.ndarray
) -> dict[str, np.ndarray]:
    """Compute forecasts of the BASELINES for `rows`, counted on `train_rows`: name -> float64 (len(rows), 3).

    Rows count as in the metrics, each unambiguous row once. With training weights, under which long neutral labels
    count less, the prior was mostly worse than the uniform forecast (docs/log.md).
    """
    train_rows = train_rows[data.unambiguous_mask[train_rows]]
    y = data.y[train_rows]
    fitted = _fit_clock(data, train_rows)
    found = {
        "prior": prior_baseline_probabilities(y, None, len(rows)),
        "last_move": last_move_baseline_probabilities(data.last_move[train_rows], y, data.last_move[rows]),
        "clock": fitted.predict(data.clock.take(rows)),
        "clock_volatility": fitted.predict(data.clock.take(rows), data.volatility[rows]),
    }
    return {name: condition_on_classes(p_N3, data.classes.values()) for name, p_N3 in found.items()}


def _fit_clock(data: PreparedDataset, train_rows: np.ndarray) -> SessionClock:
    """Fit the clock baseline, with volatility, on these rows, in time order."""
    rows = np.sort(train_rows)
    minutes, bars = np.diff(data.labels.index[rows].as_unit("ns").asi8) / MINUTE_NS, np.diff(data.row[rows])
    bar_minutes = float(np.median(minutes / bars)) if len(rows) > 1 else 1.0
    return SessionClock.fit(
        data.clock.take(rows), data.y[rows], horizon=data.horizon, bar_minutes=bar_minutes,
        volatility=data.volatility[rows],
    )  # fmt: skip


def best_baseline(data: PreparedDataset, rows: np.ndarray, counted: Mapping[str, np.ndarray]) -> str:
    """Return the name of the baseline with the smallest log loss on the unambiguous ones of `rows`.

    rows : validation rows, or the early-stopping rows of a fold; never test rows. "prior" where all are ambiguous.
    counted : forecasts of these rows, as of `prepared_dataset_baselines`.
    """
    clear = data.unambiguous_mask[rows]
    if not clear.any():
        return BASELINES[0]
    losses = {name: row_log_loss(data.y[rows[clear]], p[clear]).mean() for name, p in counted.items()}
    return min(losses, key=losses.get)


def prepared_dataset_metrics(
    data: PreparedDataset, rows: np.ndarray, forecasts: dict[str, np.ndarray], best: str
) -> pd.DataFrame:
    """Compute metrics of each forecast on `rows`, each unambiguous row once.

    `effective_rows` is reduced by the overlap of the rows' labels.
    """
    rows, clear = rows[data.unambiguous_mask[rows]], data.unambiguous_mask[rows]
    return compute_forecast_metrics(
        {name: p_N3[clear] for name, p_N3 in forecasts.items()}, data.y[rows], best=best, horizon=data.horizon,
        effective_rows=effective_sample_size(data.labels.iloc[rows]), times=data.labels.index[rows],
    )  # fmt: skip


def dataset_calibration_by_class(
    data: PreparedDataset, rows: np.ndarray, forecasts: Mapping[str, np.ndarray]
) -> pd.DataFrame:
    """Compute `calibration_by_class` of each forecast on the unambiguous ones of `rows`.

    forecasts : name -> float64 (len(rows), 3).

    Returns
    -------
    DataFrame with a row per forecast (`name`) and class.
    """
    clear, tables = data.unambiguous_mask[rows], []
    options = {"horizon": data.horizon, "times_N": data.labels.index[rows][clear], "classes": data.classes}
    for name, p_N3 in forecasts.items():
        table = calibration_by_class(data.y[rows][clear], p_N3[clear], **options)
        table.insert(0, "name", name)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def dataset_weighted_prior_loss(data: PreparedDataset, train_rows: np.ndarray, rows: np.ndarray) -> float:
    """Compute the log loss of the class prior on `rows` with training weights, as the loss of a training is measured.

    Comparable with the losses of a history; metrics count each row once instead.
    """
    train_rows, train_weights = dataset_rows_with_weight(data, train_rows)
    rows, weights = dataset_rows_with_weight(data, rows)
    p_N3 = condition_on_classes(
        prior_baseline_probabilities(data.y[train_rows], train_weights, len(rows)), data.classes.values()
    )
    return float(np.average(row_log_loss(data.y[rows], p_N3), weights=weights))


def baseline_training_rows(data: PreparedDataset, predicted: np.ndarray) -> np.ndarray:
    """Return the training rows whose windows are as long as those of all predicted rows, on which baselines are counted
    (QUICK predicts only some of them): later rows of a session have another class balance.

    predicted : positions of rows in any split.
    """
    first = np.flatnonzero(np.diff(data.segment, prepend=data.segment[0] - 1))  # bar of each segment
    bars = data.row[predicted]
    lookback = int((bars - first[np.searchsorted(first, bars, side="right") - 1]).min()) + 1
    train = data.splits["train"]
    return train[data.full_window_mask(lookback)[train]]


# ---- the answer of the suite ---------------------------------------------------------------------------------------


def suite_answer(workspace: Workspace, found: Result) -> list[str]:
    """Return the last lines of the suite: edge or not, how sure, what costs leave, on DEMO what could be known."""
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
    times = pd.DatetimeIndex(bars["timestamp"]).as_unit("ns").asi8
    sessions = assign_sessions(times, synthetic.SyntheticSpec.calendar).id
    market = synthetic.synthetic_market(synthetic.SyntheticSpec(days=len(np.unique(sessions))))
    if data.kind != "triple_barrier" or not np.array_equal(bars["close"], market.bars["close"]):
        return ""
    stored = predictions.load_predictions(
        workspace, found.symbol, found.horizon, found.chosen, found.run_ids[found.chosen]
    )
    train = baseline_training_rows(data, data.labels.index.get_indexer(stored.index))  # those of the gain that is shown
    stored = stored[stored["split"] == "test"]
    rows = data.labels.index.get_indexer(stored.index)
    sampled = np.flatnonzero(data.unambiguous_mask[rows])[::EVERY]
    rows, p_N3 = rows[sampled], stored[PROBABILITIES].to_numpy()[sampled]
    labels, base_minutes = data.labels.iloc[rows], data.settings["data"]["features"]["base_minutes"]
    times, up, down = labels.index.as_unit("ns").asi8, labels["up"].to_numpy(), labels["down"].to_numpy()
    truth = synthetic.oracle_probabilities(market, times, up, down, found.horizon * base_minutes, paths=PATHS)
    truth = (PATHS * truth + 1 / 3) / (PATHS + 1)  # one path more than were simulated ends anywhere
    best = prepared_dataset_baselines(data, train, rows)[found.verdicts[found.chosen].best_baseline]
    loss = row_log_loss(data.y[rows], best).mean()
    own, known = (loss - row_log_loss(data.y[rows], p).mean() for p in (p_N3, truth))
    return (
        f"Of what can be known: the oracle, which knows how {DEMO} is made and all bars so far, gains {known:+.4f}, "
        f"and {found.chosen} {own / known:.0%} of that (every {EVERY}th test row)."
    )
