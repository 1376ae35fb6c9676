"""`evaluate`, and the HTML report of `evaluate`, `train` and `stack`: the verdict first, then what it stands on."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.argument_checks import DEMO, DEMOS
from ml_factory.datasets.store import DatasetStore, open_current_store
from ml_factory.errors import NotPreparedError, SettingsError
from ml_factory.evaluation.baselines import BASELINES
from ml_factory.evaluation.calibration import reliability_table
from ml_factory.evaluation.findings import finding_lines, findings_section, next_step_sentence, sort_findings
from ml_factory.evaluation.html_report import HtmlSection, write_html_report
from ml_factory.evaluation.metrics import decile_returns
from ml_factory.evaluation.verdict import BASELINE_LINES, format_verdict_bounds, verdict_gains_of_folds
from ml_factory.lazy_module import LazyModule
from ml_factory.models.base import CLASSES
from ml_factory.result import Result, calibration_lines, limits_lines, origin_table, verdict_lines
from ml_factory.runs import Run, read_stored_runs
from ml_factory.storage.artifact_registry import Artifact
from ml_factory.storage.files import files
from ml_factory.storage.json_values import to_json_value
from ml_factory.storage.workspace import Workspace, push_workspace_on_exit
from ml_factory.workflows.backtest import backtest
from ml_factory.workflows.evaluation import Evaluation, evaluate_artifacts
from ml_factory.workflows.inspect_data import bar_findings_table, label_balance_table, split_figure
from ml_factory.workflows.predictions import artifacts_to_compare, describe_run_choice, predictions_path
from ml_factory.workflows.prepared_dataset import PreparedDataset, load_dataset
from ml_factory.workflows.prove import describe_proof_of_store

SCORES = ["log_loss", "brier", "accuracy", "ece"]
data_plots = LazyModule("ml_factory.evaluation.data_plots")  # matplotlib comes with the extra train
plots = LazyModule("ml_factory.evaluation.plots")


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
    started, workspace = time.perf_counter(), Workspace(workspace)
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
    traded = _backtest_for_report(workspace, data, compared.chosen, run_ids[compared.chosen])
    path = _write_evaluation_report(
        workspace.results / "report.html", title or f"{symbol}: {', '.join(compared.artifacts)}", data,
        open_current_store(workspace, symbol), compared, traded,
        quick_limits=limited,
        extra_sections=[*_cross_validation_sections(workspace, data), _compared_runs_section(compared.artifacts)],
    )  # fmt: skip
    shown = compared.test_metrics.reset_index()
    shown.insert(0, "split", "test")
    seconds = time.perf_counter() - started
    table = shown.set_index("name")[["log_loss", "accuracy", "log_loss_gain", "gain_best"]].round(4)
    others = [one.sentence for name, one in compared.verdicts.items() if name != compared.chosen]
    lines = [
        f"{len(shown)} forecasts compared on the test rows, {seconds:.1f} s", *table.to_string().splitlines(),
        f"  report {path}",
        *(f"  {name}: run {run} ({choices[name]})" for name, run in run_ids.items()), *(f"  {line}" for line in others),
        *([f"  chosen on validation rows: {compared.chosen}"] if others else []),
        *calibration_lines(shown, compared.calibration, compared.chosen), *verdict_lines(compared.verdict),
        *finding_lines(compared.findings),
    ]  # fmt: skip
    return Result(
        lines, figure=lambda: plots.plot_metrics(compared.test_metrics), also={"verdict": compared.verdict},
        symbol=symbol, horizon=horizon, metrics=shown, report_path=path, run_ids=run_ids,
        choices=choices, verdicts=dict(compared.verdicts), chosen=compared.chosen, calibration=compared.calibration,
        findings=compared.findings, traded=traded, seconds=seconds,
    )  # fmt: skip


# ---- the report -----------------------------------------------------------------------------------------------------


def _write_evaluation_report(
    path: Path, title: str, data: PreparedDataset, store: DatasetStore, evaluated: Evaluation,
    traded: Result | str, *, quick_limits: Mapping[str, object], extra_sections: Sequence[HtmlSection],
) -> Path:  # fmt: skip
    """Write the report of one run, or of several runs on the same rows.

    traded : backtest of the chosen model, or why there is none, `_backtest_for_report`.
    quick_limits : limits of QUICK.
    extra_sections : sections of the runs, such as learning curves.
    """
    findings = sort_findings([*evaluated.findings, *(traded.findings if isinstance(traded, Result) else ())])
    next_step = next_step_sentence(findings, synthetic=data.symbol in DEMOS, quick=bool(quick_limits))
    limits = pd.DataFrame({"limited to": map(str, quick_limits.values())}, index=pd.Index(quick_limits, name="what"))
    sections = [
        _money_section(traded),
        _gain_section(evaluated),
        _report_calibration_section(data, evaluated),
        findings_section(findings),
        _report_verdict_section(evaluated, len(data.splits["test"]), two_sided=len(data.classes) == len(CLASSES)),
        _decile_returns_section(data, evaluated),
        *extra_sections,
        *(
            [HtmlSection("QUICK", tables=[("Limits of the training; QUICK=0 has none", limits)])]
            if quick_limits
            else []
        ),
        *_data_sections(data, store),
    ]
    files.write_json(path.with_suffix(".json"), to_json_value({
        "symbol": data.symbol, "horizon": data.horizon, "data": data.fingerprint, "chosen": evaluated.chosen,
        "answer": evaluated.verdict.answer, "next_step": next_step,
        "findings": [one.to_dict() for one in findings],
        "backtest": traded.to_dict() if isinstance(traded, Result) else traded,
        "verdicts": {name: one.to_dict() for name, one in evaluated.verdicts.items()},
        "metrics": evaluated.test_metrics.reset_index().to_dict("records"),
    }))  # fmt: skip
    return write_html_report(
        path, title, sections, answer=evaluated.verdict.answer,
        subtitle=f"{next_step}\n\n{_report_test_period(data, evaluated)}",
        facts=_report_headline_cards(evaluated, traded),
        notice="\n\n".join(_notices(data.symbol, quick_limits)),
        footer=f"data {data.fingerprint[:12]}, proof that nothing looks ahead: "
        f"{describe_proof_of_store(store, data.horizon)}. Past results do not guarantee future results; a gain whose "
        "interval includes 0 is no gain.",
    )  # fmt: skip


def _report_test_period(data: PreparedDataset, evaluated: Evaluation) -> str:
    """Describe model, labels and test period."""
    times = data.labels.index[evaluated.rows]
    first, last = (f"{moment:%Y-%m-%d}" for moment in (times[0], times[-1]))
    minutes = data.settings["data"]["features"]["base_minutes"]
    span = f"{data.horizon} bar{'s' * (data.horizon != 1)} of {minutes} minute{'s' * (minutes != 1)}"
    return (
        f"{evaluated.chosen}, labels {span} ahead. Test period {first} to {last}: rows that no model "
        "was fitted or chosen on."
    )


def model_result(
    run: Run, data: PreparedDataset, artifact: Artifact, evaluated: Evaluation, started: float, first: str, *,
    found: str, reused: bool, figure: Callable[[], Any], more_lines: Sequence[str] = (),
    also: Mapping[str, Any] | None = None, **own: Any,
) -> Result:  # fmt: skip
    """Write `report.html` into the folder of a run that made a model, and return the verb's result.

    first : first line of the summary, without its seconds. own : facts of the verb alone. The others are

    run_id, artifact, predictions_path, predictions_hash, report_path : what was written.
    found : status of the run when it was opened, in a sentence; reused: it was finished before.
    resumed_from : epochs, blocks or parts of an interrupted run; None where there are none, or where it is reused.
    reached : progress at which it was resumed, in words; "" from the beginning.
    exact : True where the bits are those of an uninterrupted run; else inexact_because lists the reasons.
    limited : limits of QUICK.
    metrics : a row per split (validation, test) and forecast, the baselines among them.
    verdict : on the test rows, over every baseline.
    calibration : predicted and observed frequency by class on test rows, `dataset_calibration_by_class`.
    findings : on the model, the most severe first.
    origin : a table of found, reached and exact.
    """
    facts, name, workspace = artifact.facts, artifact.facts["model"], run.workspace
    path = _write_evaluation_report(
        run.folder / "report.html", f"{data.symbol}: {name}", data,
        open_current_store(workspace, data.symbol), evaluated,
        _backtest_for_report(workspace, data, name, facts["run_id"]), quick_limits=facts["limited"],
        extra_sections=_run_sections(facts, evaluated.prior_loss),
    )  # fmt: skip
    written = predictions_path(workspace, artifact)
    state = {
        "run_id": run.run_id, "found": found, "reused": reused,
        "resumed_from": None if reused else facts["resumed_from"], "reached": "" if reused else facts["reached"],
        "exact": not facts["inexact"], "inexact_because": facts["inexact"],
    }  # fmt: skip
    seconds = time.perf_counter() - started
    lines = [
        f"{first}, {seconds:.1f} s", *limits_lines(facts["limited"], facts["inexact"]),
        *(f"  {line}" for line in more_lines),
        *(f"  {what} {file}" for what, file in
          {"model": artifact.path, "predictions": written, "report": path}.items()),
        *calibration_lines(evaluated.metrics, evaluated.calibration, name), *verdict_lines(evaluated.verdict),
        *finding_lines(evaluated.findings),
    ]  # fmt: skip
    return Result(
        lines, figure=figure, also={**(also or {}), "origin": origin_table(state)}, symbol=data.symbol,
        horizon=data.horizon, **state, limited=facts["limited"], metrics=evaluated.metrics,
        artifact=artifact.path, predictions_path=written, predictions_hash=files.sha256(written), report_path=path,
        verdict=evaluated.verdict, calibration=evaluated.calibration, findings=evaluated.findings, **own,
        seconds=seconds,
    )  # fmt: skip


def _notices(symbol: str, quick_limits: Mapping[str, object]) -> Iterator[str]:
    """Yield what a reader must know first: a synthetic market, limits of QUICK."""
    if symbol in DEMOS:
        yield (
            f"{symbol} is a synthetic market with{'' if symbol == DEMO else 'out'} a planted edge. "
            "A gain here shows that the pipeline works; it is no evidence about a real market."
        )
    if quick_limits:
        yield "QUICK limited the training: a model may find less than it could. The limits are listed under QUICK."


def _report_verdict_section(evaluated: Evaluation, of: int, *, two_sided: bool) -> HtmlSection:
    """Return the section with the verdict on each model, its numbers, and the metrics of models and baselines.

    of : number of all test rows.
    two_sided : True where the labels have two sides and a neutral class, so that a gain has a directional part.
    """
    chosen_first = sorted(evaluated.verdicts.values(), key=lambda one: one.model != evaluated.chosen)
    lines = [f"{one.sentence} {one.numbers[:1].upper()}{one.numbers[1:]}." for one in chosen_first]
    count = len(evaluated.rows)
    some = f"{count:,} of the {of:,} test rows, those with a full input window"
    lines.append(f"Evaluated on {some if count < of else f'all {of:,} test rows'}.")
    lines += [
        report_comparison_sentence(evaluated.chosen, who, gain) for who, gain in evaluated.reference_gains.items()
    ]
    lines.append(
        "A gain is the log loss of another forecast less the model's, in nats per row, with a 95 % interval. The time "
        "of the session and the volatility predict how far the price moves; the directional gain, over the class "
        "prior, is about which way."
        if two_sided
        else "Only the bets of the primary side are evaluated: whether each returns more than it costs. A gain means "
        "that the model separates good bets from bad ones, not that the bets are good."
    )
    if len(evaluated.verdicts) > 1:
        lines.append(
            f"{evaluated.chosen} was chosen on validation rows. The best of several on the same test rows looks better "
            "than it is."
        )
    lines.append("The baselines, counted on training rows:")
    lines += [f"`{name}`: {how}." for name, how in BASELINE_LINES.items()]
    metrics = evaluated.test_metrics
    best = metrics["best_baseline"].iloc[0]
    gains = {f"over {best}": _bounds(metrics, "gain_best", "gain_best_low", "gain_best_high")}
    if two_sided:
        gains["directional, over prior"] = _bounds(metrics, "direction_gain", "direction_low", "direction_high")
    gains["over prior"] = _bounds(metrics, "log_loss_gain", "gain_low", "gain_high")
    return HtmlSection(
        "Verdict",
        text="\n\n".join(lines),
        tables=[
            ("Test rows: gains in nats per row, with 95 % intervals", pd.DataFrame(gains)),
            ("Test rows: scores", metrics[[name for name in SCORES if name in metrics]]),
        ],
    )


def _bounds(table: pd.DataFrame, value: str, low: str, high: str) -> pd.Series:
    """Format a gain and its interval; "0" for a forecast compared with itself."""
    return table.apply(
        lambda row: format_verdict_bounds(row[value], row[low], row[high]) if row[value] else "0", axis=1
    )


def _gain_section(evaluated: Evaluation) -> HtmlSection:
    best = evaluated.verdict.best_baseline
    text = f"`{best}` is the best of four simple forecasts on validation rows: {BASELINE_LINES[best]}."
    return HtmlSection("Gain", text=text, figures=[
        (f"Gain of {evaluated.chosen} over {best} in each month of the test rows; below 0 it was worse. A month of few "
         "rows says little.",
         plots.plot_months(evaluated.months)),
        (f"Right of 0 is better than {best}. Diamonds are baselines.", plots.plot_metrics(evaluated.test_metrics)),
    ])  # fmt: skip


def _decile_returns_section(data: PreparedDataset, evaluated: Evaluation) -> HtmlSection:
    """Return the section of realised returns and information coefficient by decile of the chosen model's forecast.

    Computed on unambiguous test rows.
    """
    rows, p_N3 = evaluated.rows, evaluated.forecasts[evaluated.chosen]
    clear = data.unambiguous_mask[rows]
    found = decile_returns(
        (p_N3[:, 2] - p_N3[:, 0])[clear], data.labels["ret"].to_numpy()[rows][clear], horizon=data.horizon,
        times_N=data.labels.index[rows][clear],
    )  # fmt: skip
    if found is None:
        return HtmlSection(
            "Returns", text="There are fewer than 100 test rows, or the forecast is constant: no deciles."
        )
    table, whole = found
    return HtmlSection(
        "Returns",
        text=f"Information coefficient of {evaluated.chosen}: {whole.mean:+.4f} (95 % from {whole.low:+.4f} to "
        f"{whole.high:+.4f}), the Spearman correlation of p_long − p_short with the realised return over "
        f"{whole.rows:,} test rows.\n\nA return is the log return from the row to the label's end, before costs.",
        figures=[("Mean return of each decile in basis points. Lines are 95 % intervals.",
                  plots.plot_deciles(table))],
        tables=[("By decile of p_long − p_short", table)],
    )  # fmt: skip


def report_comparison_sentence(name: str, who: str, gain: tuple[float, float, float]) -> str:
    """Compare a stack with the plain mean of its models in a sentence; gain: (gain, low, high) in nats, 95 %."""
    value, low, high = gain
    how = "beats" if low > 0 else "is worse than" if high < 0 else "does not differ measurably from"
    return (
        f"{name} {how} the plain mean of its models ({who}): {value:+.4f} nats per row (95 % from {low:+.4f} to "
        f"{high:+.4f}).{'' if low > 0 else ' The learnt weights show no advantage here.'}"
    )


def _report_calibration_section(data: PreparedDataset, evaluated: Evaluation) -> HtmlSection:
    """Return the section of the chosen model's reliability diagram, and of frequencies by class of every model."""
    rows, chosen = evaluated.rows, evaluated.chosen
    clear = data.unambiguous_mask[rows]
    table = reliability_table(data.y[rows][clear], evaluated.forecasts[chosen][clear], horizon=data.horizon)
    by_class = evaluated.calibration
    shown = by_class[["name", "class", "predicted", "observed"]].assign(
        difference=_bounds(by_class, "difference", "low", "high")
    )
    return HtmlSection(
        "Calibration",
        text="On the dashed line, predicted is observed. Temperature and class biases were fitted on validation rows. "
        "Bars are 95 % intervals that count overlapping labels once. The expected calibration error of "
        f"{chosen} is {evaluated.test_metrics.loc[chosen, 'ece']:.3f}; chance alone puts it above 0 for calibrated "
        "forecasts too.",
        figures=[(f"Probabilities of {chosen} on test rows.", plots.plot_calibration(table, classes=data.classes))],
        tables=[("Mean predicted probability and observed frequency of each class, with the 95 % interval of their "
                 "difference", shown.set_index("name"))],
    )  # fmt: skip


