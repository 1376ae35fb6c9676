"""serve --follow: a file that grows, is replaced, torn, or of another market; killed and started again."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory import Bundle, PredictionStream
from ml_factory.errors import BarsError, FactoryError, SettingsError, WorkspaceError
from ml_factory.serving import follow
from ml_factory.serving.feed import ServedBundle, kept_bars
from ml_factory.serving.follow import FollowedFile

P = ["p_short", "p_neutral", "p_long"]


@pytest.fixture(scope="module")
def served(made) -> ServedBundle:
    return ServedBundle(made.load("DEMO", "xgboost"))


@pytest.fixture
def opened(served, tmp_path):
    """opened(path): the file as it is followed after a start of the process."""

    def start(path: Path) -> FollowedFile:
        return FollowedFile(path, served, tmp_path / "state", live=False)

    return start


def write(bars: pd.DataFrame, path: Path) -> None:
    """Write the whole file in one step."""
    part = path.with_name(f"part-{path.name}")
    bars.to_csv(part, index=False) if path.suffix == ".csv" else bars.to_parquet(part, index=False)
    part.replace(path)


def append(bars: pd.DataFrame, path: Path) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(bars.to_csv(index=False, header=False))


def expected(bundle: Bundle, bars: pd.DataFrame, history: int) -> pd.DataFrame:
    """Return what a stream with the same history answers for the bars after it."""
    stream = PredictionStream(bundle, cold=True)
    stream.push(bars.iloc[max(history - kept_bars(bundle), 0) : history])
    return stream.push(bars.iloc[history:])


def check_answers(answers: list[dict], wanted: pd.DataFrame) -> None:
    found = pd.DataFrame(answers)
    assert list(pd.to_datetime(found["known_at"], utc=True)) == list(wanted.index)
    seen = found["guard"].isin(["ok", "warn"]).to_numpy()
    assert seen.sum() > 0
    np.testing.assert_array_equal(found[P].to_numpy(float)[seen], wanted[P].to_numpy()[seen])


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_followed_file_answers_appended_bars_once_over_restarts(ending, made, served, opened, tmp_path):
    bars, path = made.bars["DEMO"].head(9000), tmp_path / f"DEMO_1m.{ending}"
    write(bars.head(8900), path)
    first = opened(path)
    assert list(first.poll()) == [] and list(first.poll()) == []  # history
    answers = []
    for end in (8903, 8911, 8930):
        append(bars.iloc[len(pd.read_csv(path)) : end], path) if ending == "csv" else write(bars.head(end), path)
        answers += list(first.poll())
        assert list(first.poll()) == []
    write(bars.head(8960), path)  # replaced while no process follows it
    again = opened(path)  # as after kill -9: the first was not closed
    answers += list(again.poll())
    write(bars, path)
    answers += list(again.poll())
    assert list(opened(path).poll()) == []
    check_answers(answers, expected(served.bundle, bars, 8900))


def test_followed_csv_with_unfinished_last_line_answers_it_once_it_is_ended(made, opened, tmp_path):
    bars, path = made.bars["DEMO"].head(8910), tmp_path / "feed.csv"
    write(bars.head(8900), path)
    followed = opened(path)
    assert list(followed.poll()) == []
    header, line = path.read_bytes(), bars.iloc[8900:8910].to_csv(index=False, header=False).encode()
    answers = []
    for cut in (40, 2, 1, 0):  # within the last line's fields, within its last number, without its end, whole
        path.write_bytes(header + line[: len(line) - cut])
        answers.append(list(followed.poll()))
        assert (followed.position <= bars["timestamp"].iloc[8909]) or not cut
    moments = [answer["known_at"] for part in answers for answer in part]
    assert len(moments) == len(set(moments)) == 2 and len(answers[-1]) == 1


def test_followed_file_of_another_market_or_format_is_refused_in_one_line(made, served, opened, tmp_path):
    bars = made.bars["DEMO"].head(8900)
    write(bars, tmp_path / "MES_1m.csv")
    with pytest.raises(SettingsError, match=r"bars of another symbol.*got MES, wanted DEMO"):
        opened(tmp_path / "MES_1m.csv")
    broken = {
        "named.csv": (bars.assign(symbol="MES"), "bars of another symbol"),
        "tick.csv": (bars.assign(**{name: bars[name] * 1.0001 for name in ("open", "high", "low", "close")}), "tick"),
        "order.csv": (bars.iloc[[*range(500), 400, *range(501, 900)]], "out of order"),
        "columns.csv": (bars.drop(columns="close"), "close"),
    }
    for name, (table, text) in broken.items():
        write(table, tmp_path / name)
        with pytest.raises((BarsError, SettingsError), match=text) as caught:
            list(opened(tmp_path / name).poll())
        assert "\n" not in str(caught.value)
    write(bars, tmp_path / "good.csv")
    followed = opened(tmp_path / "good.csv")
    assert list(followed.poll()) == []
    append(made.bars["DEMO"].iloc[8900:8901].assign(high=1.0), tmp_path / "good.csv")
    with pytest.raises(BarsError, match="highest"):
        list(followed.poll())
    write(made.bars["DEMO"].head(8910), tmp_path / "good.csv")  # corrected
    assert list(followed.poll())


def test_followed_file_that_stays_torn_or_absent_is_refused_and_waited_for_at_first(
    opened, made, tmp_path, monkeypatch
):
    path = tmp_path / "bars.parquet"
    write(made.bars["DEMO"].head(8900), path)
    followed = opened(path)
    assert list(followed.poll()) == []
    path.write_bytes(path.read_bytes()[:-100])
    assert list(followed.poll()) == []
    monkeypatch.setattr(follow, "TORN_SECONDS", 0.0)
    with pytest.raises(FactoryError, match="Parquet file cannot be read"):
        list(followed.poll())
    path.unlink()
    with pytest.raises(WorkspaceError, match="no such file"):
        list(followed.poll())
    monkeypatch.setattr(follow, "TORN_SECONDS", 10.0)
    assert list(followed.poll()) == []
    write(made.bars["DEMO"].head(8930), path)
    assert list(followed.poll())


def test_followed_file_answers_again_what_was_not_taken_after_kill(made, served, opened, tmp_path):
    bars, path = made.bars["DEMO"].head(8960), tmp_path / "bars.parquet"
    write(bars.head(8900), path)
    assert list(opened(path).poll()) == []
    write(bars, path)
    killed = opened(path).poll()
    taken = [next(killed) for _ in range(4)]
    again = opened(path)
    stopped = again.poll()
    assert next(stopped) == taken[0]
    stopped.close()  # its reader failed
    answers = list(again.poll())
    assert answers[:4] == taken and list(again.poll()) == []
    check_answers(answers, expected(served.bundle, bars, 8900))
    assert list(opened(path).poll()) == []


def test_followed_csv_that_grows_while_it_is_read_is_read_from_its_last_lines_on(
    made, served, opened, tmp_path, monkeypatch
):
    bars, path, sizes, answers, read = made.bars["DEMO"], tmp_path / "bars.csv", [], [], follow.read_bars_table
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
    write(bars.head(8900), path)
    followed, end = opened(path), 8900
    assert list(followed.poll()) == []
    monkeypatch.setattr(follow, "TAIL", 10_000)
    for end in (8901, 8920, 8930):
        append(bars.iloc[len(pd.read_csv(path)) : end], path)
        answers += followed.poll()
    assert sizes[0] > 400_000 and all(9_000 < size < 10_100 for size in sizes[1:])
    monkeypatch.undo()
    bars.head(8950).to_csv(path, index=False)  # written over in place, by a longer one with the same bars
    answers += followed.poll()
    check_answers(answers, expected(served.bundle, bars.head(8950), 8900))


def test_followed_csv_that_grows_by_more_than_its_tail_answers_every_bar(made, served, opened, tmp_path, monkeypatch):
    bars, path = made.bars["DEMO"].head(9000), tmp_path / "bars.csv"
    write(bars.head(8900), path)
    followed = opened(path)
    assert list(followed.poll()) == []
    monkeypatch.setattr(follow, "TAIL", 1_500)  # 25 bars
    append(bars.iloc[8900:], path)
    check_answers(list(followed.poll()), expected(served.bundle, bars, 8900))


def test_followed_csv_in_utf_16_is_refused_at_the_start(made, opened, tmp_path):
    made.bars["DEMO"].head(100).to_csv(tmp_path / "bars.csv", index=False, encoding="utf-16")
    with pytest.raises(BarsError, match=r"UTF-16 cannot be followed.*give it in UTF-8") as caught:
        opened(tmp_path / "bars.csv")
    assert "\n" not in str(caught.value)


def test_serve_follow_killed_and_started_again_prints_every_answer_and_ends_quietly(made, tmp_path):
    bars, path = made.bars["DEMO"], tmp_path / "bars.csv"
    write(bars.head(8900), path)
    words = ["serve", made.bundles["DEMO", "xgboost"], "--follow", path, "--json", "--no-clock"]
    command = [sys.executable, "-W", "error", "-m", "ml_factory", *map(str, words)]
    lines, end = {}, 8900
    for number in range(2):
        with open(tmp_path / f"out-{number}", "w+", encoding="utf-8") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
            try:
                assert "waiting for bars" in process.stderr.readline()
                append(bars.iloc[end : end + 15], path)
                end += 15
                until, new = time.monotonic() + 60, 0
                while time.monotonic() < until and new < 3:  # those before the kill may come once more
                    time.sleep(0.1)
                    whole = Path(out.name).read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
                    new = sum(json.loads(line)["known_at"] not in lines for line in whole)
                if number:
                    process.send_signal(signal.SIGINT)
                    assert process.wait(60) == 0 and process.stderr.read() == ""
            finally:
                process.kill()
                process.wait()
                process.stderr.close()
            printed = [json.loads(line) for line in Path(out.name).read_text(encoding="utf-8").splitlines()]
            assert len(printed) >= 3 and all(lines.get(one["known_at"], one) == one for one in printed)
            lines |= {one["known_at"]: one for one in printed}
    check_answers(list(lines.values()), expected(made.load("DEMO", "xgboost"), bars.head(end), 8900))


def test_serve_follow_prints_readable_lines(made, opened, tmp_path):
    answer = {"known_at": "2026-01-05T14:35:00+00:00", "p_short": 0.25, "p_neutral": 0.5, "p_long": None,
              "guard": "warn", "reason": "a gap"}  # fmt: skip
    assert follow.answer_line(answer) == (
        "2026-01-05 14:35:00+00:00  short 0.2500  neutral 0.5000  long -  warn  a gap"
    )
