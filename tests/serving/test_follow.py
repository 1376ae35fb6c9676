"""serve --follow: a file that grows, is replaced, torn, or of another market; killed and started again."""

import json
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory import Bundle, PredictionStream
from ml_factory.errors import BarsError, CheckpointError, FactoryError, SettingsError, WorkspaceError
from ml_factory.serving import follow
from ml_factory.serving.feed import kept_bars
from ml_factory.serving.follow import FollowedFile
from ml_factory.serving.served_bundle import ServedBundle

P = ["p_short", "p_neutral", "p_long"]


@pytest.fixture(scope="module")
def served(made) -> ServedBundle:
    return ServedBundle(made.load("DEMO", "xgboost"))


@pytest.fixture
def opened(served, tmp_path):
    """opened(path): the file as it is followed after a start of the process."""
    made: list[FollowedFile] = []

    def start(path: Path) -> FollowedFile:
        made.append(FollowedFile(path, served, tmp_path / "state", live=False))
        return made[-1]

    yield start
    for one in made:
        one.close()


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
    again.close()
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
        assert (followed.position <= bars["timestamp"].iloc[8909].isoformat()) or not cut
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


def test_followed_file_that_stays_torn_is_refused_and_absent_one_too(opened, made, tmp_path, monkeypatch):
    path = tmp_path / "bars.parquet"
    write(made.bars["DEMO"].head(8900), path)
    followed = opened(path)
    path.write_bytes(path.read_bytes()[:-100])
    assert list(followed.poll()) == []
    monkeypatch.setattr(follow, "TORN_SECONDS", 0.0)
    with pytest.raises(FactoryError, match="Parquet file cannot be read"):
        list(followed.poll())
    path.unlink()
    with pytest.raises(WorkspaceError, match="no such file"):
        list(followed.poll())


def test_followed_file_with_impossible_bar_answers_each_bar_before_and_after_correction(
    made, served, opened, tmp_path, monkeypatch
):
    monkeypatch.setattr(follow, "_BARS_AT_ONCE", 20)
    bars, path, answers = made.bars["DEMO"].head(8960), tmp_path / "bars.csv", []
    write(bars.head(8900), path)
    followed = opened(path)
    assert list(followed.poll()) == []
    wrong = bars.copy()
    wrong.loc[8951, "high"] = 1.0
    write(wrong, path)
    with pytest.raises(BarsError, match="highest"):
        answers.extend(followed.poll())
    assert len(answers) >= 7  # of two parts
    write(bars, path)
    answers += list(opened(path).poll())
    check_answers(answers, expected(served.bundle, bars, 8900))


def test_followed_file_yields_answers_that_were_not_taken_again_after_kill(made, served, opened, tmp_path):
    bars, path = made.bars["DEMO"].head(8960), tmp_path / "bars.parquet"
    write(bars.head(8900), path)
    assert list(opened(path).poll()) == []
    write(bars, path)
    killed = opened(path).poll()
    taken = [next(killed) for _ in range(4)]  # the log has all bars, and four answers were printed
    again = opened(path)
    answers = list(again.poll())
    assert [one["known_at"] for one in answers[:4]] == [one["known_at"] for one in taken]  # none was lost
    check_answers(answers, expected(served.bundle, bars, 8900))
    assert list(again.poll()) == []
    again.close()
    assert list(opened(path).poll()) == []
    (tmp_path / "state" / "DEMO" / "delivered.json").write_text('{"known_at": 7, "x": ')
    assert list(opened(path).poll()) == []  # a state without a mark: all were printed
    (tmp_path / "state" / "DEMO" / "delivered.json").write_text('{"known_at": "then"}')
    with pytest.raises(CheckpointError, match=r"mark of the last printed answer is damaged.*delete this file"):
        opened(path)


def test_followed_file_yields_unprinted_answers_after_start_with_another_bundle(made, served, opened, tmp_path):
    bars, path = made.bars["DEMO"].head(8960), tmp_path / "bars.parquet"
    write(bars.head(8900), path)
    assert list(opened(path).poll()) == []
    write(bars, path)
    printed = next(opened(path).poll())  # killed: the state has all bars, one answer was printed
    other = ServedBundle(made.load("DEMO", "linear"))
    again = FollowedFile(path, other, tmp_path / "state", live=False)
    answers = list(again.poll())
    assert list(again.poll()) == []
    again.close()
    known = [printed["known_at"], *(one["known_at"] for one in answers if one["known_at"] != printed["known_at"])]
    assert known == [moment.isoformat() for moment in expected(served.bundle, bars, 8900).index]
    assert {one["bundle"] for one in answers} == {served.id}  # each bar keeps its first answer
    wanted = expected(served.bundle, bars, 8900)["p_long"]
    for one in answers:
        assert one["p_long"] == pytest.approx(wanted.loc[pd.Timestamp(one["known_at"])], abs=1e-9)


