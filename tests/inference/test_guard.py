"""The guard of live predictions: simple checks, actions with reasons, one push or many, and a restored state."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ml_factory import Bundle
from ml_factory.argument_checks import CALENDARS
from ml_factory.data.resample import to_bar_chunk
from ml_factory.data.sessions import MINUTE_NS, assign_sessions, scheduled_session_days
from ml_factory.errors import BarsError, CheckpointError, SettingsError
from ml_factory.evaluation.metrics import PROBABILITIES as P
from ml_factory.features.build import build_features
from ml_factory.inference.guard.alarms import Alarms, Event
from ml_factory.inference.guard.bar_checks import BarChecks, check_clock, open_minutes
from ml_factory.inference.guard.guarded_stream import GuardedStream
from ml_factory.inference.guard.request_checks import check_predict_bars
from ml_factory.inference.guard.settings import DEFAULT_SETTINGS, KINDS, GuardSettings
from ml_factory.inference.stream import PredictionStream
from ml_factory.storage.serialization import deserialize_state, serialize_state

PRICES = ["open", "high", "low", "close"]
LAST, PARTS = 300, ("guard", "rows", "outcomes")


@pytest.fixture(scope="module")
def bundle(bundle_file) -> Bundle:
    return Bundle.load(bundle_file("lightgbm"))


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
    """A stream fed with the history, and its answer to the last bars; drift is not checked after a week of training."""
    quiet = {"drift": "ok", "martingale": "ok", "range": "ok", "gap_minutes": 30}
    stream = GuardedStream(bundle, GuardSettings(**quiet | settings), cold=False)
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
    pd.testing.assert_frame_equal(pd.concat(pushed), wanted, check_exact=True, check_freq=False)
    got, kept = stream.get_state(), whole.get_state()
    assert all(serialize_state({"one": got[part]}) == serialize_state({"one": kept[part]}) for part in PARTS)
    assert stream.status() == whole.status()


FIRST, BACK, WARMUP = 7204, 7243, 640  # the prices of these bars are in cents, neither end at that of a base bar


@pytest.fixture(scope="module")
def short_memory(bundle) -> Bundle:
    """The bundle as if it had no coarse frames, whose windows are longer than the demo's bars."""
    return replace(bundle, description=bundle.description | {"warmup_bars": WARMUP})


def two_units(bars):
    """The bars with those of a stretch in cents."""
    return pd.concat([bars.iloc[:FIRST], in_cents(bars.iloc[FIRST:BACK]), bars.iloc[BACK:]])


def built(bundle, bars):
    return build_features(bundle.spec.check_bars(bars)[0], bundle.spec.market, bundle.spec.features)


def ends_of(bars) -> np.ndarray:
    return (bars["timestamp"] + pd.Timedelta(minutes=1)).dt.as_unit("ns").astype(np.int64).to_numpy()


@pytest.mark.parametrize("pushed", [20_000, 331])
def test_guarded_stream_abstains_exactly_while_feature_windows_hold_bars_of_two_units(short_memory, raw_bars, pushed):
    bars, clean = two_units(raw_bars.iloc[:-7]), built(short_memory, raw_bars.iloc[:-7])
    settings = GuardSettings(drift="ok", martingale="ok", gap="ok", range="ok")
    stream, answers = GuardedStream(short_memory, settings, cold=False), []
    for start in range(0, len(bars), pushed):
        state = deserialize_state(serialize_state(stream.get_state()))
        stream = GuardedStream(short_memory, settings, cold=False)
        stream.load_state(state)
        answers.append(stream.push(bars.iloc[start : start + pushed]))
    answers = pd.concat(answers)
    first, last = np.searchsorted(clean.base.known_at, ends_of(raw_bars)[[FIRST, BACK - 1]])
    number = np.searchsorted(clean.base.known_at, answers.index.as_unit("ns").asi8)
    mixed = (first <= number) & (number <= last + WARMUP)
    assert mixed.sum() == WARMUP + last - first + 1 and not mixed[-50:].any() and not mixed[:5].any()
    assert (answers["guard"].to_numpy() == np.where(mixed, "abstain", "ok")).all()
    assert stream.status()["checks"]["unit"]["state"] == "ok" and stream.status()["checks"]["unit"]["onsets"] == 1
    frames = [one.to_frame().filter(regex="^[^@]+$") for one in (clean, built(short_memory, bars))]
    off = np.abs(frames[0] - frames[1]).loc[answers.index] / frames[0].std()
    assert off.shape[1] > 20 and off[~mixed].max(axis=None) < 1e-5 < off[mixed].iloc[:-100].max(axis=1).min()


def test_guarded_stream_leaves_rows_of_two_units_out_of_drift_range_and_outcomes(short_memory, raw_bars):
    settings, alarmed = GuardSettings(martingale="ok", gap="ok", drift_scale=3.0), []
    for bars in (raw_bars.iloc[:-7], two_units(raw_bars.iloc[:-7])):
        stream = GuardedStream(short_memory, settings, cold=False)
        answers = stream.push(bars)
        alarmed.append({name for name in stream._guard.alarms.get_state() if not name.startswith("drift:r")})
    assert alarmed[1] - alarmed[0] <= {"unit", "drift:gap", "drift:momentum"}, alarmed
    silent = answers.index[answers["guard"] == "abstain"]
    assert not stream.add_outcome(silent[5], 0) and stream.add_outcome(answers.index[-1], 0)


