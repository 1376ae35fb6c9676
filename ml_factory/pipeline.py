"""The public pipeline: prepare, search_barriers, audit, train, cross_validate, stack, evaluate, predict, …

Each function takes a workspace, resumes interrupted work, and returns a result with `.summary()`, `.plot()` and the
paths it wrote. Notebooks, command line and tests call the same functions.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from ml_factory.models.registry import find_model_spec
from ml_factory.result import Result
from ml_factory.storage.workspace import Workspace, check_symbol, push_workspace_on_exit
from ml_factory.workflows.audit import audit_for_look_ahead
from ml_factory.workflows.audit_files import Tamper
from ml_factory.workflows.audit_runs import MODELS
from ml_factory.workflows.backtest import backtest
from ml_factory.workflows.clean import clean
from ml_factory.workflows.cross_validate import cross_validate
from ml_factory.workflows.evaluate import evaluate
from ml_factory.workflows.explain import explain
from ml_factory.workflows.export import export
from ml_factory.workflows.export_data import export_data
from ml_factory.workflows.inspect_data import (
    certificate,
    draw_cuts,
    draw_gaps,
    draw_split,
    feature_families,
    frame_alignment,
    gap_table,
    replay,
    try_feature,
)
from ml_factory.workflows.leaderboard import leaderboard
from ml_factory.workflows.load_prepared import load_features, load_labels, load_splits
from ml_factory.workflows.plan import plan
from ml_factory.workflows.predictions import load_predictions, predict
from ml_factory.workflows.prepare import prepare
from ml_factory.workflows.search_barriers import search_barriers
from ml_factory.workflows.stack import stack
from ml_factory.workflows.train import open_training, train

__all__ = [
    "audit", "backtest", "certificate", "clean", "cross_validate", "draw_cuts", "draw_gaps", "draw_split", "evaluate",
    "explain", "export", "export_data", "feature_families", "frame_alignment", "gap_table", "leaderboard",
    "load_features", "load_labels", "load_predictions", "load_splits", "open_training", "plan", "predict", "prepare",
    "replay", "search_barriers", "stack", "train", "try_feature",
]  # fmt: skip

prepare = push_workspace_on_exit(prepare)


@push_workspace_on_exit
def audit(
    workspace: Workspace | str | Path, symbol: str, horizons: Sequence[int] | None = None, *, cuts: int | None = None,
    fresh: bool = False, progress: Callable[[int, int], None] | None = None, models: Sequence[str] | None = None,
    tamper: Tamper | None = None,
) -> Result:  # fmt: skip
    """Prove that nothing prepared or learnt looks ahead, and write the certificates that training requires.

    At 50 moments or more the future is cut off, rewritten and thinned, and all that was known, proven or learnt
    before must stay the same bit for bit. Bars that an earlier proof with the same code and settings covers are not
    proved again, unless `fresh`.

    horizons : default: all that are prepared.
    cuts : number of moments; default 50; fewer are the quick form.
    progress : called with (builds done, builds in all).
    models : models trained on a small sample; default: a booster and a network (xgboost, lstm).
    tamper : checks the audit itself: `tamper(stage, value)` returns the value to use (None: the same object) at the
        stages of `workflows.audit_files.STAGES` (docs/guide.md). `.sentences` names leaks; nothing is written.
    """
    for name in models or ():
        find_model_spec(name)
    return audit_for_look_ahead(
        Workspace(workspace), check_symbol(symbol), horizons, cuts, fresh, progress, models or MODELS, tamper
    )
