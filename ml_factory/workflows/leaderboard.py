"""Leaderboard of a workspace: the finished models of every prepared symbol and horizon, each on its test rows."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_horizon
from ml_factory.datasets.store import DatasetStore
from ml_factory.errors import NotPreparedError
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.workflows.compare_models import ModelComparison, compare_finished_models
from ml_factory.workflows.load_prepared import load_dataset
from ml_factory.workflows.predictions import load_fitted_models
from ml_factory.workflows.prepared_dataset import PreparedDataset
from ml_factory.workflows.results.base import Result

TIMED_ROWS = 4_096  # newest test rows that are predicted again for the time
SHOWN = ["symbol", "horizon", "model", "status", "gain_best", "log_loss", "fit_seconds", "predict_seconds"]


@dataclass(frozen=True, kw_only=True)
class LeaderboardResult(Result):
    """Result of `leaderboard`.

    frame : a row per symbol, horizon and finished model; within a symbol and horizon the smallest log loss first:
        symbol, horizon, model, chosen (smallest log loss on validation rows), status and sentence of the verdict,
        log_loss, best_baseline with its baseline_log_loss, gain_best with gain_low and gain_high (nats per row, 95 %
        interval), direction_gain, rows, effective_rows, fit_seconds (of all epochs, or of the last session where a
        model keeps no history), predict_seconds of predict_rows newest test rows on this machine, quick, run_id.
    skipped : prepared symbols and horizons without a finished model.
    """

    frame: pd.DataFrame
    skipped: list[str]

    def summary(self) -> str:
        table = self.frame[SHOWN].rename(columns={"gain_best": "gain"})
        digits = {"gain": "{:+.4f}", "log_loss": "{:.4f}", "fit_seconds": "{:.1f}", "predict_seconds": "{:.3f}"}
        text = table.to_string(index=False, formatters={name: one.format for name, one in digits.items()})
        beats = int((self.frame["status"] == "beats").sum())
        lines = [
            text,
            f"{beats} of {len(self.frame)} models beat every baseline on their test rows.",
            "Each model tried is one more trial: the best of many may be the best by luck.",
        ]
        return "\n".join([*lines, *(f"  no finished model: {name}" for name in self.skipped)])

    def __str__(self) -> str:
        """Return the summary; the table's lines stay whole."""
        return self.summary()

    def to_dict(self) -> dict:
        """Return the facts of the summary as JSON values, a record per model."""
        return super().to_dict() | {"models": self.frame.to_dict("records")}


def leaderboard(
    workspace: Workspace | str | Path, symbols: Sequence[str] | None = None, horizons: Sequence[int] | None = None
) -> LeaderboardResult:
    """Compare the newest finished run of every model, for each symbol and horizon of the workspace.

    The rows of one symbol and horizon are those of `evaluate`: the test rows that all of its models predict.

    symbols, horizons : those to list; None: all that are prepared.
    Raises NotPreparedError where no model is finished.
    """
    started, workspace = time.perf_counter(), Workspace(workspace)
    wanted = {check_horizon(one) for one in horizons or ()}
    rows, skipped = [], []
    for symbol in [check_symbol(one) for one in symbols] if symbols else _prepared_symbols(workspace):
        for horizon in DatasetStore.current(workspace.processed(symbol)).horizons:
            if wanted and horizon not in wanted:
                continue
            data = load_dataset(workspace, symbol, horizon)
            if not _has_model(workspace, data):
                skipped.append(f"{symbol}, horizon {horizon}")
                continue
            rows += _model_rows(workspace, data, compare_finished_models(workspace, data))
    if not rows:
        raise NotPreparedError(
            "No model is finished", where=workspace.models, got=f"prepared: {'; '.join(skipped) or 'nothing'}",
            next_step="python -m ml_factory train --symbol SYMBOL --model xgboost",
        )  # fmt: skip
    frame = pd.DataFrame(rows).sort_values(["symbol", "horizon", "log_loss"], kind="stable", ignore_index=True)
    return LeaderboardResult(frame=frame, skipped=skipped, seconds=time.perf_counter() - started)


def _prepared_symbols(workspace: Workspace) -> list[str]:
    parent = workspace.processed("X").parent
    names = sorted(name for name in workspace.files.names(parent) if not name.startswith("."))
    return [name for name in names if workspace.files.is_file(parent / name / "current.json")]


def _has_model(workspace: Workspace, data: PreparedDataset) -> bool:
    return any(
        (one.facts.get("horizon"), one.facts.get("data")) == (data.horizon, data.fingerprint)
        for one in ArtifactRegistry(workspace.models).list(data.symbol)
    )


def _model_rows(workspace: Workspace, data: PreparedDataset, compared: ModelComparison) -> list[dict]:
    rows = []
    for name, artifact in compared.artifacts.items():
        verdict = compared.verdicts[name]
        timed = compared.rows[-TIMED_ROWS:]
        rows.append({
            "symbol": data.symbol, "horizon": data.horizon, "model": name, "chosen": name == compared.chosen,
            "status": verdict.status, "sentence": verdict.sentence,
            "log_loss": float(compared.metrics.loc[name, "log_loss"]), "best_baseline": verdict.best_baseline,
            "baseline_log_loss": float(compared.metrics.loc[verdict.best_baseline, "log_loss"]),
            "gain_best": verdict.gain_best, "gain_low": verdict.gain_best_low, "gain_high": verdict.gain_best_high,
            "direction_gain": verdict.direction_gain, "rows": verdict.rows, "effective_rows": verdict.effective_rows,
            "fit_seconds": _fit_seconds(artifact),
            "predict_seconds": _predict_seconds(workspace, data, artifact, timed), "predict_rows": len(timed),
            "quick": bool(artifact.facts["limited"]), "run_id": artifact.facts["run_id"],
        })  # fmt: skip
    return rows


def _fit_seconds(artifact: Artifact) -> float:
    """Return the seconds of all epochs, those before an interruption included."""
    epochs = [one["seconds"] for one in artifact.facts.get("history", ()) if one.get("seconds") is not None]
    return float(sum(epochs)) if epochs else float(artifact.facts["seconds"])


def _predict_seconds(workspace: Workspace, data: PreparedDataset, artifact: Artifact, rows: np.ndarray) -> float:
    """Return the seconds of predicting these rows of the labels from their features, the model in memory."""
    fitted = load_fitted_models(workspace, artifact)
    most = max((model.lookback for model in fitted.models.values()), default=0)
    first, end = max(int(data.row[rows[0]]) - most, 0), int(data.row[rows[-1]]) + 1
    given = {"segment": data.segment[first:end], "close": data.close[first:end], "rows": data.row[rows] - first}
    for _ in range(2):  # the first pass compiles kernels and wakes threads
        started = time.perf_counter()
        fitted.predict_features(data.features.iloc[first:end], **given)
    return time.perf_counter() - started
