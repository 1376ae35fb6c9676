"""Evaluation of finished models on the rows that all of them predict, beside the baselines."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from ml_factory.ensemble.stacking import equal_weight_probabilities
from ml_factory.evaluation.findings import Finding
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.evaluation.verdict import ModelVerdict
from ml_factory.inference.predict import common_prediction_index
from ml_factory.storage.artifact_registry import Artifact
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import predictions
from ml_factory.workflows.dataset_evaluation import (
    baseline_training_rows,
    dataset_best_baseline,
    dataset_calibration_by_class,
    dataset_gain_over_forecast,
    dataset_metrics_with_baselines,
    dataset_missing_classes,
    dataset_weighted_prior_loss,
    prepared_dataset_verdict,
)
from ml_factory.workflows.model_findings import find_model_issues, gain_by_month
from ml_factory.workflows.prepared_dataset import PreparedDataset
from ml_factory.workflows.runs.stored_runs import count_trials

EQUAL_POOL = "equal_pool"


@dataclass(frozen=True)
class Evaluation:
    """Finished models on N test rows, and on validation rows.

    rows : int64 (N,), positions of the test rows into the labels.
    forecasts : model -> float64 (N, 3) probabilities of the test rows.
    metrics : a row per split (validation, test) and forecast, the baselines among them.
    verdicts : model -> its verdict on the test rows, over every baseline; the best one was chosen on validation rows.
    chosen : the model with the smallest log loss on validation rows.
    months, findings : of the chosen model, `gain_by_month` over the best baseline and the most severe finding first.
    calibration : predicted and observed frequency by class on test rows, `dataset_calibration_by_class`.
    priors : split -> weighted loss of the class prior, comparable with a history's losses on that split.
    reference_gains : reference forecast -> gain over it on test rows, in nats, with its 95 % interval.
    artifacts : model -> its artifact.
    """

    rows: np.ndarray
    forecasts: Mapping[str, np.ndarray]
    metrics: pd.DataFrame
    verdicts: Mapping[str, ModelVerdict]
    chosen: str
    months: pd.DataFrame
    findings: tuple[Finding, ...] = ()
    calibration: pd.DataFrame | None = None
    priors: Mapping[str, float] = field(default_factory=dict)
    reference_gains: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)

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
    index, parts = common_prediction_index(frames), {}
    for name, rows in data.splits.items():
        parts[name] = rows[data.labels.index[rows].isin(index)]
    given = {part: _probabilities(data, frames, rows) for part, rows in parts.items()}
    references = _equal_pool(workspace, data, *artifacts.values(), parts=parts) if len(artifacts) == 1 else {}
    train_rows = baseline_training_rows(data, np.concatenate([*parts.values()]))
    best, tables, priors = dataset_best_baseline(data, train_rows, parts["validation"]), {}, {}
    for part in ("validation", "test"):
        forecasts = given[part] | {who: p[part] for who, p in references.items()}
        tables[part] = dataset_metrics_with_baselines(data, train_rows, parts[part], forecasts, best)
        priors[part] = dataset_weighted_prior_loss(data, train_rows, parts[part])
    losses, rows = tables["validation"].loc[list(artifacts), "log_loss"], parts["test"]
    chosen = str(losses.idxmin()) if len(losses) > 1 else next(iter(artifacts))
    lacking = dataset_missing_classes(data, parts | {"train": train_rows})
    verdicts = {
        name: prepared_dataset_verdict(data, train_rows, rows, name, p_N3, best, lacking)
        for name, p_N3 in given["test"].items()
    }
    months = gain_by_month(data, train_rows, rows, given["test"][chosen], best)
    predicted = {part: (at, given[part][chosen]) for part, at in parts.items()}
    # Epoch, calibration and best baseline were chosen on validation rows: their figures flatter.
    metrics = [
        table.reset_index().assign(split=part, used_for_choosing=part == "validation") for part, table in tables.items()
    ]
    return Evaluation(
        rows, given["test"], pd.concat(metrics, ignore_index=True), verdicts, chosen, months,
        find_model_issues(data, verdicts[chosen], predicted, months, count_trials(workspace, data.symbol)),
        dataset_calibration_by_class(data, rows, given["test"]), priors,
        {who: dataset_gain_over_forecast(data, rows, given["test"][chosen], p["test"])
         for who, p in references.items()},
        dict(artifacts),
    )  # fmt: skip


def _probabilities(
    data: PreparedDataset, frames: Mapping[str, pd.DataFrame], rows: np.ndarray
) -> dict[str, np.ndarray]:
    index = data.labels.index[rows]
    return {name: frame.loc[index, PROBABILITIES].to_numpy() for name, frame in frames.items()}


def _equal_pool(
    workspace: Workspace, data: PreparedDataset, artifact: Artifact, parts: Mapping[str, np.ndarray]
) -> dict[str, dict[str, np.ndarray]]:
    """Return, for a stack, the plain mean of its calibrated base models by part: a pool without learnt weights."""
    if artifact.kind != predictions.STACK:
        return {}
    bases = predictions.base_model_artifacts(workspace, artifact)
    frames = {name: predictions.load_or_make_predictions(workspace, data, base) for name, base in bases.items()}
    return {
        EQUAL_POOL: {
            part: equal_weight_probabilities(_probabilities(data, frames, rows)) for part, rows in parts.items()
        }
    }
