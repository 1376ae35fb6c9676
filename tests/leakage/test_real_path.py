"""Leaks put into the product's own functions, one a stage: the proof tries what `prepare` and `train` call.

What can leak, and how little of it is seen, is in the catalogue, which spoils a pipeline's methods.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest

from ml_factory.data import resample, sessions
from ml_factory.datasets import feature_selection, scaling
from ml_factory.features import build
from ml_factory.features.build import FeatureSpec
from ml_factory.leakage.pipeline_under_test import StandardPipelineUnderTest
from ml_factory.leakage.proof import prove_no_look_ahead
from ml_factory.leakage.proof_spec import ProofSpec
from ml_factory.targets import label_table, splits
from ml_factory.targets.labels import LabelSpec
from ml_factory.targets.splits import SplitSpec
from ml_factory.workflows import audit, evaluation, prepared_dataset
from ml_factory.workflows import train as train_module
from ml_factory.workflows.load_prepared import load_dataset
from tests.leakage.catalogue import bars_with_events

CUT = ProofSpec(cuts=8, whole_cuts=2, ahead=1_500, fit_rows=0, fit_splits=2, feed_rows=0, enough=5)
LEARNT = replace(CUT, cuts=1, whole_cuts=0, fit_rows=2_000)


def pipeline_of(preprocess: tuple = ("robust",), symbol: str = "DEMO") -> StandardPipelineUnderTest:
    features = FeatureSpec(base_minutes=5, frames=(60,), families=("calendar", "momentum"))
    asked = (LabelSpec(horizon=10, sigma_span=50),)
    return StandardPipelineUnderTest(
        symbol, features, asked, SplitSpec(embargo_bars=16), folds=3, preprocess=preprocess
    )


@dataclass(frozen=True)
class Injected:
    """inject : (patch) spoils one function of the product.  part, column : where the proof must see it.

    steps : the fitted steps of the pipeline.  also : parts that are made of the spoilt one.
    """

    name: str
    inject: Callable[[pytest.MonkeyPatch], None]
    part: str
    column: str = ""
    steps: tuple = ("robust",)
    symbol: str = "DEMO"
    spec: ProofSpec = CUT
    also: tuple[str, ...] = ()


def one_ahead(patch):
    """The momentum family itself, and then each row takes the first column of the next."""
    family = build.FAMILIES["momentum"]

    def spoilt(block):
        for name, column in family(block):
            if name == "return_1" and not block.coarse:
                column[:-1] = column[1:].copy()
            yield name, column

    patch.setitem(build.FAMILIES, "momentum", spoilt)


def known_at_their_start(patch):
    honest = resample.BarStream.push

    def spoilt(stream, bars):
        made = honest(stream, bars)
        return replace(made, known_at=made.start) if stream.minutes == 60 else made

    patch.setattr(resample.BarStream, "push", spoilt)


def read_off_the_file(patch):
    patch.setattr(sessions, "INFER_SESSIONS", 10_000)


def proven_a_bar_early(patch):
    honest = label_table._proven_at

    def spoilt(base, rows, *given):
        return np.maximum(honest(base, rows, *given) - 300_000_000_000, base.known_at[rows.entry] + 1)

    patch.setattr(label_table, "_proven_at", spoilt)


def unpurged(patch):
    patch.setattr(splits, "purge_keep_mask", lambda known_at, label_end, rows, block, embargo: np.ones(len(rows), bool))


def without_embargo(patch):
    honest = splits.purge_keep_mask
    patch.setattr(splits, "purge_keep_mask", lambda *given: honest(*given[:4], 0))


def scaler_of_all(patch):
    honest = scaling.RobustScaler.fit
    spoilt = classmethod(lambda cls, x_NF, rows=None, **options: honest(x_NF, None, **options))
    patch.setattr(scaling.RobustScaler, "fit", spoilt)


def clusters_of_all(patch):
    """The step's real selection, on every row."""
    honest = feature_selection.SELECTIONS["clusters"]

    def spoilt(sample, **options):
        return honest(replace(sample, rows=np.arange(len(sample.x_NF))), **options)

    patch.setitem(feature_selection.SELECTIONS, "clusters", spoilt)


FITTED = {"part": "fitted h10", "spec": LEARNT}
INJECTED = [
    Injected("negative shift", one_ahead, "features"),
    Injected("left-labelled frame", known_at_their_start, "frame 60m", "(rows)", also=("features",)),
    Injected("calendar or tick of the whole file", read_off_the_file, "facts", symbol="ODD"),
    Injected("label_end too early", proven_a_bar_early, "labels h10"),
    Injected("unpurged", unpurged, "split h10", spec=LEARNT),
    Injected("embargo forgotten", without_embargo, "split h10", spec=LEARNT),
    Injected("scaler of all rows", scaler_of_all, column="preprocessing", **FITTED),
    Injected("clusters of all rows", clusters_of_all, column="preprocessing", steps=("clusters", "robust"),
             **FITTED),
]  # fmt: skip


