"""The full proof of a prepared data set, and of a training on it."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.data.prefixes import Prefixes
from ml_factory.data.sources import load_bars
from ml_factory.datasets.preprocessing import fit_steps
from ml_factory.datasets.store import Store
from ml_factory.datasets.transforms import Sample
from ml_factory.evaluation import figures
from ml_factory.experiment import open_run, run_spec
from ml_factory.leakage.certificate import place_of
from ml_factory.leakage.effort import FULL_CUTS, ProofSpec
from ml_factory.leakage.fitted import leaks_of_fitted
from ml_factory.leakage.subject import Fitted, Split
from ml_factory.leakage.tables import Leak
from ml_factory.models.registry import spec_of
from ml_factory.progress import phase
from ml_factory.runs.workspace import Workspace
from ml_factory.units.dataset import Dataset
from ml_factory.units.holdout import fit_holdout
from ml_factory.units.preparation import load_dataset
from ml_factory.units.proving import Progress, leak_table, prove_store, settings_of
from ml_factory.units.results import AuditResult

MODELS = ("xgboost", "lstm")  # a booster and a network: their ways to the rows are the two there are
TRAINING_ROWS = {"tabular": 4_000, "network": 1_000}


def audit_data(
    workspace: Workspace, symbol: str, horizons: Sequence[int] | None, cuts: int | None, fresh: bool,
    progress: Progress | None, models: Sequence[str] = MODELS,
) -> AuditResult:  # fmt: skip
    """Prove a symbol's current data set at 50 cuts or more, and small trainings on it; write the certificates."""
    started = time.perf_counter()
    store = Store.current(workspace.processed(symbol))
    horizons = tuple(horizons or store.horizons)
    data = load_dataset(workspace, symbol, horizons[0])  # refuses bars or code that changed since they were prepared
    bars, _ = load_bars(workspace, symbol, settings_of(store).bars)
    spec = ProofSpec(cuts=FULL_CUTS if cuts is None else cuts)
    trained = []
    for model in models:
        with phase(f"training {model}", min(_rows_for(model), len(data.labels))):
            trained += leaks_of_training(data, model)
    fresh = fresh or spec.form == "quick"  # only the full form is worth finding again: who asks for cuts gets them
    proved = prove_store(store, Prefixes(bars), horizons, spec, fresh=fresh, also=trained, progress=progress)
    leaks = proved.proof.leaks if proved.proof else ()
    told = proved.certificates[horizons[0]]
    tried = [(pd.Timestamp(moment), why) for moment, why in told.cuts]
    close = bars["close"]
    return AuditResult(
        symbol=symbol, form=told.words(), passed=not leaks, horizons=list(horizons), cuts=len(tried),
        disturbances=list(told.disturbances), compared=dict(told.compared), leaks=leak_table(leaks),
        sentences=[leak.sentence() for leak in leaks], reused=proved.proof is None,
        certificates=[place_of(store.folder.parent, store.fingerprint, horizon) for horizon in horizons],
        seconds=time.perf_counter() - started, draw=lambda: figures.cuts_on_price(close, tried),
    )  # fmt: skip


def leaks_of_training(data: Dataset, model: str = MODELS[0]) -> list[Leak]:
    """What a real training (weights, early stopping, temperature, the steps before) takes from rows it may not read."""
    some = np.flatnonzero(data.row >= 0)[: _rows_for(model)]
    values = data.x_NF[data.row[some]]
    labels = data.labels.iloc[some].assign(close=data.close[data.row[some]])  # some steps follow the price
    first, second = int(0.6 * len(some)), int(0.8 * len(some))
    rows = np.arange(len(some))
    split = Split("training", {"train": rows[:first], "validation": rows[first:second], "test": rows[second:]})
    with tempfile.TemporaryDirectory(prefix="ml_factory_audit_") as folder:
        training = _Training(data, Workspace(Path(folder)), model)
        return list(leaks_of_fitted(training, values, labels, [split], f"h{data.horizon}"))


class _Training:
    """`fit_holdout` as a pipeline under proof: the same door that `train` goes through."""

    def __init__(self, data: Dataset, workspace: Workspace, model: str):
        self.data, self.workspace, self.model = data, workspace, model

    def fit(self, values: np.ndarray, labels: pd.DataFrame, roles: Mapping[str, np.ndarray]) -> dict[str, Fitted]:
        names, data = tuple(self.data.features.columns), self.data
        train, close = np.asarray(roles["train"]), labels["close"].to_numpy()
        sample = Sample(values, names, train, close, labels.iloc[train])
        part = replace(
            data, features=pd.DataFrame(values, index=labels.index, columns=names), labels=labels, close=close,
            segment=np.zeros(len(labels), np.int32), splits=dict(roles),
            scaler=fit_steps(data.settings["data"]["preprocess"], sample),
        )  # fmt: skip
        spec = run_spec(
            data.symbol, data.horizon, self.model, task="train", seed=0, quick=False, data=data.fingerprint,
            settings=_small(self.model),
        )  # fmt: skip
        run = open_run(self.workspace.results, data.symbol, spec, fresh=True)
        state = fit_holdout(self.workspace, part, run, spec, callbacks=(), mirror="off").load_state()
        learnt = {name: state[name] for name in ("model_state", "temperature")}
        # Validation rows stop the training and set the temperature; only training rows teach the steps before.
        trained = {f"trained {self.model}": Fitted(learnt, ("train", "validation"))}
        return trained | ({"steps before the model": Fitted(state["scaler"])} if self.model == MODELS[0] else {})


def _family(model: str) -> str:
    return "tabular" if spec_of(model).family == "tabular" else "network"


def _rows_for(model: str) -> int:
    return TRAINING_ROWS[_family(model)]


def _small(model: str) -> dict:
    """Settings of a training that reads rows as the model's own does, and is over in a second or two."""
    if _family(model) == "tabular":
        return {"rounds": 20, "threads": 1} | ({} if model == "linear" else {"depth": 3})
    return {"epochs": 2, "lookback": 16, "batch": 128}
