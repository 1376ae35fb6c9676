"""Audit of a prepared data set and of training on it: the full proof that nothing looks ahead."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.data.io import load_bars
from ml_factory.datasets.fitted_transforms import TransformFitSample
from ml_factory.datasets.preprocessing import fit_preprocessing_steps
from ml_factory.datasets.store import DatasetStore
from ml_factory.lazy_module import LazyModule
from ml_factory.leakage.artifact_comparison import Tamper
from ml_factory.leakage.certificate import certificate_path
from ml_factory.leakage.pipeline_under_test import FittedObjectUnderTest, SplitUnderTest
from ml_factory.leakage.proof_result import Proof
from ml_factory.leakage.proof_spec import FULL_CUTS, ProofSpec
from ml_factory.leakage.split_and_fit_check import check_fitted_for_leaks
from ml_factory.leakage.timed_tables import Leak
from ml_factory.models.registry import find_model_spec
from ml_factory.progress import progress_phase
from ml_factory.result import Result
from ml_factory.runs import open_run
from ml_factory.settings import RunSettings, make_run_settings
from ml_factory.storage.scratch_folder import scratch_folder
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.audits.audit_artifacts import (
    AuditFindings,
    audit_bars_artifact,
    audit_dataset_artifact,
    audit_row_artifacts,
    audit_scaler_artifact,
)
from ml_factory.workflows.audits.audit_models import audit_finished_models, audit_model_predictions, audit_stack_model
from ml_factory.workflows.audits.audit_training import (
    audit_fold_training,
    audit_training_baselines,
    audit_training_predictions,
    audit_training_row_count,
    audit_training_subsample,
)
from ml_factory.workflows.evaluation import evaluate_artifacts
from ml_factory.workflows.load_prepared import load_certified_dataset, load_dataset
from ml_factory.workflows.prepared_dataset import PreparedDataset
from ml_factory.workflows.prove import Progress, proof_leak_table, prove_store, stored_data_settings
from ml_factory.workflows.train import train_with_holdout

MODELS = ("xgboost", "lstm")  # a booster and a network read rows in the two ways there are
TRAINING_ROWS = {"tabular": 4_000, "network": 1_000}
data_plots = LazyModule("ml_factory.evaluation.data_plots")  # matplotlib comes with the extra train


def audit_for_look_ahead(
    workspace: Workspace, symbol: str, horizons: Sequence[int] | None, cuts: int | None, fresh: bool,
    progress: Progress | None, models: Sequence[str] = MODELS, tamper: Tamper | None = None,
) -> Result:  # fmt: skip
    """Prove a symbol's current data set at 50 cuts or more, the files that training reads, and small trainings on it.

    Writes the certificates. Where full ones of these data and this code are there, nothing is done, unless `fresh`.

    tamper : changes values stage by stage. Then nothing is written, and earlier findings are ignored.
    """
    started = time.perf_counter()
    store = DatasetStore.current(workspace.processed(symbol))
    horizons = tuple(horizons or store.horizons)
    data = load_dataset(workspace, symbol, horizons[0])  # refuses bars or code that changed since they were prepared
    bars, _ = load_bars(workspace, symbol, stored_data_settings(store).bars)
    spec = ProofSpec(cuts=FULL_CUTS if cuts is None else cuts)
    fresh = fresh or spec.form == "quick" or tamper is not None  # an explicit number of cuts is always run
    findings = _audit_prepared_files(workspace, store, bars, horizons, tamper)
    if not (tamper and findings.leaks):
        audit_sample_runs(data, bars, tamper, findings)
        for horizon in horizons:
            prepared = load_certified_dataset(workspace, symbol, horizon, uncertified=True)
            audit_finished_models(workspace, prepared, tamper, findings)
    if not (tamper and findings.leaks):
        for model in models:
            with progress_phase(f"training {model}", min(_rows_for(model), len(data.labels))):
                findings.leaks += audit_leaks_of_model(data, model)
    if tamper and findings.leaks:  # one named leak is enough: the cuts are skipped
        return _tampered(symbol, horizons, findings, started)
    proved = prove_store(
        store, bars, horizons, spec, fresh=fresh, also=findings.leaks, compared=findings.compared,
        progress=progress, write=tamper is None,
    )  # fmt: skip
    if tamper:
        findings.compared, findings.leaks = dict(proved.proof.compared), list(proved.proof.leaks)
        return _tampered(symbol, horizons, findings, started, proved.proof)
    leaks = proved.proof.leaks if proved.proof else ()
    shown = proved.certificates[horizons[0]]
    cuts_made = [(pd.Timestamp(moment), why) for moment, why in shown.cuts]
    close = bars["close"]
    return _audit_result(
        symbol, horizons, findings_of=dict(shown.compared), leaks=leaks, form=shown.describe(), cuts=cuts_made,
        disturbances=list(shown.disturbances), reused=proved.proof is None, started=started,
        certificates=[certificate_path(store.folder.parent, store.fingerprint, horizon) for horizon in horizons],
        figure=lambda: data_plots.plot_cuts(close, cuts_made),
    )  # fmt: skip


def _audit_result(
    symbol: str, horizons: Sequence[int], *, findings_of: dict[str, int], leaks: Sequence[Leak], form: str,
    cuts: Sequence, disturbances: list[str], started: float, reused: bool = False, certificates: Sequence[Path] = (),
    figure: Callable | None = None,
) -> Result:  # fmt: skip
    """Return the result of an audit.

    form : of the certificate, in words. findings_of : part -> rows compared. leaks : a row each, with `sentences`.
    """
    sentences, seconds = [leak.sentence() for leak in leaks], time.perf_counter() - started
    how = "proved before" if reused else f"{sum(findings_of.values()):,} rows compared"
    verdict = f"{len(leaks)} leaks" if leaks else "nothing looks ahead"
    lines = [
        f"{symbol}, horizons {list(horizons)}: {verdict} ({form}; {how}), {seconds:.1f} s",
        *(f"  {line}" for line in sentences), *(f"  {path.parent}" for path in certificates[:1]),
    ]  # fmt: skip
    return Result(
        lines, figure=figure, symbol=symbol, form=form, passed=not leaks, horizons=list(horizons), cuts=len(cuts),
        disturbances=disturbances, compared=findings_of, leaks=proof_leak_table(leaks), sentences=sentences,
        reused=reused, certificates=list(certificates), seconds=seconds,
    )  # fmt: skip


def _audit_prepared_files(
    workspace: Workspace, store: DatasetStore, bars: pd.DataFrame, horizons: Sequence[int], tamper: Tamper | None = None
) -> AuditFindings:
    """Compare everything that is stored and read by training with its reference: bars, rows, splits, scalers, data
    sets.
    """
    findings = AuditFindings()
    audit_bars_artifact(workspace, store, bars, tamper, findings)
    audit_row_artifacts(store, bars, horizons, tamper, findings)
    for horizon in horizons:
        audit_scaler_artifact(store, horizon, tamper, findings)
        data = load_certified_dataset(
            workspace, store.facts["symbol"], horizon, uncertified=True
        )  # as trainings read it
        audit_dataset_artifact(data, store, findings, tamper)
    return findings


def audit_sample_runs(
    data: PreparedDataset, bars: pd.DataFrame, tamper: Tamper | None, findings: AuditFindings, model: str = MODELS[0]
) -> None:
    """Run every step that learns or predicts on a sample: baselines, a fold, a training, a stack, and `predict`."""
    part = audit_training_subsample(data)
    steps = {
        "baselines": lambda: audit_training_baselines(data, tamper, findings),
        "a fold": lambda: audit_fold_training(part, model, tamper, findings),
        "predictions": lambda: audit_training_predictions(part, model, tamper, findings),
        "a stack": lambda: audit_stack_model(part, findings),
        "predict": lambda: audit_model_predictions(part, bars, findings),
    }
    for name, check in steps.items():
        with progress_phase(f"proof of {name}", len(part.labels)):
            check()


def _tampered(
    symbol: str, horizons: Sequence[int], findings: AuditFindings, started: float, proof: Proof | None = None
) -> Result:
    """Build the result of an audit with a tamper; it has no certificate."""
    cuts = [(pd.Timestamp(cut.moment), cut.why) for cut in proof.cuts] if proof else []
    return _audit_result(
        symbol, horizons, findings_of=findings.compared, leaks=findings.leaks, cuts=cuts, started=started,
        form="tampered with: no certificate", disturbances=["truncate", *proof.disturbances] if proof else [],
    )  # fmt: skip


def audit_leaks_of_model(data: PreparedDataset, model: str = MODELS[0]) -> list[Leak]:
    """Return leaks of a real training (weights, early stopping, temperature, preprocessing) and its evaluation."""
    some = np.flatnonzero(data.row >= 0)
    some = some[: audit_training_row_count(data.y[some], _rows_for(model))]
    values = data.x_NF[data.row[some]]
    labels = data.labels.iloc[some].assign(close=data.close[data.row[some]])  # baselines follow the price
    first, second = int(0.6 * len(some)), int(0.8 * len(some))
    rows = np.arange(len(some))
    split = SplitUnderTest("training", {"train": rows[:first], "validation": rows[first:second], "test": rows[second:]})
    return list(check_fitted_for_leaks(_Training(data, model), values, labels, [split], f"h{data.horizon}"))


class _Training:
    """`train_with_holdout` and `evaluate_artifacts` as a pipeline under proof: the functions that
    `train` calls.
    """

    def __init__(self, data: PreparedDataset, model: str):
        self.data, self.model = data, model

    def fit(
        self, values: np.ndarray, labels: pd.DataFrame, roles: Mapping[str, np.ndarray]
    ) -> dict[str, FittedObjectUnderTest]:
        names, data = tuple(self.data.features.columns), self.data
        train = np.asarray(roles["train"])
        sample = TransformFitSample(values, names, train, labels.iloc[train])
        part = replace(
            data, features=pd.DataFrame(values, index=labels.index, columns=names), labels=labels,
            close=labels["close"].to_numpy(), segment=np.zeros(len(labels), np.int32), splits=dict(roles),
            scaler=fit_preprocessing_steps(data.settings["data"]["preprocess"], sample),
        )  # fmt: skip
        spec = _small_run(data, self.model)
        with scratch_folder("audit-") as folder:
            # One for each fit: a model that other rows left as it was would find its earlier forecasts.
            workspace = Workspace(folder)
            with open_run(workspace, spec) as run:
                artifact = train_with_holdout(part, run)
            state, verdict = artifact.load_state(), evaluate_artifacts(workspace, part, {self.model: artifact})
        learnt = {name: state[name] for name in ("model_state", "calibration")}
        metrics = verdict.metrics[verdict.metrics["split"] == "validation"].set_index("name").drop(columns="split")
        evaluated = {"metrics": metrics.T.to_dict(), "prior": verdict.prior_loss}
        # Validation rows stop the training and set the temperature; the preprocessing reads training rows alone.
        both = ("train", "validation")
        trained = {
            f"trained {self.model}": FittedObjectUnderTest(learnt, both),
            f"evaluated {self.model}": FittedObjectUnderTest(evaluated, both),
        }
        return trained | (
            {"steps before the model": FittedObjectUnderTest(state["scaler"])} if self.model == MODELS[0] else {}
        )


def _small_run(data: PreparedDataset, model: str) -> RunSettings:
    return make_run_settings(
        data.symbol, data.horizon, model, task="train", seed=0, quick=False, data=data.fingerprint,
        settings=_small(model),
    )  # fmt: skip


def _family(model: str) -> str:
    return "tabular" if find_model_spec(model).family == "tabular" else "network"


def _rows_for(model: str) -> int:
    return TRAINING_ROWS[_family(model)]


def _small(model: str) -> dict:
    """Settings of a training that reads rows as the model's own does, and is over in a second or two."""
    if _family(model) == "tabular":
        return {"rounds": 20, "threads": 1} | ({} if model == "linear" else {"depth": 3})
    return {"epochs": 2, "lookback": 16, "batch": 128}
