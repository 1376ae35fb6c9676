"""Small bundles of two symbols, an application in this process, and servers in processes of their own."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pandas as pd
import pytest
from starlette.testclient import TestClient

from ml_factory import Bundle, GuardSettings, pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.storage.workspace import Workspace
from tests.contract.doors import DataSpec, FeatureSpec, ServedBundle, build_app, write_bundle

ROOT = Path(__file__).resolve().parents[2]
H = 5
SETTINGS = {  # on so few days the booster is no better than the clock: without it, it keeps trees, which read prices
    "xgboost": {"rounds": 30, "depth": 3, "min_leaf": 5.0, "threads": 1, "offset": "none"}, "linear": {"rounds": 20},
}  # fmt: skip
DATA = DataSpec(features=FeatureSpec(frames=(15,), families=("momentum", "volatility", "calendar")))


@dataclass(frozen=True)
class Made:
    """Files of the bundles xgboost and linear of DEMO and linear of MES, by (symbol, model), and the bars of both."""

    bundles: Mapping[tuple[str, str], Path]
    bars: pd.DataFrame

    def load(self, model: str) -> Bundle:
        return Bundle.load(self.bundles["DEMO", model])


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Made:
    """Models on features with a short warm-up; tests only read them. That of MES is DEMO's under another name."""
    root = tmp_path_factory.mktemp("served")
    workspace, bundles = Workspace(root / "workspace"), {}
    ensure_synthetic_demo_market(workspace, "DEMO", days=8)
    pipeline.prepare(workspace, "DEMO", (H,), settings=DATA)
    for model, settings in SETTINGS.items():
        pipeline.train(workspace, "DEMO", H, model, mirror="off", model_settings=settings)
        out = pipeline.export(workspace, "DEMO", H, model, formats=("bundle",), out=root / "bundles")
        bundles["DEMO", model] = out.paths["bundle"]
    linear = Bundle.load(bundles["DEMO", "linear"])
    other = replace(linear, description=linear.description | {"symbol": "MES"})
    bundles["MES", "linear"] = write_bundle(other, root / "bundles" / "MES.bundle")
    bars = pd.read_parquet(workspace.raw_bars("DEMO"))
    assert Bundle.load(bundles["DEMO", "xgboost"]).predict(bars, all_rows=True)["p_long"].nunique() > 100
    return Made(bundles, bars)


@contextmanager
def running_server(*words: object, **environment: str) -> Iterator[tuple[subprocess.Popen, httpx.Client]]:
    """Start `serve` on a free port of this machine, with a client of it, and stop it at the end."""
    command = [sys.executable, "-W", "error", "-m", "ml_factory", "serve", *map(str, words), "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ML_FACTORY_API_KEY": "", **environment}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    output: list[str] = []
    reader = threading.Thread(target=lambda: output.extend(process.stderr), daemon=True)
    reader.start()
    try:
        url = process.stdout.readline().partition(" at ")[2].split()
        assert url, process.wait(60) or reader.join(10) or "".join(output)
        headers = {"X-API-Key": environment.get("ML_FACTORY_API_KEY", "")}
        with httpx.Client(base_url=url[0], timeout=60, trust_env=False, headers=headers) as client:
            yield process, client
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            reader.join(10)
            process.stdout.close()
            process.stderr.close()
    assert "Traceback" not in "".join(output) and len(output) < 100, "".join(output)[:4000]


def app_client(
    *given: Path | ServedBundle, state: Path, key: str = "", hosts: tuple[str, ...] = ("*",), **guard
) -> TestClient:
    """A client of the application with these bundles, in this process."""
    served = [one if isinstance(one, ServedBundle) else ServedBundle.load(one, GuardSettings(**guard)) for one in given]
    return TestClient(build_app(served, state, key, hosts), raise_server_exceptions=False)


@pytest.fixture(scope="session")
def client(made, tmp_path_factory) -> TestClient:
    """Of DEMO's booster and MES's linear model, for tests that leave no trace in it but feeds of their own."""
    paths = made.bundles["DEMO", "xgboost"], made.bundles["MES", "linear"]
    return app_client(*paths, state=tmp_path_factory.mktemp("feeds"), gap="ok")


def columns_of(bars: pd.DataFrame) -> dict[str, list]:
    """The bars as a list for each column, as a request holds them."""
    return {name: [str(one) for one in bars[name]] if name == "timestamp" else bars[name].tolist() for name in bars}


def push(client: httpx.Client, name: str, symbol: str, bars: pd.DataFrame) -> dict:
    """Return the reply, or the problem, to these bars of a feed."""
    return client.post(f"/feeds/{name}/bars", json={"symbol": symbol, "bars": columns_of(bars), "live": False}).json()


def guide_message(case: str) -> re.Pattern:
    """The message of this row of docs/guide.md; … stands for any text."""
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| {case} \| `(.*)` \|$", guide, re.MULTILINE)
    return re.compile(".*".join(re.escape(part) for part in row.split("…")))
