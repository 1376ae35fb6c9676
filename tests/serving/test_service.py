"""The service as a whole: guard, outcomes, metrics, pages, its own OpenAPI page, and hot swap under load."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jsonschema
import pandas as pd
import pytest
import requests
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ml_factory.evaluation.metrics import PROBABILITIES as P
from ml_factory.inference.guard.guarded_stream import GuardedStream
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.serving.served_bundle import ServedBundle
from tests.serving.conftest import ROOT, Server, StreamClient, columns_of, rows_body, running_server

HISTORY = 8000
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 12  # of each request and kind


@pytest.fixture(scope="module")
def file(made, tmp_path_factory) -> Path:
    """The file that `swapped` serves: at first the booster's bundle."""
    return Path(shutil.copy(made.bundles["DEMO", "xgboost"], tmp_path_factory.mktemp("swap") / "served.bundle"))


@pytest.fixture(scope="module")
def swapped(file) -> Iterator[Server]:
    """A server whose bundle's file may be replaced."""
    limits = ("--limit", "requests_per_second=100000", "--limit", "burst=100000")
    with running_server(file, "--guard", "stale=refuse", *limits) as server:
        yield server


def replace_file(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def test_guard_refuses_stale_bars_and_marks_history_as_without_clock(swapped, made):
    bars = columns_of(made.bars["DEMO"])
    with swapped.client() as client:
        stale = client.post("/predict", json={"bars": bars})
        assert stale.status_code == 422
        assert stale.json()["what"] == "The guard refuses these bars (stale)"
        assert re.search(r"the newest bar ended at 2024-02-0\d \d\d:\d\d UTC, \d+ open minutes before", stale.text)
        (answer,) = client.post("/predict", json={"bars": bars, "live": False}).json()["answers"]
        assert answer["guard"] == "ok"
        assert client.get("/info").json()["bundles"]["DEMO"]["guard"]["stale"] == "refuse"


def test_outcomes_metrics_status_and_pages_show_what_a_stream_answered(swapped, made):
    bars = made.bars["DEMO"]
    with swapped.client() as client, StreamClient(swapped, "shown") as stream:
        answers = stream.push("DEMO", bars.iloc[:HISTORY])["answers"]
        outcome = {"feed": "shown", "known_at": answers[-1]["known_at"], "label": 1}
        assert client.post("/outcome", json=outcome).json()["remembered"]
        assert not client.post("/outcome", json=outcome | {"known_at": "2020-01-01T00:00:00Z"}).json()["remembered"]
        assert client.post("/outcome", json=outcome | {"label": 2}).status_code == 422
        status = client.get("/status").json()
        (guard,) = [one for one in status["guards"] if one["feed"] == "shown"]
        assert guard["outcomes"] == 1 and guard["checks"]["gap"]["state"] in ("ok", "alarm")
        assert status["answers"][0] == answers[-1] | {
            "symbol": "DEMO", "run_id": status["bundles"][0]["run_id"], "bundle": status["bundles"][0]["bundle"]
        }  # fmt: skip
        metrics = client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert f'ml_factory_bundle{{bundle="{status["bundles"][0]["bundle"]}"' in metrics.text
        assert 'ml_factory_requests_total{method="POST",path="/outcome",status="200"} 2.0' in metrics.text
        assert re.search(r'ml_factory_answers_total\{guard="ok",symbol="DEMO"\} \d+', metrics.text)
        assert 'ml_factory_guard_alarm{check="stale",feed="shown",symbol="DEMO"} 0.0' in metrics.text
        assert "ml_factory_streams 1.0" in metrics.text
        for path in ("/", "/docs"):
            page = client.get(path)
            assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
            assert not re.search(r"(src|href)=.?(https?:)?//", page.text)  # nothing of another site


def test_every_request_of_openapi_page_answers_as_it_describes(swapped):
    schema = schemathesis.openapi.from_url(f"{swapped.url}/openapi.json")
    names = []
    with requests.Session() as session:
        session.trust_env = False
        for operation in (result.ok() for result in schema.get_all_operations()):
            names.append(f"{operation.method.upper()} {operation.path}")
            for mode in GenerationMode:
                if operation.path != "/reload" and (mode == GenerationMode.POSITIVE or operation.body):
                    check_operation(operation, mode, session)
    assert sorted(names) == [
        "GET /health", "GET /info", "GET /metrics", "GET /status", "POST /outcome", "POST /predict", "POST /reload"
    ]  # fmt: skip


def test_openapi_page_describes_the_stream_as_it_speaks(swapped, made):
    with swapped.client() as client:
        page = client.get("/openapi.json").json()
        assert "WebSocket" in client.get("/docs").text
    stream, schemas = page["x-websockets"]["/stream"], page["components"]["schemas"]

    def check(kind: str, message: dict) -> None:
        name = stream[kind][message["type"]]["$ref"].rpartition("/")[2]
        jsonschema.validate(message, {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})

    bars = columns_of(made.bars["DEMO"].iloc[:3])
    sent = [{"type": "bars", "id": 7, "symbol": "DEMO", "bars": bars, "live": False}, {"type": "position"},
            {"type": "advance", "until": made.bars["DEMO"]["timestamp"][3].isoformat()}]  # fmt: skip
    with StreamClient(swapped, "page") as connection:
        received = [connection.hello, *(connection.send(**one) for one in sent), connection.send(type="sell")]
    for one in sent:
        check("sent", one)
    assert [one["type"] for one in received] == ["hello", "ack", "position", "ack", "problem"]
    for one in received:
        check("received", one)
    assert set(stream["sent"]) == {"bars", "advance", "position"} and set(stream["closeCodes"]) >= {"1009", "1013"}
    with pytest.raises(jsonschema.ValidationError):
        check("received", received[1] | {"repeated": "no"})


def check_operation(operation, mode: GenerationMode, session: requests.Session) -> None:
    """Send generated requests: every answer is one that the page describes, and none a failure of the server."""
    quiet = [
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.filter_too_much,
        hypothesis.HealthCheck.data_too_large,
    ]

    @hypothesis.settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
                         suppress_health_check=quiet)  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        response = case.call(session=session, timeout=60)
        case.validate_response(response, checks=CHECKS)

    run()


