"""The Lambda function of raw bars: the handler of the container image, with a bundle in its folder."""

import base64
import importlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[2]
EVENT = json.loads((ROOT / "tests" / "serving" / "function_url_event.json").read_text(encoding="utf-8"))
P = ["p_short", "p_neutral", "p_long"]


@pytest.fixture
def handler(made, tmp_path, monkeypatch):
    """The handler, imported from a folder as the image lays it out."""
    shutil.copy(ROOT / "deploy" / "lambda" / "raw_bars.py", tmp_path)
    shutil.copy(made.bundles["DEMO", "xgboost"], tmp_path / "model.bundle")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "raw_bars", raising=False)
    return importlib.import_module("raw_bars").handler


def event(body: object) -> dict:
    return {**EVENT, "body": json.dumps(body)}


def test_lambda_image_answers_recorded_event_with_raw_bars_as_bundle_predict(made, handler):
    bars, bundle = made.bars["DEMO"], made.load("DEMO", "xgboost")
    table = bars.assign(timestamp=bars["timestamp"].astype(str)).to_dict("list")
    answer = handler(event({"bars": table, "last": 3, "live": False}), None)
    assert answer["statusCode"] == 200, answer
    parsed = json.loads(answer["body"])
    found = pd.DataFrame(parsed["answers"])[P].to_numpy(float)
    np.testing.assert_allclose(found, bundle.predict(bars, all_rows=True)[P].tail(3), rtol=0, atol=1e-6)
    assert parsed["symbol"] == "DEMO" and parsed["run_id"] == bundle.description["run_id"]


def test_lambda_image_refuses_wrong_bodies_with_what_and_where(made, handler):
    bars = made.bars["DEMO"].tail(300)
    table = bars.assign(timestamp=bars["timestamp"].astype(str)).to_dict("list")
    wrong = [
        {"bars": {**table, "high": [1.0] * len(bars)}, "live": False}, {"bars": []}, {"rows": {}}, {},
        {"bars": table, "symbol": "MES"}, {"rows": {"columns": ["a"], "values": [[1.0]]}},
    ]  # fmt: skip
    for body in wrong:
        answer = handler(event(body), None)
        parsed = json.loads(answer["body"])
        assert (
            answer["statusCode"] == 400 and parsed["what"] and parsed["where"] and parsed.keys() >= {"got", "wanted"}
        ), parsed


def test_lambda_image_answers_packed_bodies_and_facts_and_refuses_other_events(made, handler):
    bars = made.bars["DEMO"]
    body = {"bars": bars.assign(timestamp=bars["timestamp"].astype(str)).to_dict("list"), "live": False}
    packed = base64.b64encode(json.dumps(body).encode()).decode()
    assert handler({**EVENT, "body": packed, "isBase64Encoded": True}) == handler(event(body))
    info = handler({"requestContext": {"http": {"method": "GET"}}})
    assert json.loads(info["body"])["symbol"] == "DEMO"
    wrong = [event(body) | {"body": "{"}, event(body) | {"body": "{", "isBase64Encoded": True}, {"Records": []},
             event(body) | {"requestContext": {"http": {"method": "DELETE"}}}]  # fmt: skip
    for one in wrong:
        answer = handler(one)
        assert answer["statusCode"] == 400 and json.loads(answer["body"])["what"], answer
