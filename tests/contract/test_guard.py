"""The guard of live predictions: findings with actions and reasons, one push or many, and a restored state."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory import Bundle, GuardedStream, GuardSettings, PredictionStream
from ml_factory.errors import BarsError, CheckpointError, SettingsError
from tests.contract import doors
from tests.contract.doors import PROBABILITIES as P

PRICES = ["open", "high", "low", "close"]
LAST = 300
QUIET = {"drift": "ok", "range": "ok", "constant": "ok", "gap_minutes": 30}  # a week of training is too little for them


@pytest.fixture(scope="module")
def bundle(bundle_file) -> Bundle:
    return Bundle.load(bundle_file("lightgbm"))


def off_tick(bars):
    return bars.assign(**{name: bars[name] + 0.1 for name in PRICES})


def in_cents(bars):
    return bars.assign(**{name: bars[name] * 100 for name in PRICES})


def stuck(bars):
    return bars.assign(**dict.fromkeys(PRICES, bars["close"].iloc[0]))


FAULTS = {
    "tick": (off_tick, "off the tick of 0.25", "abstain"),
    "unit": (in_cents, "times that of the bar before", "abstain"),
    "stuck": (stuck, "bars in a row at the price", "abstain"),
    "gap": (lambda bars: bars.iloc[61:], "open minutes without a bar before", "warn"),
}


@pytest.fixture(scope="module")
def guarded(bundle, raw_bars):
    """guarded(**settings): a stream fed with the history, all but the last bars of a session."""
    first = GuardedStream(bundle, GuardSettings(**QUIET), cold=False)
    first.push(raw_bars.iloc[: -7 - LAST])
    state = first.get_state()

    def again(**settings) -> GuardedStream:
        stream = GuardedStream(bundle, GuardSettings(**QUIET | settings), cold=False)
        stream.load_state(state)
        return stream

    return again


def restored(stream: GuardedStream) -> GuardedStream:
    """The stream in another process."""
    other = GuardedStream(stream.bundle, stream.settings, cold=False)
    other.load_state(doors.deserialize_state(doors.serialize_state(stream.get_state())))
    return other


def kinds(stream: GuardedStream) -> list[str]:
    return [one["kind"] for one in stream.status()["findings"]]


def test_guarded_stream_of_sound_feed_answers_without_a_finding(guarded, raw_bars):
    stream = guarded()
    answers = stream.push(raw_bars.iloc[-7 - LAST : -7])
    assert set(answers["guard"]) == {"ok"} and set(answers["reason"]) == {""} and answers[P].notna().all(axis=None)
    assert kinds(stream) == []


@pytest.mark.parametrize("kind", FAULTS)
def test_guarded_stream_of_faulty_feed_acts_with_reason(guarded, raw_bars, kind):
    fault, reason, action = FAULTS[kind]
    last = raw_bars.iloc[-7 - LAST : -7]
    last = pd.concat([last.iloc[:50], fault(last.iloc[50:])])
    answers = guarded().push(last)
    found = answers[answers["reason"].str.contains(reason)]
    assert len(found) and set(found["guard"]) == {action} and "wanted" in found["reason"].iloc[0]
    assert (found[P].isna().all(axis=None)) == (action == "abstain")
    assert not answers["reason"].iloc[:5].str.contains(reason).any()
    if kind == "stuck":
        run, limit = re.search(r"(\d+) bars in a row .*? fewer than (\d+)", found["reason"].iloc[0]).groups()
        assert 0 <= int(run) - int(limit) < 5  # the first row from there on
    for other, empty in (("warn", False), ("refuse", True), ("ok", False)):
        rows = guarded(**{kind: other}).push(last).loc[found.index]
        assert set(rows["guard"]) == {other} and rows[P].isna().all(axis=None) == empty


def test_guarded_stream_takes_limits_of_prices_from_the_reference_of_training(guarded, bundle, raw_bars):
    limits = bundle.reference.limits | {"unit_jump": np.log(1.25), "stuck_bars": 24.0}
    own = replace(bundle, reference=replace(bundle.reference, limits=limits))
    for kind, wanted in (("stuck", "fewer than 24"), ("unit", "between 0.8 and 1.25 wanted")):
        stream, last = GuardedStream(own, GuardSettings(**QUIET), cold=False), raw_bars.iloc[-7 - LAST : -7]
        stream.load_state(guarded().get_state())
        answers = stream.push(pd.concat([last.iloc[:50], FAULTS[kind][0](last.iloc[50:])]))
        assert answers["reason"].str.contains(wanted).any(), kind


def test_guarded_stream_of_single_bars_and_restored_equals_one_push(guarded, raw_bars):
    last, faults = raw_bars.iloc[-7 - LAST : -7], [fault for fault, _, _ in FAULTS.values()]
    last = pd.concat([last.iloc[:20], *(fault(last.iloc[20 + 70 * at :][:70]) for at, fault in enumerate(faults))])
    settings = dict.fromkeys(("drift", "range", "constant"), "warn")
    whole, stream, pushed = guarded(**settings), guarded(**settings), []
    wanted = whole.push(last)
    for number in range(len(last)):
        stream = restored(stream) if number % 97 == 5 else stream
        pushed.append(stream.push(last.iloc[number : number + 1]))
    pd.testing.assert_frame_equal(pd.concat(pushed), wanted, check_exact=True, check_freq=False)
    assert doors.serialize_state(stream.get_state()["guard"]) == doors.serialize_state(whole.get_state()["guard"])
    assert stream.status() == whole.status()
    used = guarded(**settings)
    used.push(raw_bars.iloc[-7 - LAST : -7])
    used.load_state(guarded(**settings).get_state())
    pd.testing.assert_frame_equal(used.push(last), wanted, check_exact=True, check_freq=False)
    for reason in (*(reason for _, reason, _ in FAULTS.values()), "distributed otherwise"):
        assert wanted["reason"].str.contains(reason).any(), reason


FIRST, BACK, WARMUP = 7204, 7243, 640  # the prices of these bars are in cents


@pytest.fixture(scope="module")
def short_memory(bundle) -> Bundle:
    """The bundle as if it had no coarse frames, whose windows are longer than the demo's bars."""
    return replace(bundle, description=bundle.description | {"warmup_bars": WARMUP})