def _backtest_for_report(workspace: Workspace, data: PreparedDataset, model: str, run_id: str) -> Result | str:
    """Trade the test rows of a run after costs; return why where it cannot be: meta-labels, unknown costs, no bars."""
    try:
        return backtest(workspace, data.symbol, data.horizon, model, run=run_id)
    except (SettingsError, NotPreparedError) as error:
        return str(error)


def _money_section(traded: Result | str) -> HtmlSection:
    """Return the section of the trades after costs, next to simple strategies, and of the choice of the least edge."""
    if isinstance(traded, str):
        return HtmlSection("After costs", text=f"No backtest: {traded}")
    shown = ["net", "break_even_ticks", "cost_ticks", "drawdown", "sharpe", "sharpe_error", "trades"]
    strategies = traded.strategies.replace({"strategy": {"random": "shifted in time"}}).set_index("strategy")
    edges, facts = traded.least_edges, traded.contract
    marks = [
        f"{edge:g}{', chosen' * (one and not traded.by_hand)}" for edge, one in edges[["least_edge", "chosen"]].values
    ]
    by_edge = edges[["net", "break_even_ticks", "trades"]].set_index(pd.Index(marks, name="least_edge"))
    return HtmlSection(
        "After costs",
        text=f"{traded.luck_sentence} {traded.rule_sentence} A position ends at its label's barrier, at "
        f"an opposite forecast, after {traded.rule['horizon']} bars or with the session.\n\n"
        f"One contract, in its currency: a tick of {facts['tick']:g} is worth "
        f"{facts['tick'] * facts['multiplier']:g}; a side costs {facts['commission']:g} of commission and "
        f"{facts['exchange_fee']:g} of fees (`--contracts` takes your own). Trades "
        "earn money where break even, what a round trip earns before costs, is above the cost. Sharpe ratios are those "
        "of a year.",
        figures=[(f"Equity of test rows, and the drawdown of {traded.model}; grey: its own forecasts at other times, "
                  "which have no skill.", traded.plot())],
        tables=[
            ("Test rows", strategies[shown]),
            ("Validation rows, by least edge, the threshold of a trade", by_edge),
        ],
    )  # fmt: skip


