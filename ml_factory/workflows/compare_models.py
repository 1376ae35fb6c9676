"""Comparison of all finished models of a symbol and horizon on the test rows that all of them predict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ml_factory.evaluation.findings import Finding
from ml_factory.evaluation.verdict import ModelVerdict
from ml_factory.storage.artifact_registry import Artifact
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import predictions
from ml_factory.workflows.dataset_evaluation import (
    baseline_training_rows,
    dataset_best_baseline,
    dataset_metrics_with_baselines,
    dataset_missing_classes,
    prepared_dataset_verdict,
)
from ml_factory.workflows.model_findings import find_model_issues, gain_by_month
from ml_factory.workflows.prepared_dataset import PreparedDataset
from ml_factory.workflows.runs.stored_runs import count_trials


@dataclass(frozen=True)
class ModelComparison:
    """Finished models on N common test rows.

    artifacts : model -> its artifact on this data.
    rows : int64 (N,), positions into the labels.
    test : model -> float64 (N, 3) probabilities.
    metrics : a row per model and baseline, index its name.
    verdicts : model -> its verdict on these rows.
    chosen : the model with the smallest log loss on validation rows.
    months, findings : of the chosen model, as of `PredictionEvaluation`.
    """

    artifacts: Mapping[str, Artifact]
    rows: np.ndarray
    test: Mapping[str, np.ndarray]
    metrics: pd.DataFrame
    verdicts: dict[str, ModelVerdict]
    chosen: str
    months: pd.DataFrame
    findings: tuple[Finding, ...]


def compare_finished_models(
    workspace: Workspace, data: PreparedDataset, models: Sequence[str] | None = None, runs: Sequence[str] = ()
) -> ModelComparison:
    """Compare the newest run of each model, or those of `runs`. Raises NotPreparedError where there is none."""
    found = predictions.artifacts_to_compare(workspace, data, models, runs)
    rows, test = predictions.predictions_on_common_rows(workspace, data, found, "test")
    predicted_rows, train = predictions.predictions_on_common_rows(workspace, data, found, "train")
    validation_rows, validation = predictions.predictions_on_common_rows(workspace, data, found, "validation")
    train_rows = baseline_training_rows(data, np.concatenate((predicted_rows, validation_rows, rows)))
    best = dataset_best_baseline(data, train_rows, validation_rows)
    metrics = dataset_metrics_with_baselines(data, train_rows, rows, test, best)
    choosing = dataset_metrics_with_baselines(data, train_rows, validation_rows, validation, best)
    lacking = dataset_missing_classes(data, {"train": train_rows, "validation": validation_rows, "test": rows})
    verdicts = {
        name: prepared_dataset_verdict(data, train_rows, rows, name, p, best, lacking) for name, p in test.items()
    }
    chosen = str(choosing.loc[list(found), "log_loss"].idxmin())
    predicted = {"train": (predicted_rows, train[chosen]), "validation": (validation_rows, validation[chosen])}
    months = gain_by_month(data, train_rows, rows, test[chosen], best)
    findings = find_model_issues(
        data, verdicts[chosen], predicted | {"test": (rows, test[chosen])}, months,
        count_trials(workspace, data.symbol),
    )  # fmt: skip
    return ModelComparison(found, rows, test, metrics, verdicts, chosen, months, findings)
