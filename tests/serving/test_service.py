"""The service as a whole: guard, outcomes, metrics, and what its OpenAPI page says."""

import json
import re
import subprocess
import sys

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from tests.serving.conftest import ROOT, FeedClient, app_client, columns_of

HISTORY = 8000
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 12  # of each request and kind


@pytest.fixture(scope="module")
def client(made, tmp_path_factory) -> TestClient:
    return app_client(made.bundles["DEMO", "xgboost"], tmp_path_factory.mktemp("feeds"), stale="refuse")


def test_outcomes_info_and_metrics_show_what_a_feed_answered(client, made):
    feed = FeedClient(client, "shown")
    reply = feed.push("DEMO", made.bars["DEMO"].iloc[:HISTORY])
    outcome = {"known_at": reply["answers"][-1]["known_at"], "label": 1}
    assert feed.send("outcomes", **outcome)["remembered"]
    assert not feed.send("outcomes", **outcome | {"known_at": "2020-01-01T00:00:00Z"})["remembered"]
    assert feed.send("outcomes", **outcome | {"label": 2})["status"] == 422
    assert FeedClient(client, "absent").send("outcomes", **outcome)["what"] == "This feed has no bars"
    (shown,) = client.get("/info").json()["feeds"]
    assert (shown["symbol"], shown["feed"], shown["outcomes"]) == ("DEMO", "shown", 1)
    assert shown["last_bar_end"] == reply["next"] and shown["reference"].startswith("training")
    metrics = client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    path = 'method="POST",path="/feeds/{name}/outcomes",status="200"'
    assert f"ml_factory_requests_total{{{path}}} 2.0" in metrics.text
    assert re.search(r'ml_factory_answers_total\{guard="ok",symbol="DEMO"\} \d+', metrics.text)
    assert 'ml_factory_guard_alarm{check="stale",feed="shown",symbol="DEMO"} 0.0' in metrics.text
    assert "/openapi.json" in client.get("/docs").text


def test_guard_refuses_stale_bars_and_marks_history_as_without_clock(client, made):
    bars = columns_of(made.bars["DEMO"])
    stale = client.post("/predict", json={"bars": bars})
    assert stale.status_code == 422 and stale.json()["what"] == "The guard refuses these bars"
    assert re.search(r"the newest bar ended at 2024-02-0\d \d\d:\d\d UTC, \d+ open minutes before", stale.text)
    (answer,) = client.post("/predict", json={"bars": bars, "live": False}).json()["answers"]
    assert answer["guard"] == "ok"
    assert client.get("/info").json()["bundles"]["DEMO"]["guard"]["stale"] == "refuse"


def test_every_request_of_openapi_page_answers_as_it_describes(client):
    schema, names = schemathesis.openapi.from_asgi("/openapi.json", client.app), []
    for operation in (result.ok() for result in schema.get_all_operations()):
        names.append(f"{operation.method.upper()} {operation.path}")
        for mode in GenerationMode:
            if mode == GenerationMode.POSITIVE or operation.body:
                check_operation(operation, mode)
    assert sorted(names) == [
        "GET /health", "GET /info", "GET /metrics", "POST /feeds/{name}/bars", "POST /feeds/{name}/outcomes",
        "POST /predict",
    ]  # fmt: skip


def check_operation(operation, mode: GenerationMode) -> None:
    """Send generated requests: every answer is one that the page describes, and none a failure of the server."""
    quiet = [
        hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much, hypothesis.HealthCheck.data_too_large,
    ]  # fmt: skip

    @hypothesis.settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
                         suppress_health_check=quiet)  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        case.validate_response(case.call(), checks=CHECKS)

    run()


# Predicts for the first time after loading; prints how many kernels that first prediction had to compile or read.
FIRST_REQUEST = """
import gc, json, sys
import pandas
from numba.core.dispatcher import Dispatcher
from ml_factory.serving.feed import ServedBundle

def kernels():
    return {(one.py_func.__qualname__, str(types)) for one in gc.get_objects() if isinstance(one, Dispatcher)
            for types in one.signatures}

served = ServedBundle.load(sys.argv[1])
loaded = kernels()
served.predict(pandas.read_csv(sys.argv[2]).to_dict("list"), 1, None)
print(json.dumps({"loaded": len(loaded), "more": sorted(kernels() - loaded)}))
"""


def test_a_loaded_bundle_has_predicted_so_that_the_first_request_compiles_nothing(made, tmp_path):
    made.bars["DEMO"].to_csv(tmp_path / "bars.csv", index=False)
    command = [sys.executable, "-W", "error", "-c", FIRST_REQUEST, str(made.bundles["DEMO", "xgboost"])]
    done = subprocess.run([*command, str(tmp_path / "bars.csv")], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found = json.loads(done.stdout)
    assert found["loaded"] > 5 and found["more"] == []