def _report_headline_cards(evaluated: Evaluation, traded: Result | str) -> dict[str, object]:
    """Return the cards below the headline, those of the chosen model: label -> (value, note)."""
    one = evaluated.verdict
    low, high = one.gain_best_low, one.gain_best_high
    money: dict[str, object] = {"after costs": ("not known", "see below")}
    if isinstance(traded, Result):
        own, luck = traded.own, traded.luck["deflated_sharpe"]
        ticks = f"break even at {own['break_even_ticks']:.2f} ticks, paid {own['cost_ticks']:.2f}"
        few = traded.lacking or "no trades"
        money = {
            "after costs": (f"{own['net']:+,.0f}", f"{own['trades']:,.0f} trades; {ticks}" if own["trades"] else few),
            "profit, not luck": (
                f"{luck:.0%}" if np.isfinite(luck) else "not known",
                f"probability of a Sharpe ratio above 0 after costs and {traded.luck['trials']} trials; from 95 % sure"
                if np.isfinite(luck) else f"not enough sessions: {few}",
            ),
        }  # fmt: skip
    return {
        f"gain over {one.best_baseline}, nats per row": (
            f"{one.gain_best:+.4f}",
            f"95 % from {low:+.4f} to {high:+.4f}",
        ),
        **money,
        "test rows": (one.rows, f"worth about {float(f'{one.effective_rows:.2g}'):,.0f} without overlap"),
    }