def test_reload_refuses_damaged_bundle_and_bundle_of_other_symbol_and_goes_on(swapped, file, made):
    before = file.read_bytes()
    with swapped.client() as client:
        served = client.get("/health").json()["bundles"]
        for content, status, named in (
            (before[:-500], 409, "This file is no bundle, or it is cut short"),
            (made.bundles["MES", "linear"].read_bytes(), 422, "The new bundle has another symbol"),
        ):
            replace_file(file, content)
            answer = client.post("/reload")
            assert (answer.status_code, answer.json()["what"]) == (status, named)
            assert client.get("/health").json()["bundles"] == served
        replace_file(file, before)
        assert client.post("/reload").json()["bundles"]["DEMO"]["changed"] is False
        assert 'ml_factory_reloads_total{outcome="refused"} 2.0' in client.get("/metrics").text


def test_hot_swap_under_load_drops_and_mixes_no_answer(swapped, file, made, feature_rows):
    rows = feature_rows("DEMO", "xgboost").tail(40)
    bodies = [rows_body(rows.iloc[number : number + 4]) for number in range(0, 40, 4)]
    served = {
        one.id: one
        for one in (ServedBundle(made.load("DEMO", name), GuardSettings()) for name in ("xgboost", "linear"))
    }
    whole = {
        name: one.bundle.predict(made.bars["DEMO"], all_rows=True).loc[rows.index, P] for name, one in served.items()
    }
    failures, counts, done = [], dict.fromkeys(served, 0), threading.Event()

    def send(offset: int) -> None:
        with swapped.client() as client:
            number = offset
            while not done.is_set():
                place = number % len(bodies)
                answer = client.post("/predict", json=bodies[place])
                if answer.status_code != 200:
                    failures.append(answer.text)
                    return
                found = answer.json()
                got = pd.DataFrame(found["answers"])[P].to_numpy()
                wanted = whole[found["bundle"]].iloc[4 * place : 4 * place + 4].to_numpy()
                if abs(got - wanted).max() > 1e-12 or found["run_id"] != served[found["bundle"]].run_id:
                    failures.append(f"{found['bundle']}: {got} instead of {wanted}")
                counts[found["bundle"]] += 1
                number += 1

    def push(stream: StreamClient, number: int) -> None:
        reply = stream.push("DEMO", made.bars["DEMO"].iloc[number : number + 1])
        assert reply["type"] == "ack", reply
        replies.append((number, reply))

    replies: list[tuple[int, dict]] = []
    senders = [threading.Thread(target=send, args=(offset,)) for offset in (0, 5)]
    with StreamClient(swapped, "swap") as stream, swapped.client() as client:
        stream.push("DEMO", made.bars["DEMO"].iloc[:HISTORY])
        for sender in senders:
            sender.start()
        try:
            for number in range(HISTORY, HISTORY + 8):
                push(stream, number)
            replace_file(file, made.bundles["DEMO", "linear"].read_bytes())
            assert client.post("/reload").json()["bundles"]["DEMO"]["changed"]
            for number in range(HISTORY + 8, HISTORY + 20):
                push(stream, number)
            replace_file(file, made.bundles["DEMO", "xgboost"].read_bytes())
            swapped.process.send_signal(signal.SIGHUP)
            until = time.monotonic() + 60
            while (
                client.get("/health").json()["bundles"]["DEMO"] == replies[-1][1]["bundle"] and time.monotonic() < until
            ):
                time.sleep(0.05)
            for number in range(HISTORY + 20, HISTORY + 30):
                push(stream, number)
        finally:
            done.set()
            for sender in senders:
                sender.join(60)
    assert not failures, failures[:3]
    assert min(counts.values()) > 3, counts
    first, second, third = ({reply["bundle"] for number, reply in replies if number in span} for span in (
        range(HISTORY, HISTORY + 8), range(HISTORY + 8, HISTORY + 20), range(HISTORY + 20, HISTORY + 30)))  # fmt: skip
    assert len(first) == len(second) == 1 and first == third != second
    check_swapped_stream(replies, served, made.bars["DEMO"])


