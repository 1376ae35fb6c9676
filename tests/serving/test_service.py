"""The service as a whole: guard, outcomes, metrics, and what its OpenAPI page says."""

import json
import re
import subprocess
import sys
from dataclasses import replace

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

from ml_factory import GuardSettings
from ml_factory.errors import BarsError
from ml_factory.serving.feed import ServedBundle
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


def test_guard_refuses_only_where_it_refuses_the_newest_row(made, tmp_path):
    client = app_client(made.bundles["DEMO", "linear"], tmp_path, gap="refuse", gap_minutes=30)
    bars = made.bars["DEMO"].iloc[:HISTORY]
    body = {"bars": columns_of(bars.drop(bars.index[-180:-120])), "live": False, "last": 40}
    answers = client.post("/predict", json=body).json()["answers"]
    refused = [one for one in answers if one["guard"] == "refuse"]
    assert answers[-1]["guard"] != "refuse" and 10 < len(refused) < 40
    assert all(one["p_long"] is None and "open minutes without a bar" in one["reason"] for one in refused)
    problem = client.post("/predict", json=body | {"bars": columns_of(bars.drop(bars.index[-80:-20]))}).json()
    assert problem["status"] == 422 and "open minutes without a bar" in problem["got"]


def test_start_shows_what_fails_at_the_example_and_not_what_the_guard_refuses(made, tmp_path, monkeypatch):
    path, given = made.bundles["DEMO", "linear"], made.load("DEMO", "linear")
    guard = GuardSettings(**dict.fromkeys(("gap", "unit", "tick", "stuck", "range", "constant", "drift"), "refuse"))
    assert ServedBundle.load(path, guard).guard == guard

    def fail(*_):
        raise BarsError("Too few bars for a prediction")

    monkeypatch.setattr(ServedBundle, "predict", fail)
    with pytest.raises(BarsError, match="Too few bars"):
        ServedBundle.load(path)
    assert ServedBundle.load(replace(given, example={}).save(tmp_path / "b")).symbol == "DEMO"


def test_openapi_page_has_the_schemas_of_problems_and_outcomes(client):
    page = client.get("/openapi.json").json()
    outcome = page["paths"]["/feeds/{name}/outcomes"]["post"]["responses"]
    assert "#/components/schemas/OutcomeAnswer" in str(outcome["200"])
    for code in ("401", "409", "422", "503"):
        schema = outcome[code]["content"]["application/problem+json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/Problem"}
    problem = client.post("/predict", json={}).json()
    assert set(page["components"]["schemas"]["Problem"]["properties"]) == set(problem)


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