def two_units(bars):
    """The bars with those of a stretch in cents."""
    return pd.concat([bars.iloc[:FIRST], in_cents(bars.iloc[FIRST:BACK]), bars.iloc[BACK:]])


def built(bundle, bars):
    return doors.build_features(bundle.spec.check_bars(bars)[0], bundle.spec.market, bundle.spec.features)


def ends_of(bars) -> np.ndarray:
    return (bars["timestamp"] + pd.Timedelta(minutes=1)).dt.as_unit("ns").astype(np.int64).to_numpy()


@pytest.mark.parametrize("pushed", [20_000, 331])
def test_guarded_stream_abstains_exactly_while_feature_windows_hold_bars_of_two_units(short_memory, raw_bars, pushed):
    bars, clean = two_units(raw_bars.iloc[:-7]), built(short_memory, raw_bars.iloc[:-7])
    stream, answers = GuardedStream(short_memory, GuardSettings(**QUIET | {"gap": "ok"}), cold=False), []
    for start in range(0, len(bars), pushed):
        stream = restored(stream)
        answers.append(stream.push(bars.iloc[start : start + pushed]))
    answers = pd.concat(answers)
    first, last = np.searchsorted(clean.base.known_at, ends_of(raw_bars)[[FIRST, BACK]])
    number = np.searchsorted(clean.base.known_at, answers.index.as_unit("ns").asi8)
    mixed = (first <= number) & (number <= last + WARMUP)
    assert mixed.sum() == WARMUP + last - first + 1 and not mixed[-50:].any() and not mixed[:5].any()
    wrong = answers["guard"].to_numpy() != np.where(mixed, "abstain", "ok")
    assert not wrong.any(), answers[wrong]
    assert kinds(stream) == []
    frames = [one.to_frame().filter(regex="^[^@]+$") for one in (clean, built(short_memory, bars))]
    off = np.abs(frames[0] - frames[1]).loc[answers.index] / frames[0].std()
    assert off.shape[1] > 20 and off[~mixed].max(axis=None) < 1e-5 < off[mixed].iloc[:-100].max(axis=1).min()
    silent = answers.index[answers["guard"] == "abstain"]
    assert not stream.add_outcome(silent[-5], 0) and stream.add_outcome(answers.index[-1], 0)