def _report_label_sentence(data: PreparedDataset) -> str:
    """Describe the labels in a sentence."""
    labels = data.settings["data"]["labels"]
    bet = f"{'against ' if labels['against'] else ''}the sign of {labels['primary']}"
    bet += f" where it is at least {labels['primary_least']:g} from 0" if labels["primary_least"] else ""
    return {
        "triple_barrier": "Triple barrier: which is touched first, the upper, the lower or neither. They stand "
        f"{labels['k_up']:g} and {labels['k_down']:g} usual moves of {data.horizon} bars away.",
        "direction": "Direction: the side of the price at the horizon, neutral inside a band of its volatility.",
        "trend_scanning": "Trend scanning: the sign of the straightest trend that begins at the row.",
        "meta": f"Meta-labels: the primary side is {bet}; act is a bet that returned more than a round trip costs.",
    }[data.kind]


def _report_left_out_rows(facts: Mapping) -> str:
    """Describe the rows that belong to no split. facts : purged, and inferred where there are such rows."""
    purged = f"In time order; {facts['purged']:,} rows whose labels reach across an edge belong to no part."
    inferred = facts.get("inferred", 0)
    also = f" Neither do {inferred:,} rows of the sessions that calendar or tick were inferred from."
    return purged + also * bool(inferred)


