"""Results of training, cross-validation, stacking, evaluation and prediction."""

from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from ml_factory.evaluation.findings import Finding, concentration_finding, finding_lines, sort_findings
from ml_factory.evaluation.verdict import ModelVerdict
from ml_factory.models.registry import find_model_spec
from ml_factory.workflows.results.base import ModelResult, Result, RunResult
from ml_factory.workflows.results.summaries import (
    summary_calibration_lines,
    summary_verdict_lines,
    summary_warning_lines,
)


@dataclass(frozen=True, kw_only=True)
class TrainResult(ModelResult):
    """Result of `train`.

    history : a row per epoch or booster block: epoch, train_loss, val_loss, seconds.
    best_epoch : epoch of the final model.
    importances : of trees and the linear model, `feature_importance_table`.
    machine : device and resources of a network's fit.
    """

    model: str
    history: pd.DataFrame
    best_epoch: int
    artifact_hash: str
    importances: pd.DataFrame | None = None
    machine: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.resumed_from is not None:
            unit = "epoch" if find_model_spec(self.model).windowed else "block"
            object.__setattr__(self, "reached", f"{unit} {self.resumed_from}")

    def ran_on(self) -> pd.DataFrame:
        """Return device, memory and speed of a network's training, in the session that ended it; empty for a
        booster.
        """
        facts = self.machine
        peak, compiles = facts.get("peak_bytes"), facts.get("compiles")
        shown = {
            "device": facts.get("device"),
            "threads of the host": facts.get("threads"),
            "precision of the steps": facts.get("precision"),
            "parameters": f"{facts.get('parameters', 0):,}",
            "peak memory": f"{peak / 1e6:,.0f} MB" if peak else "unknown",
            "compiles": ", ".join(f"{name} {count}" for name, count in (compiles or {}).items()) or "none",
            "samples a second": f"{facts.get('rows_per_second', 0):,.0f}, validation included",
        }
        return pd.DataFrame({"value": shown if facts else {}}, dtype=object).rename_axis("training")

    def summary(self) -> str:
        if self.reused:
            how = "was finished before; loaded"
        elif self.resumed_from is not None:
            how = f"resumed after {self.reached}"
        else:
            how = "trained from the start"
        first = f"{self.model} on {self.symbol}, horizon {self.horizon}: {how}, {self.seconds:.1f} s"
        return self._lines_after([first, *summary_warning_lines(self)], self.model)


