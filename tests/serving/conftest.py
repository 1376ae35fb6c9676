"""Small bundles of two symbols, and servers in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pandas as pd
import pytest
from websockets.sync.client import connect

from ml_factory import Bundle, pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.features.build import FeatureSpec, build_features
from ml_factory.settings import DataSpec
from ml_factory.storage.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
H = 5
SETTINGS = {"xgboost": {"rounds": 30, "depth": 3, "min_leaf": 5.0, "threads": 1}, "linear": {"rounds": 20}}
FAMILIES = ("momentum", "volatility", "calendar")


@dataclass(frozen=True)
class Files:
    """Bundles by (symbol, model), and the raw bars by symbol."""

    bundles: Mapping[tuple[str, str], Path]
    bars: Mapping[str, pd.DataFrame]

    def load(self, symbol: str, model: str) -> Bundle:
        return Bundle.load(self.bundles[symbol, model])


@dataclass(frozen=True)
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen
    url: str

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send the signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Files:
    """Models of two symbols on features with a short warm-up; tests only read them."""
    root = tmp_path_factory.mktemp("served")
    workspace, bundles, bars = Workspace(root / "workspace"), {}, {}
    data = DataSpec(features=FeatureSpec(frames=(15,), families=FAMILIES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ML_FACTORY_WANDB", "off")
        for seed, (symbol, models) in enumerate({"DEMO": ("xgboost", "linear"), "MES": ("linear",)}.items()):
            ensure_synthetic_demo_market(workspace, symbol, seed, days=8)
            pipeline.prepare(workspace, symbol, (H,), settings=data)
            bars[symbol] = pd.read_parquet(workspace.raw_bars(symbol))
            for model in models:
                pipeline.train(workspace, symbol, H, model, mirror="off", model_settings=SETTINGS[model])
                out = pipeline.export(workspace, symbol, H, model, formats=("bundle",), out=root / "bundles")
                bundles[symbol, model] = out.paths["bundle"]
    return Files(bundles, bars)


@contextmanager
def running_server(*words: object, prefix: tuple[str, ...] = (), **environment: str) -> Iterator[Server]:
    """Start `serve` on a free port of this machine, and stop it at the end.

    prefix : words of the command that starts it
    """
    command = [*prefix, sys.executable, "-W", "error", "-m", "ml_factory", "serve", *map(str, words), "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ML_FACTORY_API_KEY": "", **environment}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    output: list[str] = []
    reader = threading.Thread(target=lambda: output.extend(process.stderr), daemon=True)
    reader.start()
    try:
        line = process.stdout.readline()
        if " at http://" not in line:
            process.wait(60)
            reader.join(10)
            pytest.fail(f"the server did not start: {line} {''.join(output)}")
        yield Server(process, line.split(" at ")[1].split()[0])
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(10)
        process.stdout.close()
        process.stderr.close()
    assert "Traceback" not in "".join(output), "".join(output)[:4000]
    assert len(output) < 100, "".join(output)[:4000]


@pytest.fixture(scope="session")
def server(made) -> Iterator[Server]:
    """A server of DEMO's booster and MES's linear model, for tests that leave no trace in it."""
    with running_server(made.bundles["DEMO", "xgboost"], made.bundles["MES", "linear"]) as one:
        yield one


@pytest.fixture(scope="session")
def client(server) -> Iterator[httpx.Client]:
    with server.client() as one:
        yield one


def columns_of(bars: pd.DataFrame) -> dict[str, list]:
    """The bars as a list for each column, as a request holds them."""
    return {name: [str(one) for one in bars[name]] if name == "timestamp" else bars[name].tolist() for name in bars}


def list_of(bars: pd.DataFrame) -> list[dict]:
    """The bars as a list of bars."""
    return json.loads(bars.assign(timestamp=bars["timestamp"].astype(str)).to_json(orient="records"))


@pytest.fixture(scope="session")
def feature_rows(made) -> Callable[[str, str], pd.DataFrame]:
    """feature_rows(symbol, model): the feature rows of all raw bars."""

    def of(symbol: str, model: str) -> pd.DataFrame:
        spec = made.load(symbol, model).spec
        return build_features(spec.check_bars(made.bars[symbol])[0], spec.market, spec.features).to_frame()

    return of


def rows_body(rows: pd.DataFrame, **more: object) -> dict:
    """Feature rows as a request holds them."""
    values = np.where(np.isnan(rows.to_numpy(float)), None, rows.to_numpy(float)).tolist()
    moments = [moment.isoformat() for moment in rows.index]
    return {"rows": {"columns": list(rows.columns), "values": values, "known_at": moments}, **more}


class StreamClient:
    """A connection to /stream that sends one message and reads its reply."""

    def __init__(self, server: Server, feed: str = "default", **options):
        address = f"{server.url.replace('http', 'ws')}/stream?feed={feed}"
        self._connection = connect(address, proxy=None, max_size=None, **options)

    def send(self, **message: object) -> dict:
        self._socket.send(json.dumps(message))
        return json.loads(self._socket.recv(120))

    def push(self, symbol: str, bars: pd.DataFrame, **more: object) -> dict:
        return self.send(type="bars", symbol=symbol, bars=columns_of(bars), **{"live": False, **more})

    def send_text(self, text: str | bytes) -> dict:
        self._socket.send(text)
        return json.loads(self._socket.recv(60))

    def send_pieces(self, pieces: list[str]) -> None:
        """Send one message in frames."""
        self._socket.send(pieces if len(pieces) > 1 else pieces[0])

    def receive(self) -> dict:
        return json.loads(self._socket.recv(60))

    def send_and_leave(self, **message: object) -> None:
        """Send a message, and read no reply."""
        self._socket.send(json.dumps(message))

    def __enter__(self) -> "StreamClient":
        self._socket = self._connection.__enter__()
        self.hello = json.loads(self._socket.recv(60))
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.__exit__(*error)
