"""Requests a second and latency of the service, compared with a bare FastAPI echo of the same bodies.

    python -m benchmarks.serving [--requests 300] [--rounds 3] [--clients 2] [--model xgboost]

Trains a small model on the demo market in a temporary workspace, starts `serve` and the echo as processes of their own,
and sends each body to both in turns. One JSON line for each of `rows` (/predict of one feature row), `bars` (/predict
of the raw bars of the warm-up) and `stream` (/stream, one bar, with and without its log on the disk):
  ours_per_s, echo_per_s            requests a second of `clients` connections, the best round
  ours_p50_ms, ours_p99_ms, echo_*  wall of one request of one connection, all rounds
  times_echo_p50                    ours over the echo's, the median of the rounds
  cpu_ms                            CPU of the server process for a request
and one for a cold start: wall and CPU seconds from the command to its first answer.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pandas as pd
import psutil
from websockets.sync.client import connect

from benchmarks.measure import digits, print_json
from ml_factory import pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.features.build import build_features
from ml_factory.inference.bundle import Bundle
from ml_factory.serving.feed import kept_bars
from ml_factory.storage.workspace import Workspace

HORIZON = 20
ECHO = """
import socket, sys, uvicorn
from fastapi import FastAPI, Request, Response, WebSocket

app = FastAPI()

@app.post("/predict")
async def echo(request: Request):
    return Response(await request.body(), media_type="application/json")

@app.websocket("/stream")
async def stream(socket: WebSocket):
    await socket.accept()
    while True:
        await socket.send_text(await socket.receive_text())

with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
    listener.bind(("127.0.0.1", 0))
    print("serving at http://127.0.0.1:%d" % listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, http="httptools", ws="websockets-sansio",
                                  ws_per_message_deflate=False, loop="asyncio")).run([listener])
"""


@contextmanager
def server(*arguments: object) -> Iterator[tuple[str, psutil.Process, dict[str, float]]]:
    """Start a server that prints its address; yield it, its process, and the seconds of its start."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "ML_FACTORY_API_KEY": ""},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        url = process.stdout.readline().split(" at ")[1].split()[0]
        found = psutil.Process(process.pid)
        cpu = found.cpu_times()
        yield url, found, {"wall_s": time.perf_counter() - began, "cpu_s": cpu.user + cpu.system}
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


