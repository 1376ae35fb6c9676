"""Small bundles of two symbols, and servers in processes of their own."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pandas as pd
import pytest
from starlette.testclient import TestClient

from ml_factory import Bundle, GuardSettings, pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.features.build import FeatureSpec
from ml_factory.serving.app import build_app
from ml_factory.serving.feed import ServedBundle
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
    bundles = made.bundles["DEMO", "xgboost"], made.bundles["MES", "linear"]
    with running_server(*bundles, "--guard", "gap=ok") as one:
        yield one


@pytest.fixture(scope="session")
def client(server) -> Iterator[httpx.Client]:
    with server.client() as one:
        yield one


def app_client(path: Path, folder: Path, key: str = "", **guard: str | int) -> TestClient:
    """A client of the application with this bundle, in this process."""
    served = ServedBundle.load(path, GuardSettings(**guard))
    return TestClient(build_app([served], folder, key), raise_server_exceptions=False)


def columns_of(bars: pd.DataFrame) -> dict[str, list]:
    """The bars as a list for each column, as a request holds them."""
    return {name: [str(one) for one in bars[name]] if name == "timestamp" else bars[name].tolist() for name in bars}


def list_of(bars: pd.DataFrame) -> list[dict]:
    """The bars as a list of bars."""
    return json.loads(bars.assign(timestamp=bars["timestamp"].astype(str)).to_json(orient="records"))


@dataclass(frozen=True)
class FeedClient:
    """A client that pushes bars to one feed."""

    http: httpx.Client
    name: str

    def push(self, symbol: str, bars: pd.DataFrame, *, live: bool = False) -> dict:
        """Return the reply, or the problem, to these bars."""
        return self.send("bars", symbol=symbol, bars=columns_of(bars), live=live)

    def send(self, path: str, **body: object) -> dict:
        return self.http.post(f"/feeds/{self.name}/{path}", json=body).json()
