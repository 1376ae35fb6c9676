"""The Lambda function of raw bars: the handler of the container image, with a bundle in its folder."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parents[2]
EVENT = json.loads((ROOT / "tests" / "inference" / "function_url_event.json").read_text(encoding="utf-8"))
P = ["p_short", "p_neutral", "p_long"]


@pytest.fixture
def handler(made, tmp_path, monkeypatch):
    """The handler, imported from a folder as the image lays it out."""
    for name in ("raw_bars.py", "http_event.py"):
        shutil.copy(ROOT / "deploy" / "lambda" / name, tmp_path)
    shutil.copy(made.bundles["DEMO", "xgboost"], tmp_path / "model.bundle")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for name in ("raw_bars", "http_event"):
        sys.modules.pop(name, None)
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