def test_check_predict_bars_of_two_units_finds_the_jump_until_the_warm_up_has_passed(short_memory, raw_bars):
    bars, settings = two_units(raw_bars.iloc[:-7]), GuardSettings(drift="ok", martingale="ok", gap="ok")
    known_at, ends = built(short_memory, raw_bars).base.known_at, ends_of(raw_bars)
    first_clean = known_at[np.searchsorted(known_at, ends[BACK - 1]) + WARMUP + 1]
    place = int(np.searchsorted(ends, first_clean)) + 1
    for stop, kinds in ((place - 1, ["unit"]), (place, []), (FIRST, [])):
        assert [one.kind for one in check_predict_bars(short_memory, bars.iloc[:stop], settings)] == kinds, stop


def test_guarded_stream_finds_features_outside_the_range_of_training(bundle, raw_bars):
    settings = {"drift": "ok", "martingale": "ok", "gap": "ok"}
    stream, rows = GuardedStream(bundle, GuardSettings(**settings), cold=False), raw_bars.iloc[:8500]
    assert set(stream.push(rows)["guard"]) == {"ok"} and stream.status()["checks"]["range"]["onsets"] == 0
    busy = raw_bars.iloc[8500:8560].assign(volume=raw_bars["volume"].iloc[8500:8560] * 1e9)
    answers = stream.push(busy)
    assert (answers["guard"].iloc[1:] == "warn").all() and answers[P].notna().all(axis=None)
    assert answers["reason"].str.contains("features are outside the range of training").iloc[1:].all()
    assert stream.status()["checks"]["range"]["onsets"] == 1
    quiet = GuardedStream(bundle, GuardSettings(**settings, range="ok"), cold=False)
    assert set(quiet.push(pd.concat([rows, busy]))["guard"]) == {"ok"}


def test_guarded_stream_of_bundle_without_reference_reports_that_drift_is_not_checked(bundle, raw_bars, tmp_path):
    assert bundle.guard_reference is not None
    Bundle.from_parts(bundle.description, bundle.models).save(tmp_path / "old.bundle")
    old = Bundle.load(tmp_path / "old.bundle")
    stream, bars = GuardedStream(old, cold=False), raw_bars.iloc[:8500]
    pd.testing.assert_frame_equal(stream.push(bars)[P], PredictionStream(old).push(bars)[P], check_exact=True)
    status = stream.status()
    assert status["reference"].startswith("none in this bundle") and "drift is not checked" in status["reference"]
    assert status["drift"] == {} and GuardedStream(bundle).status()["reference"].startswith("training rows")
    again = GuardedStream(old, cold=False)
    again.load_state(deserialize_state(serialize_state(stream.get_state())))
    assert again.status() == status
    assert check_predict_bars(old, bars) == []


def test_bundle_load_with_changed_reference_raises(bundle, tmp_path):
    state = deserialize_state(bundle.to_bytes())
    inner = deserialize_state(state["reference"])
    inner["bars"]["psi"] = -inner["bars"]["psi"]
    (tmp_path / "a").write_bytes(serialize_state({**state, "reference": serialize_state(inner)}))
    with pytest.raises(CheckpointError, match="part of this bundle was changed: the guard's reference"):
        Bundle.load(tmp_path / "a")


def test_guarded_stream_counts_outcomes_and_warns_where_they_contradict(bundle, raw_bars):
    stream, bars = GuardedStream(bundle, GuardSettings(drift="ok", martingale="ok"), cold=False), raw_bars.iloc[:9500]
    frame = stream.push(bars)
    state = stream.get_state()
    generator = np.random.default_rng(3)
    likely = (frame[P].to_numpy().cumsum(axis=1) < generator.random((len(frame), 1))).sum(axis=1).clip(0, 2) - 1
    assert all(stream.add_outcome(moment, int(label)) for moment, label in zip(frame.index, likely, strict=True))
    status = stream.status()
    assert status["checks"]["calibration"]["onsets"] == 0 and status["outcomes"] == len(frame)
    assert not stream.add_outcome(frame.index[0], 0)
    stream.load_state(state)
    assert stream.status()["outcomes"] == 0
    for moment, p in zip(frame.index, frame[P].to_numpy(), strict=True):
        stream.add_outcome(moment, int(p.argmin()) - 1)
    checks = stream.status()["checks"]
    assert checks["calibration"]["state"] == "alarm" and checks["calibration"]["onsets"] == 1
    later = stream.push(raw_bars.iloc[9500:9600])
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


