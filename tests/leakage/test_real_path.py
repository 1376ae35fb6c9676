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
from ml_factory.leakage.proof import ProofSpec, prove
from ml_factory.settings import DataSpec
from ml_factory.targets import label_table, splits
from ml_factory.targets.labels import LabelSpec
from ml_factory.targets.splits import SplitSpec
from ml_factory.workflows.build import DataUnderProof
from tests.leakage.catalogue import bars_with_events

CUT = ProofSpec(cuts=8, whole_cuts=2, ahead=1_500, fit_rows=0, fit_splits=2, feed_pushes=0, enough=5)
LEARNT = replace(CUT, cuts=1, whole_cuts=0, fit_rows=2_000)


def pipeline_of(preprocess: tuple = ("robust",), symbol: str = "DEMO") -> DataUnderProof:
    settings = DataSpec(
        features=FeatureSpec(base_minutes=5, frames=(60,), families=("calendar", "momentum")),
        labels=LabelSpec(sigma_span=50), splits=SplitSpec(embargo_bars=16), preprocess=preprocess,
    )  # fmt: skip
    return DataUnderProof(symbol, settings, (10,), folds=3)


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
    proof = prove(pipeline_of(steps), bars, replace(CUT, cuts=4, whole_cuts=1, fit_rows=2_000))
    assert proof.passed, [leak.sentence() for leak in proof.leaks]


@pytest.mark.parametrize("one", INJECTED, ids=lambda one: one.name.replace(" ", "_"))
def test_prove_leak_injected_into_library_function_is_reported(one, bars, monkeypatch):
    one.inject(monkeypatch)
    proof = prove(pipeline_of(one.steps, one.symbol), bars, one.spec)
    found = [leak for leak in proof.leaks if leak.part == one.part and leak.column.startswith(one.column)]
    assert found, [leak.sentence() for leak in proof.leaks]
    assert {leak.part for leak in proof.leaks} <= {one.part, *one.also}, [leak.sentence() for leak in proof.leaks]
