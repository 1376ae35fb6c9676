"""Result objects of the pipeline: facts, a summary to read, a figure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas as pd

from ml_factory.evaluation.verdict import ModelVerdict
from ml_factory.models.registry import find_model_spec
from ml_factory.progress import ProgressPhase
from ml_factory.storage.json_values import to_json_value
from ml_factory.workflows.result_summaries import (
    summary_calibration_lines,
    summary_verdict_lines,
    summary_warning_lines,
    wrap_summary_line,
)


def _facts(value: Any) -> Any:
    """Convert a field to JSON values; a table to its records, with the index where it has a name."""
    if isinstance(value, ModelVerdict):
        return to_json_value(value.to_dict())
    if isinstance(value, dict):
        return {str(name): _facts(one) for name, one in value.items()}
    if not isinstance(value, pd.DataFrame):
        return to_json_value(value)
    table = value.reset_index() if value.index.name or value.index.nlevels > 1 else value
    return to_json_value(table.to_dict("records"))


def result_phase_table(phases: Sequence[ProgressPhase]) -> pd.DataFrame:
    """Return a row per phase: rows, seconds, rows a second, and the seconds of compiling kernels, once per machine."""
    rows = [(one.name, one.done, one.seconds, one.rate, one.compiled) for one in phases]
    table = pd.DataFrame(rows, columns=["phase", "rows", "seconds", "rows_per_second", "compiling"])
    return table.set_index("phase").round({"seconds": 3, "rows_per_second": 0, "compiling": 3})


@dataclass(frozen=True, kw_only=True)
class Result:
    """Base of all results. `draw` makes the figure of `.plot()`."""

    seconds: float
    draw: Callable[[], Any] | None = field(default=None, repr=False, compare=False)

    def summary(self) -> str:
        """Return the result as lines of text."""
        raise NotImplementedError(f"{type(self).__name__}.summary")

    def to_dict(self) -> dict:
        """Return the facts of the summary as JSON values (`--json`)."""
        hidden = {"draw", "frame", "history"}
        return {item.name: _facts(getattr(self, item.name)) for item in fields(self) if item.name not in hidden}

    def __str__(self) -> str:
        """Return the summary wrapped at 80 columns; a longer path stays whole."""
        return "\n".join(wrap_summary_line(line) for line in self.summary().splitlines())

    def plot(self) -> Any:
        """Return the matplotlib Figure of the result."""
        return self.draw() if self.draw else None


@dataclass(frozen=True, kw_only=True)
class _RunResult(Result):
    """Result of a run that may have been resumed.

    found : status of the run when it was opened, in a sentence.
    resumed_from : epochs, blocks, trials, folds or parts of an interrupted run; None where there are none, or where the
        run was finished before.
    reached : progress at which it was resumed, in words; "" from the beginning.
    exact : True where the bits are those of an uninterrupted run; else `inexact_because` lists the reasons.
    limited : limits of QUICK.
    """

    symbol: str
    horizon: int
    run_id: str
    resumed_from: int | None
    exact: bool
    inexact_because: list[str]
    reused: bool = False
    limited: dict = field(default_factory=dict)
    found: str = ""
    reached: str = ""

    def origin(self) -> pd.DataFrame:
        """Describe the origin of this result: what was found, where it resumed, and whether it is bit-exact."""
        resumed = self.reached or ("the beginning" if self.resumed_from is None else str(self.resumed_from))
        facts = {
            "found": self.found,
            "resumed from": "the end: it was finished before" if self.reused else resumed,
            "bits": "as uninterrupted" if self.exact else "continued, not bit-exact",
            "because": ", ".join(self.inexact_because),
        }
        return pd.DataFrame({"value": {name: text for name, text in facts.items() if text}}).rename_axis("this run")


@dataclass(frozen=True, kw_only=True)
class ModelResult(_RunResult):
    """Result of a run that makes a model: its files, and its evaluation on test rows.

    metrics : a row per split (validation, test) and forecast, the baselines among them.
    verdict : on the test rows, over every baseline.
    calibration : predicted and observed frequency by class on test rows, `dataset_calibration_by_class`.
    """

    metrics: pd.DataFrame
    artifact: Path
    predictions_path: Path
    predictions_hash: str
    report_path: Path
    verdict: ModelVerdict | None = None
    calibration: pd.DataFrame | None = None

    def _lines_after(self, first: list[str], name: str) -> str:
        """Return the summary: these lines, the files, calibration and verdict of the forecast `name`."""
        files = {"model": self.artifact, "predictions": self.predictions_path, "report": self.report_path}
        written = [f"  {what} {path}" for what, path in files.items()]
        calibration = summary_calibration_lines(self.metrics, self.calibration, name)
        return "\n".join([*first, *written, *calibration, *summary_verdict_lines(self.verdict)])


@dataclass(frozen=True, kw_only=True)
class PrepareResult(Result):
    """Result of `prepare`.

    bar_findings : a row per finding.
    proof : the certificate in words.
    phases : work of this call, `result_phase_table`.
    staleness : frame -> minutes of age of the frame's newest visible bar (mean, median, p99, max).
    resumed_from : horizons that were found with the features, where only the rest was prepared now.
    """

    symbol: str
    fingerprint: str
    folder: Path
    market: dict
    rows: int
    features: list[str]
    horizons: list[int]
    label_balance: pd.DataFrame
    split_table: pd.DataFrame
    staleness: dict[str, dict[str, float]]
    bar_findings: pd.DataFrame
    proof: str
    reused: bool
    phases: pd.DataFrame
    resumed_from: list[int] | None = None

    def summary(self) -> str:
        how = "found as prepared before" if self.reused else "prepared now"
        if self.resumed_from is not None:
            kept = f" and horizons {self.resumed_from}" if self.resumed_from else ""
            how = f"features{kept} found there, the rest prepared now"
        return (
            f"{self.symbol}: {self.rows:,} rows x {len(self.features)} features, horizons {self.horizons}, "
            f"{how} in {self.seconds:.1f} s\n  proof that nothing looks ahead: {self.proof}\n  {self.folder}"
        )


@dataclass(frozen=True, kw_only=True)
class SearchBarriersResult(_RunResult):
    """Result of `search_barriers`.

    labels : the label spec found; `reused` where it existed before.
    seen_rows : rows that the search saw, as `BarrierSearchRows`.
    trials : a row per trial.
    """

    name: str
    labels: dict
    seen_rows: dict
    best: dict
    trials: pd.DataFrame
    path: Path

    def summary(self) -> str:
        how = "found as searched before" if self.reused else f"{len(self.trials)} trials"
        resumed = f", resumed after {self.resumed_from}" if self.resumed_from and not self.reused else ""
        shares = ", ".join(f"{name} {self.best[name]:.1%}" for name in ("short", "neutral", "long"))
        seen = self.seen_rows
        text = (
            f"{self.symbol}, horizon {self.horizon}: barriers {self.name}, {how}{resumed}, {self.seconds:.1f} s\n"
            f"  k_up {self.labels['k_up']:.3f}, k_down {self.labels['k_down']:.3f}, volatility over "
            f"{self.labels['sigma_span']} bars: {shares}\n"
            f"  rows it saw: {seen['count']:,} training rows, {seen['first']} to {seen['last']}, "
            f"bars until {seen['until']}"
        )
        return "\n".join([text, *summary_warning_lines(self), f"  {self.path}"])


@dataclass(frozen=True, kw_only=True)
class AuditResult(Result):
    """Result of `audit`.

    form : of the certificate, in words.
    compared : part -> rows compared.
    leaks : a row each, with `sentences`.
    """

    symbol: str
    form: str
    passed: bool
    horizons: list[int]
    cuts: int
    disturbances: list[str]
    compared: dict[str, int]
    leaks: pd.DataFrame
    sentences: list[str]
    reused: bool
    certificates: list[Path]

    def summary(self) -> str:
        how = "proved before" if self.reused else f"{sum(self.compared.values()):,} rows compared"
        verdict = "nothing looks ahead" if self.passed else f"{len(self.leaks)} leaks"
        first = f"{self.symbol}, horizons {self.horizons}: {verdict} ({self.form}; {how}), {self.seconds:.1f} s"
        where = [f"  {self.certificates[0].parent}"] if self.certificates else []
        return "\n".join([first, *(f"  {line}" for line in self.sentences), *where])


@dataclass(frozen=True, kw_only=True)
class TrainResult(ModelResult):
    """Result of `train`.

    history : a row per epoch or booster block: epoch, train_loss, val_loss, seconds.
    best_epoch : epoch of the final model.
    importances : of trees and the linear model, `feature_importance_table`.
    machine : device and resources of a network's fit.
    profile : of a training with `profile`, a row per function or operation: calls, seconds, total_seconds, share.
    profile_path : folder with its table and flame graph.
    time_line : where time is spent, in a line.
    """

    model: str
    history: pd.DataFrame
    best_epoch: int
    artifact_hash: str
    importances: pd.DataFrame | None = None
    machine: dict = field(default_factory=dict)
    profile: pd.DataFrame | None = None
    profile_path: Path | None = None
    time_line: str = ""

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
        where = [f"  {self.time_line}"] if self.time_line else []
        where += [f"  profile {self.profile_path}"] if self.profile_path else []
        return self._lines_after([first, *where, *summary_warning_lines(self)], self.model)


@dataclass(frozen=True, kw_only=True)
class CrossValidateResult(_RunResult):
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
        return "\n".join([first, *lines, *summary_verdict_lines(self.verdict)])

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
        return "\n".join([*lines, *summary_verdict_lines(self.verdict)])


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