def test_guarded_stream_leaves_rows_of_two_units_out_of_range_and_drift_of_rows(short_memory, raw_bars):
    reasons, of_rows = [], ("outside the range", "NaN", "one value", "features of the last", "p_short", "p_long")
    for bars in (raw_bars.iloc[:-7], two_units(raw_bars.iloc[:-7])):
        answers = GuardedStream(short_memory, GuardSettings(gap="ok", drift_scale=3.0), cold=False).push(bars)
        reasons.append({words for words in of_rows if answers["reason"].str.contains(words).any()})
    assert reasons[1] <= reasons[0]


def test_guarded_stream_finds_features_outside_the_range_of_training(bundle, raw_bars):
    stream = GuardedStream(bundle, GuardSettings(drift="ok", gap="ok"), cold=False)
    assert set(stream.push(raw_bars.iloc[:8500])["guard"]) == {"ok"}
    busy = raw_bars.iloc[8500:8560]
    answers = stream.push(busy.assign(volume=busy["volume"] * 1e9))
    assert answers["reason"].str.contains("outside the range of training").iloc[1:].all()
    assert set(answers["guard"].iloc[1:]) == {"warn"} and answers[P].notna().all(axis=None)
    assert kinds(stream) == ["range"]


def test_guarded_stream_of_bundle_without_reference_reports_that_drift_is_not_checked(bundle, raw_bars):
    old = replace(bundle, reference=None)
    stream, bars = GuardedStream(old, cold=False), raw_bars.iloc[:8500]
    pd.testing.assert_frame_equal(stream.push(bars)[P], PredictionStream(old).push(bars)[P], check_exact=True)
    status = stream.status()
    assert "drift is not checked" in status["reference"] and status["drift"] == {}
    assert GuardedStream(bundle).status()["reference"].startswith("training rows")
    assert restored(stream).status() == status


def test_guarded_stream_counts_outcomes_and_warns_where_they_contradict(bundle, raw_bars):
    stream, bars = GuardedStream(bundle, GuardSettings(**QUIET), cold=False), raw_bars.iloc[:9500]
    frame = stream.push(bars)
    other, generator = restored(stream), np.random.default_rng(3)
    likely = (frame[P].to_numpy().cumsum(axis=1) < generator.random((len(frame), 1))).sum(axis=1).clip(0, 2) - 1
    assert all(stream.add_outcome(moment, int(label)) for moment, label in zip(frame.index, likely, strict=True))
    assert kinds(stream) == [] and stream.status()["outcomes"] == 100
    assert not stream.add_outcome(frame.index[0], 0)
    for moment, p in zip(frame.index, frame[P].to_numpy(), strict=True):
        other.add_outcome(moment, int(p.argmin()) - 1)
    assert kinds(other) == ["calibration"]
    later = restored(other).push(raw_bars.iloc[9500:9600])
    assert set(later["guard"]) == {"warn"} and later["reason"].str.contains("outcomes contradict the prob").all()
    with pytest.raises(SettingsError, match="no such outcome"):
        stream.add_outcome(later.index[-1], 7)


def test_guarded_stream_of_meta_labels_refuses_outcome_of_other_classes(bundle):
    labels = bundle.description["spec"]["data"]["labels"] | {"kind": "meta", "primary": "macd_12_26"}
    spec = bundle.description["spec"] | {"data": bundle.description["spec"]["data"] | {"labels": labels}}
    stream, known_at = GuardedStream(bundle), pd.Timestamp("2026-01-05 15:00", tz="UTC")
    assert not stream.add_outcome(known_at, -1)
    meta = GuardedStream(replace(bundle, description=bundle.description | {"spec": spec}))
    assert not meta.add_outcome(known_at, 0) and not meta.add_outcome(known_at, 1)
    with pytest.raises(SettingsError, match=r"no such outcome.*0 or 1"):
        meta.add_outcome(known_at, -1)


