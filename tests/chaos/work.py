"""The units of work that are killed, on a made-up market so small that each takes a second or two, and their hashes."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from ml_factory import pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.datasets.store import DatasetStore
from ml_factory.models.registry import available_models, find_model_spec
from ml_factory.storage.artifact_registry import ArtifactRegistry
from ml_factory.storage.workspace import Workspace
from ml_factory.targets.barrier_search_spec import BarrierSearchSpec
from ml_factory.targets.labels import LabelSpec

SYMBOL, HORIZONS, HORIZON, DAYS = "DEMO", (4, 6), 6, 10
TREES = {"rounds": 40, "block": 5, "depth": 3, "threads": 1, "patience": 0}
NETWORK = {
    "epochs": 4, "batch": 128, "lookback": 8, "threads": 1, "device": "cpu", "precision": "fp32", "dropout": 0.2,
    "save_seconds": 0.0, "log_steps": 1,
}  # fmt: skip
OWN = {
    "lstm": {"hidden": 8}, "gru": {"hidden": 8}, "tcn": {"width": 8}, "tft": {"width": 8},
    "patchtst": {"patch": 4, "stride": 4, "width": 8, "inner": 8, "layers": 1},
    "itransformer": {"width": 8, "inner": 8, "layers": 1},
}  # fmt: skip
SEARCH = BarrierSearchSpec(LabelSpec(), trials=12, sigma_spans=(20, 40), neutral=(0.05, 0.6), lean=0.9)
BASES = ("xgboost", "lightgbm")
Hashes = dict[str, str]


def settings_of(model: str) -> dict:
    """Return small settings with sampling, dropout and no patience, which make a deviating resume visible."""
    trees = {name: value for name, value in TREES.items() if name != "depth" or model != "linear"}
    return (NETWORK if find_model_spec(model).windowed else trees) | OWN.get(model, {})


def market(root: Path) -> None:
    """A workspace with raw bars and nothing else."""
    ensure_synthetic_demo_market(Workspace(root), SYMBOL, days=DAYS)


def prepared(root: Path) -> None:
    """A workspace ready to train in."""
    market(root)
    pipeline.prepare(root, SYMBOL, HORIZONS)


def based(root: Path) -> None:
    """A workspace with the base models of a stack."""
    prepared(root)
    for model in BASES:
        pipeline.train(root, SYMBOL, HORIZON, model, quick=True, mirror="off")


def prepare(root: Path) -> Hashes:
    result = pipeline.prepare(root, SYMBOL, HORIZONS)
    store = DatasetStore(result.folder, result.fingerprint, json.loads((result.folder / "manifest.json").read_bytes()))
    proofs = sorted((result.folder.parent / "certificates" / result.folder.name).glob("h*.json"))
    observed = {
        "files": store.files,
        "facts": store.facts,
        "proofs": [path.read_text() for path in proofs],
    }
    return {name: _digest(value) for name, value in observed.items()} | {"balance": _table(result.label_balance)}


def train(model: str, **more) -> Callable[[Path], Hashes]:
    def work(root: Path) -> Hashes:
        result = pipeline.train(root, SYMBOL, HORIZON, model, mirror="off", model_settings=settings_of(model) | more)
        losses = result.history.drop(columns="seconds")
        return {
            "weights": result.artifact_hash, "predictions": result.predictions_hash, "metrics": _table(result.metrics),
            "history": _table(losses), "log": _digest(_logged(result)),
        }  # fmt: skip

    return work


def folds(model: str) -> Callable[[Path], Hashes]:
    def work(root: Path) -> Hashes:
        result = pipeline.cross_validate(
            root, SYMBOL, HORIZON, model, folds=3, model_settings=settings_of(model) | _short(model)
        )
        return {"metrics": _table(result.folds), "table": _table(result.fold_table), "gain": repr(result.gain_mean)}

    return work


def search(root: Path) -> Hashes:
    result = pipeline.search_barriers(root, SYMBOL, HORIZON, SEARCH)
    return {"labels": _digest(result.path.read_text()), "trials": _table(result.trials)}


def stack(root: Path) -> Hashes:
    result = pipeline.stack(root, SYMBOL, HORIZON, BASES, folds=2, quick=True, mirror="off")
    artifact = ArtifactRegistry(Workspace(root).models).find(SYMBOL, HORIZON, "stack")
    return {"weights": artifact.hash, "predictions": result.predictions_hash, "metrics": _table(result.metrics)}


def _short(model: str) -> dict:
    return {"epochs": 2} if find_model_spec(model).windowed else {"rounds": 20}


UNITS: Mapping[str, Callable[[Path], Hashes]] = {
    "prepare": prepare,
    **{model: train(model) for model in available_models()},
    "early stopping": train("lstm", lr=0.05, patience=2, epochs=8),  # best after 1 epoch, stopped after 3
    "half precision": train("patchtst", precision="fp16"),
    "folds": folds("xgboost"),
    "folds of a network": folds("lstm"),
    "search": search,
    "stack": stack,
}


def _logged(result) -> list:
    """Return the run's log, step by step."""
    from tests.tracking.metrics_table import read_log

    log = read_log(result.report_path.parent / "log")
    return [list(log["step"]), [repr(loss) for loss in log["train_loss"]]]


def _table(table: pd.DataFrame) -> str:
    return _digest(table.to_json(double_precision=15, orient="split") + table.to_csv())


def _digest(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=os.fspath)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
