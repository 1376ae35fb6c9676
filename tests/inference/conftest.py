"""A workspace with small models of every kind, for bundles."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.storage.workspace import Workspace

H = 5
BOOSTER = {"rounds": 30, "depth": 3, "threads": 1}
NETWORK = {"epochs": 2, "hidden": 4, "lookback": 8, "batch": 128}
SETTINGS = {  # LightGBM is no better than the clock on so few days: without it, it keeps trees
    "xgboost": BOOSTER, "lightgbm": {**BOOSTER, "offset": "none"}, "catboost": BOOSTER, "linear": {"rounds": 20},
    "lstm": NETWORK,
}  # fmt: skip
STACKED = ("xgboost", "lstm")


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Callable[[str], Workspace]:
    """trained(model): one workspace on all columns, with this small model or a stack of two in it; only read."""
    workspace = Workspace(tmp_path_factory.mktemp("trained") / "workspace")
    ensure_synthetic_demo_market(workspace, "DEMO", days=8)
    pipeline.prepare(workspace, "DEMO", (H,))

    @cache
    def with_model(model: str) -> Workspace:
        if model == "stack":
            stacked = {name: SETTINGS[name] for name in STACKED}
            pipeline.stack(workspace, "DEMO", H, STACKED, folds=2, mirror="off", model_settings=stacked)
        else:
            pipeline.train(workspace, "DEMO", H, model, mirror="off", model_settings=SETTINGS[model])
        return workspace

    return with_model


@pytest.fixture(scope="session")
def bundle_file(trained, tmp_path_factory) -> Callable[[str], Path]:
    """bundle_file(model): the exported bundle of this model; made once."""
    folder = tmp_path_factory.mktemp("bundles")
    return cache(lambda model: pipeline.export(
        trained(model), "DEMO", H, model, formats=("bundle",), out=folder).paths["bundle"])  # fmt: skip


@pytest.fixture(scope="session")
def raw_bars(trained) -> pd.DataFrame:
    """The raw bars of the workspace, as they lie there."""
    return pd.read_parquet(trained("linear").raw_bars("DEMO"))
