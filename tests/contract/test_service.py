"""Requests to the service: answers of the batch, feeds, limits, keys, and problems in place of failures."""

import json
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from types import SimpleNamespace

import hypothesis
import pandas as pd
import pytest
import schemathesis
from pydantic import ValidationError
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ml_factory import GuardSettings
from ml_factory.errors import SettingsError
from tests.contract import doors
from tests.contract.doors import PROBABILITIES as P
from tests.contract.service import app_client, columns_of, guide_message, push

HISTORY = 8000
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 8  # of each request and kind
JSON = {"Content-Type": "application/json"}


def test_predict_of_raw_bars_in_both_forms_equals_batch_to_the_bit(client, made):
    bundle = made.load("xgboost")
    wanted = bundle.predict(made.bars, all_rows=True).tail(40)
    rows = json.loads(made.bars.assign(timestamp=made.bars["timestamp"].astype(str)).to_json(orient="records"))
    for bars in (columns_of(made.bars), rows):
        got = client.post("/predict", json={"symbol": "DEMO", "bars": bars, "live": False, "last": 40}).json()
        assert [[one[name] for name in P] for one in got["answers"]] == wanted[P].to_numpy().tolist()
        assert [pd.Timestamp(one["known_at"]) for one in got["answers"]] == list(wanted.index)
        assert [one["split"] for one in got["answers"]] == wanted["split"].tolist()
        assert got["run_id"] == bundle.description["run_id"] and len(got["bundle"]) == 16


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"bars": "B"}, "Several symbols are served [symbol]. got none, wanted one of DEMO, MES."),
        ({"symbol": "NQ", "bars": "B"}, "guide: wrong symbol"),
        ({"symbol": "MES", "bars": "-low"}, "guide: missing column"),
        ({"symbol": "MES", "bars": "few"}, "Too few bars"),
        ({"symbol": "MES", "bars": "again"}, "contradict another row"),
        ({"symbol": "MES", "bars": {"open": [1], "close": [1, 2]}}, "All arrays must be of the same length"),
        ({"symbol": "MES", "bars": [{"timestamp": "soon", "open": 1, "high": 1, "low": 1, "close": 1}]}, "timestamp"),
        ({"symbol": "MES", "rows": {}, "bars": "B"}, "The request is not of the form that is read [body.rows]"),
        ({"symbol": "MES"}, "wanted Field required"),
        ({"symbol": "MES", "bars": {"close": [1] * 100_001}}, "at most 100000 items"),
        ({"symbol": "MES", "bars": {"high": [1e308]}}, "wanted Input should be less than or equal to 300000"),
        ({"symbol": "MES", "bars": {"high": [1, 1e308]}}, "[body.bars.high[1]"),
        ({"symbol": "\ud800", "bars": "B"}, "wanted Input should be a valid string"),
        ({"symbol": "MES", "bars": "B", "other": 1}, "The request is not of the form that is read [body.other]"),
    ],
)  # fmt: skip
def test_predict_of_wrong_body_answers_422_with_message(client, made, body, named):
    bars, one = made.bars, made.bars.tail(1)
    again = pd.concat([bars, one.assign(close=one["low"], open=one["low"], high=one["low"])])
    tables = {"B": bars, "-low": bars.drop(columns="low"), "few": bars.head(300), "again": again}
    if isinstance(body.get("bars"), str):
        body = body | {"bars": columns_of(tables[body["bars"]])}
    answer = client.post("/predict", content=json.dumps(body), headers=JSON)
    problem = answer.json()
    assert (answer.status_code, problem["status"]) == (422, 422)
    assert answer.headers["content-type"] == "application/problem+json"
    assert not re.search(r" --?[a-z]|python -m", problem["message"])  # advice for the client, not for its server
    assert says(named, problem["message"]) and {"what", "where", "got", "wanted", "next_step"} < set(problem)


def says(named: str, message: str) -> bool:
    """Whether the message is that of a row of the guide, or holds this text."""
    row = named.removeprefix("guide: ")
    return named in message if row == named else guide_message(row).fullmatch(message) is not None