class HttpSender:
    """One connection that posts a body to /predict."""

    def __init__(self, url: str, body: bytes):
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=60)
        self._body = body

    def send(self) -> None:
        answer = self._client.post("/predict", content=self._body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200, answer.text

    def close(self) -> None:
        self._client.close()


class StreamSender:
    """One connection that pushes bar after bar to a feed of its own."""

    def __init__(self, url: str, feed: str, history: str | None, bars: list[str]):
        self._connection = connect(f"{url.replace('http', 'ws')}/stream?feed={feed}", proxy=None, max_size=None)
        self._socket, self._bars = self._connection.__enter__(), iter(bars)
        if history is not None:
            self._socket.recv()
            self._send(history)

    def send(self) -> None:
        self._send(next(self._bars))

    def close(self) -> None:
        self._connection.__exit__(None, None, None)

    def _send(self, text: str) -> None:
        self._socket.send(text)
        reply = self._socket.recv()
        assert '"type":"problem"' not in str(reply), reply


def latencies(sender: HttpSender | StreamSender, count: int) -> list[float]:
    """Return the wall seconds of requests of one connection."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        sender.send()
        taken.append(time.perf_counter() - began)
    return taken


def rate(senders: list[HttpSender | StreamSender], count: int) -> float:
    """Return the requests a second of several connections, each of which sends `count`."""
    threads = [threading.Thread(target=latencies, args=(sender, count)) for sender in senders]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(senders) * count / (time.perf_counter() - began)


def compare(
    name: str, sides: dict[str, Callable[[int], HttpSender | StreamSender]], processes: dict[str, psutil.Process],
    options: argparse.Namespace
) -> None:  # fmt: skip
    """Send to all sides in turns and print a line for each but the echo. sides : number of a connection -> sender."""
    with ExitStack() as stack:
        senders = {side: [make(number) for number in range(options.clients)] for side, make in sides.items()}
        for one in [sender for several in senders.values() for sender in several]:
            stack.callback(one.close)
        walls: dict[str, list[list[float]]] = {side: [] for side in sides}
        rates: dict[str, list[float]] = {side: [] for side in sides}
        cpu: dict[str, float] = dict.fromkeys(sides, 0.0)
        for _ in range(options.rounds):
            for side, several in senders.items():
                before = sum(processes[side].cpu_times()[:2])
                walls[side].append(latencies(several[0], options.requests))
                cpu[side] += sum(processes[side].cpu_times()[:2]) - before
                rates[side].append(rate(several, options.requests // options.clients))
    for side in (side for side in sides if side != "echo"):
        facts = {"bench": "serving", "request": name, "side": side, "clients": options.clients}
        for shown, measured in (("ours", side), ("echo", "echo")):
            p50, p99 = np.percentile(np.concatenate(walls[measured]), [50, 99]) * 1e3
            facts |= {f"{shown}_per_s": digits(max(rates[measured])), f"{shown}_p50_ms": digits(p50)}
            facts |= {f"{shown}_p99_ms": digits(p99)}
        ratios = [np.median(one) / np.median(other) for one, other in zip(walls[side], walls["echo"], strict=True)]
        facts["times_echo_p50"] = digits(statistics.median(ratios), 3)
        facts["cpu_ms"] = digits(1e3 * cpu[side] / (options.rounds * options.requests))
        print_json(**facts)


def columns(bars: pd.DataFrame) -> dict[str, list]:
    return {name: [str(one) for one in bars[name]] if name == "timestamp" else bars[name].tolist() for name in bars}


def message(bars: pd.DataFrame) -> str:
    return json.dumps({"type": "bars", "bars": columns(bars), "live": False})


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Train, start the servers, and print the lines."""
    workspace = Workspace(folder / "workspace")
    ensure_synthetic_demo_market(workspace, "DEMO", days=options.days)
    pipeline.prepare(workspace, "DEMO", (HORIZON,))
    pipeline.train(workspace, "DEMO", HORIZON, options.model, quick=True, mirror="off")
    path = pipeline.export(workspace, "DEMO", HORIZON, options.model, formats=("bundle",)).paths["bundle"]
    bundle, bars = Bundle.load(path), pd.read_parquet(workspace.raw_bars("DEMO"))
    warmup = min(kept_bars(bundle), len(bars) - 5000)
    checked, _ = bundle.spec.check_bars(bars)
    row = build_features(checked, bundle.spec.market, bundle.spec.features).to_frame().iloc[-1]
    rows = {"columns": list(row.index), "values": [[None if np.isnan(one) else float(one) for one in row]]}
    limits = [word for name in ("requests_per_second", "burst") for word in ("--limit", f"{name}=1000000")]
    ours = ["-m", "ml_factory", "serve", path, "--port", 0, *limits]
    with (
        server(*ours) as (url, ours_process, start), server("-c", ECHO) as (echo, echo_process, _),
        server(*ours, "--state", folder / "state") as (durable, durable_process, _),
    ):  # fmt: skip
        processes = {"ours": ours_process, "temporary": ours_process, "on disk": durable_process, "echo": echo_process}
        print_json(bench="serving", request="cold start", **{name: digits(one) for name, one in start.items()})
        for name, body in (("rows", {"rows": rows}), ("bars", {"bars": columns(bars[-warmup:]), "live": False})):
            text = json.dumps(body).encode()
            sides = {"ours": lambda _, text=text: HttpSender(url, text)}
            compare(name, sides | {"echo": lambda _, text=text: HttpSender(echo, text)}, processes, options)
        history = message(bars[:warmup])
        singles = [message(bars[number : number + 1]) for number in range(warmup, len(bars))]
        compare("stream", {
            "temporary": lambda number: StreamSender(url, f"bench{number}", history, singles),
            "on disk": lambda number: StreamSender(durable, f"bench{number}", history, singles),
            "echo": lambda number: StreamSender(echo, "echo", None, singles),
        }, processes, options)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300, help="of a round and connection")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--model", default="xgboost")
    parser.add_argument("--days", type=int, default=30)
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), parser.parse_args())


if __name__ == "__main__":
    main()
