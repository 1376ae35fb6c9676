"""/stream: each bar answered as by the batch, acknowledged when it is on the disk, and kept over kills and restarts."""

import base64
import json
import signal
import socket
from contextlib import suppress

import pandas as pd
import pytest
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus

from ml_factory.evaluation.metrics import PROBABILITIES as P
from tests.serving.conftest import Files, StreamClient, columns_of, running_server

HISTORY = 8000


def wanted_answers(made: Files, symbol: str, model: str, bars: pd.DataFrame) -> dict[str, list[float]]:
    """known_at -> probabilities of `Bundle.predict` on these bars."""
    frame = made.load(symbol, model).predict(bars, all_rows=True)
    return {moment.isoformat(): row for moment, row in zip(frame.index, frame[P].to_numpy().tolist(), strict=True)}


def check_answers(answers: list[dict], wanted: dict[str, list[float]]) -> None:
    """Every answer is that of the batch."""
    for one in answers:
        assert [one[name] for name in P] == pytest.approx(wanted[one["known_at"]], rel=0, abs=1e-12), one


def test_stream_of_two_symbols_answers_each_bar_as_batch(server, made):
    answers: dict[str, list[dict]] = {"DEMO": [], "MES": []}
    with StreamClient(server, "two") as stream:
        assert {one["symbol"]: one["next"] for one in stream.hello["positions"]} == {"DEMO": None, "MES": None}
        for symbol in answers:
            reply = stream.push(symbol, made.bars[symbol].iloc[:HISTORY], id=symbol)
            assert (reply["type"], reply["id"], reply["symbol"]) == ("ack", symbol, symbol), reply
            answers[symbol] += reply["answers"]
        for number in range(HISTORY, HISTORY + 60):
            for symbol in answers:
                reply = stream.push(symbol, made.bars[symbol].iloc[number : number + 1])
                assert reply["type"] == "ack" and reply["run_id"].startswith("train-"), reply
                answers[symbol] += reply["answers"]
    for symbol, model in (("DEMO", "xgboost"), ("MES", "linear")):
        wanted = wanted_answers(made, symbol, model, made.bars[symbol].iloc[: HISTORY + 60])
        check_answers(answers[symbol], wanted)
        known, rows = [one["known_at"] for one in answers[symbol]], list(wanted)
        first = rows.index(known[0])
        assert known == rows[first : first + len(known)] and len(known) > 600
        assert len(rows) - first - len(known) <= 1  # the batch may give the last bar, which the feed has not closed


def test_stream_acknowledges_doubled_bars_again_and_refuses_impossible_ones_unchanged(server, made):
    bars = made.bars["DEMO"]
    with StreamClient(server, "odd") as stream:
        stream.push("DEMO", bars.iloc[:HISTORY])
        place = HISTORY
        while not (reply := stream.push("DEMO", bars.iloc[place : place + 1]))["answers"]:
            place += 1
        assert stream.push("DEMO", bars.iloc[place : place + 1]) == reply | {"repeated": 1, "repeated_answers": 1}
        position = stream.send(type="position", symbol="DEMO")["next"]
        one = bars.iloc[place + 1 : place + 2]
        for wrong, named in (
            (bars.iloc[place : place + 1].assign(high=lambda frame: frame["high"] + 1), "Bars overlap"),
            (bars.iloc[place - 50 : place - 48], "repeated"),
            (bars.iloc[[place + 2, place + 1]], "out of order"), (one.assign(high=1.0), "high is not the highest"),
            (one.drop(columns="close"), "Missing column 'close'"), (one.assign(close="much"), "close"),
            (one.assign(timestamp="then"), "timestamp cannot be read"), (one.assign(volume=-1.0), "volume is negative"),
        ):  # fmt: skip
            got = stream.push("DEMO", wrong)
            assert named in (json.dumps(got) if named == "repeated" else got.get("message", "")), got
            assert stream.send(type="position", symbol="DEMO")["next"] == position
        texts = ["", "{", "[]", "null", '{"type": "bars"}', '{"type": "sell", "id": 7}', '{"type": "bars", "bars": []}']
        texts += ['{"type": "advance", "symbol": "DEMO", "until": "9999-01-01T00:00:00Z"}', "[" * 50_000]
        for text in (*texts, b"\x00\xff"):
            got = stream.send_text(text)
            assert got["type"] == "problem" and got["status"] == 422 and got["what"], text
        assert stream.send(type="sell", id=7)["id"] == 7
        assert "ES" in stream.push("ES", one)["message"]
        overlapping = stream.push("DEMO", bars.iloc[place : place + 30])
        assert overlapping["repeated"] == 1
        check_answers(overlapping["answers"], wanted_answers(made, "DEMO", "xgboost", bars.iloc[: place + 30]))


