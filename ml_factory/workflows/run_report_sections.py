"""Sections of the HTML report about runs: learning curves, stack weights, importances, settings, compared runs."""

from collections.abc import Mapping

import pandas as pd

from ml_factory.evaluation.html_report import HtmlSection
from ml_factory.lazy_module import LazyModule
from ml_factory.storage.artifact_registry import Artifact

plots = LazyModule("ml_factory.evaluation.plots")  # matplotlib comes with the extra train


def _learning_section(history: pd.DataFrame, best: int, resumed_from: int | None, prior: float | None) -> HtmlSection:
    """Return the section of training and validation loss by epoch or booster block."""
    text = f"Best at {best}." + (f" This run was resumed after {resumed_from}." if resumed_from is not None else "")
    curves = plots.plot_learning_curves(history, best_epoch=best, resumed_from=resumed_from, prior=prior)
    caption = (
        "Validation rows were used for choosing the epoch and for calibration, so they are no test. Rows are weighted "
        "as in training, in the dashed line too; the verdict counts each row once."
    )
    return HtmlSection("Learning", text=text, figures=[(caption, curves)])


def run_report_sections(facts: Mapping, prior_loss: float) -> list[HtmlSection]:
    """Return the sections with the learning curves of a model, or the weights of a stack, and the settings of the
    run.
    """
    if "history" in facts:
        first = _learning_section(
            pd.DataFrame(facts["history"]), facts["best_epoch"], facts["resumed_from"], prior_loss
        )
    else:
        weights = pd.DataFrame(facts["weights"]).set_index("model")
        first = HtmlSection(
            "The stack",
            text="Weights learnt from out-of-fold predictions on training rows. " + facts["note"],
            figures=[("Weight of each model.", plots.plot_stack_weights(weights))],
        )
    settings = {name: str(value) for name, value in facts["run"].items()} | {"run_id": facts["run_id"]}
    made = HtmlSection(
        "The run",
        notice="Continued, not bit-exact: " + ", ".join(facts["inexact"]) if facts.get("inexact") else "",
        tables=[
            ("Settings", pd.DataFrame({"value": settings}).rename_axis("setting")),
            ("Versions", pd.DataFrame({"version": facts["versions"]}).rename_axis("library")),
        ],
    )
    worth = _importance_sections(pd.DataFrame(facts["importances"])) if facts.get("importances") else []
    return [first, *worth, made]


def _importance_sections(table: pd.DataFrame) -> list[HtmlSection]:
    """Return the section of feature importances; table: as of `feature_importance_table`."""
    table = table.set_index("feature")
    return [
        HtmlSection(
            "Features",
            text="Gain is a feature's share of the reduction of the training loss. Permuted is the increase of "
            "the validation rows' log loss when its values are shuffled; correlated features replace each other there.",
            figures=[("Permutation importance and gain of each feature.", plots.plot_importances(table))],
        )
    ]


def compared_runs_section(found: Mapping[str, Artifact]) -> HtmlSection:
    """Return the section that lists the compared runs."""
    rows = {
        name: {"run": one.facts["run_id"], "artifact": one.hash[:12], "seconds": f"{one.facts['seconds']:.1f}"}
        for name, one in found.items()
    }
    return HtmlSection("Runs", tables=[("Compared here", pd.DataFrame(rows).T.rename_axis("model"))])