@pytest.mark.parametrize(
    "body", [{"bars": {"a": [[]] * 20_000}}, {"bars": [{"a": []}] * 20_000}, {"bars": {"close": []}}]
)
def test_predict_request_of_many_wrong_cells_collects_few_errors(body):
    with pytest.raises(ValidationError) as caught:
        doors.PredictRequest.model_validate_json(json.dumps(body))
    assert caught.value.error_count() < 50


class Failing(doors.ServedBundle):
    def predict(self, *_):
        raise ZeroDivisionError


def test_requests_that_are_not_json_or_too_long_or_of_another_path_or_fail_answer_problems(client, made, tmp_path):
    for method, path, content, status in (
        ("POST", "/predict", b'{"symbol"', 422), ("POST", "/predict", b"[" * 100_000, 422), ("GET", "/none", None, 404),
        ("POST", "/predict", b'{"symbol": NaN, "bars": [{"open": 1e999}]}', 422), ("GET", "/predict", None, 405),
        ("POST", "/predict", b'{"symbol": 1' + b"0" * 9000 + b"}", 422), ("POST", "/predict", b"\xff\xfe", 422),
    ):  # fmt: skip
        answer = client.request(method, path, content=content, headers=JSON)
        assert answer.status_code in (status, 400) and answer.json()["what"], (path, content, answer.text)
    cut = client.post("/predict", content=b'{"bars": [1,2', headers=JSON)
    assert cut.status_code == 400 and cut.json()["message"].startswith("The body is not JSON [character 13")
    undeclared = client.post("/predict", content=b"{}", headers={"Content-Type": "text/plain"})
    assert undeclared.status_code == 422 and "Content-Type" in undeclared.json()["where"]
    for long in (b" " * 9_000_000, (b" " * 0x200000 for _ in range(5))):  # the second in chunks, of no known length
        assert client.post("/predict", content=long, headers=JSON).status_code == 413


def test_error_of_the_service_itself_answers_500_and_stands_in_its_log(made, tmp_path, caplog):
    bundle = made.load("linear")
    vars(bundle)["fitted"] = SimpleNamespace(lookback=1)  # it cannot predict
    client = app_client(doors.ServedBundle(bundle), state=tmp_path)
    for path in ("/predict", "/feeds/main/bars"):
        body = {"bars": columns_of(made.bars.head(HISTORY)), "live": False}
        failed = client.post(path, json=body)
        assert failed.status_code == 500 and failed.json()["next_step"] == "see its log", failed.text
        assert "predict_rows" in caplog.text and "predict_rows" not in failed.text
        caplog.clear()


def test_feed_whose_state_is_damaged_answers_409_and_the_others_as_before(made, tmp_path, caplog):
    path, bars = made.bundles["DEMO", "linear"], made.bars.head(100)
    for name in ("good", "bad"):
        push(app_client(path, state=tmp_path), name, "DEMO", bars)
    (tmp_path / "DEMO" / "bad" / "feed.state").write_bytes(b"")
    client = app_client(path, state=tmp_path)
    assert "state of this feed is damaged" in caplog.text
    outcome = client.post("/feeds/bad/outcomes", json={"known_at": "2024-01-02T00:00:00Z", "label": 1}).json()
    for problem in (push(client, "bad", "DEMO", bars), outcome):
        assert problem["status"] == 409 and "Next: delete this file" in problem["message"]
    assert push(client, "good", "DEMO", bars)["repeated"] == 100
    (tmp_path / "DEMO" / "bad" / "feed.state").unlink()
    assert push(client, "bad", "DEMO", bars)["repeated"] == 0


