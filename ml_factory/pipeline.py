"""The public pipeline: prepare, search_barriers, audit, train, cross_validate, stack, evaluate, predict, …

Each function takes a workspace, resumes interrupted work, and returns a result with `.summary()`, `.plot()` and the
paths it wrote. Notebooks, command line and tests call the same functions.
"""

from ml_factory.workflows.audit import audit
from ml_factory.workflows.auto import auto
from ml_factory.workflows.backtest import backtest
from ml_factory.workflows.clean import clean
from ml_factory.workflows.cross_validate import cross_validate
from ml_factory.workflows.distribute import distribute
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
from ml_factory.workflows.plan import plan
from ml_factory.workflows.predictions import load_predictions, predict
from ml_factory.workflows.prepare import prepare
from ml_factory.workflows.prepared_dataset import load_features, load_labels, load_splits
from ml_factory.workflows.report import evaluate
from ml_factory.workflows.search_barriers import search_barriers
from ml_factory.workflows.stack import stack
from ml_factory.workflows.train import open_training, train

__all__ = [
    "audit", "auto", "backtest", "certificate", "clean", "cross_validate", "distribute", "draw_cuts", "draw_gaps",
    "draw_split", "evaluate", "explain", "export", "export_data", "feature_families", "frame_alignment", "gap_table",
    "leaderboard", "load_features", "load_labels", "load_predictions", "load_splits", "open_training", "plan",
    "predict", "prepare", "replay", "search_barriers", "stack", "train", "try_feature",
]  # fmt: skip
