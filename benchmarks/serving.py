"""Requests a second and latency of the service, compared with a bare FastAPI echo of the same bodies.

    python -m benchmarks.serving [--requests 300] [--rounds 3] [--clients 2] [--model xgboost]

Trains a small model on the demo market in a temporary workspace, starts `serve` and the echo as processes of their own,
and sends each body to both in turns. One JSON line for each of `bars` (/predict of the raw bars of the warm-up) and
`feed` (one bar of a feed):
  ours_per_s, echo_per_s            requests a second of `clients` connections, the best round
  ours_p50_ms, ours_p99_ms, echo_*  wall of one request of one connection, all rounds
  times_echo_p50                    ours over the echo's, the median of the rounds
  cpu_ms                            CPU of the server process for a request
and one for a cold start: wall and CPU seconds from the command to its first answer.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pandas as pd
import psutil

from benchmarks.measure import digits, print_json
from ml_factory import pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.inference.bundle import Bundle
from ml_factory.serving.feed import kept_bars
from ml_factory.storage.workspace import Workspace

HORIZON = 20
ECHO = """
import socket, sys, uvicorn
from fastapi import FastAPI, Request, Response

app = FastAPI()

@app.post("/{path:path}")
async def echo(request: Request):
    return Response(await request.body(), media_type="application/json")

with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
    listener.bind(("127.0.0.1", 0))
    print("serving at http://127.0.0.1:%d" % listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, ws="none")).run([listener])
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


class Sender:
    """One connection that posts body after body to a path."""

    def __init__(self, url: str, path: str, bodies: Iterable[bytes]):
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=60)
        self._path, self._bodies = path, iter(bodies)

    def send(self) -> None:
        content = next(self._bodies)
        answer = self._client.post(self._path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200, answer.text

    def close(self) -> None:
        self._client.close()


def latencies(sender: Sender, count: int) -> list[float]:
    """Return the wall seconds of requests of one connection."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        sender.send()
        taken.append(time.perf_counter() - began)
    return taken


def rate(senders: list[Sender], count: int) -> float:
    """Return the requests a second of several connections, each of which sends `count`."""
    threads = [threading.Thread(target=latencies, args=(sender, count)) for sender in senders]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(senders) * count / (time.perf_counter() - began)


def compare(
    name: str, sides: dict[str, Callable[[int], Sender]], processes: dict[str, psutil.Process],
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


def body(bars: pd.DataFrame) -> bytes:
    return json.dumps({"bars": columns(bars), "live": False}).encode()


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Train, start the servers, and print the lines."""
    workspace = Workspace(folder / "workspace")
    ensure_synthetic_demo_market(workspace, "DEMO", days=options.days)
    pipeline.prepare(workspace, "DEMO", (HORIZON,))
    pipeline.train(workspace, "DEMO", HORIZON, options.model, quick=True, mirror="off")
    path = pipeline.export(workspace, "DEMO", HORIZON, options.model, formats=("bundle",)).paths["bundle"]
    bundle, bars = Bundle.load(path), pd.read_parquet(workspace.raw_bars("DEMO"))
    warmup = min(kept_bars(bundle), len(bars) - 5000)
    ours = ["-m", "ml_factory", "serve", path, "--port", 0, "--state", folder / "state"]
    with server(*ours) as (url, ours_process, start), server("-c", ECHO) as (echo, echo_process, _):
        processes = {"ours": ours_process, "echo": echo_process}
        print_json(bench="serving", request="cold start", **{name: digits(one) for name, one in start.items()})
        whole = body(bars[-warmup:])
        compare("bars", {
            "ours": lambda _: Sender(url, "/predict", itertools.repeat(whole)),
            "echo": lambda _: Sender(echo, "/predict", itertools.repeat(whole)),
        }, processes, options)  # fmt: skip
        bodies = [body(bars[:warmup]), *(body(bars[number : number + 1]) for number in range(warmup, len(bars)))]
        compare("feed", {
            "ours": lambda number: Sender(url, f"/feeds/bench{number}/bars", bodies),
            "echo": lambda number: Sender(echo, "/feeds", bodies),
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