def test_stream_feeds_of_other_names_are_separate_and_wrong_names_refused(server, made):
    with StreamClient(server, "left") as left, StreamClient(server, "right") as right:
        left.push("MES", made.bars["MES"].iloc[:100])
        assert right.send(type="position", symbol="MES")["next"] is None
        with StreamClient(server, "left") as again:
            assert {one["symbol"]: one["next"] for one in again.hello["positions"]}["MES"] is not None
    for name in ("..", "a%2Fb", "", "x" * 41):
        with pytest.raises(InvalidStatus, match="422"), StreamClient(server, name):
            pass


@pytest.mark.parametrize(
    ("number", "counts"),
    [
        pytest.param(signal.SIGKILL, (37, 230, None), id="kill"),
        pytest.param(signal.SIGTERM, (7, None), id="stop", marks=pytest.mark.soak),  # its snapshot: tests of Feed
    ],
)
def test_stream_killed_and_restarted_lost_no_acknowledged_bar_and_answers_as_uninterrupted(
    made, tmp_path, number, counts
):
    bars, bundle, answers = made.bars["DEMO"], made.bundles["DEMO", "xgboost"], {}
    place, acknowledged, state = HISTORY, HISTORY, tmp_path / "state"
    for count in counts:  # 230 pass a snapshot
        with running_server(bundle, "--state", state) as server, StreamClient(server) as stream:
            (position,) = stream.hello["positions"]
            if place == HISTORY:
                assert stream.hello["durable"] and position["next"] is None
                stream.push("DEMO", bars.iloc[:HISTORY])
            else:  # the bar that was sent and not acknowledged may be there or not
                there = int((bars["timestamp"] < pd.Timestamp(position["next"])).sum())
                assert there in (acknowledged, acknowledged + 1)
                repeated = stream.push("DEMO", bars.iloc[place - 1 : place])
                assert repeated["repeated"] == 1 and all(answers[one["known_at"]] == one for one in repeated["answers"])
            for _ in range(count or 40):
                reply = stream.push("DEMO", bars.iloc[place : place + 1])
                assert reply["type"] == "ack", reply
                place, acknowledged = place + 1, place + 1
                answers |= {one["known_at"]: one for one in reply["answers"]}
            if count is not None:
                one = columns_of(bars.iloc[place : place + 1])
                stream.send_and_leave(type="bars", symbol="DEMO", bars=one, live=False)
                code = server.stop(number)
                assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    wanted = wanted_answers(made, "DEMO", "xgboost", bars.iloc[:place])
    check_answers(list(answers.values()), wanted)
    known = [moment for moment in wanted if moment > bars["timestamp"][HISTORY].isoformat()]
    absent = set(known[:-1]) - set(answers)
    assert len(absent) <= 2, absent  # of the bars that were sent and not acknowledged


def test_stream_message_beyond_the_limit_closes_with_reason_that_names_both_sizes(server):
    limit, size = 8 * 2**20, 20_000_000
    for pieces in (["x" * size], ["x" * 5_000_000] * 4):
        with StreamClient(server, "large") as stream:
            with suppress(ConnectionClosed):
                stream.send_pieces(pieces)
            with pytest.raises(ConnectionClosedError) as caught:
                stream.receive()
        closed = caught.value.rcvd
        assert closed is not None and closed.code == 1009, caught.value
        assert f"exceeds limit of {limit} bytes" in closed.reason and str(len(pieces[0])) in closed.reason
    with StreamClient(server, "large") as stream:
        assert stream.send(type="position", symbol="MES")["type"] == "position"


def test_client_that_sends_a_large_message_whole_before_it_reads_gets_the_reason(server):
    size, port = 20_000_000, int(server.url.rsplit(":", 1)[1])
    opening = (
        f"GET /stream HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sender:
        sender.sendall(opening.encode())
        while b'"positions"' not in sender.recv(1 << 16):
            pass
        sender.sendall(b"\x81\xff" + size.to_bytes(8, "big") + bytes(4))
        for _ in range(size // 500_000):  # a connection that is reset ends this with an error
            sender.sendall(b" " * 500_000)
        got = b""
        while piece := sender.recv(1 << 16):
            got += piece
    assert (1009).to_bytes(2, "big") in got and b"frame with 20000000 bytes exceeds limit of 8388608 bytes" in got


def test_two_servers_on_one_state_folder_are_refused(made, tmp_path, call):
    bundle = made.bundles["MES", "linear"]
    with running_server(bundle, "--state", tmp_path):
        code, _, err = call("serve", bundle, "--port", 0, "--state", tmp_path)
    assert code == 1 and err.startswith("error: Another process is working on this folder of feeds")