def test_service_with_key_and_names_refuses_requests_without_them_and_never_shows_the_key(made, tmp_path):
    key, hosts = "a-very-secret-key-1234567", ("localhost", "127.0.0.1")
    client = app_client(made.bundles["DEMO", "linear"], state=tmp_path, key=key, hosts=hosts)
    for headers, status in (
        ({}, 401), ({"X-API-Key": "wrong"}, 401), ({"X-API-Key": key + "\xe9"}, 401), ({"X-API-Key": key}, 200),
        ({"X-API-Key": key, "Host": "evil.example:80"}, 400), ({"X-API-Key": key, "Host": "127.0.0.1:80"}, 200),
    ):  # fmt: skip
        given = {"Host": "localhost"} | {name: value.encode("latin-1") for name, value in headers.items()}
        answer = client.get("/info", headers=given)
        assert answer.status_code == status and key not in answer.text, headers
    assert client.get("/health", headers={"Host": "localhost"}).status_code == 200


class Alone(doors.ServedBundle):
    busy = Lock()

    def predict(self, *given):
        assert self.busy.acquire(blocking=False)
        try:
            return super().predict(*given)
        finally:
            self.busy.release()


def test_predict_in_four_threads_answers_each_as_alone_and_one_at_a_time(made, tmp_path):
    client = app_client(Alone(made.load("linear")), state=tmp_path)

    def answers(end: int) -> dict:
        body = {"bars": columns_of(made.bars.iloc[:end]), "live": False, "last": 5}
        return client.post("/predict", json=body).json().get("answers")

    ends = [6000, 6050, 6100, 6150] * 2
    wanted = [answers(end) for end in ends[:4]]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answers, ends)) == wanted * 2
    assert len({str(one) for one in wanted}) == 4


def test_feed_that_several_clients_push_at_once_takes_each_bar_once_and_answers_as_the_batch(client, made):
    bars, clients, answers = made.bars.iloc[: HISTORY + 30], 4, []
    wanted = made.load("xgboost").predict(bars, all_rows=True)[P]
    push(client, "shared", "DEMO", bars.iloc[:HISTORY])
    with ThreadPoolExecutor(clients) as pool:
        for place in range(HISTORY, len(bars)):
            given = [bars.iloc[place : place + 1]] * clients
            replies = list(pool.map(lambda one: push(client, "shared", "DEMO", one), given))
            assert sorted(one["repeated"] for one in replies) == [0] + [1] * (clients - 1)
            assert all(one["answers"] == replies[0]["answers"] for one in replies)
            answers += replies[0]["answers"]
    assert len(answers) > 4
    assert all([one[name] for name in P] == wanted.loc[one["known_at"]].tolist() for one in answers)


def test_feeds_of_other_names_and_symbols_are_separate_and_wrong_names_and_first_bars_make_none(client, made):
    first, second = made.bars.iloc[:100], made.bars.iloc[100:101]
    assert push(client, "left", "MES", first)["repeated"] == 0
    assert push(client, "right", "MES", second)["lacking_bars"] > 100
    assert push(client, "left", "MES", first)["repeated"] == 100
    other = push(client, "left", "DEMO", first)
    assert other["repeated"] == 0 and other["symbol"] == "DEMO" and other["run_id"].startswith("train-xgboost")
    for name, bars in (("a b", first), ("a.b", first), ("x" * 41, first), ("wrong", first.assign(high=1.0))):
        assert push(client, name, "MES", bars)["status"] == 422
    assert {"left", "right"} <= {one["feed"] for one in client.get("/info").json()["feeds"]} - {"wrong"}