@dataclass(frozen=True, kw_only=True)
class CrossValidateResult(RunResult):
    """Result of `cross_validate`.

    folds, paths : a row per fold, block and forecast; a row per path and forecast of combinatorial folds. Calibrated
        forecasts have the model's name, uncalibrated ones the suffix `_uncalibrated`.
    gain_mean, gain_se : over the blocks; gain_uncalibrated the mean without calibration.
    untaught : folds whose training rows hold one class.
    verdict : over the blocks, against every baseline.
    """

    model: str
    scheme: str
    folds: pd.DataFrame
    fold_table: pd.DataFrame
    paths: pd.DataFrame | None
    gain_mean: float
    gain_se: float
    gain_uncalibrated: float
    untaught: list[int]
    path: Path
    paths_path: Path | None
    verdict: ModelVerdict | None = None

    def summary(self) -> str:
        begun = f", resumed at {self.reached}" if self.reached else ""
        resumed = f", {self.resumed_from} folds found done" if self.resumed_from else begun
        first = (
            f"{self.model} on {self.symbol}, horizon {self.horizon}, {len(self.fold_table)} folds "
            f"({self.scheme}){resumed}: log loss below the prior's by {self.gain_mean:+.4f} "
            f"(standard error over blocks {self.gain_se:.4f}; not calibrated {self.gain_uncalibrated:+.4f}), "
            f"{self.seconds:.1f} s"
        )
        lines = [*self._path_lines(), *self._untaught_lines(), *summary_warning_lines(self), f"  folds {self.path}"]
        return "\n".join([first, *lines, *summary_verdict_lines(self.verdict), *finding_lines(self.findings)])

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings on the gains of the blocks over the class prior, the mean of a block that several folds test."""
        own = self.folds[self.folds["name"] == self.model]
        return sort_findings([concentration_finding("fold", own.groupby("block")["log_loss_gain"].mean())])

    def _path_lines(self) -> list[str]:
        if self.paths is None:
            return []
        gains = self.paths.loc[self.paths["name"] == self.model, "log_loss_gain"]
        return [
            f"  {len(gains)} paths: from {gains.min():+.4f} to {gains.max():+.4f}, {(gains > 0).mean():.0%} above 0"
        ]

    def _untaught_lines(self) -> list[str]:
        names = ", ".join(map(str, self.untaught))
        return [f"  forecast nothing, their training rows are of one class: fold {names}"] if self.untaught else []


@dataclass(frozen=True, kw_only=True)
class StackResult(ModelResult):
    """Result of `stack`; `comparison` compares it with the plain mean of its models."""

    base_models: list[str]
    weights: pd.DataFrame
    lineage: pd.DataFrame | None = None
    comparison: tuple[str, ...] = ()

    def summary(self) -> str:
        begun = f", resumed at {self.reached}" if self.reached else ""
        resumed = f", {self.resumed_from} out-of-fold parts found done" if self.resumed_from else begun
        names = ", ".join(self.base_models)
        first = f"stack of {names} on {self.symbol}, horizon {self.horizon}{resumed}, {self.seconds:.1f} s"
        return self._lines_after(
            [first, *summary_warning_lines(self), *(f"  {line}" for line in self.comparison)], "stack"
        )


@dataclass(frozen=True, kw_only=True)
class EvaluateResult(Result):
    """Result of `evaluate`.

    metrics : a row per forecast on the common test rows, the baselines among them.
    verdicts : model -> its verdict on these rows.
    chosen : model with the smallest log loss on validation rows.
    calibration : of every model, as of TrainResult.
    run_ids, choices : model -> its run, and why that one was taken, in words.
    findings : on the chosen model, the most severe first.
    traded : `BacktestResult` of the chosen model's test rows, or why there is none.
    """

    symbol: str
    horizon: int
    metrics: pd.DataFrame
    report_path: Path
    run_ids: dict[str, str] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    verdicts: dict[str, ModelVerdict] = field(default_factory=dict)
    chosen: str = ""
    calibration: pd.DataFrame | None = None
    findings: tuple[Finding, ...] = ()
    traded: Result | str = ""

    @property
    def verdict(self) -> ModelVerdict | None:
        """Verdict on the chosen model."""
        return self.verdicts.get(self.chosen)

    def summary(self) -> str:
        first = f"{len(self.metrics)} forecasts compared on the test rows, {self.seconds:.1f} s"
        others = [one.sentence for name, one in self.verdicts.items() if name != self.chosen]
        chosen = [f"  chosen on validation rows: {self.chosen}"] if others else []
        runs = [f"  {name}: run {run} ({self.choices[name]})" for name, run in self.run_ids.items()]
        lines = [first, f"  report {self.report_path}", *runs, *(f"  {line}" for line in others), *chosen]
        lines += summary_calibration_lines(self.metrics, self.calibration, self.chosen)
        return "\n".join([*lines, *summary_verdict_lines(self.verdict), *finding_lines(self.findings)])


@dataclass(frozen=True, kw_only=True)
class PredictResult(Result):
    """Result of `predict`.

    frame : index known_at; p_short, p_neutral, p_long (of meta-labels `side` too), split (test, new; with all_rows also
        train, validation) and run_id, as in the file at `path`.
    choice : why this run's model was taken, in words.
    """

    symbol: str
    horizon: int
    model: str
    run_id: str
    choice: str
    rows: int
    path: Path
    frame: pd.DataFrame
    frame_hash: str

    def summary(self) -> str:
        first, last = self.frame.index[0], self.frame.index[-1]
        counts = self.frame["split"].value_counts(sort=False)
        return (
            f"{self.model} on {self.symbol}, run {self.run_id} ({self.choice}): {self.rows:,} rows, {first} to {last}, "
            f"{self.seconds:.1f} s\n  by split: {', '.join(f'{name} {count:,}' for name, count in counts.items())}\n"
            f"  {self.path}"
        )
