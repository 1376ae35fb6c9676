"""A workspace with small models of every kind, for bundles."""

from pathlib import Path

import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.storage.workspace import Workspace

H = 5
BOOSTER = {"rounds": 30, "depth": 3, "min_leaf": 5.0, "threads": 1}
NETWORK = {"epochs": 2, "hidden": 4, "lookback": 8, "batch": 128}
SETTINGS = {  # LightGBM is no better than the clock on so few days: without it, it keeps trees
    "xgboost": BOOSTER, "lightgbm": {**BOOSTER, "offset": "none"}, "catboost": BOOSTER, "linear": {"rounds": 20},
    "lstm": NETWORK,
}  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Workspace:
    """Five models and a stack of a booster and a network on all columns, a second's training each; only read."""
    workspace = Workspace(tmp_path_factory.mktemp("trained") / "workspace")
    ensure_synthetic_demo_market(workspace, "DEMO", days=8)
    pipeline.prepare(workspace, "DEMO", (H,))
    for model, settings in SETTINGS.items():
        pipeline.train(workspace, "DEMO", H, model, mirror="off", model_settings=settings)
    stacked = {name: SETTINGS[name] for name in ("xgboost", "lstm")}
    pipeline.stack(workspace, "DEMO", H, tuple(stacked), folds=2, mirror="off", model_settings=stacked)
    return workspace


@pytest.fixture(scope="session")
def bundle_file(trained, tmp_path_factory):
    """bundle_file(model): the exported bundle of this model; made once."""
    folder, made = tmp_path_factory.mktemp("bundles"), {}

    def of(model: str) -> Path:
        if model not in made:
            made[model] = pipeline.export(trained, "DEMO", H, model, formats=("bundle",), out=folder).paths["bundle"]
        return made[model]

    return of


@pytest.fixture(scope="session")
def raw_bars(trained) -> pd.DataFrame:
    """The raw bars of the workspace, as they lie there."""
    return pd.read_parquet(trained.raw_bars("DEMO"))
