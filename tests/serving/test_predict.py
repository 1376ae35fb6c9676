"""/predict and what surrounds it: answers of the batch, limits, keys, and problems in place of failures."""

import json
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock

import pandas as pd
import pytest
from pydantic import ValidationError

from ml_factory.errors import SettingsError
from ml_factory.evaluation.metrics import PROBABILITIES as P
from ml_factory.serving.app import KEY_VARIABLE, _listen, check_service_address, parse_api_key
from ml_factory.serving.feed import ServedBundle
from ml_factory.serving.schemas import PredictRequest
from tests.serving.conftest import app_client, columns_of, list_of, running_server


def p_of(answer: dict) -> list[float]:
    return [answer[name] for name in P]


def test_predict_of_raw_bars_in_both_forms_equals_batch_to_the_bit(client, made):
    bundle, bars = made.load("DEMO", "xgboost"), made.bars["DEMO"]
    wanted = bundle.predict(bars, all_rows=True).tail(40)
    for form in (columns_of, list_of):
        got = client.post("/predict", json={"symbol": "DEMO", "bars": form(bars), "live": False, "last": 40}).json()
        assert [p_of(one) for one in got["answers"]] == wanted[P].to_numpy().tolist()
        assert [pd.Timestamp(one["known_at"]) for one in got["answers"]] == list(wanted.index)
        assert [one["split"] for one in got["answers"]] == wanted["split"].tolist()
        assert got["run_id"] == bundle.description["run_id"] and len(got["bundle"]) == 16


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"bars": "B"}, "Several symbols are served [symbol]. got none, wanted one of DEMO, MES."),
        ({"symbol": "ES", "bars": "B"}, "No bundle of this symbol is served [symbol]. got ES, wanted DEMO, MES."),
        ({"symbol": "MES", "bars": "-close"}, "Missing column 'close' [bars]."),
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
    bars = made.bars["MES"]
    tables = {"B": bars, "-close": bars.drop(columns="close"), "few": bars.head(300),
              "again": pd.concat([bars, bars.tail(1).assign(close=lambda one: one["low"], open=lambda one: one["low"],
                                                            high=lambda one: one["low"])])}  # fmt: skip
    if isinstance(body.get("bars"), str):
        body = body | {"bars": columns_of(tables[body["bars"]])}
    answer = client.post("/predict", content=json.dumps(body), headers={"Content-Type": "application/json"})
    problem = answer.json()
    assert (answer.status_code, problem["status"]) == (422, 422)
    assert answer.headers["content-type"] == "application/problem+json"
    assert not re.search(r" --?[a-z]|python -m", problem["message"])  # advice for the client, not for its server
    assert named in problem["message"] and {"what", "where", "got", "wanted", "next_step"} < set(problem)


@pytest.mark.parametrize(
    "body", [{"bars": {"a": [[]] * 20_000}}, {"bars": [{"a": []}] * 20_000}, {"bars": {"close": []}}]
)
def test_predict_request_of_many_wrong_cells_collects_few_errors(body):
    with pytest.raises(ValidationError) as caught:
        PredictRequest.model_validate_json(json.dumps(body))
    assert caught.value.error_count() < 50


def test_predict_in_four_threads_answers_each_as_alone_and_one_at_a_time(made, tmp_path, monkeypatch):
    client, busy, alone = app_client(made.bundles["DEMO", "linear"], tmp_path), Lock(), ServedBundle.predict

    def predict(*given):
        assert busy.acquire(blocking=False)
        try:
            return alone(*given)
        finally:
            busy.release()

    def answers(end: int) -> dict:
        body = {"bars": columns_of(made.bars["DEMO"].iloc[:end]), "live": False, "last": 5}
        return client.post("/predict", json=body).json()

    monkeypatch.setattr(ServedBundle, "predict", predict)
    ends = [6000, 6050, 6100, 6150] * 2
    wanted = [answers(end)["answers"] for end in ends[:4]]
    with ThreadPoolExecutor(4) as pool:
        assert [one.get("answers") for one in pool.map(answers, ends)] == wanted * 2
    assert len({str(one) for one in wanted}) == 4


