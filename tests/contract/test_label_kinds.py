"""Each kind of label from prepare to a trained model: proved, stored as the library makes it, learnt."""

import json

import numpy as np
import pandas as pd
import pytest

from ml_factory import pipeline
from ml_factory.errors import SettingsError
from tests.contract import doors
from tests.small_data import SMALL_DATA_WORDS

BY_HAND = {"direction": doors.direction_labels, "trend_scanning": doors.trend_scanning_labels}


@pytest.mark.parametrize("kind", sorted(BY_HAND))
def test_prepare_label_kind_is_certified_stored_and_trained(prepared, every_cut, call, kind):
    before = pipeline.load_labels(prepared, "DEMO", 5)
    words = ("--workspace", prepared.root, "--horizon", 5, "--target", kind, *SMALL_DATA_WORDS, "--json")
    with every_cut():
        code, out, err = call("prepare", *words)
    assert code == 0, err
    assert json.loads(out)["proof"] == "quick, 16 cuts" and "looks ahead" not in err
    store = doors.DatasetStore.current(prepared.processed("DEMO"))
    market = doors.MarketSpec.from_dict(store.facts["market"])
    bars = pd.read_parquet(prepared.raw_bars("DEMO")).set_index("timestamp")
    wanted = BY_HAND[kind](doors.resample_bars(bars, market, 5), doors.LabelSpec(5, kind=kind), market)
    labels = pipeline.load_labels(prepared, "DEMO", 5)
    pd.testing.assert_frame_equal(labels, wanted[wanted["entry_bar"] >= store.facts["first"]], check_freq=False)
    assert not labels["label"].equals(before["label"])
    trained = pipeline.train(
        prepared, "DEMO", 5, "xgboost", quick=True, mirror="off",
        model_settings={"rounds": 5, "depth": 2, "threads": 1},
    )  # fmt: skip
    printed = pipeline.load_predictions(prepared, "DEMO", 5, "xgboost")
    assert trained.artifact.exists() and len(printed) and {"train", "validation", "test"} <= set(printed["split"])
    p = printed[["p_short", "p_neutral", "p_long"]].to_numpy()
    assert np.allclose(p.sum(axis=1), 1, atol=1e-6)
    share = (labels["label"] == 0).mean()
    assert abs(p[:, 1].mean() - share) < 0.15  # it has learnt this question's classes: trends are hardly ever neutral


def test_prepare_unknown_or_unsearchable_label_kind_exits_2(prepared, call):
    code, _, err = call("prepare", "--workspace", prepared.root, "--target", "forward_return")
    assert code == 2 and "triple_barrier, direction, trend_scanning, meta" in err
    words = ("--workspace", prepared.root, "--set", "labels.kind=direction", "--search")
    code, _, err = call("prepare", *words)
    assert code == 2 and "Only barriers are searched for [--search]" in err  # before any work
    found = pipeline.search_barriers(prepared, "DEMO", 5, doors.BarrierSearchSpec(neutral=(0.02, 0.7), lean=0.5))
    with pytest.raises(SettingsError, match="Only barriers are searched for"):
        asked = doors.DataSpec(labels=doors.LabelSpec(kind="direction"))
        pipeline.prepare(prepared, "DEMO", (5,), settings=asked, searched=found.name)
    assert doors.LABEL_KINDS[0] == doors.LabelSpec().kind
