"""Leaderboard of a workspace: the finished models of every prepared symbol and horizon, each on its test rows."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_horizon
from ml_factory.datasets.store import CURRENT, open_current_store
from ml_factory.errors import NotPreparedError
from ml_factory.evaluation.verdict import BEATS
from ml_factory.result import Result
from ml_factory.runs import count_trials
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace, check_symbol, push_workspace_on_exit
from ml_factory.workflows.backtest import backtest
from ml_factory.workflows.evaluation import Evaluation, evaluate_artifacts
from ml_factory.workflows.predictions import artifacts_to_compare
from ml_factory.workflows.prepared_dataset import PreparedDataset, load_dataset

SHOWN = ["symbol", "horizon", "model", "run", "status", "gain_best", "net", "chance"]


@push_workspace_on_exit
def leaderboard(
    workspace: Workspace | str | Path, symbols: Sequence[str] | None = None, horizons: Sequence[int] | None = None
) -> Result:
    """Compare the finished models of the workspace, for each symbol and horizon: the newest full run of each, or the
    newest QUICK one where there is no full one.

    The rows of one symbol and horizon are those of `evaluate`: the test rows that all of its models predict. A model
    whose data is not the prepared data of now has a line without figures.

    symbols, horizons : those to list; None: all that have models or are prepared.

    The result has

    frame : a row per symbol, horizon and finished model; within a symbol and horizon the smallest log loss first,
        models of other data last, which have no figures. Columns: symbol, horizon, model, chosen (smallest log loss on
        validation rows), status, edge and sentence of the verdict, log_loss, best_baseline with its baseline_log_loss,
        gain_best with gain_low and gain_high (nats per row, 95 % interval), direction_gain, rows, effective_rows, net
        and break_even_ticks of the backtest after costs, chance (that its true Sharpe ratio is above 0, after all
        trials of the symbol), fit_seconds (of all epochs, or of the last session where a model keeps no history),
        quick, run_id.
    trials : symbol -> trials, as `count_trials`.
    skipped : prepared symbols and horizons without a finished model.

    Raises NotPreparedError where no model is finished.
    """
    started, workspace = time.perf_counter(), Workspace(workspace)
    wanted = {check_horizon(one) for one in horizons or ()}
    rows, skipped, registry = [], [], ArtifactRegistry(workspace.models)
    symbols = [check_symbol(one) for one in symbols] if symbols else _known_symbols(workspace)
    for symbol in symbols:
        finished = [one for one in registry.list(symbol) if "run_id" in one.facts]
        there = {one.facts["horizon"] for one in finished}
        if not finished or files.is_file(workspace.processed(symbol) / CURRENT):
            there |= set(open_current_store(workspace, symbol).horizons)
        for horizon in sorted(there & wanted if wanted else there):
            models = [one for one in finished if one.facts["horizon"] == horizon]
            rows += _rows_of_horizon(workspace, symbol, horizon, models)
            skipped += [] if models else [f"{symbol}, horizon {horizon}"]
    if not rows:
        raise NotPreparedError(
            "No model is finished", where=workspace.models, got=f"prepared: {'; '.join(skipped) or 'nothing'}",
            next_step="python -m ml_factory train --symbol SYMBOL --model xgboost",
        )  # fmt: skip
    table = pd.DataFrame(rows).sort_values(["symbol", "horizon", "log_loss"], kind="stable", ignore_index=True)
    trials = {symbol: count_trials(workspace, symbol) for symbol in dict.fromkeys(table["symbol"])}
    return Result(
        _lines(table, trials, skipped), also={"frame": table}, trials=trials, skipped=skipped,
        seconds=time.perf_counter() - started, models=table,
    )  # fmt: skip


def _lines(table: pd.DataFrame, trials: Mapping[str, int], skipped: Sequence[str]) -> list[str]:
    """Return the summary: the table, the number of models that beat their baselines, the trials."""
    run = table["quick"].map({True: "QUICK", False: "full"})
    shown = table.assign(run=run).reindex(columns=SHOWN).rename(columns={"gain_best": "gain", "net": "after costs"})
    digits = {"gain": "{:+.4f}", "after costs": "{:,.0f}", "chance": "{:.0%}"}
    text = shown.to_string(index=False, formatters={name: one.format for name, one in digits.items()}, na_rep="-")
    tried = ", ".join(f"{count} on {symbol}" for symbol, count in trials.items())
    return [
        *text.splitlines(),
        f"{int((table['status'] == BEATS).sum())} of {len(table)} models beat every baseline on their test rows, "
        f"{int(table['edge'].sum())} with an edge.",
        f"Trials, all counted in chance (that the Sharpe ratio after costs is above 0): {tried}.",
        *(f"  no finished model: {name}" for name in skipped),
    ]


def _known_symbols(workspace: Workspace) -> list[str]:
    """Return the symbols that have models, or prepared data on this machine."""
    data = workspace.processed("X").parent  # a `prepare` that was refused leaves its lock alone there
    prepared = {name for name in files.names(data) if files.is_file(data / name / "current.json")}
    return sorted(prepared | {name for name in files.names(workspace.models) if not name.startswith(".")})


def _rows_of_horizon(workspace: Workspace, symbol: str, horizon: int, models: Sequence[Artifact]) -> list[dict]:
    """Return the rows of the models of one symbol and horizon, oldest first."""
    newest = {one.name: one for one in models}
    try:
        data = load_dataset(workspace, symbol, horizon) if models else None
    except NotPreparedError as error:  # each model's line says so
        data, reason = None, str(error)
    else:
        reason = f"trained on other data than that prepared now, {data.fingerprint[:12]}" if data else ""
    rows = []
    if data is not None and any(one.facts["data"] == data.fingerprint for one in models):
        rows = _model_rows(
            workspace, data, evaluate_artifacts(workspace, data, artifacts_to_compare(workspace, data, None))
        )
    for name in [name for name in newest if name not in {row["model"] for row in rows}]:
        rows.append({
            "symbol": symbol, "horizon": horizon, "model": name, "chosen": False, "status": "other data",
            "edge": False, "sentence": reason, "log_loss": np.nan, "quick": newest[name].facts["run"]["quick"],
            "run_id": newest[name].facts["run_id"],
        })  # fmt: skip
    return rows


def _model_rows(workspace: Workspace, data: PreparedDataset, compared: Evaluation) -> list[dict]:
    rows, metrics = [], compared.test_metrics
    for name, artifact in compared.artifacts.items():
        verdict = compared.verdicts[name]
        rows.append({
            "symbol": data.symbol, "horizon": data.horizon, "model": name, "chosen": name == compared.chosen,
            "status": verdict.status, "edge": verdict.edge, "sentence": verdict.sentence,
            "log_loss": float(metrics.loc[name, "log_loss"]), "best_baseline": verdict.best_baseline,
            "baseline_log_loss": float(metrics.loc[verdict.best_baseline, "log_loss"]),
            "gain_best": verdict.gain_best, "gain_low": verdict.gain_best_low, "gain_high": verdict.gain_best_high,
            "direction_gain": verdict.direction_gain, "rows": verdict.rows, "effective_rows": verdict.effective_rows,
            **_after_costs(workspace, data, artifact), "fit_seconds": training_seconds(artifact),
            "quick": artifact.facts["run"]["quick"], "run_id": artifact.facts["run_id"],
        })  # fmt: skip
    return rows


def _after_costs(workspace: Workspace, data: PreparedDataset, artifact: Artifact) -> dict[str, float]:
    """Return the figures of the model's backtest; NaN for bets of meta-labels, which have none."""
    if data.kind == "meta":
        return dict.fromkeys(("net", "break_even_ticks", "chance"), np.nan)
    traded = backtest(workspace, data.symbol, data.horizon, artifact.facts["model"], run=artifact.facts["run_id"])
    net, ticks = traded.own["net"], traded.own["break_even_ticks"]
    return {"net": net, "break_even_ticks": ticks, "chance": traded.luck["deflated_sharpe"]}


def training_seconds(artifact: Artifact) -> float:
    """Return the seconds of all epochs, those before an interruption included."""
    epochs = [one["seconds"] for one in artifact.facts.get("history", ()) if one.get("seconds") is not None]
    return float(sum(epochs)) if epochs else float(artifact.facts["seconds"])