def check_swapped_stream(replies: list[tuple[int, dict]], served: dict[str, ServedBundle], bars: pd.DataFrame) -> None:
    """Every answer is that of the named bundle's own stream on all bars before it."""
    streams = {}
    for name, one in served.items():
        streams[name] = GuardedStream(one.bundle)
        streams[name].push(bars.iloc[: replies[0][0]])
    answers = 0
    for number, reply in replies:
        frames = {name: stream.push(bars.iloc[number : number + 1]) for name, stream in streams.items()}
        wanted = frames[reply["bundle"]]
        assert [one["known_at"] for one in reply["answers"]] == [moment.isoformat() for moment in wanted.index]
        for one, row in zip(reply["answers"], wanted[P].to_numpy().tolist(), strict=True):
            assert [one[name] for name in P] == pytest.approx(row, rel=0, abs=1e-12)
            answers += 1
    assert answers >= 5


# Predicts for the first time after loading; prints how many kernels that first prediction had to compile or read.
FIRST_REQUEST = """
import gc, json, sys
import pandas
from numba.core.dispatcher import Dispatcher
from ml_factory.serving.served_bundle import ServedBundle

def kernels():
    return {(one.py_func.__qualname__, str(types)) for one in gc.get_objects() if isinstance(one, Dispatcher)
            for types in one.signatures}

served = ServedBundle.load(sys.argv[1])
loaded = kernels()
served.predict_bars(pandas.read_csv(sys.argv[2]).to_dict("list"), 1, None)
print(json.dumps({"loaded": len(loaded), "more": sorted(kernels() - loaded)}))
"""


def test_a_loaded_bundle_has_predicted_so_that_the_first_request_compiles_nothing(made, tmp_path):
    made.bars["DEMO"].to_csv(tmp_path / "bars.csv", index=False)
    command = [sys.executable, "-W", "error", "-c", FIRST_REQUEST, str(made.bundles["DEMO", "xgboost"])]
    done = subprocess.run([*command, str(tmp_path / "bars.csv")], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found = json.loads(done.stdout)
    assert found["loaded"] > 5 and found["more"] == []
