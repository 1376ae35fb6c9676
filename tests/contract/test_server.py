"""Servers in processes of their own: killed, stopped in a request, two on one folder; many clients."""

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import psutil
import pytest

from tests.contract.doors import PROBABILITIES as P
from tests.contract.service import columns_of, push, running_server

HISTORY, CLIENTS = 6000, 8
REQUESTS = int(os.environ.get("SERVING_REQUESTS", "10000"))  # of the soak test, at most 40,000
GROWTH = 30.0  # megabytes between a fifth of the requests and their end


def test_feed_of_killed_server_lost_no_answered_bar_and_goes_on_as_uninterrupted(made, tmp_path, call):
    bars, answers, place = made.bars, {}, HISTORY
    words = made.bundles["DEMO", "xgboost"], "--state", tmp_path / "state"
    for life, count in enumerate((60, 40)):
        with running_server(*words, ML_FACTORY_API_KEY="" if life else "key") as (process, client):
            if life == 0:
                assert client.get("/info", headers={"X-API-Key": ""}).status_code == 401
                assert client.get("/health", headers={"Host": "public.example"}).status_code == 200  # of a proxy
                push(client, "killed", "DEMO", bars.iloc[:HISTORY])
                code, _, err = call("serve", *words, "--port", 0)
                assert code == 1 and err.startswith("error: Another process is working on this folder of feeds")
            else:
                (stored,) = client.get("/info").json()["feeds"]
                assert stored["last_bar_end"] == bars["timestamp"].iloc[place].isoformat()
                again = push(client, "killed", "DEMO", bars.iloc[place - 30 : place])
                assert again["repeated"] == 30 and all(answers[one["known_at"]] == one for one in again["answers"])
            for _ in range(count):
                reply = push(client, "killed", "DEMO", bars.iloc[place : place + 1])
                assert reply["repeated"] == 0, reply
                place += 1
                answers |= {one["known_at"]: one for one in reply["answers"]}
            if life == 0:
                process.kill()
                assert process.wait(60) == -signal.SIGKILL
            else:
                assert client.get("/health", headers={"Host": "evil.example"}).status_code == 400
                check_request_in_flight(process, client.base_url.port, columns_of(bars))
    frame = made.load("xgboost").predict(bars.iloc[:place], all_rows=True)
    wanted = {moment.isoformat(): row for moment, row in zip(frame.index, frame[P].to_numpy().tolist(), strict=True)}
    assert all([one[name] for name in P] == wanted[moment] for moment, one in answers.items())
    known = [moment for moment in wanted if moment > bars["timestamp"][HISTORY].isoformat()]
    assert set(known[:-1]) <= set(answers)


def check_request_in_flight(process, port: int, bars: dict[str, list]) -> None:
    """Stop the server by SIGTERM while a body arrives: the request is answered before it ends."""
    body = json.dumps({"bars": bars, "live": False}).encode()
    head = "POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: key\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sender:
        sender.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:-100])
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        sender.sendall(body[-100:])
        received = b""
        while piece := sender.recv(1 << 16):
            received += piece
    assert received.startswith(b"HTTP/1.1 200") and b'"p_long":' in received
    assert process.wait(60) == 0


@pytest.mark.soak
def test_many_requests_of_clients_at_once_get_the_answers_of_the_batch_and_memory_stays_flat(made):
    ends, sizes, bars = (HISTORY, HISTORY + REQUESTS // CLIENTS // 5, HISTORY + REQUESTS // CLIENTS), [], made.bars
    wanted = made.load("xgboost").predict(bars.iloc[: ends[-1]], all_rows=True)[P]
    with running_server(made.bundles["DEMO", "xgboost"]) as (process, client), ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(lambda number: push(client, f"load{number}", "DEMO", bars.iloc[:HISTORY]), range(CLIENTS)))
        for first, last in pairwise(ends):
            parts = [bars.iloc[place : place + 1] for place in range(first, last)]
            answers = list(pool.map(
                lambda number, parts=parts: [push(client, f"load{number}", "DEMO", one)["answers"] for one in parts],
                range(CLIENTS),
            ))  # fmt: skip
            assert all(one == answers[0] for one in answers) and sum(map(len, answers[0])) > len(parts) // 6
            for one in (one for part in answers[0] for one in part):
                assert [one[name] for name in P] == wanted.loc[one["known_at"]].tolist()
            sizes.append(psutil.Process(process.pid).memory_info().rss / 1e6)
        assert 'status="500"' not in client.get("/metrics").text
    assert sizes[1] - sizes[0] < GROWTH, sizes
