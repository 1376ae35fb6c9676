"""The guard of live predictions: simple checks, actions with reasons, one push or many, and a restored state."""

import numpy as np
import pandas as pd
import pytest

from ml_factory import Bundle
from ml_factory.errors import BarsError, SettingsError
from ml_factory.evaluation.metrics import PROBABILITIES as P
from ml_factory.features.build import build_features
from ml_factory.inference.guard.guarded_stream import GuardedStream
from ml_factory.inference.guard.request_checks import check_feature_rows, check_predict_bars
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.inference.stream import PredictionStream
from ml_factory.storage.serialization import deserialize_state, serialize_state

PRICES = ["open", "high", "low", "close"]
LAST = 300


@pytest.fixture(scope="module")
def bundle(bundle_file) -> Bundle:
    return Bundle.load(bundle_file("linear"))


def off_tick(bars):
    return bars.assign(**{name: bars[name] + 0.1 for name in PRICES})


def in_cents(bars):
    return bars.assign(**{name: bars[name] * 100 for name in PRICES})


def stuck(bars):
    return bars.assign(**dict.fromkeys(PRICES, bars["close"].iloc[0]))


def without_an_hour(bars):
    return bars.iloc[61:]


FAULTS = {
    "tick": (off_tick, "off the tick of 0.25", "abstain"),
    "unit": (in_cents, "times that of the bar before", "abstain"),
    "stuck": (stuck, "bars in a row at the price", "abstain"),
    "gap": (without_an_hour, "open minutes without a bar before", "warn"),
}


def guarded(bundle, bars, **settings) -> tuple[GuardedStream, pd.DataFrame]:
    """A stream fed with the history, and its answer to the last bars."""
    stream = GuardedStream(bundle, GuardSettings(gap_minutes=30, **settings), cold=False)
    stream.push(bars.iloc[:-LAST])
    return stream, stream.push(bars.iloc[-LAST:])


def faulty(bars, fault):
    """The bars with their last 250 damaged, in the middle of a session."""
    return pd.concat([bars.iloc[:-250], fault(bars.iloc[-250:])])


@pytest.mark.parametrize("kind", FAULTS)
def test_guarded_stream_of_faulty_feed_acts_with_reason(bundle, raw_bars, kind):
    fault, reason, action = FAULTS[kind]
    bars = raw_bars.iloc[:-7]
    sound, answers = guarded(bundle, bars)
    assert set(answers["guard"]) == {"ok"} and set(answers["reason"]) == {""} and answers[P].notna().all(axis=None)
    assert sound.status()["checks"][kind]["onsets"] == 0
    stream, answers = guarded(bundle, faulty(bars, fault))
    found = answers[answers["reason"].str.contains(reason)]
    assert len(found) and set(found["guard"]) == {action} and "wanted" in found["reason"].iloc[0]
    assert (found[P].isna().all(axis=None)) == (action == "abstain")
    assert not answers["reason"].iloc[:5].str.contains(reason).any()
    assert stream.status()["checks"][kind]["onsets"] == 1
    for other, empty in (("warn", False), ("refuse", True), ("ok", False)):
        _, again = guarded(bundle, faulty(bars, fault), **{kind: other})
        rows = again.loc[found.index]
        assert set(rows["guard"]) == {other} and rows[P].isna().all(axis=None) == empty


@pytest.mark.parametrize("kind", FAULTS)
def test_guarded_stream_of_single_bars_and_restored_equals_one_push(bundle, raw_bars, kind):
    bars = faulty(raw_bars.iloc[:-7], FAULTS[kind][0])
    whole, wanted = guarded(bundle, bars)
    stream = GuardedStream(bundle, whole.settings, cold=False)
    stream.push(bars.iloc[:-LAST])
    pushed, last = [], bars.iloc[-LAST:]
    for number in range(len(last)):
        if number % 97 == 5:
            state = deserialize_state(serialize_state(stream.get_state()))
            stream = GuardedStream(bundle, whole.settings, cold=False)
            stream.load_state(state)
        pushed.append(stream.push(last.iloc[number : number + 1]))
    pd.testing.assert_frame_equal(
        pd.concat(pushed).drop(columns=P), wanted.drop(columns=P), check_exact=True, check_freq=False
    )
    assert serialize_state(stream.get_state()["guard"]) == serialize_state(whole.get_state()["guard"])
    assert stream.status() == whole.status()