def _data_sections(data: PreparedDataset, store: DatasetStore) -> list[HtmlSection]:
    """Return the sections of the split on the price, the label balance, and the findings in the bars."""
    stored = store.facts["horizons"][str(data.horizon)]
    splits = pd.DataFrame(stored["parts"]).T.rename_axis("split")
    balance, findings = label_balance_table(store, store.horizons), bar_findings_table(store)
    minutes = store.facts["market"]["bar_minutes"]
    return [
        HtmlSection(
            "The split",
            text=_report_left_out_rows(stored),
            figures=[("Price with the parts of the split.", split_figure(store, data.horizon))],
            tables=[("Parts", splits)],
        ),
        HtmlSection(
            "Labels",
            text=_report_label_sentence(data)
            + f" An ambiguous row touches both barriers inside one {minutes}-minute bar and "
            "counts nowhere.",
            figures=[("Share of each label.", data_plots.plot_label_balance(balance))],
        ),
        HtmlSection(
            "Bars",
            text=f"{store.facts['raw']['rows']:,} bars of {minutes} min; {len(store.feature_names)} features."
            + ("" if (findings["severity"] != "info").any() else " Nothing unusual; gaps that were expected:"),
            tables=[("What the check of the bars noted", findings)] if len(findings) else [],
        ),
    ]