def test_guarded_stream_clock_holds_for_its_own_call_and_is_in_the_state(bundle, raw_bars):
    history, later = raw_bars.iloc[:-300], raw_bars.iloc[-300:-7]
    late = history["timestamp"].iloc[-1] + pd.Timedelta(minutes=41)
    stream = GuardedStream(bundle, GuardSettings(drift="ok", martingale="ok"), cold=False)
    assert stream.push(history, now=late)["guard"].iloc[-1] == "abstain"
    restored = GuardedStream(bundle, stream.settings, cold=False)
    restored.load_state(deserialize_state(serialize_state(stream.get_state())))
    assert restored.status() == stream.status() and restored.status()["checks"]["stale"]["state"] == "alarm"
    assert serialize_state(restored.get_state()) == serialize_state(stream.get_state())
    answers = stream.push(later)
    assert len(answers) > 50 and not answers["reason"].str.contains("open minutes before").any()
    assert stream.status()["checks"]["stale"]["state"] == "ok"
    pd.testing.assert_frame_equal(restored.push(later), answers, check_exact=True)


def test_guarded_stream_status_has_kinds_that_a_feed_is_checked_for(bundle):
    checks = GuardedStream(bundle).status()["checks"]
    assert tuple(checks) == KINDS and "range" in checks


@pytest.mark.parametrize("window", [100, 1000])
def test_bar_checks_state_of_another_window_keeps_newest_bars_of_own_window(bundle, raw_bars, window):
    checked, _ = bundle.spec.check_bars(off_tick(raw_bars.iloc[:150]))
    market, chunk = bundle.spec.market, to_bar_chunk(checked, bundle.spec.market)
    before = BarChecks(market, DEFAULT_SETTINGS, {}, 0.0)
    before.push(chunk.part(0, 149), 0)
    checks = BarChecks(market, GuardSettings(window_bars=window), {}, 0.0)
    checks.load_state(before.get_state())
    (message,) = [event.message for event in checks.push(chunk.part(149, 150), 149) if event.check == "tick"]
    assert message.startswith(f"{min(150, window) / window:.0%} of the last {window} bars")
    assert len(checks.get_state()["off"]) == window


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


def test_alarms_hold_each_finding_and_count_its_onsets():
    alarms = Alarms(GuardSettings(hold_bars=10, long_hold_bars=30))
    events = [Event(bar, "gap", f"gap {bar}") for bar in (5, 12, 40)] + [Event(41, "unit", "unit")]
    answers = alarms.answers(events, range(80))
    state = "".join(action[0] for action, _ in answers)
    assert state == "o" * 5 + "w" * 17 + "o" * 18 + "w" + "a" * 30 + "o" * 9
    assert answers[13][1] == "gap 12" and answers[45][1] == "unit; gap 40"
    assert alarms.status(79)["gap"]["onsets"] == 2 and alarms.status(45)["unit"]["state"] == "alarm"


def test_bundle_predict_and_request_checks_compare_ticks_with_training_rows_alone(bundle, raw_bars):
    later = replace(bundle, description=bundle.description | {"off_tick": 0.9})  # test rows are off the tick
    assert later.off_tick_share == 0.0
    with pytest.raises(BarsError, match="another tick"):
        later.predict(off_tick(raw_bars))
    assert check_predict_bars(later, off_tick(raw_bars))[0].kind == "schema"


def test_guard_settings_with_unknown_action_raises():
    with pytest.raises(SettingsError, match="gap"):
        GuardSettings(gap="shout")
    with pytest.raises(SettingsError, match="hold_bars"):
        GuardSettings(hold_bars=0)


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
        assert open_minutes(moment(begin), moment(end), "cme") == wanted, (begin, end)
    assert open_minutes(moment("2024-01-01"), moment("2026-01-01"), "24h") == 731 * 1440
    assert 98 * week < open_minutes(moment("2024-01-08"), moment("2026-01-05"), "cme") < 104 * week


def test_open_minutes_equals_count_of_single_minutes_in_each_calendar():
    generator = np.random.default_rng(0)
    for calendar in CALENDARS:
        for _ in range(12):
            begin = moment("1995-01-01") + int(generator.integers(30 * 365 * 1440)) * MINUTE_NS
            minutes = begin + np.arange(int(generator.integers(1, 9 * 1440))) * MINUTE_NS
            sessions = assign_sessions(minutes, calendar)
            days, lengths = scheduled_session_days(calendar, int(sessions.id[0]), int(sessions.id[-1]))
            until = dict(zip(days.tolist(), lengths.tolist(), strict=True))
            closes = sessions.open_ns + np.array([until.get(day, 0) for day in sessions.id.tolist()]) * MINUTE_NS
            wanted = int((sessions.inside & (minutes < closes)).sum())
            assert open_minutes(begin, int(minutes[-1]) + MINUTE_NS, calendar) == wanted


def test_clock_finding_counts_a_silence_of_years_with_any_limit(bundle):
    market, now = bundle.spec.market, pd.Timestamp("2026-01-05 15:00", tz="UTC")
    for limit, found in ((100_000, 1), (500_000, 0)):
        findings = check_clock(moment("2025-01-06 15:00"), now, market, GuardSettings(stale_minutes=limit))
        assert len(findings) == found, findings
