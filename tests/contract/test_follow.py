"""serve --follow: a file that grows, is replaced, torn, or of another market; killed and started again."""

import json
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from ml_factory import PredictionStream
from ml_factory.errors import BarsError, FactoryError, SettingsError
from tests.contract.doors import PROBABILITIES as P
from tests.contract.doors import FollowedFile, ServedBundle, follow, kept_bars

HISTORY, LAST = 8900, 8960  # bars


@pytest.fixture(scope="module")
def served(made) -> ServedBundle:
    return ServedBundle(made.load("xgboost"))


@pytest.fixture(scope="module")
def wanted(served, made) -> pd.DataFrame:
    """What a stream with the same history answers for the bars after it, up to LAST."""
    stream = PredictionStream(served.bundle, cold=True)
    stream.push(made.bars.iloc[HISTORY - kept_bars(served.bundle) : HISTORY])
    return stream.push(made.bars.iloc[HISTORY:LAST])


@pytest.fixture(scope="module")
def begun(served, made, tmp_path_factory) -> Path:
    """The state after the first look at a file, whose bars are the history."""
    folder = tmp_path_factory.mktemp("begun")
    write(made.bars.head(HISTORY), folder / "bars.parquet")
    followed = FollowedFile(folder / "bars.parquet", served, folder / "state", live=False)
    assert list(followed.poll()) == [] and list(followed.poll()) == []
    return folder / "state"


@pytest.fixture
def opened(served, begun, tmp_path):
    """opened(path): the file as it is followed after a start of the process; the history was read."""
    state = shutil.copytree(begun, tmp_path / "state")
    return lambda path: FollowedFile(path, served, state, live=False)


def write(bars: pd.DataFrame, path: Path) -> None:
    """Write the whole file in one step."""
    part = path.with_name(f"part-{path.name}")
    bars.to_csv(part, index=False) if path.suffix == ".csv" else bars.to_parquet(part, index=False)
    part.replace(path)


def append(bars: pd.DataFrame, path: Path) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(bars.to_csv(index=False, header=False))


def check_answers(answers: list[dict], wanted: pd.DataFrame) -> None:
    found = pd.DataFrame(answers)
    assert list(pd.to_datetime(found["known_at"], utc=True)) == list(wanted.index)
    seen = found["guard"].isin(["ok", "warn"]).to_numpy()
    assert seen.sum() > 0
    np.testing.assert_array_equal(found[P].to_numpy(float)[seen], wanted[P].to_numpy()[seen])


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_followed_file_answers_each_bar_over_restarts_and_again_what_was_not_taken(
    ending, made, opened, wanted, tmp_path, monkeypatch
):
    monkeypatch.setattr(follow, "TAIL", 1_500)  # 25 bars of a CSV, which grows by more
    bars, path, answers = made.bars.head(LAST), tmp_path / f"DEMO_1m.{ending}", []
    write(bars.head(HISTORY), path)
    first = opened(path)
    for end in (HISTORY, 8903, 8911, 8930):
        append(bars.iloc[len(pd.read_csv(path)) : end], path) if ending == "csv" else write(bars.head(end), path)
        answers += list(first.poll())
        assert list(first.poll()) == []
    write(bars, path)  # replaced while no process follows it
    killed = opened(path).poll()  # as after kill -9: the first was not closed
    taken = [next(killed) for _ in range(4)]
    again = opened(path)
    stopped = again.poll()
    assert next(stopped) == taken[0]
    stopped.close()  # its reader failed
    rest = list(again.poll())
    assert rest[:4] == taken and list(again.poll()) == list(opened(path).poll()) == []
    check_answers(answers + rest, wanted)


def test_followed_csv_that_grows_while_it_is_read_is_read_from_its_last_lines_on(
    made, opened, wanted, tmp_path, monkeypatch
):
    bars, path, sizes, answers, read = made.bars, tmp_path / "bars.csv", [], [], follow.read_bars_table
    lines = bars.to_csv(index=False, header=False).splitlines(True)

    def append_and_read(where, *, copy):
        """Read what the poll copied, while the next line is written in two halves."""
        sizes.append(copy.stat().st_size)
        with open(path, "a", encoding="utf-8") as file:
            file.write(lines[end][:-20])
            file.flush()
            table = read(where, copy=copy)
            file.write(lines[end][-20:])
        return table

    monkeypatch.setattr(follow, "read_bars_table", append_and_read)
    monkeypatch.setattr(follow, "TAIL", 10_000)
    write(bars.head(HISTORY), path)
    followed = opened(path)
    for end in (8901, 8920, 8930):
        append(bars.iloc[len(pd.read_csv(path)) : end], path)
        answers += followed.poll()
    assert all(9_000 < size < 10_100 for size in sizes)
    monkeypatch.undo()
    header, line = path.read_bytes(), "".join(lines[8931:8941]).encode()
    for cut in (40, 2, 1, 0):  # within the last line's fields, within its last number, without its end, whole
        path.write_bytes(header + line[: len(line) - cut])
        answers += followed.poll()
        assert followed.position <= bars["timestamp"].iloc[8940] or not cut
    bars.head(LAST).to_csv(path, index=False)  # written over in place, by a longer one with the same bars
    check_answers(answers + list(followed.poll()), wanted)