def test_guarded_stream_without_findings_answers_as_prediction_stream(bundle, raw_bars):
    bars = raw_bars.iloc[-3000:-7]
    got = GuardedStream(bundle).push(bars)
    pd.testing.assert_frame_equal(
        got.drop(columns=["guard", "reason"]), PredictionStream(bundle, cold=True).push(bars), check_exact=True
    )


def test_guarded_stream_refuses_bars_that_cannot_be_and_is_as_before(bundle, raw_bars):
    stream = GuardedStream(bundle, cold=False)
    stream.push(raw_bars.iloc[:50])
    state = serialize_state(stream.get_state())
    for bars, named in (
        (raw_bars.iloc[40:60], "overlap"),
        (raw_bars.iloc[49:51], "overlap"),
        (raw_bars.iloc[[61, 60]], "out of order"),
        (raw_bars.iloc[60:61].assign(high=1.0), "high"),
        (raw_bars.iloc[60:61].assign(close=np.nan), "close"),
        (raw_bars.iloc[60:61].drop(columns="volume"), "volume"),
        (raw_bars.iloc[60:61].drop(columns="open"), "open"),
    ):
        with pytest.raises(BarsError, match=named):
            stream.push(bars)
        assert serialize_state(stream.get_state()) == state
    assert not len(stream.push(raw_bars.iloc[:0]))


def test_guarded_stream_with_clock_finds_stale_and_future_bars(bundle, raw_bars):
    bars = raw_bars.iloc[:-7]
    end = bars["timestamp"].iloc[-1] + pd.Timedelta(minutes=1)
    for ahead, named in ((0, ""), (40, "open minutes before"), (-60, "60 min after the clock")):
        stream = GuardedStream(bundle, cold=False)
        answers = stream.push(bars, now=end + pd.Timedelta(minutes=ahead))
        assert named in answers["reason"].iloc[-1] and (answers["guard"].iloc[-1] == "abstain") == bool(ahead)
        assert (stream.status()["guard"] == "abstain") == bool(ahead)


def test_check_predict_bars_names_schema_and_faults(bundle, raw_bars):
    bars = raw_bars.iloc[:-7]
    assert check_predict_bars(bundle, bars) == []
    for change, kind in (
        (bars.drop(columns="open"), "schema"), (bars.assign(high=1.0), "schema"), (off_tick(bars), "schema"),
        (faulty(bars, in_cents), "unit"), (faulty(bars, stuck), "stuck"),
    ):  # fmt: skip
        found = check_predict_bars(bundle, change)
        assert [one.kind for one in found][:1] == [kind] and found[0].action in ("abstain", "refuse"), kind
    later = check_predict_bars(bundle, bars, now=bars["timestamp"].iloc[-1] + pd.Timedelta(minutes=90))
    assert [one.kind for one in later] == ["stale"]


def test_check_feature_rows_names_columns_and_values(bundle, raw_bars):
    checked, _ = bundle.spec.check_bars(raw_bars)
    rows = build_features(checked, bundle.spec.market, bundle.spec.features).to_frame().iloc[-5:]
    names = list(rows)
    assert check_feature_rows(bundle, rows) == []
    for change, named in (
        (rows[names[1:]], f"no {names[0]}"), (rows[names[::-1]], "the order"), (rows.assign(more=1.0), "unknown more"),
        (rows.assign(**{names[0]: np.inf}), "infinite"), (rows.assign(**{names[0]: "text"}), "no numbers"),
    ):  # fmt: skip
        (found,) = check_feature_rows(bundle, change)
        assert named in found.message and (found.kind, found.action) == ("schema", "refuse")


def test_guard_settings_with_unknown_action_raises():
    with pytest.raises(SettingsError, match="gap"):
        GuardSettings(gap="shout")
    with pytest.raises(SettingsError, match="hold_bars"):
        GuardSettings(hold_bars=0)