def test_health_info_metrics_and_outcomes_show_bundles_and_what_a_feed_answered(client, made):
    reply = push(client, "shown", "DEMO", made.bars.iloc[:HISTORY])
    outcome = {"symbol": "DEMO", "known_at": reply["answers"][-1]["known_at"], "label": 1}

    def remembered(name: str = "shown", **other: object) -> dict:
        return client.post(f"/feeds/{name}/outcomes", json=outcome | other).json()

    assert remembered()["remembered"] and not remembered(known_at="2020-01-01T00:00:00Z")["remembered"]
    assert remembered(label=2)["status"] == 422 and remembered("absent")["what"] == "This feed has no bars"
    health, info, metrics = (client.get(path) for path in ("/health", "/info", "/metrics"))
    health, info, description = health.json(), info.json(), made.load("xgboost").description
    assert health["status"] == "ok" and set(health["bundles"]) == {"DEMO", "MES"}
    facts = info["bundles"]["DEMO"]
    assert facts["bundle"] == health["bundles"]["DEMO"] and facts["run_id"] == description["run_id"]
    assert facts["certificate"] == description["certificate"] and facts["versions"]["ml_factory"] == info["version"]
    assert facts["guard"]["gap"] == "ok" and facts["feature_names"] == description["feature_names"]
    assert "gain_best_low" in facts["metrics"][0]
    (shown,) = (one for one in info["feeds"] if one["feed"] == "shown")
    assert (shown["symbol"], shown["outcomes"]) == ("DEMO", 1)
    assert shown["last_bar_end"] == reply["next"] and shown["reference"].startswith("training")
    assert metrics.headers["content-type"].startswith("text/plain")
    path = r'method="POST",path="/feeds/{name}/outcomes",status="200"'
    assert re.search(rf"ml_factory_requests_total{{{re.escape(path)}}} [2-9]", metrics.text)
    assert re.search(r'ml_factory_answers_total\{guard="ok",symbol="DEMO"\} \d+', metrics.text)
    assert 'ml_factory_guard_alarm{check="stale",feed="shown",symbol="DEMO"} 0.0' in metrics.text


def test_guard_refuses_stale_bars_and_only_where_it_refuses_the_newest_row(client, made, tmp_path):
    path, bars = made.bundles["DEMO", "linear"], made.bars.iloc[:HISTORY]
    (late,) = client.post("/predict", json={"symbol": "MES", "bars": columns_of(bars)}).json()["answers"]
    assert guide_message("stale bar").search(late["reason"]) and late["p_long"] is None
    client = app_client(path, state=tmp_path, gap="refuse", gap_minutes=30, stale="refuse")
    stale = client.post("/predict", json={"bars": columns_of(bars)})
    assert stale.status_code == 422 and stale.json()["what"] == "The guard refuses these bars"
    assert re.search(r"the newest bar ended at 2024-01-\d\d \d\d:\d\d UTC, \d+ open minutes before", stale.text)
    body = {"bars": columns_of(bars.drop(bars.index[-180:-120])), "live": False, "last": 40}
    answers = client.post("/predict", json=body).json()["answers"]
    refused = [one for one in answers if one["guard"] == "refuse"]
    assert answers[-1]["guard"] != "refuse" and 10 < len(refused) < 40
    assert all(one["p_long"] is None and "open minutes without a bar" in one["reason"] for one in refused)
    problem = client.post("/predict", json=body | {"bars": columns_of(bars.drop(bars.index[-80:-20]))}).json()
    assert problem["status"] == 422 and "open minutes without a bar" in problem["got"]


def test_start_shows_what_fails_at_the_example_and_not_what_the_guard_refuses(made, tmp_path):
    path, given = made.bundles["DEMO", "linear"], made.load("linear")
    guard = GuardSettings(**dict.fromkeys(("gap", "unit", "tick", "stuck", "range", "constant", "drift"), "refuse"))
    assert doors.ServedBundle.load(path, guard).guard == guard

    with pytest.raises(ZeroDivisionError):  # so the first request compiles nothing
        Failing.load(path)
    assert doors.ServedBundle.load(doors.write_bundle(replace(given, example={}), tmp_path / "b")).symbol == "DEMO"


def test_every_request_of_openapi_page_answers_as_it_describes(client):
    page = client.get("/openapi.json").json()
    outcome = page["paths"]["/feeds/{name}/outcomes"]["post"]["responses"]
    assert "#/components/schemas/OutcomeAnswer" in str(outcome["200"])
    for code in ("401", "409", "422", "503"):
        schema = outcome[code]["content"]["application/problem+json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/Problem"}
    problem = client.post("/predict", json={}).json()
    assert set(page["components"]["schemas"]["Problem"]["properties"]) == set(problem)
    assert "/openapi.json" in client.get("/docs").text
    (example,) = page["components"]["schemas"]["FeedBars"]["properties"]["bars"]["examples"]
    assert json.dumps(page).count('"examples"') == 1  # and it is accepted
    assert client.post("/feeds/example/bars", json={"symbol": "MES", "bars": example}).status_code == 200
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
    quiet = [getattr(hypothesis.HealthCheck, name) for name in ("too_slow", "filter_too_much", "data_too_large")]

    @hypothesis.settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
                         suppress_health_check=quiet)  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        case.validate_response(case.call(), checks=CHECKS)

    run()