OTHERS = {  # name -> a file of what is not followed from the start, the message
    "MES_1m.csv": (lambda bars: bars, r"bars of another symbol.*got MES, wanted DEMO"),
    "named.csv": (lambda bars: bars.assign(symbol="MES"), "bars of another symbol"),
    "tick.csv": (lambda bars: bars.assign(**{name: bars[name] * 1.0001 for name in ("open", "high", "low", "close")}),
                 "tick"),
    "longer.csv": (lambda bars: bars.iloc[::5], "5 minutes apart"),
    "two.csv": (lambda bars: bars.assign(symbol=np.where(bars.index < 5, "MES", "DEMO")), "bars of another symbol"),
    "order.csv": (lambda bars: bars.iloc[[*range(500), 400, *range(501, 900)]], "out of order"),
    "columns.csv": (lambda bars: bars.drop(columns="close"), "close"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_followed_file_of_another_market_or_format_is_refused_in_one_line(name, made, served, tmp_path):
    change, text = OTHERS[name]
    change(made.bars.head(900)).to_csv(tmp_path / name, index=False)
    with pytest.raises((BarsError, SettingsError), match=text) as caught:
        list(FollowedFile(tmp_path / name, served, tmp_path / "state", live=False).poll())
    assert "\n" not in str(caught.value)


def test_followed_file_that_is_torn_absent_or_wrong_is_refused_waited_for_at_first_and_taken_once_right(
    opened, made, tmp_path, monkeypatch
):
    path, bars = tmp_path / "bars.parquet", made.bars
    write(bars.head(HISTORY), path)
    followed, whole = opened(path), path.read_bytes()

    def tear() -> None:
        path.write_bytes(whole[:-100])

    for spoil, waits, named in (
        (tear, True, "Parquet file cannot be read"), (path.unlink, True, "no such file"),
        (lambda: write(pd.concat([bars.head(HISTORY), bars.iloc[[HISTORY]].assign(high=1.0)]), path), False, "highest"),
    ):  # fmt: skip
        spoil()
        if waits:
            assert list(followed.poll()) == []
        with monkeypatch.context() as patch, pytest.raises(FactoryError, match=named):
            patch.setattr(follow, "TORN_SECONDS", 0.0)
            list(followed.poll())
    write(bars.head(8930), path)
    assert list(followed.poll())


def test_serve_follow_started_again_prints_every_answer_and_ends_quietly(
    made, served, begun, wanted, call, tmp_path, monkeypatch
):
    path, lines, end = tmp_path / "bars.csv", [], HISTORY
    write(made.bars.head(HISTORY), path)
    shutil.copytree(begun, tmp_path / "bars.csv.state")

    def sleep(seconds: float) -> None:
        nonlocal end
        if end not in (HISTORY, 8930):  # it has seen what was appended
            signal.raise_signal(signal.SIGTERM)
        append(made.bars.iloc[end : end + 29], path)
        end += 29

    monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    monkeypatch.setitem(sys.modules, "ml_factory.serving.app", None)  # a file is followed without the web framework
    for _ in range(2):
        code, out, err = call("serve", made.bundles["DEMO", "xgboost"], "--follow", path, "--json", "--no-clock")
        assert code == 0 and err.count("\n") == 1 and "waiting for bars after" in err
        lines += map(json.loads, out.splitlines())
        append(made.bars.iloc[end : end + 1], path)  # while no process follows it
        end += 1
    check_answers(lines, wanted[: len(lines)])
    assert len(wanted) - len(lines) <= 1


def test_serve_follow_prints_readable_lines():
    answer = {"known_at": "2026-01-05T14:35:00+00:00", "p_short": 0.25, "p_neutral": 0.5, "p_long": None,
              "guard": "warn", "reason": "a gap"}  # fmt: skip
    assert follow.answer_line(answer) == (
        "2026-01-05 14:35:00+00:00  short 0.2500  neutral 0.5000  long -  warn  a gap"
    )