def test_follow_announces_unprinted_answers_of_the_process_before_and_their_bundle(made, served, opened, tmp_path):
    bars, path = made.bars["DEMO"].head(8960), tmp_path / "bars.parquet"
    write(bars.head(8900), path)
    assert list(opened(path).poll()) == []
    write(bars, path)
    next(opened(path).poll())  # killed
    other = ServedBundle(made.load("DEMO", "linear"))
    again, said, printed = FollowedFile(path, other, tmp_path / "state", live=False), [], []

    def announce(line: str) -> None:
        said.append((len(printed), line))
        if "waiting" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow.follow_file(again, poll_seconds=0.0, announce=announce, answer=printed.append)
    (before, first), (_, second) = said
    assert before == 0 and first == (
        f"{len(printed)} answers that were not printed before the last end follow, of bundle {served.id}"
    )
    assert len(printed) > 5 and second.startswith("waiting for bars after")


@pytest.mark.parametrize("mark", ["null", "7", '"NaT"', '"2099-01-01T00:00:00+00:00"', '"then"'])
def test_mark_of_no_moment_or_after_the_last_bar_is_refused(made, opened, tmp_path, mark):
    path = tmp_path / "bars.csv"
    write(made.bars["DEMO"].head(8900), path)
    assert list(opened(path).poll()) == []
    (tmp_path / "state" / "DEMO" / "delivered.json").write_text(f'{{"known_at": {mark}}}')
    with pytest.raises(CheckpointError, match=r"mark of the last printed answer is damaged.*delete this file"):
        opened(path)


def test_followed_parquet_with_decimals_dates_and_unnamed_time_index_is_answered(made, served, opened, tmp_path):
    bars, path = made.bars["DEMO"].head(8930), tmp_path / "bars.parquet"
    odd = bars.set_index("timestamp").rename_axis(None)
    odd = odd.assign(
        close=[Decimal(str(one)) for one in odd["close"]], fee=Decimal("0.25"),
        day=[moment.date() for moment in odd.index], raw=b"x",
    )  # fmt: skip
    odd.head(8900).to_parquet(path)
    followed = opened(path)
    assert list(followed.poll()) == []
    odd.to_parquet(path)
    check_answers(list(followed.poll()), expected(served.bundle, bars, 8900))


def test_followed_file_that_is_absent_for_a_moment_is_waited_for(made, opened, tmp_path):
    path = tmp_path / "bars.csv"
    write(made.bars["DEMO"].head(8900), path)
    followed = opened(path)
    assert list(followed.poll()) == []
    path.unlink()
    assert list(followed.poll()) == []
    write(made.bars["DEMO"].head(8930), path)
    assert list(followed.poll())


def test_followed_csv_that_grows_during_each_read_answers_the_rows_that_were_read(
    made, served, opened, tmp_path, monkeypatch
):
    bars, path, answers, end = made.bars["DEMO"], tmp_path / "bars.csv", [], 8900
    write(bars.head(end), path)
    followed, read = opened(path), follow.read_copied_bars_table
    assert list(followed.poll()) == []

    def append_and_read(*places):
        nonlocal end
        lines = bars.iloc[end : end + 10].to_csv(index=False, header=False)
        with open(path, "a", encoding="utf-8") as file:
            file.write(lines[:-20])  # the last line half
            file.flush()
            table = read(*places)
            file.write(lines[-20:])
        end += 10
        return table

    monkeypatch.setattr(follow, "read_copied_bars_table", append_and_read)
    append(bars.iloc[end : end + 10], path)
    end += 10
    for _ in range(4):
        answers += list(followed.poll())
    check_answers(answers, expected(served.bundle, bars.head(8940), 8900))


def test_serve_follow_killed_and_started_again_prints_each_answer_once(made, tmp_path):
    bars, path = made.bars["DEMO"], tmp_path / "bars.csv"
    write(bars.head(8900), path)
    words = ["serve", made.bundles["DEMO", "xgboost"], "--follow", path, "--json", "--no-clock"]
    command = [sys.executable, "-W", "error", "-m", "ml_factory", *map(str, words)]
    lines, end = [], 8900
    for number in range(2):
        with open(tmp_path / f"out-{number}", "w+", encoding="utf-8") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
            try:
                assert "waiting for bars" in process.stderr.readline()
                append(bars.iloc[end : end + 15], path)
                end += 15
                wanted, until = len(lines) + 3, time.monotonic() + 60
                while time.monotonic() < until:
                    out.seek(0)
                    found = out.read().splitlines()
                    mark = tmp_path / "bars.csv.state" / "DEMO" / "delivered.json"
                    if len(found) >= 3 and json.loads(found[-1])["known_at"] in mark.read_text(encoding="utf-8"):
                        break
                    time.sleep(0.1)
            finally:
                process.kill()
                process.wait()
                process.stderr.close()
            out.seek(0)
            lines += [json.loads(line) for line in out.read().splitlines()]
            assert len(lines) == wanted
    check_answers(lines, expected(made.load("DEMO", "xgboost"), bars.head(end), 8900))


def test_serve_follow_prints_readable_lines(made, opened, tmp_path):
    answer = {"known_at": "2026-01-05T14:35:00+00:00", "p_short": 0.25, "p_neutral": 0.5, "p_long": None,
              "guard": "warn", "reason": "a gap"}  # fmt: skip
    assert follow.answer_line(answer) == (
        "2026-01-05 14:35:00+00:00  short 0.2500  neutral 0.5000  long -  warn  a gap"
    )
