"""Evaluate the finished models of a symbol and horizon on the same test rows."""

import time
from collections.abc import Sequence
from pathlib import Path

from ml_factory.datasets.store import DatasetStore
from ml_factory.evaluation.findings import finding_lines
from ml_factory.evaluation.metrics import MetricsTable
from ml_factory.lazy_module import LazyModule
from ml_factory.result import Result, calibration_lines, verdict_lines
from ml_factory.storage.workspace import Workspace, push_workspace_on_exit
from ml_factory.workflows import report
from ml_factory.workflows.evaluation import evaluate_artifacts
from ml_factory.workflows.load_prepared import load_dataset
from ml_factory.workflows.predictions import artifacts_to_compare, describe_run_choice

plots = LazyModule("ml_factory.evaluation.plots")  # matplotlib comes with the extra train


@push_workspace_on_exit
def evaluate(
    workspace: Workspace | str | Path, symbol: str, horizon: int, models: Sequence[str] | None = None, *,
    title: str = "", runs: Sequence[str] = (),
) -> Result:  # fmt: skip
    """Evaluate every finished model of this symbol and horizon on the same test rows.

    Writes `results/report.html`, and `results/report.json` with its numbers.

    runs : ids of runs whose models are compared; of the other models the newest run on the current data.

    The result has

    metrics : a row per forecast on the common test rows, the baselines among them; report_path is where they are shown.
    verdicts, verdict : model -> its verdict on these rows; that of the chosen one.
    chosen : model with the smallest log loss on validation rows; findings are on it, the most severe first.
    calibration : of every model, as of `train`.
    run_ids, choices : model -> its run, and why that one was taken, in words.
    traded : result of `backtest` on the chosen model's test rows, or why there is none.
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
        quick_limits=limited, extra_sections=[report.compared_runs_section(compared.artifacts)],
    )  # fmt: skip
    shown = compared.test_metrics.reset_index()
    shown.insert(0, "split", "test")
    seconds = time.perf_counter() - started
    others = [one.sentence for name, one in compared.verdicts.items() if name != compared.chosen]
    lines = [
        f"{len(shown)} forecasts compared on the test rows, {seconds:.1f} s", f"  report {path}",
        *(f"  {name}: run {run} ({choices[name]})" for name, run in run_ids.items()), *(f"  {line}" for line in others),
        *([f"  chosen on validation rows: {compared.chosen}"] if others else []),
        *calibration_lines(shown, compared.calibration, compared.chosen), *verdict_lines(compared.verdict),
        *finding_lines(compared.findings),
    ]  # fmt: skip
    return Result(
        lines, figure=lambda: plots.plot_metrics(compared.test_metrics), also={"verdict": compared.verdict},
        symbol=symbol, horizon=horizon, metrics=MetricsTable(shown), report_path=path, run_ids=run_ids,
        choices=choices, verdicts=dict(compared.verdicts), chosen=compared.chosen, calibration=compared.calibration,
        findings=compared.findings, traded=traded, seconds=seconds,
    )  # fmt: skip