@pytest.mark.parametrize("text", ["two words", "two\nlines", "a\tb", "schl\u00fcssel", "a\x00b"])
def test_api_key_that_no_header_holds_is_refused_in_one_line_without_showing_it(text):
    assert [doors.parse_api_key(given) for given in ("abc123\n", " abc123\r\n", "\n")] == ["abc123", "abc123", ""]
    with pytest.raises(SettingsError, match=f"cannot be sent as a header.*{doors.KEY_VARIABLE}") as caught:
        doors.parse_api_key(text)
    assert "\n" not in str(caught.value) and text not in str(caught.value)


def test_service_address_beyond_this_machine_without_key_is_refused():
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.1.2.3", "0:0:0:0:0:0:0:1"):
        doors.check_service_address(host, "", False)
    doors.check_service_address("0.0.0.0", "key", False)
    doors.check_service_address("0.0.0.0", "", True)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "127.999.0.1", "127.0.0.\u0661"):
        with pytest.raises(SettingsError, match="ML_FACTORY_API_KEY"):
            doors.check_service_address(host, "", False)


def test_serve_that_cannot_start_exits_with_one_line(made, tmp_path, call):
    good, made_by = made.bundles["DEMO", "linear"], "the file of a bundle. Next: python -m ml_factory export writes one"
    (tmp_path / "cut.bundle").write_bytes(good.read_bytes()[:-1000])
    (tmp_path / "text.bundle").write_text("no bundle")
    (registered,) = (good.parents[1] / "workspace" / "models" / "DEMO").glob("model-linear-*/state.safetensors")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for words, code, named in (
            ([registered], 1, "guide: wrong bundle"),
            ([tmp_path / "cut.bundle"], 1, "guide: truncated bundle"),
            ([tmp_path / "text.bundle"], 1, "This file is no bundle, or it is cut short"),
            ([tmp_path / "cat.bundle"], 1, f"No such file [{tmp_path / 'cat.bundle'}]. wanted the file of a bundle"),
            ([tmp_path / "none" / "a"], 1, f"No such file [{tmp_path / 'none' / 'a'}]. wanted {made_by}"),
            ([tmp_path], 1, "Not a file"),
            ([good, "--port", port], 1, "guide: port in use"),
            ([good, "--host", "0.0.0.0"], 2, "Other machines reach this address, and there is no key [--host]"),
            ([good, good], 2, "Two bundles of DEMO"),
            ([good, "--no-clock"], 2, "These options do not belong together [--follow]. got none, with --no-clock"),
            ([good, "--follow", good], 2, "wanted --no-clock with --follow; --host, --port and --no-key without"),
            ([good, "--guard", "stale_minutes=abc"], 2, "A value of another kind [stale_minutes]. got 'abc'"),
        ):
            got, out, err = call("serve", *words, *([] if "--port" in words else ["--port", 0]))
            (line,) = err.splitlines()
            assert got == code and line.startswith("error: ") and says(named, line) and not out, (words, err)


def test_serve_sets_the_threads_of_openmp_before_it_imports_what_reads_them(made, tmp_path, call, monkeypatch):
    (tmp_path / "reads_threads.py").write_text("import os\nfound = os.environ['OMP_NUM_THREADS']\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "9")  # so that it is put back
    monkeypatch.delenv("OMP_NUM_THREADS")
    code, _, err = call("serve", made.bundles["DEMO", "linear"], "--import", "reads_threads", "--guard", "none=1")
    assert code == 2 and "There is no such setting [--guard]" in err
    assert sys.modules.pop("reads_threads").found == "1"
