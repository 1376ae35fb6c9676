"""Evaluate the finished models of a symbol and horizon on the same test rows."""

import time
from collections.abc import Sequence
from pathlib import Path

from ml_factory.datasets.store import DatasetStore
from ml_factory.evaluation.metrics import MetricsTable
from ml_factory.lazy_module import LazyModule
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows import report
from ml_factory.workflows.evaluation import evaluate_artifacts
from ml_factory.workflows.load_prepared import load_dataset
from ml_factory.workflows.predictions import artifacts_to_compare, describe_run_choice
from ml_factory.workflows.results.models import EvaluateResult
from ml_factory.workflows.run_report_sections import compared_runs_section

plots = LazyModule("ml_factory.evaluation.plots")  # matplotlib comes with the extra train


def evaluate(
    workspace: Workspace | str | Path, symbol: str, horizon: int, models: Sequence[str] | None = None, *,
    title: str = "", runs: Sequence[str] = (),
) -> EvaluateResult:  # fmt: skip
    """Evaluate every finished model of this symbol and horizon on the same test rows.

    Writes `results/report.html`, and `results/report.json` with its numbers.

    runs : ids of runs whose models are compared; of the other models the newest run on the current data.
    """
    started = time.perf_counter()
    workspace = Workspace(workspace)
    data = load_dataset(workspace, symbol, horizon)
    compared = evaluate_artifacts(workspace, data, artifacts_to_compare(workspace, data, models, runs))
    choices = {
        name: describe_run_choice(
            workspace, one, one.facts["run_id"] if one.facts["run_id"] in runs else "", data.fingerprint
        )
        for name, one in compared.artifacts.items()
    }
    limited = {
        f"{name} {what}": value
        for name, one in compared.artifacts.items()
        for what, value in one.facts["limited"].items()
    }
    run_ids = {name: one.facts["run_id"] for name, one in compared.artifacts.items()}
    traded = report.backtest_for_report(workspace, data, compared.chosen, run_ids[compared.chosen])
    path = report.write_evaluation_report(
        workspace.results / "report.html", title or f"{symbol}: {', '.join(compared.artifacts)}", data,
        DatasetStore.current(workspace.processed(symbol)), compared, traded,
        quick_limits=limited, extra_sections=[compared_runs_section(compared.artifacts)],
    )  # fmt: skip
    shown = compared.test_metrics.reset_index()
    shown.insert(0, "split", "test")
    return EvaluateResult(
        symbol=symbol, horizon=horizon, metrics=MetricsTable(shown), report_path=path,
        verdicts=dict(compared.verdicts), chosen=compared.chosen, findings=compared.findings, traded=traded,
        seconds=time.perf_counter() - started,
        run_ids=run_ids, choices=choices,
        calibration=compared.calibration,
        draw=lambda: plots.plot_metrics(compared.test_metrics),
    )  # fmt: skip
