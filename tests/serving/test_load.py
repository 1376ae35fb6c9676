"""Eight clients at once that also send what is wrong: no wrong answer, no failure, and memory that stays flat.

`SERVING_REQUESTS=100000 python -m pytest tests/serving/test_load.py -m soak` sends that many instead of 10,000.
"""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import psutil
import pytest

from ml_factory.evaluation.metrics import PROBABILITIES as P
from tests.serving.conftest import FeedClient, Files, Server, columns_of, running_server

HISTORY, CLIENTS = 6000, 8
REQUESTS = int(os.environ.get("SERVING_REQUESTS", "10000"))
GROWTH = 30.0  # megabytes between a fifth of the requests and their end
KINDS = {"push": 8, "doubled": 2, "out of order": 1, "malformed": 1, "wrong symbol": 1, "oversized": 0.05, "raw": 0.2}
STATUS = {"out of order": 422, "malformed": 400, "wrong symbol": 422, "oversized": 413, "raw": 200}


def send_many(number: int, place: int, server: Server, made: Files, wanted: pd.DataFrame, requests: int) -> int:
    """Send requests from one feed's place on, and return its place at the end."""
    chosen, bars = random.Random(number + place), made.bars["DEMO"]
    with server.client() as client:
        feed = FeedClient(client, f"load{number}")
        if place == HISTORY:
            feed.push("DEMO", bars.iloc[:HISTORY])
        for kind in chosen.choices(list(KINDS), list(KINDS.values()), k=requests):
            if kind in ("push", "doubled"):
                place += kind == "push" and place < len(bars) - 3
                reply = feed.push("DEMO", bars.iloc[place - 1 : place])
                for one in reply["answers"]:
                    assert [one[name] for name in P] == wanted.loc[pd.Timestamp(one["known_at"])].tolist(), one
                continue
            body = {
                "out of order": {"bars": columns_of(bars.iloc[[place + 1, place]])},
                "wrong symbol": {"symbol": "ES", "bars": [{"open": 1}]},
                "raw": {"bars": columns_of(bars.iloc[:HISTORY]), "live": False},
            }.get(kind)
            path = f"/feeds/load{number}/bars" if kind == "out of order" else "/predict"
            text = {"malformed": b'{"bars": [{"open": "x"', "oversized": b" " * 9_000_000}.get(kind)
            answer = client.post(path, json=body, content=text, headers={"Content-Type": "application/json"})
            assert answer.status_code == STATUS[kind], answer.text
    return place


@pytest.mark.soak
def test_concurrent_clients_get_no_wrong_answer_and_memory_stays_flat(made):
    wanted = made.load("DEMO", "xgboost").predict(made.bars["DEMO"], all_rows=True)[P]
    with running_server(made.bundles["DEMO", "xgboost"]) as server, ThreadPoolExecutor(CLIENTS) as pool:
        places, sizes = [HISTORY] * CLIENTS, []
        for part in (REQUESTS // 5, REQUESTS - REQUESTS // 5):
            given = [(number, places[number], server, made, wanted, part // CLIENTS) for number in range(CLIENTS)]
            places = list(pool.map(lambda one: send_many(*one), given))
            sizes.append(psutil.Process(server.process.pid).memory_info().rss / 1e6)
        with server.client() as one:
            assert 'status="500"' not in one.get("/metrics").text
    assert min(places) > HISTORY + 5
    assert REQUESTS < 5000 or sizes[1] - sizes[0] < GROWTH, sizes