def test_requests_that_are_not_json_or_of_another_path_answer_problems(client):
    for method, path, content, status in (
        ("POST", "/predict", b'{"symbol"', 422), ("POST", "/predict", b"[" * 100_000, 422), ("GET", "/none", None, 404),
        ("POST", "/predict", b'{"symbol": NaN, "bars": [{"open": 1e999}]}', 422), ("GET", "/predict", None, 405),
        ("POST", "/predict", b'{"symbol": 1' + b"0" * 9000 + b"}", 422), ("POST", "/predict", b"\xff\xfe", 422),
    ):  # fmt: skip
        answer = client.request(method, path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code in (status, 400) and answer.json()["what"], (path, content, answer.text)
    cut = client.post("/predict", content=b'{"bars": [1,2', headers={"Content-Type": "application/json"})
    assert cut.status_code == 400 and cut.json()["message"].startswith("The body is not JSON [character 13")
    undeclared = client.post("/predict", content=b"{}", headers={"Content-Type": "text/plain"})
    assert undeclared.status_code == 422 and "Content-Type" in undeclared.json()["where"]


def test_health_and_info_name_bundles_certificate_and_versions(client, made):
    health, info = client.get("/health").json(), client.get("/info").json()
    assert health["status"] == "ok" and set(health["bundles"]) == {"DEMO", "MES"}
    facts, description = info["bundles"]["DEMO"], made.load("DEMO", "xgboost").description
    assert facts["bundle"] == health["bundles"]["DEMO"] and facts["run_id"] == description["run_id"]
    assert facts["certificate"] == description["certificate"] and facts["versions"]["ml_factory"] == info["version"]
    assert facts["guard"]["gap"] == "ok"  # of --guard
    assert "gain_best_low" in facts["metrics"][0] and facts["feature_names"] == description["feature_names"]


def test_service_with_key_refuses_requests_without_it_and_never_shows_it(made, tmp_path):
    key = "a-very-secret-key-1234567"
    client = app_client(made.bundles["DEMO", "linear"], tmp_path, key)
    assert client.get("/health").status_code == 200
    for headers in ({}, {"X-API-Key": "wrong"}, {"X-API-Key": key + "\xe9"}):
        answer = client.get("/info", headers={name: value.encode("latin-1") for name, value in headers.items()})
        assert answer.status_code == 401 and key not in answer.text
    answer = client.get("/info", headers={"X-API-Key": key})
    assert answer.status_code == 200 and key not in answer.text


def test_requests_that_name_another_host_are_refused(client, server):
    port = server.url.rsplit(":", 1)[1]
    for headers, status in (
        ({"Host": f"evil.example:{port}"}, 400), ({"Host": f"localhost:{port}"}, 200), ({}, 200),
    ):  # fmt: skip
        assert client.get("/info", headers=headers).status_code == status, headers


def test_server_finishes_request_in_flight_before_it_stops(made):
    with running_server(made.bundles["DEMO", "xgboost"], ML_FACTORY_API_KEY="key") as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        body = json.dumps({"bars": columns_of(made.bars["DEMO"]), "live": False}).encode()
        head = "POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: key\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(address, timeout=60) as sender:
            sender.sendall(head.encode() + body[:-100])
            with server.client() as other:
                assert other.get("/health").status_code == 200 and other.get("/info").status_code == 401
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            sender.sendall(body[-100:])
            received = b""
            while piece := sender.recv(1 << 16):
                received += piece
        assert received.startswith(b"HTTP/1.1 200") and b'"p_long":' in received
        assert server.process.wait(60) == 0


def test_body_in_chunks_beyond_limit_is_refused_with_413(server):
    head = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=60) as sender:
        sender.sendall(head)
        with suppress(OSError):  # refused before everything was sent
            for _ in range(5):
                sender.sendall(b"200000\r\n" + b" " * 0x200000 + b"\r\n")
        assert sender.recv(12) == b"HTTP/1.1 413"


def test_connections_to_the_server_are_answered_without_the_delay_of_nagle():
    with _listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP  # asyncio turns the delay off on such sockets alone


@pytest.mark.parametrize("text", ["two words", "two\nlines", "a\tb", "schl\u00fcssel", "a\x00b"])
def test_api_key_that_no_header_holds_is_refused_in_one_line_without_showing_it(text):
    assert [parse_api_key(given) for given in ("abc123\n", " abc123\r\n", "\n")] == ["abc123", "abc123", ""]
    with pytest.raises(SettingsError, match=f"cannot be sent as a header.*{KEY_VARIABLE}") as caught:
        parse_api_key(text)
    assert "\n" not in str(caught.value) and text not in str(caught.value)


def test_service_address_beyond_this_machine_without_key_is_refused():
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.1.2.3", "0:0:0:0:0:0:0:1"):
        check_service_address(host, "", False)
    check_service_address("0.0.0.0", "key", False)
    check_service_address("0.0.0.0", "", True)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "127.999.0.1", "127.0.0.\u0661"):
        with pytest.raises(SettingsError, match="ML_FACTORY_API_KEY"):
            check_service_address(host, "", False)


def test_serve_that_cannot_start_exits_with_one_line(made, tmp_path, call):
    good = made.bundles["DEMO", "linear"]
    (tmp_path / "cut.bundle").write_bytes(good.read_bytes()[:-1000])
    (tmp_path / "text.bundle").write_text("no bundle")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        made_by = "the file of a bundle. Next: python -m ml_factory export writes one"
        for words, code, named in (
            ([tmp_path / "cut.bundle"], 1, "This file is no bundle, or it is cut short"),
            ([tmp_path / "text.bundle"], 1, "This file is no bundle, or it is cut short"),
            ([tmp_path / "cat.bundle"], 1, f"No such file [{tmp_path / 'cat.bundle'}]. wanted the file of a bundle"),
            ([tmp_path / "none" / "a"], 1, f"No such file [{tmp_path / 'none' / 'a'}]. wanted {made_by}"),
            ([tmp_path], 1, "Not a file"),
            ([good, "--port", port], 1, f"The port is in use [127.0.0.1:{port}]. Next: stop what uses it, or give"),
            ([good, "--host", "0.0.0.0"], 2, "Other machines reach this address, and there is no key [--host]"),
            ([good, good], 2, "Two bundles of DEMO"),
        ):
            got, out, err = call("serve", *words, *([] if "--port" in words else ["--port", 0]))
            (line,) = err.splitlines()
            assert got == code and line.startswith(f"error: {named}") and not out, (words, err)
