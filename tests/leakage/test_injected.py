"""Leaks of every mechanism we know of, injected one at a time: each is caught and named, the clean pipeline never."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.validation import validate_bars
from ml_factory.leakage.proof import ProofSpec, prove
from tests.leakage import leaky_columns, leaky_parts
from tests.leakage.catalogue import CATALOGUE, Leak, Learning, bars_with_events, clean_pipeline

FULL = ProofSpec(ahead=1_500, whole_cuts=4, fit_rows=2_000)
LEARNT = ("split", "fitted")
MODULES = (leaky_columns, leaky_parts)  # their leaks entered the catalogue when they were read


def named(leaks: list[Leak]) -> list:
    return [pytest.param(leak, id=leak.name.replace(" ", "_")) for leak in leaks]


def spec_for(leak: Leak) -> ProofSpec:
    """The cuts and disturbances of the full form; it may stop at the first leak, and look where this one can be."""
    learnt = leak.part.split()[0] in LEARNT
    return replace(FULL, cuts=1, whole_cuts=0, feed_pushes=0) if learnt else replace(FULL, fit_rows=0, enough=1)


@pytest.fixture(scope="module")
def bars() -> pd.DataFrame:
    return bars_with_events()


@pytest.fixture(scope="module")
def real_bars(shared_data) -> pd.DataFrame:
    """Five weeks of ES over Presidents' Day and the change of the clocks."""
    raw = pd.read_parquet(shared_data / "bars" / "ES_1m.parquet").set_index("timestamp")
    return validate_bars(raw.loc["2025-02-10":"2025-03-14"].reset_index(), symbol="ES")[0]


def assert_caught(leak: Leak, proof) -> None:
    found = [one for one in proof.leaks if one.part == leak.part and one.column.startswith(leak.column)]
    assert found, [one.sentence() for one in proof.leaks]
    assert {one.part for one in proof.leaks} == {leak.part}  # and nothing clean is blamed
    sentence = found[0].sentence()
    assert leak.column in sentence and found[0].disturbance in sentence and found[0].cut in sentence


@pytest.mark.parametrize("leak", named(CATALOGUE))
def test_prove_with_injected_leak_reports_part_and_column_of_leak(leak, bars):
    assert_caught(leak, prove(leak.spoil(clean_pipeline()), bars, spec_for(leak)))


ON_REAL_BARS = ("trace of the next move", "backfilled_weekend", "close_ahead_in_the_first_minutes_of_summer")


@pytest.mark.parametrize("leak", named([leak for leak in CATALOGUE if leak.name in ON_REAL_BARS]))
def test_prove_sparse_or_tiny_leak_on_real_bars_is_reported(leak, real_bars):
    assert_caught(leak, prove(leak.spoil(clean_pipeline("ES")), real_bars, spec_for(leak)))


def test_prove_clean_pipeline_passes(bars):
    proof = prove(clean_pipeline(), bars, replace(FULL, cuts=20))
    assert proof.passed, [leak.sentence() for leak in proof.leaks]
    assert FULL.form == "full" and len(proof.cuts) == 20
    # Something was compared: each part at each cut under each disturbance, and the facts.
    parts = {"features", "frame 5m", "frame 60m", "labels h10", "facts", "fitted h10", "features, fed bar by bar"}
    assert parts == set(proof.compared)
    assert proof.compared["features"] > 20 * 3 * 24
    kinds = {cut.why for cut in proof.cuts}
    assert {"session end", "frame edge", "gap", "daylight saving", "hour of the week"} <= kinds


def test_prove_full_form_fits_every_split_of_every_scheme(bars):
    pipeline, fitted = clean_pipeline(), []

    class Watched(Learning):
        def fit(self, values, labels, roles):
            fitted.append((len(roles["train"]), tuple(np.asarray(roles["test"])[[0, -1]])))
            return super().fit(values, labels, roles)

    spec = replace(FULL, cuts=1, whole_cuts=0, feed_pushes=0)
    proof = prove(Watched(**vars(pipeline)), bars, spec)
    labels = pipeline.tables(bars, pipeline.facts(bars))["labels h10"].rows
    splits = pipeline.splits(labels.iloc[-FULL.fit_rows :])
    schemes = {split.name.split()[0] for split in splits}
    assert schemes == {"holdout", "purged", "expanding", "rolling", "combinatorial"} and len(splits) == 13
    assert proof.compared["fitted h10"] == 13 * FULL.fit_rows
    # Each once as it is, and once with other and fewer rows that it may not read; the holdout for both roles.
    assert len(fitted) == 13 * (1 + 1) + 1
    few = pipeline.splits(labels.iloc[: 17 * 4 * 3 - 1])  # with less than four embargoes a fold, none is cut
    assert [split.name for split in few] == ["holdout"]


def test_prove_too_few_bars_for_a_cut_does_not_pass(bars):
    pipeline = clean_pipeline()
    rows = pipeline.tables(bars, pipeline.facts(bars))["features"].rows
    until = int(bars.index.searchsorted(rows.index[3]))
    proof = prove(pipeline, bars.iloc[:until], replace(FULL, cuts=5, fit_rows=0))
    assert not proof.passed and "too few bars" in proof.leaks[0].sentence()
