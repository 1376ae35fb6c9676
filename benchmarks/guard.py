"""False alarms and detections of the guard on held-out bars, compared with a range check and a fixed z-score.

    python -m benchmarks.guard FOLDER [--symbols ES XAUUSD SPY FILUSDT] [--bars 120000] [--starts 5]

FOLDER holds SYMBOL_1m.parquet; the newest --bars of each are used. A linear model is trained on the training rows and
exported as a user would; thresholds come with the bundle, from training and validation rows. The test rows are pushed
through `GuardedStream` at its default setting, with their outcomes as they become known.

An alarm state: any check is in alarm, from a bar at which it finds something until 60 bars after it last did (1,440
for calibration; for a jump of unit until the features' windows hold bars of one unit). An onset is the first bar of
such a state. The drifts of `guard_drifts` begin at --starts places of the first 5,000 test bars; one is found when,
within 500 bars, a check begins an alarm that it has not without it.

One JSON line for each file and side (guard, range: a value outside the training's range; z_score: the mean of 240 bars
more than 4 standard errors of independent bars from that of training):
  onsets_per_1000, alarm_share   over the first 5,000 test bars
  onsets_per_1000_long, alarm_share_long  over the first 25,000, or as many as there are
  found                          drifts of 10: ten times the share of all places at which they were found
  drifts                         places at which each was found, and the median bars until then
and with side us_per_bar the CPU microseconds of a bar, in one push of many and in pushes of single bars, with the guard
and without.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.guard_drifts import DRIFTS
from benchmarks.measure import digits, print_json, timed
from ml_factory import pipeline
from ml_factory.data.io import import_bars, read_bars_table
from ml_factory.data.resample import to_bar_chunk
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.features.stream import StreamedFeatureRows
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.guard.alarms import Event, kind_of
from ml_factory.inference.guard.bar_channels import BarChannels
from ml_factory.inference.guard.guarded_stream import GuardedStream
from ml_factory.inference.guard.settings import DEFAULT_SETTINGS, LONG_HELD
from ml_factory.inference.stream import PredictionStream
from ml_factory.seeding import seeded_generator
from ml_factory.storage.workspace import Workspace

HORIZON, HISTORY, WITHIN = 5, 30_000, 500
SHORT, LONG = 5000, 25_000
CHUNK = 250  # bars between two looks for outcomes
ENDED = "ended:"  # before the name of a check whose alarm ends
Alarmed = list[tuple[int, str]]  # bar after the first, and the check


class RecordedStream:
    """A guarded stream whose events are recorded, with outcomes as they become known.

    sharper : predicted probabilities are raised to the fourth power, as without their calibrator
    """

    def __init__(self, bundle: Bundle, labels: pd.DataFrame, state: dict | None = None, *, sharper: bool = False):
        self.stream, self.events, self._labels = GuardedStream(bundle), [], labels
        if state:
            self.stream.load_state(state)
        alarms, predict = self.stream._guard.alarms, self.stream._stream.predict_rows
        record = alarms.add

        def add(event: Event) -> None:
            self.events.append((event.bar, ENDED + event.check if event.state == "ended" else event.check))
            record(event)

        def predict_sharper(rows: StreamedFeatureRows) -> pd.DataFrame:
            frame = predict(rows)
            p = frame[PROBABILITIES].to_numpy() ** 4
            return frame.assign(**dict(zip(PROBABILITIES, (p / p.sum(axis=1, keepdims=True)).T, strict=True)))

        alarms.add = add
        if sharper:
            self.stream._stream.predict_rows = predict_sharper

    def push(self, bars: pd.DataFrame) -> Alarmed:
        """Push bars, and return the events of checks as (bar counted from the first pushed, check)."""
        first = self.stream._guard.bars
        for start in range(0, len(bars), CHUNK):
            part = bars.iloc[start : start + CHUNK]
            before = pd.Timestamp(self.stream._guard.last_end, tz="UTC")
            self.stream.push(part.reset_index())
            ended = self._labels["label_end"]
            known = self._labels[(ended > before) & (ended <= part.index[-1])]
            for moment, label in zip(known.index, known["label"], strict=True):
                self.stream.add_outcome(moment, int(label))
        found = [(bar - first, check) for bar, check in self.events if bar >= first]
        self.events = []
        return found


def simple_events(bundle: Bundle, train: np.ndarray, bars: pd.DataFrame, side: str) -> Alarmed:
    """Return the events of the range check or the fixed z-score."""
    channels = BarChannels(bundle.spec.market, bundle.guard_reference.season)
    values = channels.push(to_bar_chunk(bars, bundle.spec.market))
    used = np.isfinite(train).any(axis=0)
    train, values = train[:, used], values[:, used]
    with np.errstate(invalid="ignore"):
        if side == "range":
            low, high = np.nanmin(train, axis=0), np.nanmax(train, axis=0)
            return [(int(bar), f"range:{column}") for bar, column in np.argwhere((values < low) | (values > high))]
        scores = np.nan_to_num((values - np.nanmean(train, axis=0)) / np.maximum(np.nanstd(train, axis=0), 1e-12))
    means = pd.DataFrame(scores).rolling(240).mean().to_numpy() * np.sqrt(240)
    return [(int(bar), f"z_score:{column}") for bar, column in np.argwhere(np.abs(means) > 4)]


def begun(events: Alarmed) -> Alarmed:
    """Return the events without the ends of alarms."""
    return [(bar, check) for bar, check in events if not check.startswith(ENDED)]


def onsets(events: Alarmed, bars: int) -> tuple[int, float]:
    """Return (onsets, share of bars in alarm) of the first bars."""
    alarm, hold = np.zeros(bars + 1, bool), DEFAULT_SETTINGS
    for bar, check in begun(events):
        length = hold.long_hold_bars if kind_of(check) in LONG_HELD else hold.hold_bars
        stop = min((end for end, name in events if name == ENDED + check and end > bar), default=bars)
        alarm[max(bar, 0) + 1 : (stop if check == "unit" else bar + length) + 1] = True
    return int((alarm[1:] & ~alarm[:-1]).sum()), float(alarm[1:].mean())


def first_new(events: Alarmed, clean: Alarmed, start: int) -> int | None:
    """Return the bars until a check began an alarm that it has not without the drift.

    events : bars counted from `start`; clean : from the first test bar
    """
    usual = {check for bar, check in clean if start - DEFAULT_SETTINGS.hold_bars <= bar < start + WITHIN}
    return min((bar for bar, check in begun(events) if check not in usual and 0 <= bar < WITHIN), default=None)


def drifted(name: str, test: pd.DataFrame, before: pd.DataFrame, start: int, tick: float) -> pd.DataFrame:
    """Return the bars from a place on, changed."""
    change, history = DRIFTS[name].change, pd.concat([before, test.iloc[:start]])
    bars = test.iloc[start : start + 2 * WITHIN]
    generator = seeded_generator("guard drift", name, start)
    return (bars if change is None else change(bars, history, tick, generator)).iloc[:WITHIN]


def exported(workspace: Workspace, symbol: str, bars: pd.DataFrame) -> tuple[Bundle, pd.DataFrame]:
    """Train and export a linear model. Return its bundle, and the labels."""
    import_bars(bars, workspace, symbol)
    pipeline.prepare(workspace, symbol, (HORIZON,))
    pipeline.train(workspace, symbol, HORIZON, "linear", mirror="off")
    path = pipeline.export(workspace, symbol, HORIZON, "linear", formats=("bundle",)).paths["bundle"]
    return Bundle.load(path), pipeline.load_labels(workspace, symbol, HORIZON)


def measure(symbol: str, file: Path, options: argparse.Namespace) -> None:
    """Print the lines of one file."""
    with tempfile.TemporaryDirectory() as folder:
        bundle, labels = exported(Workspace(folder), symbol, read_bars_table(file).iloc[-options.bars :])
        bars = bundle.spec.check_bars(pd.read_parquet(Workspace(folder).raw_bars(symbol)))[0]
    times = {name: pd.Timestamp(bundle.description["split_times"][name]) for name in ("validation", "test")}
    place = int((bars.index < times["test"]).sum())
    before, test = bars.iloc[place - HISTORY : place], bars.iloc[place : place + LONG]
    train = BarChannels(bundle.spec.market, bundle.guard_reference.season).push(
        to_bar_chunk(bars[bars.index < times["validation"]], bundle.spec.market)
    )
    # Guard: states at the places, and the events without a drift.
    stream = RecordedStream(bundle, labels)
    stream.push(before)
    starts = np.linspace(500, SHORT - WITHIN, options.starts).astype(int).tolist()
    states, clean, pushed = {}, [], 0
    for start in [*starts, len(test)]:
        clean += [(bar + pushed, check) for bar, check in stream.push(test.iloc[pushed:start])]
        states[start], pushed = stream.stream.get_state(), start
    tick = bundle.spec.market.tick or float(np.diff(np.unique(test["close"].iloc[:2000])).min())

    def guard(name: str, start: int, changed: pd.DataFrame) -> Alarmed:
        return RecordedStream(bundle, labels, states[start], sharper=name == "calibrator_lost").push(changed)

    report(symbol, "guard", clean, guard, (test, before, starts, tick))
    for side in ("range", "z_score"):

        def simple(name: str, start: int, changed: pd.DataFrame, side: str = side) -> Alarmed:
            history = pd.concat([before, test.iloc[:start]]).iloc[-2000:]
            found = simple_events(bundle, train, pd.concat([history, changed]), side)
            return [(bar - len(history), check) for bar, check in found]

        whole = simple_events(bundle, train, pd.concat([before.iloc[-2000:], test]), side)
        usual = [(bar - 2000, check) for bar, check in whole if bar >= 2000]
        report(symbol, side, usual, simple, (test, before, starts, tick))
    speed(symbol, bundle, before)


def report(
    symbol: str, side: str, clean: Alarmed, run: Callable[[str, int, pd.DataFrame], Alarmed],
    where: tuple[pd.DataFrame, pd.DataFrame, list[int], float],
) -> None:  # fmt: skip
    """Print the line of one side; where: test bars, the bars before, places of drifts, tick."""
    test, before, starts, tick = where
    count, share = onsets(clean, min(SHORT, len(test)))
    long, long_share = onsets(clean, len(test))
    drifts, hits = {}, 0
    for name in DRIFTS:
        bars = [first_new(run(name, start, drifted(name, test, before, start, tick)), clean, start) for start in starts]
        found = [bar for bar in bars if bar is not None]
        hits += len(found)
        drifts[name] = [len(found), int(np.median(found)) if found else None]
    kinds = sorted({check for bar, check in begun(clean) if bar < SHORT})
    print_json(
        bench="guard", file=symbol, side=side, onsets_per_1000=digits(count / min(SHORT, len(test)) * 1000),
        alarm_share=digits(share), onsets_per_1000_long=digits(long / len(test) * 1000), long_bars=len(test),
        alarm_share_long=digits(long_share),
        found=digits(10 * hits / (len(DRIFTS) * len(starts))), starts=len(starts), drifts=drifts, false_alarms=kinds,
    )  # fmt: skip


def speed(symbol: str, bundle: Bundle, bars: pd.DataFrame) -> None:
    """Print the CPU time of a bar in one push and in pushes of single bars, with and without the guard."""
    table, rest = bars.reset_index(), 1000
    taken = {}
    for name, stream in (("guarded", GuardedStream(bundle)), ("plain", PredictionStream(bundle, cold=True))):
        stream.push(table.iloc[:rest])
        _, many = timed(lambda stream=stream: stream.push(table.iloc[rest:-rest]))
        single = [table.iloc[place : place + 1] for place in range(len(table) - rest, len(table))]
        _, one = timed(lambda stream=stream, single=single: [stream.push(bar) for bar in single])
        taken |= {
            name: digits(many.cpu / (len(table) - 2 * rest) * 1e6),
            f"{name}_single": digits(one.cpu / rest * 1e6),
        }
    print_json(bench="guard", file=symbol, side="us_per_bar", **taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--symbols", nargs="+", default=["ES", "XAUUSD", "SPY", "FILUSDT"])
    parser.add_argument("--bars", type=int, default=120_000)
    parser.add_argument("--starts", type=int, default=5)
    options = parser.parse_args()
    for symbol in options.symbols:
        measure(symbol, options.folder / f"{symbol}_1m.parquet", options)


if __name__ == "__main__":
    main()