def test_guarded_stream_refuses_bars_that_cannot_be_and_is_as_before(bundle, raw_bars):
    stream = GuardedStream(bundle, cold=False)
    stream.push(raw_bars.iloc[:50])
    state = stream.get_state()
    before = doors.serialize_state(state)
    for bars, named in (
        (raw_bars.iloc[40:60], "overlap"),
        (raw_bars.iloc[49:51], "overlap"),
        (raw_bars.iloc[[61, 60]], "out of order"),
        (raw_bars.iloc[60:61].assign(high=1.0), "high"),
        (raw_bars.iloc[60:61].assign(close=np.nan), "close"),
        (raw_bars.iloc[60:61].assign(contract="ESH4"), "contracts without a chain"),
        (raw_bars.iloc[60:61].drop(columns="volume"), "volume"),
        (raw_bars.iloc[60:61].drop(columns="open"), "open"),
    ):
        with pytest.raises(BarsError, match=named):
            stream.push(bars)
        assert doors.serialize_state(stream.get_state()) == before
    assert not len(stream.push(raw_bars.iloc[:0])) and not len(stream.push(raw_bars.iloc[50:51].assign(volume=0.0)))
    with pytest.raises(CheckpointError, match="state of a guard is damaged"):
        stream.load_state(state | {"guard": {}})


def test_guarded_stream_with_clock_finds_stale_and_future_bars_of_its_own_call(bundle, raw_bars):
    history, later = raw_bars.iloc[:-300], raw_bars.iloc[-300:-7]
    end = history["timestamp"].iloc[-1] + pd.Timedelta(minutes=1)
    for ahead, named in ((0, ""), (40, "open minutes before"), (-60, "60 min after the clock")):
        stream = GuardedStream(bundle, GuardSettings(**QUIET), cold=False)
        answers = stream.push(history, now=end + pd.Timedelta(minutes=ahead))
        assert named in answers["reason"].iloc[-1] and (answers["guard"].iloc[-1] == "abstain") == bool(ahead)
        other = restored(stream)
        assert other.status() == stream.status() and kinds(other) == ["stale"] * bool(ahead)
        answers = stream.push(later)
        assert len(answers) > 50 and not answers["reason"].str.contains("open minutes before|clock").any()
        pd.testing.assert_frame_equal(other.push(later), answers, check_exact=True)


def test_guard_settings_with_unknown_action_or_limit_raises():
    for wrong in (
        {"gap": "shout"}, {"gap": 1}, {"stale_minutes": 0}, {"gap_minutes": -1}, {"stale_minutes": "abc"},
        {"stale_minutes": None}, {"drift_scale": None},
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            GuardSettings(**wrong)


def moment(text: str) -> int:
    return pd.Timestamp(text, tz="UTC").value


def test_open_minutes_of_silence_leaves_out_weekends_and_holidays_and_has_no_end():
    week = 5 * 23 * 60  # of the CME's hours
    for begin, end, wanted in (
        ("2026-01-09 22:00", "2026-01-11 23:00", 0), ("2026-01-09 22:00", "2026-01-11 23:05", 5),  # a weekend
        ("2025-12-24 18:15", "2025-12-25 23:00", 0), ("2025-04-17 21:00", "2025-04-20 22:00", 0),  # Christmas, Easter
        ("2026-01-05 15:00", "2026-01-12 15:00", week), ("2026-01-05 15:00", "2026-01-19 15:00", 2 * week),
        ("2026-01-05 15:00:30", "2026-01-05 15:02:00", 2), ("2026-01-05 15:00", "2026-01-05 15:00", 0),
    ):  # fmt: skip
        assert doors.open_minutes(moment(begin), moment(end), "cme") == wanted, (begin, end)
    assert doors.open_minutes(moment("2024-01-01"), moment("2026-01-01"), "24h") == 731 * 1440
    assert 98 * week < doors.open_minutes(moment("2024-01-08"), moment("2026-01-05"), "cme") < 104 * week


def test_open_minutes_equals_count_of_single_minutes_in_each_calendar():
    generator = np.random.default_rng(0)
    for calendar in doors.CALENDARS:
        for _ in range(12):
            begin = moment("1995-01-01") + int(generator.integers(30 * 365 * 1440)) * doors.MINUTE_NS
            minutes = begin + np.arange(int(generator.integers(1, 9 * 1440))) * doors.MINUTE_NS
            sessions = doors.assign_sessions(minutes, calendar)
            days, lengths = doors.scheduled_session_days(calendar, int(sessions.id[0]), int(sessions.id[-1]))
            until = dict(zip(days.tolist(), lengths.tolist(), strict=True))
            closes = sessions.open_ns + np.array([until.get(day, 0) for day in sessions.id.tolist()]) * doors.MINUTE_NS
            wanted = int((sessions.inside & (minutes < closes)).sum())
            assert doors.open_minutes(begin, int(minutes[-1]) + doors.MINUTE_NS, calendar) == wanted
