"""Audit of a prepared data set and of training on it: the full proof that nothing looks ahead.

What learns and predicts does so on a small sample by the functions that users call, and again after the rows it may not
read were changed (`leakage.blind`): a fold with its baselines, trainings, a stack, `predict`; and finished models
predict their stored forecasts again.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_horizons
from ml_factory.data.io import load_bars, write_bars
from ml_factory.datasets.store import open_current_store
from ml_factory.evaluation.baselines import BASELINES
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.inference.predict import TrainedModel, predict_features
from ml_factory.lazy_module import LazyModule
from ml_factory.leakage.blind import Fitted, Split, find_blind_leaks, find_unpurged_rows
from ml_factory.leakage.certificate import certificate_path
from ml_factory.leakage.proof import FULL_CUTS, ProofSpec
from ml_factory.leakage.tables import ROWS, Findings, Leak, Tamper, compare, compare_states, mismatch
from ml_factory.models.registry import find_model_spec
from ml_factory.progress import progress_phase
from ml_factory.result import Result
from ml_factory.runs import Run, open_run
from ml_factory.settings import RunSettings, make_run_settings
from ml_factory.storage.artifact_registry import Artifact, ArtifactRegistry
from ml_factory.storage.workspace import Workspace, check_symbol, push_workspace_on_exit
from ml_factory.targets.label_table import usable_label_rows
from ml_factory.workflows.cross_validate import UNCALIBRATED, score_folds
from ml_factory.workflows.evaluation import evaluate_artifacts
from ml_factory.workflows.folds import FoldModel, FoldPlan, FoldSchemeSpec, fit_folds, plan_folds
from ml_factory.workflows.predictions import (
    STACK,
    is_prediction_of_artifact,
    load_or_make_predictions,
    predict_bars,
    predictions_path,
    read_predictions,
)
from ml_factory.workflows.prepared_dataset import (
    SPLITS,
    PreparedDataset,
    fit_dataset_preprocessing,
    load_dataset,
    stored_data_settings,
)
from ml_factory.workflows.prove import audit_prepared_files, find_certificates, prove_store
from ml_factory.workflows.stack import fit_stack, stack_run_settings
from ml_factory.workflows.train import train_with_holdout

data_plots = LazyModule("ml_factory.evaluation.data_plots")  # matplotlib comes with the extra train
MODELS = ("xgboost", "lstm")  # a booster and a network read rows in the two ways there are
SAMPLE_ROWS = {"tabular": 4_000, "network": 1_000}
STACKED = ("linear", "xgboost")
FOLDS, AUDITED_FOLD = 3, 1  # a middle fold has training rows on both sides
STACK_FOLDS = 2
PREDICTED_BARS = 60_000  # newest bars, on which `predict` is checked
PREDICTED_CUTS = (1, 777, 2_345)  # minutes before the end at which the file is shortened, by one bar at least
NETWORK_ROWS = 1_000  # newest rows of each split of a finished network, which is slow on all of them
CLOSE = {"tabular": 1e-6, "network": 1e-3}  # a network may have been trained on another device
SHIFT = 1e-4  # mean change of the probability of the outcome: many small moves towards it
READS = ("train", "validation")  # validation rows stop a training and set its temperature


@push_workspace_on_exit
def audit(
    workspace: Workspace | str | Path, symbol: str, horizons: int | Sequence[int] | None = None, *,
    cuts: int | None = None, fresh: bool = False, models: Sequence[str] | None = None, tamper: Tamper | None = None,
) -> Result:  # fmt: skip
    """Prove that nothing prepared or learnt looks ahead, and write the certificates that training requires.

    At 50 moments or more the future is cut off, rewritten and thinned, and all that was known, proven or learnt
    before must stay the same bit for bit; the files that training reads, and small trainings, are compared too. Where
    full certificates of these data and this code are there, nothing is done, unless `fresh`.

    horizons : default: all that are prepared.
    cuts : number of moments; default 50; fewer are the quick form.
    models : models trained on a small sample; default: a booster and a network (xgboost, lstm).
    tamper : checks the audit itself: `tamper(stage, value)` returns the value to use (None: the same object) at the
        stages listed in docs/guide.md. `.sentences` names leaks; nothing is written, and
        earlier findings are ignored.
    """
    started, workspace, symbol = time.perf_counter(), Workspace(workspace), check_symbol(symbol)
    models = [find_model_spec(name).name for name in models or MODELS]
    store = open_current_store(workspace, symbol)
    horizons = check_horizons(horizons or store.horizons)
    data = load_dataset(workspace, symbol, horizons[0])  # refuses bars or code that changed since they were prepared
    bars, _ = load_bars(workspace, symbol, stored_data_settings(store).bars)
    spec = ProofSpec(cuts=FULL_CUTS if cuts is None else cuts)
    found = Findings(tamper=tamper)
    audit_prepared_files(workspace, store, bars, horizons, found)
    if not (tamper and found.leaks):
        audit_sample_runs(data, bars, found, models)
        for horizon in horizons:
            audit_finished_models(workspace, load_dataset(workspace, symbol, horizon), found)
    certificates, reused = {}, False
    if not (tamper and found.leaks):  # one named leak is enough: the cuts are skipped
        # An explicit number of cuts is always run.
        again = fresh or spec.form == "quick" or tamper is not None or found.leaks
        certificates = {} if again else find_certificates(store, horizons, spec.form)
        reused = bool(certificates)
        certificates = certificates or prove_store(store, bars, horizons, found, spec)
    leaks, shown = found.leaks, certificates.get(horizons[0])
    cuts_made = [(pd.Timestamp(moment), why) for moment, why in shown.cuts] if shown else []
    paths = [certificate_path(store.folder.parent, store.fingerprint, horizon) for horizon in horizons]
    form = "tampered with: no certificate" if tamper else shown.describe()
    compared, sentences = dict(shown.compared) if shown else found.compared, [leak.sentence() for leak in leaks]
    seconds, verdict = time.perf_counter() - started, f"{len(leaks)} leaks" if leaks else "nothing looks ahead"
    how = "proved before" if reused else f"{sum(compared.values()):,} rows compared"
    lines = [
        f"{symbol}, horizons {list(horizons)}: {verdict} ({form}; {how}), {seconds:.1f} s",
        *(f"  {line}" for line in sentences), *([] if tamper else [f"  {paths[0].parent}"]),
    ]  # fmt: skip
    return Result(
        lines, figure=lambda: data_plots.plot_cuts(bars["close"], cuts_made), symbol=symbol, form=form,
        passed=not leaks, horizons=list(horizons), cuts=len(cuts_made),
        disturbances=list(shown.disturbances) if shown else [], compared=compared,
        leaks=pd.DataFrame([vars(leak) for leak in leaks], columns=[one.name for one in fields(Leak)]),
        sentences=sentences, reused=reused, certificates=[] if tamper else paths, seconds=seconds,
    )  # fmt: skip


# ---- samples ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditSample:
    """The first labelled rows of a data set, a row of inputs each.

    labels : with `close`, which baselines follow. split : of these rows
    """

    data: PreparedDataset
    values: np.ndarray
    labels: pd.DataFrame
    split: Split

    @property
    def dataset(self) -> PreparedDataset:
        return self.make(self.values, self.labels, self.split.roles)

    def make(self, values: np.ndarray, labels: pd.DataFrame, roles) -> PreparedDataset:
        """Return a data set of these rows, with steps fitted on its training rows."""
        features = pd.DataFrame(values, index=labels.index, columns=self.data.features.columns)
        part = replace(
            self.data, features=features, labels=labels, close=labels["close"].to_numpy(), splits=dict(roles),
            segment=np.zeros(len(labels), np.int32),
        )  # fmt: skip
        return replace(part, scaler=fit_dataset_preprocessing(part, np.asarray(roles["train"])))


def sample_rows(data: PreparedDataset, rows: int) -> AuditSample:
    """Return the first `rows` labelled rows, twice as many until each fifth of them holds two classes.

    The roles adjoin: inputs of a validation row may reach back over all rows before it.
    """
    there = usable_label_rows(data.labels)
    there = there[data.row[there] >= 0]
    while rows < len(there) and any(len(np.unique(y)) < 2 for y in np.array_split(data.y[there[:rows]], 5)):
        rows *= 2
    some = there[:rows]
    labels = data.labels.iloc[some].assign(close=data.close[data.row[some]])
    parts = np.split(np.arange(len(some)), [int(0.6 * len(some)), int(0.8 * len(some))])
    return AuditSample(data, data.x_NF[data.row[some]], labels, Split("holdout", dict(zip(SPLITS, parts, strict=True))))


def audit_sample_runs(data: PreparedDataset, bars: pd.DataFrame, found: Findings, models: Sequence[str]) -> None:
    """Run every step that learns or predicts on samples: a fold with its baselines, a stack, `predict`, trainings."""
    sample = sample_rows(data, SAMPLE_ROWS["tabular"])
    steps = {
        "a fold": partial(audit_fold, sample, models[0], found),
        "a stack": partial(audit_stack, sample, found),
        "predict": partial(audit_predict, sample.dataset, bars, found),
    }
    for model in models:
        own = sample if _family(model) == "tabular" else sample_rows(data, SAMPLE_ROWS["network"])
        steps[f"training {model}"] = partial(audit_training, own, model, found)
    for name, check in steps.items():
        with progress_phase(f"proof of {name}", len(sample.labels)):
            check()


# ---- what learns -----------------------------------------------------------------------------------------------------


def _prior_shares(data: PreparedDataset, rows: np.ndarray) -> np.ndarray:
    """Count the share of each class among these rows independently, half a row more of each where one is absent."""
    y = data.y[rows[data.unambiguous_mask[rows]]]
    counts = np.array([np.count_nonzero(y == k) for k in (-1, 0, 1)], np.float64)
    counts = (counts + 0.5 * (counts == 0).any()) * np.isin((-1, 0, 1), list(data.classes.values()))
    return counts / counts.sum()


def audit_fold(sample: AuditSample, model: str, found: Findings) -> None:
    """Check that a fold separates training from test rows, that nothing fitted in it depends on its test rows, and its
    baselines on no outcome of a test row.
    """
    data = sample.dataset
    plan = plan_folds(data, data.development_rows(), FoldSchemeSpec(folds=FOLDS), 1)
    roles = dict(zip(("train", "test"), (plan.rows[rows] for rows in plan.folds[AUDITED_FOLD]), strict=True))

    def fit(values, labels, roles):
        made = sample.make(values, labels, roles)
        # The data set's own scaler has seen rows that folds test: here it has seen all, so that its use is a leak.
        made = replace(made, scaler=fit_dataset_preprocessing(made, np.arange(len(labels))))
        given, baselines = _record_fold(made, roles, plan.embargo, model)
        if values is sample.values and labels is sample.labels:
            given, baselines = found.given("fold", given), found.given("baseline", baselines)
            rows = {name: np.asarray(given[name]) for name in SPLITS}
            outer = {"train": np.union1d(rows["train"], rows["validation"]), "test": rows["test"]}
            found.add(find_unpurged_rows(labels, Split("", outer, plan.embargo), "fold"))
            found.add(find_unpurged_rows(labels, Split("", {**rows, "test": ()}), "fold"))
            if not np.allclose(np.asarray(baselines["prior"]), _prior_shares(made, roles["train"]), 0.0, 1e-9):
                index = labels.index[roles["test"]]
                found.add([mismatch("baseline", "prior", len(index), index[0], "a recount of the training rows")])
        learnt = {"scaler": given["scaler"].to_dict()} | {
            name: np.asarray(given[name]) for name in ("y", "inputs_train")
        }
        shown = {name: np.asarray(given[name]) for name in (*SPLITS, "inputs_test", "forecasts", "calibrated")}
        states = {name: Fitted(state, forecasts=name in shown) for name, state in (learnt | shown).items()}
        numbers = {name: np.asarray(one, np.float64) for name, one in baselines.items()}
        return states | {name: Fitted(p, forecasts=True, part="baseline") for name, p in numbers.items()}

    found.count("fold", len(plan.rows))
    found.count("baseline", len(roles["test"]))
    found.add(find_blind_leaks(fit, sample.values, sample.labels, Split("a fold", roles, plan.embargo), "fold"))


def _record_fold(data: PreparedDataset, roles, embargo: int, model: str) -> tuple[dict, dict[str, pd.DataFrame]]:
    """Return the inputs, scaler, rows and forecasts of a fold of a cross-validation, as docs/guide.md lists, and the
    baselines of its test rows.
    """
    rows, spec = np.arange(len(data.labels)), _small_run(data, model, "folds")
    block = np.where(np.isin(rows, roles["test"]), 0, -1)
    fold, usable = (roles["train"], roles["test"]), np.ones(len(rows), bool)
    plan = FoldPlan(rows, data.labels, [fold], usable, block, None, {}, embargo)
    seen: dict = {}
    with _opened_run(spec) as run:
        outcome = fit_folds(run, data, plan, FoldModel(spec.seed, model, dict(spec.settings)), observe=seen.update)
    (scored,) = score_folds(data, outcome, model)
    _, validation = plan.fit_and_held_out(0)
    at = {"index": data.labels.index[scored.rows], "columns": PROBABILITIES}
    baselines = {name: pd.DataFrame(p, **at) for name, p in scored.forecasts.items() if name in BASELINES}
    recorded = {
        "labels": data.labels, "features": data.features, "embargo": embargo, "train": seen["train"],
        "validation": validation, "test": scored.rows, "scaler": seen["scaler"], "y": seen["y"],
        "inputs_train": seen["inputs_train"], "inputs_test": seen["inputs_test"],
        "forecasts": scored.forecasts[model + UNCALIBRATED], "calibrated": scored.forecasts[model],
    }  # fmt: skip
    return recorded, baselines


def audit_training(sample: AuditSample, model: str, found: Findings) -> None:
    """Check a training: weights, early stopping, temperature, steps, forecasts and its verdict."""

    def fit(values, labels, roles):
        data = sample.make(values, labels, roles)
        with _opened_run(_small_run(data, model, "train")) as run:
            artifact = train_with_holdout(data, run)
            state, verdict = artifact.load_state(), evaluate_artifacts(run.workspace, data, {model: artifact})
            forecasts = read_predictions(predictions_path(run.workspace, artifact))
        if values is sample.values and labels is sample.labels:
            reference = "the steps refitted on the training rows"
            found.add(compare_states("training", "steps before the model", state["scaler"], data.scaler, reference))
            given = found.given("predictions", forecasts)
            about = {"split": data.split_names(), "label": data.y}
            about = pd.DataFrame(about, index=labels.index).reindex(forecasts.index)
            if leaks := compare("predictions", given, about, "the data set", extra=True):
                found.add(leaks)
                given = forecasts
            forecasts = given
            found.add(_leaks_of_verdict(data, model, forecasts, verdict.metrics))
        metrics = verdict.metrics[verdict.metrics["split"] == "validation"].set_index("name").drop(columns="split")
        learnt = {
            f"trained {model}": {name: state[name] for name in ("model_state", "calibration")},
            f"evaluated {model}": {"metrics": metrics.T.to_dict(), "prior": verdict.prior_loss},
        }
        shown = {name: forecasts[name].to_numpy() for name in PROBABILITIES}
        return {name: Fitted(one, READS) for name, one in learnt.items()} | {
            name: Fitted(one, READS, forecasts=True, part="predictions") for name, one in shown.items()
        }

    found.count("predictions", len(sample.labels))
    found.add(find_blind_leaks(fit, sample.values, sample.labels, sample.split, "training"))


def _leaks_of_verdict(data: PreparedDataset, model: str, forecasts: pd.DataFrame, metrics: pd.DataFrame) -> list[Leak]:
    """Return leaks for log losses of the model and the prior that differ from a recount."""
    at, leaks = data.labels.index.get_indexer(forecasts.index), []
    split, p_N3 = forecasts["split"].to_numpy(), forecasts[PROBABILITIES].to_numpy()
    prior = np.tile(_prior_shares(data, at[split == "train"]), (len(at), 1))
    for name in ("validation", "test"):
        rows = (split == name) & data.unambiguous_mask[at]
        table = metrics[metrics["split"] == name].set_index("name")["log_loss"]
        for who, p in ((model, p_N3), ("prior", prior)):
            wanted = -np.log(np.maximum(p[rows, data.y[at[rows]] + 1], 1e-12)).mean()
            if not np.isclose(table[who], wanted, rtol=0.0, atol=1e-9):
                numbers = f"{wanted:.6f} by a recount, {table[who]:.6f} in the table"
                first = forecasts.index[rows][0]
                leaks.append(mismatch("baseline", f"{who}, log loss of {name} rows", rows.sum(), first, numbers))
    return leaks


def audit_stack(sample: AuditSample, found: Findings) -> None:
    """Check that a stack's weights depend on labels of training rows alone, its calibration and forecasts on no label
    of a test row.
    """

    def fit(values, labels, roles):
        data = sample.make(values, labels, roles)
        with tempfile.TemporaryDirectory() as folder:
            workspace, hashes = Workspace(folder), []
            for model in STACKED:
                with open_run(workspace, _small_run(data, model, "train")) as run:
                    hashes.append(train_with_holdout(data, run).hash)
            small = {model: _small_settings(model) for model in STACKED}
            with open_run(workspace, stack_run_settings(data, STACKED, hashes, STACK_FOLDS, 0, False, small)) as run:
                artifact = fit_stack(data, run, STACK_FOLDS)
            state = artifact.load_state()
            forecasts = load_or_make_predictions(workspace, data, artifact)[PROBABILITIES].to_numpy()
        both = {"its calibration": state["calibration"], "forecasts": forecasts}
        return {"its weights": Fitted(state["stack"], forecasts=True)} | {
            name: Fitted(one, READS, forecasts=True) for name, one in both.items()
        }

    found.count("stack", len(sample.labels))
    found.add(find_blind_leaks(fit, sample.values, sample.labels, sample.split, "stack"))


# ---- what predicts ---------------------------------------------------------------------------------------------------


def audit_predict(data: PreparedDataset, bars: pd.DataFrame, found: Findings) -> None:
    """Check that `predict` gives the same probabilities for a moment whether the file of bars ends there or later."""
    bars, minutes = bars.iloc[-PREDICTED_BARS:], data.settings["market"]["bar_minutes"]
    with _opened_run(_small_run(data, STACKED[0], "train")) as run:
        artifact = train_with_holdout(data, run)

        def predicted_until(stop: int) -> pd.DataFrame:
            write_bars(run.workspace.raw_bars(data.symbol, minutes), bars.iloc[:stop])
            return predict_bars(run.workspace, artifact, None)[0]

        whole = predicted_until(len(bars))
        for cut in PREDICTED_CUTS:
            stop = len(bars) - max(1, cut // minutes)
            known = whole[whole.index <= bars.index[stop - 1] + pd.Timedelta(minutes=minutes)]
            found.count("predict", len(known))
            if not len(known):
                found.add([mismatch("predict", ROWS, 1, "the first", "any row: the bars are too few")])
                continue
            short = predicted_until(stop)
            if short.index.equals(known.index):
                # Matrix products round by their number of rows, so the last bits are not compared.
                same = np.isclose(short[PROBABILITIES], known[PROBABILITIES], rtol=0.0, atol=1e-8)
                short[PROBABILITIES] = known[PROBABILITIES].where(same, short[PROBABILITIES])
            found.add(compare("predict", short, known, "the prediction with later bars"))


def audit_finished_models(workspace: Workspace, data: PreparedDataset, found: Findings) -> None:
    """Predict the stored forecasts of every finished model of this data set again from its bundle."""
    for artifact in ArtifactRegistry(workspace.models).list(data.symbol):
        facts = artifact.facts
        if artifact.kind == STACK or (facts.get("data"), facts.get("horizon")) != (data.fingerprint, data.horizon):
            continue
        path = predictions_path(workspace, artifact)
        if not artifact.is_intact() or not is_prediction_of_artifact(path, artifact):
            continue  # torn files and files without a checksum are rebuilt before use
        part, state, table = f"predictions of {facts['run_id']}", artifact.load_state(), read_predictions(path)
        found.add(compare_states(part, "scaler", state["scaler"], data.scaler, "the stored one"))
        given = found.given("predictions", table)
        with progress_phase(f"re-predicting {facts['model']}", len(table)):
            found.count(part, len(table))
            found.add(_differences_from_bundle(data, artifact, TrainedModel.from_state(state), given, part))


def _differences_from_bundle(
    data: PreparedDataset, artifact: Artifact, bundle: TrainedModel, table: pd.DataFrame, part: str
) -> Iterator[Leak]:
    """Yield leaks of stored probabilities against those that the bundle predicts now."""
    at = data.labels.index.get_indexer(table.index)
    if not len(at) or (at < 0).any() or not (np.diff(at) > 0).all():
        yield mismatch(part, ROWS, max(1, int((at < 0).sum())), "the first", "the rows of the labels")
        return
    family, split = _family(artifact.facts["model"]), data.split_names()[at]
    kept = np.arange(len(at))
    if family == "network":
        kept = np.concatenate([np.flatnonzero(split == name)[-NETWORK_ROWS:] for name in SPLITS])
    predicted = predict_features(bundle, data.features, segment=data.segment, rows=data.row[at[kept]])
    moved = (table[PROBABILITIES].iloc[kept] - predicted[PROBABILITIES].reindex(table.index[kept])).to_numpy()
    wrong, reference = np.flatnonzero(~(np.abs(moved).max(axis=1) <= CLOSE[family])), "the predictions of its bundle"
    if len(wrong):
        yield mismatch(part, "probabilities", len(wrong), table.index[kept[wrong[0]]], reference)
    elif abs(moved[np.arange(len(kept)), data.y[at[kept]] + 1].mean()) > SHIFT:
        yield mismatch(part, "probability of the outcome", len(kept), table.index[kept[0]], reference)
    about = pd.DataFrame({"label": data.y[at], "split": split}, index=table.index)
    yield from compare(part, table, about[[name for name in about if name in table]], "the data set", extra=True)


# ---- small runs ------------------------------------------------------------------------------------------------------


@contextmanager
def _opened_run(spec: RunSettings) -> Iterator[Run]:
    """A run in a workspace that is gone afterwards: a model that other rows left would find its earlier forecasts."""
    with tempfile.TemporaryDirectory() as folder, open_run(Workspace(folder), spec) as run:
        yield run


def _small_run(data: PreparedDataset, model: str, task: str) -> RunSettings:
    """Return a run that reads rows as the model's own does, and is over in a second or two."""
    return make_run_settings(
        data.symbol, data.horizon, model, task=task, seed=0, quick=False, data=data.fingerprint,
        settings=_small_settings(model),
    )  # fmt: skip


def _small_settings(model: str) -> dict:
    if _family(model) == "tabular":
        return {"rounds": 20, "threads": 1} | ({} if model == "linear" else {"depth": 3})
    return {"epochs": 2, "lookback": 16, "batch": 128}


def _family(model: str) -> str:
    return "tabular" if find_model_spec(model).family == "tabular" else "network"
