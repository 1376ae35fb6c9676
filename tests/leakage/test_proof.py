"""The proof where it stops at the first leak, and where the product's own functions look ahead."""
# ruff: noqa: F811 - a fixture of the contract

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest

from ml_factory.data import resample, sessions
from ml_factory.data.sessions import MarketSpec
from ml_factory.data.validation import validate_bars
from ml_factory.datasets import scaling
from ml_factory.datasets.preprocessing import PcaTransform
from ml_factory.features import build
from ml_factory.features.build import FeatureSpec
from ml_factory.leakage.proof import ProofSpec, prove
from ml_factory.leakage.tables import Findings
from ml_factory.settings import DataSpec
from ml_factory.targets import label_table, make_labels, splits
from ml_factory.targets.labels import LabelSpec
from ml_factory.workflows.build import DataUnderProof
from tests.contract.test_proof import CUT, FULL, assert_caught, bars, named  # noqa: F401 - a fixture
from tests.leakage.catalogue import CATALOGUE, Leak, clean_pipeline

pytestmark = pytest.mark.slow  # so that it begins first

LEARNT = replace(CUT, cuts=1, whole_cuts=0, fit_rows=2_000)


def spec_for(leak: Leak) -> ProofSpec:
    """The cuts and disturbances of the full form, where this leak can be."""
    learnt = leak.part.split()[0] in ("split", "fitted")
    return replace(FULL, cuts=1, whole_cuts=0, feed_pushes=0) if learnt else replace(FULL, fit_rows=0)


class Enough(BaseException):
    """Ends a proof at its first leak."""


def first_leak(subject, bars, spec, patch) -> Findings:
    """What a proof had found when it met the first leak; the rest of it takes minutes."""

    def add(self, leaks, real=Findings.add):
        real(self, leaks)
        if self.leaks:
            raise Enough(self)

    with patch.context() as until_first:
        until_first.setattr(Findings, "add", add)
        try:
            return prove(subject, bars, spec)
        except Enough as stop:
            return stop.args[0]


@pytest.fixture(scope="module")
def real_bars(shared_data) -> pd.DataFrame:
    """Five weeks of ES over Presidents' Day and the change of the clocks."""
    raw = pd.read_parquet(shared_data / "bars" / "ES_1m.parquet").set_index("timestamp")
    return validate_bars(raw.loc["2025-02-10":"2025-03-14"].reset_index(), symbol="ES")[0]


@pytest.mark.parametrize("leak", named(CATALOGUE))
def test_prove_with_injected_leak_reports_part_and_column_of_leak(leak, bars, monkeypatch):
    spec, spoiled = spec_for(leak), leak.spoil(clean_pipeline())
    assert_caught(leak, prove(spoiled, bars, spec) if spec.fit_rows else first_leak(spoiled, bars, spec, monkeypatch))


ON_REAL_BARS = ("trace of the next move", "close_ahead_in_the_first_minutes_of_summer")


@pytest.mark.parametrize("leak", named([leak for leak in CATALOGUE if leak.name in ON_REAL_BARS]))
def test_prove_sparse_or_tiny_leak_on_real_bars_is_reported(leak, real_bars, monkeypatch):
    assert_caught(leak, first_leak(leak.spoil(clean_pipeline("ES")), real_bars, spec_for(leak), monkeypatch))


def test_feed_pushes_end_all_over_the_file_and_give_the_rows_of_a_file(bars, monkeypatch):
    market, ends = MarketSpec("DEMO", "cme", 0.25, True), []
    pipeline = clean_pipeline()
    honest = resample.BarChunk.part

    def watched(chunk, first, stop):
        ends.append(stop)
        return honest(chunk, first, stop)

    monkeypatch.setattr(resample.BarChunk, "part", watched)
    plan = pipeline.feed_plan(bars, market.to_dict(), ProofSpec(feed_pushes=500))
    fed = pipeline.feed(bars, market.to_dict(), plan)
    assert 499 <= len(ends) <= 501 and ends[0] < len(bars) / 50 and np.diff(ends).max() < len(bars) / 50
    assert ends[-1] == len(bars)
    monkeypatch.undo()
    assert fed.equals(build.build_features(bars, market, pipeline.settings.features).to_frame())


# ---- the product's own functions -------------------------------------------------------------------------------------


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
    patch.setattr(splits, "purge_training_rows", lambda known_at, label_end, rows, block, embargo: rows)


def without_embargo(patch):
    honest = splits.purge_training_rows
    patch.setattr(splits, "purge_training_rows", lambda *given: honest(*given[:4], 0))


def scaler_of_all(patch):
    honest = scaling.RobustScaler.fit
    spoilt = classmethod(lambda cls, x_NF, rows=None, **options: honest(x_NF, None, **options))
    patch.setattr(scaling.RobustScaler, "fit", spoilt)


def components_of_all(patch):
    honest = PcaTransform.fit
    spoilt = classmethod(lambda cls, x_NF, rows, **options: honest(x_NF, np.arange(len(x_NF)), **options))
    patch.setattr(PcaTransform, "fit", spoilt)


FITTED = {"part": "fitted h10", "spec": LEARNT}
INJECTED = [
    Injected("negative shift", one_ahead, "features"),
    Injected("left-labelled frame", known_at_their_start, "frame 60m", "(rows)", also=("features",)),
    Injected("calendar or tick of the whole file", read_off_the_file, "facts", symbol="ODD"),
    Injected("label_end too early", proven_a_bar_early, "labels h10"),
    Injected("unpurged", unpurged, "split h10", spec=LEARNT),
    Injected("embargo forgotten", without_embargo, "split h10", spec=LEARNT),
    Injected("scaler of all rows", scaler_of_all, column="preprocessing", **FITTED),
    Injected("components of all rows", components_of_all, column="preprocessing", steps=("pca", "robust"), **FITTED),
]  # fmt: skip


@pytest.mark.parametrize("one", INJECTED, ids=lambda one: one.name.replace(" ", "_"))
def test_prove_leak_injected_into_library_function_is_reported(one, bars, monkeypatch):
    one.inject(monkeypatch)
    proof = prove(clean_pipeline(one.symbol, preprocess=one.steps), bars, one.spec)
    found = [leak for leak in proof.leaks if leak.part == one.part and leak.column.startswith(one.column)]
    assert found, [leak.sentence() for leak in proof.leaks]
    assert {leak.part for leak in proof.leaks} <= {one.part, *one.also}, [leak.sentence() for leak in proof.leaks]


def test_prove_meta_labels_with_look_ahead_side_reports_leak(prepared, monkeypatch):
    bars = pd.read_parquet(prepared.raw_bars("DEMO")).set_index("timestamp")
    spec = LabelSpec(5, kind="meta", primary="macd_12_26")
    settings = DataSpec(features=FeatureSpec(frames=(60,), families=("calendar",)), labels=spec)
    asked = DataUnderProof("DEMO", settings, (5,), folds=0)
    short = ProofSpec(cuts=10, whole_cuts=2, fit_rows=0, feed_pushes=0)
    assert prove(asked, bars, short).passed
    honest = make_labels.compute_family_columns

    def peeking(family, bars, market, coarse):
        return {name: np.append(one[1:], np.nan) for name, one in honest(family, bars, market, coarse).items()}

    monkeypatch.setattr(make_labels, "compute_family_columns", peeking)
    leaks = prove(asked, bars, short).leaks  # one bar is less than a label's life: only the side itself shows it
    assert "frame primary side" in {leak.part for leak in leaks}