# ---- sections of runs ----------------------------------------------------------------------------------------------


def _run_sections(facts: Mapping, prior_loss: float) -> list[HtmlSection]:
    """Return the sections with the learning curves and importances of a model, or the weights of a stack, and the
    settings of the run.
    """
    if "history" in facts:
        best, resumed = facts["best_epoch"], facts["resumed_from"]
        curves = plots.plot_learning_curves(
            pd.DataFrame(facts["history"]), best_epoch=best, resumed_from=resumed, prior=prior_loss
        )
        caption = (
            "Validation rows were used for choosing the epoch and for calibration, so they are no test. Rows are "
            "weighted as in training, in the dashed line too; the verdict counts each row once."
        )
        text = f"Best at {best}." + (f" This run was resumed after {resumed}." if resumed is not None else "")
        sections = [HtmlSection("Learning", text=text, figures=[(caption, curves)])]
    else:
        weights = pd.DataFrame(facts["weights"]).set_index("model")
        text = "Weights learnt from out-of-fold predictions on training rows. " + facts["note"]
        figures = [("Weight of each model.", plots.plot_stack_weights(weights))]
        sections = [HtmlSection("The stack", text=text, figures=figures)]
    if facts.get("importances"):
        table = pd.DataFrame(facts["importances"]).set_index("feature")
        sections.append(HtmlSection(
            "Features",
            text="Gain is a feature's share of the reduction of the training loss. Permuted is the increase of "
            "the validation rows' log loss when its values are shuffled; correlated features replace each other there.",
            figures=[("Permutation importance and gain of each feature.", plots.plot_importances(table))],
        ))  # fmt: skip
    settings = {name: str(value) for name, value in facts["run"].items()} | {"run_id": facts["run_id"]}
    made = HtmlSection(
        "The run",
        notice="Continued, not bit-exact: " + ", ".join(facts["inexact"]) if facts.get("inexact") else "",
        tables=[
            ("Settings", pd.DataFrame({"value": settings}).rename_axis("setting")),
            ("Versions", pd.DataFrame({"version": facts["versions"]}).rename_axis("library")),
        ],
    )
    return [*sections, made]


