"""What a report shows, and in which order: the verdict first, then the data it rests on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd

from ml_factory.data.synthetic import DEMO
from ml_factory.datasets.store import Store
from ml_factory.evaluation import data_figures, figures
from ml_factory.evaluation.calibration import reliability
from ml_factory.evaluation.report import Section, write_report
from ml_factory.models.contract import CLASSES
from ml_factory.runs.registry import Artifact
from ml_factory.runs.workspace import Workspace
from ml_factory.units.dataset import Dataset
from ml_factory.units.forecasts import Verdict
from ml_factory.units.proving import words_of
from ml_factory.units.views import findings_table

MAIN_METRICS = [
    "log_loss",
    "log_loss_gain",
    "gain_se",
    "direction_gain",
    "brier",
    "accuracy",
    "balanced_accuracy",
    "mcc",
    "auc_ovr",
    "ece",
]
MANY = 2  # more forecasts than this in one reliability plot hide each other


@dataclass(frozen=True)
class OnTest:
    """What was said of N test rows, and how right it was.

    rows : int64 (N,), positions into the labels.  said : forecast -> (N, 3) probabilities.
    metrics : `metrics_table`.  beaten : as of `Verdict`.
    """

    rows: np.ndarray
    said: Mapping[str, np.ndarray]
    metrics: pd.DataFrame
    beaten: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)


def run_page(
    path: Path, title: str, data: Dataset, store: Store, judged: OnTest, *, facts: dict,
    limited: Mapping[str, object], more: Sequence[Section] = (),
) -> Path:  # fmt: skip
    """Write the report of one run (or of several on the same rows).

    facts : shown under the title.  limited : what QUICK limits.
    more : chapters between the verdict and the data, such as learning curves.
    """
    of = len(data.splits["test"])
    sections = [
        verdict(judged.metrics, len(judged.rows), of, sided=sided(data), beaten=judged.beaten),
        calibration(data, judged.said, judged.rows),
        *more,
        *data_chapters(data, store),
    ]
    return write_report(
        path, title, sections,
        subtitle=f"{data.symbol}, labels {data.horizon} bars ahead, judged on rows no model has learnt from",
        facts=facts | {"proof": words_of(store, data.horizon)},
        notice="\n\n".join(filter(None, [made_up_notice(data.symbol), quick_notice(limited)])),
        footer=f"data {data.fingerprint[:12]}. Past results say little about the next ones; a gain whose interval "
        "reaches 0 is no gain.",
    )  # fmt: skip


def write_run_report(workspace: Workspace, folder: Path, data: Dataset, artifact: Artifact, verdict: Verdict) -> Path:
    """`report.html` of one finished model, in the folder of its run."""
    facts, metrics = artifact.facts, verdict.test_table
    name, store = facts["model"], Store.current(workspace.processed(data.symbol))
    return run_page(
        folder / "report.html", f"{name} on {data.symbol}", data, store,
        OnTest(verdict.test_rows, {name: verdict.test_p}, metrics, verdict.beaten),
        facts=tiles(data, metrics, name), limited=facts["limited"],
        more=how_it_was_made(facts, verdict.priors["validation"]),
    )  # fmt: skip


def made_up_notice(symbol: str) -> str:
    """What a gain on the market that comes with the library means, or ''."""
    if symbol != DEMO:
        return ""
    return (
        f"{DEMO} is a made-up market with an edge planted in it. "
        "A gain here says that the machinery works, and nothing about a real market."
    )


def quick_notice(limited: Mapping[str, object]) -> str:
    """What QUICK limited, or ''."""
    if not limited:
        return ""
    return "QUICK limited the training: " + "; ".join(f"{name}: {value}" for name, value in limited.items())


def sided(data: Dataset) -> bool:
    """Whether the question has two sides and a middle: then a gain has a part that says which side."""
    return len(data.classes) == len(CLASSES)


def verdict(
    metrics: pd.DataFrame, rows: int, of: int, *, sided: bool = True,
    beaten: Mapping[str, tuple[float, float, float]] = MappingProxyType({}),
) -> Section:  # fmt: skip
    """The metrics beside both baselines, and one honest sentence for each model.

    rows : test rows judged on, out of `of`.  sided : whether a gain has a part on the side.  beaten : as of `Verdict`.
    """
    models = [(str(name), row) for name, row in metrics.iterrows() if name not in figures.BASELINES]
    lines = [sentence(name, row, sided=sided) for name, row in models]
    lines += [beside_words(models[0][0], who, gain) for who, gain in beaten.items()]
    shown = [name for name in MAIN_METRICS if sided or name != "direction_gain"]
    judged = f"{rows:,} of the {of:,} test rows"
    judged += ", those with a full input window." if rows < of else "."
    lines.append(
        "When a barrier is touched at all follows the hour and the volatility, and much of a gain is usually that. "
        "Only the part on the side says which way."
        if sided
        else "Judged are the bets of the primary side alone: whether each pays more than it costs. A gain says that "
        "the model can tell good bets from bad ones, not that the bets are good."
    )
    if len(models) > 1:
        lines.append("The best of several on the same rows looks better than it is: it was chosen on them.")
    return Section(
        "Verdict",
        text="\n\n".join([judged, *lines]),
        figures=[("Right of 0 is better than the prior. Lines are 95 % intervals.", figures.metrics_bar(metrics))],
        tables=[("Test rows, beside the baselines", metrics[[name for name in shown if name in metrics]])],
    )


def sentence(name: str, row: pd.Series, *, sided: bool = True) -> str:
    """Better, worse, or not to be told from the class prior; and so for the side alone, which a position needs."""
    words = _beside(row["gain_low"], row["gain_high"])
    whole = f"{row['log_loss_gain']:+.4f} nats per row (95 % from {row['gain_low']:+.4f} to {row['gain_high']:+.4f})"
    if not sided:
        return f"{name} {words}: {whole}."
    side = f"{row['direction_gain']:+.4f} (from {row['direction_low']:+.4f} to {row['direction_high']:+.4f})"
    beside = _beside(row["direction_low"], row["direction_high"])
    return f"{name} {words}: {whole}. On the side alone, up or down, it {beside}: {side}."


def beside_words(name: str, who: str, gain: tuple[float, float, float]) -> str:
    """Whether what was learnt is worth more than what it has to beat; gain: (gain, low, high) in nats."""
    value, low, high = gain
    other = {"equal_pool": "the plain mean of its models (equal_pool)"}.get(who, who)
    said = f"{name} {_beside(low, high, other)}: {value:+.4f} nats per row (95 % from {low:+.4f} to {high:+.4f})."
    return said if low > 0 else f"{said} Nothing speaks for the learnt weights here."


def _beside(low: float, high: float, other: str = "the class prior") -> str:
    """What a 95 % interval of a gain allows to say."""
    if low > 0:
        return f"beats {other}"
    return f"is worse than {other}" if high < 0 else f"cannot be told from {other}"


def calibration(data: Dataset, test: Mapping[str, np.ndarray], rows: np.ndarray) -> Section:
    """Said against happened on the test rows."""
    clear = data.clear[rows]
    tables = {name: reliability(data.y[rows][clear], p[clear], horizon=data.horizon) for name, p in test.items()}
    together = {"Said against happened": tables}
    if len(tables) > MANY:
        together = {name: {name: table} for name, table in tables.items()}
    return Section(
        "Calibration",
        text="On the dashed line, what was said is what happened. Temperatures were fitted on validation rows. "
        "Bars are 95 % intervals that count overlapping labels once.",
        figures=[("", figures.calibration_plot(some, name, data.classes)) for name, some in together.items()],
    )


def learning(history: pd.DataFrame, best: int, resumed_from: int | None, prior: float | None) -> Section:
    """Training and validation loss by epoch or booster block."""
    text = f"Best at {best}." + (f" This run was resumed after {resumed_from}." if resumed_from is not None else "")
    curves = figures.learning_curves(history, best_epoch=best, resumed_from=resumed_from, prior=prior)
    caption = "Rows are weighted as in training, in the dashed line too; the verdict counts each row once."
    return Section("Learning", text=text, figures=[(caption, curves)])


def how_it_was_made(facts: Mapping, prior_loss: float) -> list[Section]:
    """Learning curves of a model, or the weights of a stack, and the settings of the run."""
    if "history" in facts:
        first = learning(pd.DataFrame(facts["history"]), facts["best_epoch"], facts["resumed_from"], prior_loss)
    else:
        weights = pd.DataFrame(facts["weights"]).set_index("model")
        first = Section(
            "The stack",
            text="Weights learnt from out-of-fold predictions on training rows. " + facts["note"],
            figures=[("Weight of each model.", figures.stack_weights(weights))],
        )
    settings = {name: str(value) for name, value in facts["run"].items()} | {"run_id": facts["run_id"]}
    made = Section(
        "The run",
        notice="Continued, not bit-exact: " + ", ".join(facts["inexact"]) if facts.get("inexact") else "",
        tables=[
            ("Settings", pd.DataFrame({"value": settings}).rename_axis("setting")),
            ("Versions", pd.DataFrame({"version": facts["versions"]}).rename_axis("library")),
        ],
    )
    worth = importances(pd.DataFrame(facts["importances"])) if facts.get("importances") else []
    return [first, *worth, made]


def importances(table: pd.DataFrame) -> list[Section]:
    """What each feature is worth to the model; table: as of `importance_table`."""
    table = table.set_index("feature")
    return [
        Section(
            "Features",
            text="Gain is a feature's share of what training won. Permuted is what the validation rows' log loss rises "
            "when its values are dealt to other rows: features that say the same stand in for each other there.",
            figures=[("What a feature is worth, beside its gain.", figures.importance_bars(table))],
        )
    ]


def runs(found: Mapping[str, Artifact]) -> Section:
    """Which runs are compared."""
    rows = {
        name: {"run": one.facts["run_id"], "artifact": one.hash[:12], "seconds": f"{one.facts['seconds']:.1f}"}
        for name, one in found.items()
    }
    return Section("Runs", tables=[("Compared here", pd.DataFrame(rows).T.rename_axis("model"))])


def tiles(data: Dataset, metrics: pd.DataFrame, chosen: str) -> dict[str, str]:
    """The figures under the title: those of `chosen`, which validation rows chose where there are several models."""
    models = metrics[~metrics.index.isin(figures.BASELINES)]
    side = {"of it on the side": f"{models.loc[chosen, 'direction_gain']:+.4f}"} if sided(data) else {}
    return {
        "best on validation rows" if len(models) > 1 else "model": chosen,
        "log loss": f"{models.loc[chosen, 'log_loss']:.4f}",
        "prior": f"{metrics.loc['prior', 'log_loss']:.4f}",
        "gain": f"{models.loc[chosen, 'log_loss_gain']:+.4f}",
        **side,
        "test rows": f"{int(models.loc[chosen, 'rows']):,}",
        "labels": f"{len(data.labels):,}",
    }


def asked_words(data: Dataset) -> str:
    """The question that the labels answer, in a sentence."""
    labels = data.settings["data"]["labels"]
    bet = f"{'against ' if labels['against'] else ''}the sign of {labels['primary']}"
    bet += f" where it is at least {labels['primary_least']:g} from 0" if labels["primary_least"] else ""
    return {
        "triple_barrier": "Triple barrier: which is touched first, up, down or neither.",
        "direction": "Direction: the side of the price at the horizon, neutral inside a band of its volatility.",
        "trend_scanning": "Trend scanning: the sign of the straightest trend that begins at the row.",
        "meta": f"Meta-labels: the primary side is {bet}; act is a bet that returned more than a round trip costs.",
    }[data.kind]


def data_chapters(data: Dataset, store: Store) -> list[Section]:
    """The split on the price, the balance of the labels, and what was found in the bars."""
    parts = {name: data.labels.index[rows] for name, rows in data.splits.items()}
    told = {horizon: store.facts["horizons"][str(horizon)] for horizon in store.horizons}
    balance = pd.DataFrame({horizon: facts["balance"] for horizon, facts in told.items()}).T.rename_axis("horizon")
    splits = pd.DataFrame(told[data.horizon]["parts"]).T.rename_axis("split")
    findings = findings_table(store)
    purged = told[data.horizon]["purged"]
    close = store.load_rows()["close"]
    return [
        Section(
            "The split",
            text=f"In time order; {purged:,} rows whose labels reach across an edge belong to no part.",
            figures=[("Price with the parts of the split.", data_figures.split_on_price(close, parts))],
            tables=[("Parts", splits)],
        ),
        Section(
            "Labels",
            text=asked_words(data) + " An ambiguous row touches both barriers inside one 1-minute bar and counts "
            "nowhere.",
            figures=[("Share of each label.", data_figures.label_balance(balance))],
        ),
        Section(
            "Bars",
            text=f"{store.facts['raw']['rows']:,} one-minute bars; {len(store.feature_names)} features."
            + ("" if (findings["severity"] != "info").any() else " Nothing strange was found in the bars."),
            tables=[("Findings", findings)] if len(findings) else [],
        ),
    ]