@pytest.fixture(scope="module")
def bars() -> pd.DataFrame:
    return bars_with_events()


@pytest.mark.parametrize("steps", sorted({one.steps for one in INJECTED}), ids="-".join)
def test_prove_standard_pipeline_without_injection_passes(steps, bars):
    proof = prove_no_look_ahead(pipeline_of(steps), bars, replace(CUT, cuts=4, whole_cuts=1, fit_rows=2_000))
    assert proof.passed, [leak.sentence() for leak in proof.leaks]


@pytest.mark.parametrize("one", INJECTED, ids=lambda one: one.name.replace(" ", "_"))
def test_prove_leak_injected_into_library_function_is_reported(one, bars, monkeypatch):
    one.inject(monkeypatch)
    proof = prove_no_look_ahead(pipeline_of(one.steps, one.symbol), bars, one.spec)
    found = [leak for leak in proof.leaks if leak.part == one.part and leak.column.startswith(one.column)]
    assert found, [leak.sentence() for leak in proof.leaks]
    assert {leak.part for leak in proof.leaks} <= {one.part, *one.also}, [leak.sentence() for leak in proof.leaks]


# ---- what a real training takes from rows it may not read ----------------------------------------------------------


def weights_of_all(patch):
    """Uniqueness counted among the rows that judge too."""
    honest = prepared_dataset.dataset_sample_weights

    def spoilt(data, rows, spec=None):
        everything = np.arange(len(data.labels))
        return honest(data, everything, spec)[rows]

    patch.setattr(prepared_dataset, "dataset_sample_weights", spoilt)


def calibration_of_test_rows(patch):
    training_data, fit, seen = train_module.build_fit_inputs, train_module.Calibration.fit, {}

    def watched(data, spec):
        seen["shares"] = np.bincount(data.y[data.splits["test"]] + 1, minlength=3) + 1.0
        return training_data(data, spec)

    def spoilt(log_p, y, w=None, *, horizon=1):
        return fit(log_p, y, seen["shares"][np.asarray(y) + 1], horizon=horizon)

    patch.setattr(train_module, "build_fit_inputs", watched)
    patch.setattr(train_module.Calibration, "fit", staticmethod(spoilt))


def learns_from_test_rows(patch):
    honest = train_module._train_validation_rows

    def spoilt(data, model, quick):
        train, validation, limited = honest(data, model, quick)
        return np.append(train, data.splits["test"][:1]), validation, limited

    patch.setattr(train_module, "_train_validation_rows", spoilt)


def prior_of_all(patch):
    """The class prior that a model must beat is counted on the rows that judge too."""
    honest = evaluation.prepared_dataset_baselines

    def spoilt(data, training_rows, rows):
        everything = np.arange(len(data.labels))
        return honest(data, training_rows, rows) | {"prior": honest(data, everything, rows)["prior"]}

    patch.setattr(evaluation, "prepared_dataset_baselines", spoilt)


def prior_other_a_history_of_all(patch):
    honest = evaluation.dataset_weighted_prior_loss

    def spoilt(data, training_rows, rows):
        return honest(data, np.arange(len(data.labels)), rows)

    patch.setattr(evaluation, "dataset_weighted_prior_loss", spoilt)


@pytest.mark.soak_except("learns_from_test_rows", "prior_of_all")
@pytest.mark.parametrize(
    ("inject", "where"),
    [
        (weights_of_all, "trained xgboost"),
        (calibration_of_test_rows, "trained xgboost"),
        (learns_from_test_rows, "trained xgboost"),
        (prior_of_all, "evaluated xgboost['metrics']"),
        (prior_other_a_history_of_all, "evaluated xgboost['prior']"),
    ],
)
def test_leaks_of_training_reading_forbidden_rows_is_reported(inject, where, prepared, monkeypatch):
    monkeypatch.setitem(audit.TRAINING_ROWS, "tabular", 1_000)
    data = load_dataset(prepared, "DEMO", 5)
    inject(monkeypatch)
    leaks = audit.audit_leaks_of_model(data, "xgboost")
    assert any(leak.column.startswith(where) for leak in leaks), [leak.sentence() for leak in leaks]
    # What was learnt wrongly is judged otherwise too; what was judged wrongly was learnt as ever.
    own, also = where.split("[")[0], "evaluated xgboost"
    assert all(leak.column.startswith((own, also)) for leak in leaks), [leak.sentence() for leak in leaks]
