"""False alarms and detections of the guard on held-out bars.

    python -m benchmarks.guard FOLDER [--symbols ES XAUUSD SPY FILUSDT] [--bars 120000] [--starts 5]

FOLDER holds SYMBOL_1m.parquet; the newest --bars of each are used. A linear model is trained on the training rows and
exported as a user would; thresholds come with the bundle, from training and validation rows. The test rows are pushed
through `GuardedStream` at its default setting, with their outcomes as they become known.

An onset is the first answer with any finding after one without. The drifts of `guard_drifts` begin at --starts places
of the first 5,000 test bars; one is found when, within 500 bars, an answer has a finding (of a kind, or a part of a
drift) that none has without it.

One JSON line for each file:
  onsets_per_1000, alarm_share   over the first 5,000 test bars
  onsets_per_1000_long, alarm_share_long  over the first 25,000, or as many as there are
  found                          drifts of 10: ten times the share of all places at which they were found
  drifts                         places at which each was found, and the median bars until then
and with side us_per_bar the CPU microseconds of a bar, in one push of many and in pushes of single bars, with the guard
and without.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.guard_drifts import DRIFTS
from benchmarks.measure import digits, print_json, timed
from ml_factory import Bundle, GuardedStream, PredictionStream, Workspace, pipeline
from ml_factory.data.io import import_bars, read_bars_table
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.features.build import FeatureRows
from ml_factory.inference.guard import GuardFinding
from ml_factory.seeding import seeded_generator

HORIZON, HISTORY, WITHIN = 5, 30_000, 500
SHORT, LONG = 5000, 25_000
CHUNK = 250  # bars between two looks for outcomes
Answers = list[tuple[pd.Timestamp, frozenset[str]]]  # moment of an answer, and what was found


class RecordedStream:
    """A guarded stream whose findings are recorded, with outcomes as they become known.

    sharper : predicted probabilities are raised to the fourth power, as without their calibrator
    """

    def __init__(self, bundle: Bundle, labels: pd.DataFrame, state: dict | None = None, *, sharper: bool = False):
        self.stream, self._labels = GuardedStream(bundle), labels
        self._found: list[list[GuardFinding]] = []
        if state:
            self.stream.load_state(state)
        find, predict = self.stream.guard.findings, self.stream.predict_rows

        def record(*given: object) -> list[list[GuardFinding]]:
            self._found = find(*given)
            return self._found

        def predict_sharper(rows: FeatureRows) -> dict[str, np.ndarray]:
            found = predict(rows)
            p = np.column_stack([found[name] for name in PROBABILITIES]) ** 4
            return found | dict(zip(PROBABILITIES, (p / p.sum(axis=1, keepdims=True)).T, strict=True))

        self.stream.guard.findings = record
        if sharper:
            self.stream.predict_rows = predict_sharper

    def push(self, bars: pd.DataFrame) -> Answers:
        """Push bars, and return what each answer found."""
        answers = []
        for start in range(0, len(bars), CHUNK):
            part = bars.iloc[start : start + CHUNK]
            before = pd.Timestamp(self.stream.guard.last_end, tz="UTC")
            moments = self.stream.push(part.reset_index()).index
            names = [frozenset(f"{one.kind}:{one.part}" for one in found) for found in self._found]
            answers += zip(moments, names, strict=True)
            ended = self._labels["label_end"]
            known = self._labels[(ended > before) & (ended <= part.index[-1])]
            for moment, label in zip(known.index, known["label"], strict=True):
                self.stream.add_outcome(moment, int(label))
        return answers


def onsets(answers: Answers) -> tuple[int, float]:
    """Return (onsets, share of the answers with a finding)."""
    alarm = np.array([bool(found) for _, found in answers])
    return int((alarm & ~np.append(False, alarm[:-1])).sum()), float(alarm.mean())


def first_new(changed: Answers, clean: Answers) -> pd.Timestamp | None:
    """Return the moment of the first answer that found what no clean answer did."""
    usual = frozenset().union(*(found for _, found in clean))
    return next((moment for moment, found in changed if found - usual), None)


def drifted(name: str, test: pd.DataFrame, before: pd.DataFrame, start: int, tick: float) -> pd.DataFrame:
    """Return the bars from a place on, changed."""
    change, history = DRIFTS[name], pd.concat([before, test.iloc[:start]])
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
    place = int((bars.index < pd.Timestamp(bundle.description["split_times"]["test"])).sum())
    before, test = bars.iloc[place - HISTORY : place], bars.iloc[place : place + LONG]
    stream = RecordedStream(bundle, labels)
    stream.push(before)
    starts = np.linspace(500, SHORT - WITHIN, options.starts).astype(int).tolist()
    states, clean, pushed = {}, [], 0
    for start in [*starts, len(test)]:
        clean += stream.push(test.iloc[pushed:start])
        states[start], pushed = stream.stream.get_state(), start
    tick = bundle.spec.market.tick or float(np.diff(np.unique(test["close"].iloc[:2000])).min())
    drifts = {}
    for name in DRIFTS:
        bars_until = []
        for start in starts:
            changed = drifted(name, test, before, start, tick)
            recorded = RecordedStream(bundle, labels, states[start], sharper=name == "calibrator_lost")
            first, last = test.index[start], test.index[min(start + WITHIN, len(test)) - 1]
            usual = [one for one in clean if first <= one[0] <= last]
            found = first_new(recorded.push(changed), usual)
            bars_until += [] if found is None else [int((changed.index < found).sum())]
        drifts[name] = [len(bars_until), int(np.median(bars_until)) if bars_until else None]
    short = [one for one in clean if one[0] <= test.index[min(SHORT, len(test)) - 1]]
    (count, share), (long, long_share) = onsets(short), onsets(clean)
    print_json(
        bench="guard", file=symbol, side="guard", onsets_per_1000=digits(count / min(SHORT, len(test)) * 1000),
        alarm_share=digits(share), onsets_per_1000_long=digits(long / len(test) * 1000), long_bars=len(test),
        alarm_share_long=digits(long_share), starts=len(starts), drifts=drifts,
        found=digits(10 * sum(count for count, _ in drifts.values()) / (len(DRIFTS) * len(starts))),
        false_alarms=sorted(frozenset().union(*(found for _, found in short))),
    )  # fmt: skip
    speed(symbol, bundle, before)


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