def _cross_validation_sections(workspace: Workspace, data: PreparedDataset) -> list[HtmlSection]:
    """Return the section of the finished cross-validations on this data: of each model the newest full one, else the
    newest QUICK one; no section without one.
    """
    stored, _ = read_stored_runs(workspace.results / data.symbol)
    best = {
        one.facts["model"]: one
        for one in sorted(stored, key=lambda one: (not one.facts["quick"], one.facts["begun_at"]))
        if one.ended and one.facts["task"] == "folds"
        and (one.facts["horizon"], one.facts["data"]) == (data.horizon, data.fingerprint)
    }  # fmt: skip
    lines, figures = [], []
    for model, one in best.items():
        name = f"{model}{' (QUICK)' * one.facts['quick']}"
        try:
            table = pd.read_parquet(one.folder / "folds.parquet")
        except (OSError, ValueError, LookupError, TypeError) as error:
            lines.append(f"{name}: its folds cannot be read ({error}); `cross-validate` writes them again.")
            continue
        over = verdict_gains_of_folds(table, model).whole
        gains = ", ".join(
            f"`{who}` {format_verdict_bounds(gain.mean, gain.low, gain.high)}" for who, gain in over.items()
        )
        lines.append(f"{name}, {table['fold'].nunique()} folds: gain over {gains} nats per row, 95 %.")
        figure = plots.plot_fold_scores(table[table["name"].isin([model, *BASELINES])])
        figures.append((f"{name} and the baselines in each fold.", figure))
    return [HtmlSection("Other periods", text="\n\n".join(lines), figures=figures)] if best else []


def _compared_runs_section(found: Mapping[str, Artifact]) -> HtmlSection:
    """Return the section that lists the compared runs."""
    rows = {
        name: {"run": one.facts["run_id"], "artifact": one.hash[:12], "seconds": f"{one.facts['seconds']:.1f}"}
        for name, one in found.items()
    }
    return HtmlSection("Runs", tables=[("Compared here", pd.DataFrame(rows).T.rename_axis("model"))])
