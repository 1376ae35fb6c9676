"""Clients at once that also send what is wrong: no wrong answer, no failure of the server, and memory that stays flat.

`SERVING_REQUESTS=100000 python -m pytest tests/serving/test_load.py -m soak` sends that many instead of 10,000.
"""

import os
import random
import threading
from collections import Counter

import pandas as pd
import psutil
import pytest

from ml_factory.evaluation.metrics import PROBABILITIES as P
from tests.serving.conftest import FeedClient, Files, Server, columns_of, running_server

HISTORY, CLIENTS = 6000, 3
FEW, MANY = 450, int(os.environ.get("SERVING_REQUESTS", "10000"))
GROWTH = 30.0  # megabytes between a fifth of the requests and their end


class Client(threading.Thread):
    """One client with a feed of its own; what was wrong is in `failures`."""

    def __init__(self, number: int, server: Server, made: Files, requests: int):
        super().__init__(daemon=True)
        self.number, self.server, self.requests = number, server, requests
        self.bars, self.place = made.bars["DEMO"], HISTORY
        self.wanted = made.load("DEMO", "xgboost").predict(self.bars, all_rows=True)[P]
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        chosen = random.Random(self.number)
        kinds = {"push": 8, "doubled": 2, "out_of_order": 1, "malformed": 1, "wrong": 1, "oversized": 0.05,
                 "raw": 0.2}  # fmt: skip
        try:
            with self.server.client() as self.client:
                self.stream = FeedClient(self.client, f"load{self.number}")
                if self.place == HISTORY:
                    self.check(self.stream.push("DEMO", self.bars.iloc[:HISTORY])["answers"])
                for _ in range(self.requests):
                    kind = chosen.choices(list(kinds), list(kinds.values()))[0]
                    getattr(self, kind)()
                    self.counts[kind] += 1
        except Exception as error:  # noqa: BLE001 - reported by the test
            self.failures.append(f"{type(error).__name__}: {error}"[:300])

    def check(self, answers: list[dict]) -> None:
        """Compare with the batch of all bars."""
        for one in answers:
            wanted = self.wanted.loc[pd.Timestamp(one["known_at"])].tolist()
            if [one[name] for name in P] != wanted:
                self.failures.append(f"{one} instead of {wanted}")

    def expect(self, good: bool, what: object) -> None:
        if not good:
            self.failures.append(str(what)[:300])

    def push(self) -> None:
        if self.place >= len(self.bars) - 3:
            return self.doubled()
        reply = self.stream.push("DEMO", self.bars.iloc[self.place : self.place + 1])
        self.expect(reply.get("repeated") == 0, reply)
        self.check(reply["answers"])
        self.place += 1
        return None

    def doubled(self) -> None:
        reply = self.stream.push("DEMO", self.bars.iloc[self.place - 1 : self.place])
        self.expect(reply.get("repeated") == 1, reply)
        self.check(reply["answers"])

    def out_of_order(self) -> None:
        reply = self.stream.push("DEMO", self.bars.iloc[[self.place + 1, self.place]])
        self.expect(reply.get("status") == 422, reply)

    def malformed(self) -> None:
        header = {"Content-Type": "application/json"}
        answer = self.client.post("/predict", content=b'{"bars": [{"open": "x"', headers=header)
        self.expect(answer.status_code == 400, answer.text)

    def wrong(self) -> None:
        answer = self.client.post("/predict", json={"symbol": "ES", "bars": [{"open": 1}]})
        self.expect(answer.status_code == 422, answer.text)

    def oversized(self) -> None:
        answer = self.client.post("/predict", content=b" " * 9_000_000, headers={"Content-Type": "application/json"})
        self.expect(answer.status_code == 413, answer.text)

    def raw(self) -> None:
        answer = self.client.post("/predict", json={"bars": columns_of(self.bars.iloc[:HISTORY]), "live": False})
        self.expect(answer.status_code == 200, answer.text)


def megabytes(server: Server) -> float:
    return psutil.Process(server.process.pid).memory_info().rss / 1e6


@pytest.mark.parametrize("requests", [FEW, pytest.param(MANY, marks=pytest.mark.soak)])
def test_concurrent_clients_get_no_wrong_answer_and_memory_stays_flat(made, requests):
    with running_server(made.bundles["DEMO", "xgboost"]) as server:
        before, places = 0.0, dict.fromkeys(range(CLIENTS), HISTORY)
        for part in (requests // 5, requests - requests // 5):
            clients = [Client(number, server, made, part // CLIENTS) for number in range(CLIENTS)]
            for client in clients:
                client.place = places[client.number]
                client.start()
            for client in clients:
                client.join()
            assert not [failure for client in clients for failure in client.failures][:3]
            places = {client.number: client.place for client in clients}
            before = before or megabytes(server)
        grown = megabytes(server) - before
        with server.client() as one:
            assert 'status="500"' not in one.get("/metrics").text
    counts = sum((client.counts for client in clients), Counter())
    assert min(counts[name] for name in ("push", "doubled", "out_of_order", "malformed", "wrong")) > 3, counts
    if requests > 5000:
        assert grown < GROWTH, f"{grown:.0f} MB more after {requests} requests"
