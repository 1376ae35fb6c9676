"""Look-ahead of every mechanism is refused or named, through the two doors a user has.

`feature` proves a user's own column before it may be used; `pipeline.audit(tamper=)` is the audit of an audit: a value
changed at any stage is named, the unchanged pipeline passes.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import signal

from ml_factory import pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.errors import LookAheadError
from ml_factory.storage.workspace import Workspace
from tests.contract import doors

DAY_NS = 86_400_000_000_000


def moves(bars):
    return np.diff(np.log(bars.close), prepend=np.log(bars.close[0]))


def by_session(bars, values, what):
    return pd.Series(np.asarray(values)).groupby(np.asarray(bars.session)).transform(what).to_numpy()


def ahead(values, rows=1):
    return np.append(values[rows:], np.zeros(rows))


def still_bars(bars):
    return (bars.volume == 0) & (bars.high == bars.low)


LEAKS = {
    "negative shift": lambda b: ahead(moves(b)),
    "trace of the next move": lambda b: moves(b) + 1e-6 * ahead(moves(b)),
    "one row of a thousand": lambda b: np.where(np.arange(len(b)) % 1000 == 500, ahead(moves(b)), moves(b)),
    "only after a still bar": lambda b: np.where(still_bars(b), ahead(moves(b)), 0.0),
    "centred window": lambda b: pd.Series(moves(b)).rolling(11, min_periods=1, center=True).mean().to_numpy(),
    "zero-phase filter": lambda b: signal.filtfilt(*signal.butter(2, 0.1), moves(b), padlen=0),
    "FFT convolution": lambda b: signal.fftconvolve(moves(b), np.ones(7))[: len(b)],
    "smoothed both ways": lambda b: pd.Series(moves(b)[::-1] ** 2).ewm(span=20).mean().to_numpy()[::-1],
    "high of the whole session": lambda b: by_session(b, b.high, "max") / b.close - 1,
    "close of the session": lambda b: by_session(b, b.close, "last") / b.close - 1,
    "VWAP of the whole session": lambda b: by_session(b, b.close * b.volume, "sum") - by_session(b, b.volume, "sum"),
    "scale of the whole file": lambda b: (moves(b) - moves(b).mean()) / moves(b).std(),
    "trace of the file's mean": lambda b: moves(b) - 1e-3 * moves(b).mean(),
    "quantile of the whole file": lambda b: (moves(b) > np.quantile(moves(b), 0.9)).astype(float),
    "rank in the whole file": lambda b: pd.Series(moves(b)).rank(pct=True).to_numpy(),
    "divided by the file's maximum": lambda b: b.close / b.high.max(),
    "backfill": lambda b: pd.Series(np.where(still_bars(b), np.nan, moves(b))).bfill().fillna(0.0).to_numpy(),
    "time to the next bar": lambda b: np.append(np.diff(b.known_at), 0) / 3e11,
    "volume of the next bar": lambda b: np.log1p(ahead(np.asarray(b.volume))),
    "usual outcome of the hour": lambda b: (
        pd.Series(ahead(moves(b))).groupby(np.asarray(b.known_at) % DAY_NS // 3_600_000_000_000).transform("mean")
    ).to_numpy(),
    "first component of all rows": lambda b: (
        np.linalg.svd(np.column_stack([moves(b), moves(b) ** 2]), full_matrices=False)[0][:, 0]
    ),
    "length of the file": lambda b: np.arange(len(b)) / len(b),
}  # fmt: skip
HONEST = {
    "move": moves,
    "mean of 30": lambda b: pd.Series(np.asarray(b.close)).rolling(30, min_periods=1).mean().to_numpy() / b.close,
    "high of the session so far": lambda b: pd.Series(np.asarray(b.high)).groupby(np.asarray(b.session)).cummax(),
    "one-sided filter": lambda b: signal.lfilter([0.1], [1, -0.9], moves(b)),
}


@pytest.mark.parametrize("name", LEAKS)
def test_own_feature_that_looks_ahead_is_refused(name):
    with doors.own_features(), pytest.raises(LookAheadError, match="peeks"):
        doors.feature(lambda bars: LEAKS[name](bars), memory=300, name="peeks")


@pytest.mark.parametrize("name", HONEST)
def test_own_feature_that_looks_back_is_registered(name):
    with doors.own_features():
        doors.feature(lambda bars: np.asarray(HONEST[name](bars)), memory=500, name="looks_back")


# ---- audit(tamper=) --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("audited") / "workspace")
    ensure_synthetic_demo_market(made, "DEMO", days=8)
    pipeline.prepare(made, "DEMO", (5,), settings=doors.SMALL_DATA)
    pipeline.train(made, "DEMO", 5, "linear", quick=True, mirror="off")
    return made


def audit(workspace: Workspace, tamper):
    return pipeline.audit(workspace, "DEMO", models=("linear",), cuts=1, tamper=tamper)


def one_row_ahead(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.shift(-1).ffill()


def softer(p: pd.DataFrame) -> pd.DataFrame:
    """Probabilities moved a little, as if something had been fitted on these rows."""
    softened = p**0.99
    return softened.div(softened.sum(axis=1), axis=0)


PROBABILITIES = ["p_short", "p_neutral", "p_long"]
STAGES = {
    "bars": (lambda x: x.assign(close=x["close"].shift(-1).ffill()), "bars: close"),
    "features": (one_row_ahead, "features: return_1"),
    "labels": (lambda x: x.assign(label_end=x["label_end"] - pd.Timedelta("5min")), "labels h5: label_end"),
    "splits": (lambda x: x | {"train": np.arange(x["train"][-1] + 40)}, "train against validation"),
    "scaler": (lambda x: replace(x, scale=np.nextafter(x.scale, 99)), "scaler h5: scaler['scale']"),
    "dataset": (lambda x: replace(x, features=one_row_ahead(x.features)), "dataset h5, features: return_1"),
    "fold": (lambda x: x | {"train": np.arange(x["test"][0] + 9)}, "fold: train against test"),
    "predictions": (lambda x: x.assign(**softer(x[PROBABILITIES])), "predictions: p_"),
    "baseline": (lambda x: x | {"clock": softer(x["clock"])}, "clock"),
}  # fmt: skip


# Files are compared before anything is run on them, and what is found there ends the audit: one at a time.
ALONE = ("bars", "features", "labels", "splits", "scaler", "dataset")


@pytest.mark.parametrize("stages", [*[(stage,) for stage in ALONE], ("fold", "predictions", "baseline")], ids="-".join)
def test_audit_names_a_value_changed_at_any_stage(workspace, stages):
    seen = []

    def tamper(here, value):
        seen.append(here)
        return STAGES[here][0](value) if here in stages else value

    before = {path: path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()}
    found = audit(workspace, tamper)
    for stage in stages:
        assert stage in seen
        says = STAGES[stage][1]
        assert not found.passed and any(says in sentence for sentence in found.sentences), found.sentences
    assert {path: path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()} == before


def test_audit_of_unchanged_values_passes_and_sees_every_stage_and_takes_the_dict_of_a_scaler_in_its_place(workspace):
    seen = set()
    found = audit(workspace, lambda stage, value: seen.add(stage) or (value.to_dict() if stage == "scaler" else None))
    assert found.passed and found.sentences == []
    assert seen == set(STAGES)


def test_cuts_of_5_minute_bars_are_exactly_at_row_times_and_label_ends():
    """A cut a bar too late would leave the next bar undisturbed, and a look ahead of one bar would pass."""
    how = {"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"}
    bars = doors.synthetic_bars(days=6, seed=3).resample("5min").agg(how).dropna(subset=["close"])
    ends = bars.index.as_unit("ns").asi8 + 5 * doors.MINUTE_NS
    proven = ends[100:-100:7]
    label = doors.Table(pd.DataFrame({"barrier": np.resize(["upper", "vertical"], len(proven))}), proven)
    cuts = doors.choose_cut_points(bars, "cme", 60, rows=ends[::3], labels={"labels h5": label}, bar_minutes=5)
    at = {why: [cut.at for cut in cuts if cut.why == why] for why in {cut.why for cut in cuts}}
    assert len(at["row of extreme"]) > 1 and set(at["row of extreme"]) <= set(ends[::3])
    for way in ("upper", "vertical"):
        own = proven[(label.rows["barrier"] == way).to_numpy()]
        assert len(at[f"label proven by {way}"]) > 1 and set(at[f"label proven by {way}"]) <= set(own)
