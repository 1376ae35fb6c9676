"""The Lambda function of feature rows: a zip with NumPy and onnxruntime alone."""

import base64
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory import Bundle, pipeline
from ml_factory.features.build import build_features
from ml_factory.storage.files import files
from tests.inference.conftest import H

ROOT = Path(__file__).resolve().parents[2]
LAMBDA = ROOT / "deploy" / "lambda"
EVENT = json.loads(Path(__file__).with_name("function_url_event.json").read_text(encoding="utf-8"))
P = ["p_short", "p_neutral", "p_long"]
# Calls the handler of an unpacked zip with each event; nothing but the zip and the standard library is on the path.
CHILD = """
import json, sys, sysconfig
sys.path[:] = [sys.argv[1], sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib") + "/lib-dynload"]
from feature_rows import handler
events = json.load(sys.stdin)
answers = [handler(event, None) for event in events]
outside = [name for name, module in sys.modules.items() if "site-packages" in str(getattr(module, "__file__", ""))]
print(json.dumps([answers, outside, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> dict[str, Path]:
    """Bundles with a graph: a booster, which reads rows, and a network, which reads windows."""
    out = tmp_path_factory.mktemp("lambda")
    return {
        name: pipeline.export(trained, "DEMO", H, name, formats=("bundle", "onnx"), out=out).paths["bundle"]
        for name in ("xgboost", "lstm")
    }


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """NumPy and onnxruntime of this environment, as pip --target would lay them."""
    place = tmp_path_factory.mktemp("packages")
    for name in ("numpy", "onnxruntime"):
        source = Path(importlib.util.find_spec(name).origin).parent
        shutil.copytree(source, place / name)
        if source.with_name(f"{name}.libs").is_dir():
            shutil.copytree(source.with_name(f"{name}.libs"), place / f"{name}.libs")
    return place


@pytest.fixture(scope="module")
def function(exported, packages, tmp_path_factory) -> Path:
    """The unpacked zip of the booster."""
    place = tmp_path_factory.mktemp("function")
    words = [str(exported["xgboost"]), "--out", str(place / "f.zip"), "--packages", str(packages)]
    assert load("build_zip").main(words) == 0
    return unpacked(place / "f.zip", place / "unpacked")


def load(name: str):
    """Return a module of deploy/lambda."""
    spec = importlib.util.spec_from_file_location(name, LAMBDA / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unpacked(zip_file: Path, place: Path) -> Path:
    with zipfile.ZipFile(zip_file) as archive:
        archive.extractall(place)
    return place


def call(place: Path, *events: dict) -> tuple[list[dict], list[str], list[str]]:
    """Return the responses of the function, modules from outside of the zip, and the names of all packages."""
    command = [sys.executable, "-I", "-S", "-W", "error", "-c", CHILD, str(place)]
    done = subprocess.run(command, input=json.dumps(events), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def event(body: object, **changes) -> dict:
    text = body if isinstance(body, str) else json.dumps(body)
    return {**EVENT, "body": text, **changes}


def feature_rows(bundle: Bundle, bars: pd.DataFrame) -> tuple[dict, pd.DataFrame]:
    """Return the body with the newest rows of these bars, and what the bundle predicts for them."""
    matrix = build_features(bundle.spec.check_bars(bars)[0], bundle.spec.market, bundle.spec.features)
    table = matrix.to_frame().iloc[-120:]
    values = [[None if np.isnan(one) else float(one) for one in row] for row in table.to_numpy()]
    rows = {"columns": list(table.columns), "values": values, "segment": matrix.segment[-120:].tolist(),
            "known_at": [moment.isoformat() for moment in table.index]}  # fmt: skip
    return {"rows": rows}, bundle.predict(bars, all_rows=True)[P]


@pytest.mark.parametrize("model", ["xgboost", "lstm"])
def test_lambda_zip_answers_recorded_event_as_bundle_predict_with_numpy_and_onnxruntime_alone(
    model, exported, function, raw_bars, tmp_path
):
    size = sum(path.stat().st_size for path in function.rglob("*") if path.is_file())
    assert 50e6 < size < 250e6, size
    shutil.copytree(function, tmp_path / "function", copy_function=os.link)
    place = tmp_path / "function"
    files.write(place / "model.onnx", Bundle.load(exported[model]).onnx)
    body, wanted = feature_rows(Bundle.load(exported[model]), raw_bars)
    encoded = base64.b64encode(json.dumps(body).encode()).decode()
    get = {"requestContext": {"http": {"method": "GET"}}}
    (plain, packed, info), outside, used = call(
        place, event(body), event(encoded, isBase64Encoded=True), {**EVENT, **get}
    )
    assert outside == [] and {"pandas", "ml_factory", "google", "packaging"}.isdisjoint(used)
    assert plain["statusCode"] == packed["statusCode"] == info["statusCode"] == 200, plain
    assert plain["body"] == packed["body"]
    answers = pd.DataFrame(json.loads(plain["body"])["answers"])
    answers = answers.set_index(pd.to_datetime(answers.pop("known_at"), utc=True))
    assert len(answers) > (40 if model == "lstm" else 119)
    np.testing.assert_allclose(answers[P], wanted.loc[answers.index], rtol=0, atol=1e-6)
    assert json.loads(info["body"])["features"] == body["rows"]["columns"]


def test_lambda_zip_refuses_wrong_requests_with_what_got_and_wanted(exported, function, raw_bars):
    body, _ = feature_rows(Bundle.load(exported["xgboost"]), raw_bars)
    names, values = body["rows"]["columns"], body["rows"]["values"][:2]

    def rows(**changes) -> dict:
        return event({"rows": {"columns": names, "values": values, **changes}})

    def first_value(value: object) -> dict:
        return rows(values=[[value, *values[0][1:]]])

    wrong = {
        "no return_1": rows(columns=names[1:]),
        "the order": rows(columns=[*names[1:], names[0]]),
        "also other": rows(columns=[*names, "other"]),
        "220 values": rows(values=[values[0][1:]]),
        "NaN": event(json.dumps({"rows": {"columns": names, "values": [[float("nan"), *values[0][1:]]]}})),
        "return_1": first_value(1e39),
        "nulls": rows(values=[[None] * len(names)]),
        "0 rows": rows(values=[]),
        "5000 rows": rows(values=[[0]] * 5000),
        "true is no number": first_value(True),
        "segment": rows(segment=[1]),
        "no JSON": event("{"),
        "no base64": event("{", isBase64Encoded=True),
        "no rows": event({}),
        "MES": event({"rows": {"columns": names, "values": values}, "symbol": "MES"}),
        "DELETE": event({}, requestContext={"http": {"method": "DELETE"}}),
        "no 'requestContext'": {"Records": []},
        "too large": event("1" * 7 * 2**20),
    }
    answers, _, _ = call(function, *wrong.values(), rows())
    for text, answer in zip(wrong, answers, strict=False):
        parsed = json.loads(answer["body"])
        assert answer["statusCode"] == 400 and parsed["what"] and (parsed["wanted"] or parsed["got"]), (text, answer)
        expected = {"true is no number": "return_1"}.get(text, text)
        assert expected in answer["body"], (text, answer)
    assert answers[-1]["statusCode"] == 200


def test_lambda_zip_of_bundle_without_graph_is_refused_and_writes_nothing(bundle_file, packages, tmp_path, capsys):
    words = [str(bundle_file("linear")), "--out", str(tmp_path / "f.zip"), "--packages", str(packages)]
    assert load("build_zip").main(words) == 1
    assert "no ONNX graph" in capsys.readouterr().err and not (tmp_path / "f.zip").exists()


@pytest.mark.soak
def test_lambda_zip_with_packages_of_the_lock_file_is_under_250_megabytes_and_answers(exported, raw_bars, tmp_path):
    python = ".".join(map(str, sys.version_info[:2]))
    words = [
        sys.executable,
        LAMBDA / "build_zip.py",
        exported["xgboost"],
        "--out",
        tmp_path / "f.zip",
        "--python",
        python,
    ]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    place = unpacked(tmp_path / "f.zip", tmp_path / "function")
    assert sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) < 250e6
    body, wanted = feature_rows(Bundle.load(exported["xgboost"]), raw_bars)
    (answer,), outside, _ = call(place, event(body))
    found = pd.DataFrame(json.loads(answer["body"])["answers"])[P].to_numpy(float)
    assert outside == []
    np.testing.assert_allclose(found, wanted.tail(len(found)), rtol=0, atol=1e-6)
