"""The Dockerfile: its instructions, and the steps of the image run without a Docker daemon; it is not built here."""

import asyncio
import base64
import json
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ml_factory import pipeline
from ml_factory.errors import SettingsError
from tests.contract.doors import cli
from tests.contract.service import columns_of
from tests.contract.test_environments import packages_of

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ROOT / "deploy" / "docker" / "Dockerfile"
WORDS = {"FROM", "COPY", "RUN", "ARG", "ENV", "USER", "WORKDIR", "EXPOSE", "HEALTHCHECK", "CMD", "ENTRYPOINT"}


def instructions() -> list[tuple[str, str]]:
    """Return (word, rest) of every instruction, one a line."""
    lines = [line for line in SERVICE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    found = [tuple(line.split(" ", 1)) for line in lines]
    assert {word for word, _ in found} <= WORDS
    return found


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    first = max(number for number, (word, _) in enumerate(found) if word == "FROM")
    return found[first:]


def test_dockerfile_copies_files_that_exist_and_are_in_context():
    copies = [shlex.split(rest) for word, rest in instructions() if word == "COPY" and "--from" not in rest]
    default = dict(rest.split("=") for word, rest in instructions() if word == "ARG")["BUNDLE"]
    everything, *lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] != "#"]
    back = [line[1:] for line in lines if line.startswith("!")]
    found = [source for words in copies for source in words[:-1]]
    assert {"ml_factory", "${BUNDLE}", "requirements/locked/image.txt"} <= set(found) and everything == "**"
    for name in found:
        assert name == "${BUNDLE}" or (ROOT / name).exists(), name
        assert any(Path(default if name == "${BUNDLE}" else name).match(pattern) for pattern in back), name


def test_dockerfile_of_service_runs_as_other_user_with_health_check_and_without_build_tools():
    stage = last_stage()
    (user,) = [rest for word, rest in stage if word == "USER"]
    assert user.isdigit() and int(user) > 0
    assert [word for word, _ in stage].index("USER") < [word for word, _ in stage].index("CMD")
    (port,) = [rest for word, rest in stage if word == "EXPOSE"]
    environment = dict(one.split("=", 1) for word, rest in stage if word == "ENV" for one in shlex.split(rest))
    assert environment["PORT"] == port == "8080"
    (check,) = [rest for word, rest in stage if word == "HEALTHCHECK"]
    compile(json.loads(check.split("CMD ")[1])[-1], "health check", "exec")
    assert "/health" in check
    words = shlex.split(json.loads(next(rest for word, rest in stage if word == "CMD"))[-1])
    arguments = cli.app[words[words.index("ml_factory") + 1]].assemble_argument_collection()
    assert {word for word in words if word.startswith("--")} <= {name for one in arguments for name in one.names}
    assert words[words.index("--port") + 1] == "$PORT" and words[words.index("--host") + 1] == "0.0.0.0"
    runs = " ".join(rest for word, rest in stage if word == "RUN")
    assert not re.search(r"\b(apt|apt-get|gcc|build-essential|pip|make|curl)\b", runs)
    assert stage[0][1].split()[0].endswith("-slim-bookworm")


def test_dockerfile_installs_locked_packages_of_extra_serve_by_hash_without_pyarrow_and_scipy():
    (install,) = [rest for word, rest in instructions() if word == "RUN" and " install " in rest]
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(shlex.split(install))
    assert install.endswith("-r /build/image.txt")
    lock = (ROOT / "requirements" / "locked" / "image.txt").read_text(encoding="utf-8")
    listed = map(Requirement, re.findall(r"^(\w\S*==.*) \\$", lock, re.MULTILINE))
    here = {one.name for one in listed if one.marker is None or one.marker.evaluate()}
    assert here == packages_of("base", "serve") - {"pyarrow", "scipy"}
    assert here.isdisjoint({"torch", "xgboost", "matplotlib", "scikit-learn", "pyarrow", "scipy"})


# Of a Function URL: docs.aws.amazon.com/lambda/latest/dg/urls-invocation.html
EVENT = {
    "version": "2.0", "routeKey": "$default", "rawPath": "/predict", "rawQueryString": "", "cookies": [],
    "headers": {"content-type": "application/json", "host": "abc.lambda-url.eu-west-1.on.aws", "x-api-key": "k",
                "x-forwarded-for": "203.0.113.7", "x-forwarded-proto": "https"},
    "requestContext": {
        "accountId": "anonymous", "apiId": "abc", "domainName": "abc.lambda-url.eu-west-1.on.aws",
        "http": {"method": "POST", "path": "/predict", "protocol": "HTTP/1.1", "sourceIp": "203.0.113.7",
                 "userAgent": "curl/8"},
        "requestId": "id", "routeKey": "$default", "stage": "$default", "time": "12/Mar/2024:19:03:58 +0000",
        "timeEpoch": 1710270238000,
    },
    "isBase64Encoded": True,
}  # fmt: skip


def test_function_of_lambda_answers_a_recorded_event_as_the_service_does(client, made, monkeypatch):
    monkeypatch.setenv("BUNDLE", str(made.bundles["DEMO", "xgboost"]))
    monkeypatch.setenv("ML_FACTORY_API_KEY", "")
    place = ROOT / "deploy" / "lambda" / "handler.py"
    with pytest.raises(SettingsError, match="there is no key"):
        runpy.run_path(str(place))
    monkeypatch.setenv("ML_FACTORY_API_KEY", "k")
    body = {"symbol": "DEMO", "bars": columns_of(made.bars.iloc[:6000]), "live": False, "last": 3}
    event = EVENT | {"body": base64.b64encode(json.dumps(body).encode()).decode()}
    with asyncio.Runner() as runner:  # the adapter closes no loop that it makes
        asyncio.set_event_loop(runner.get_loop())
        handler = runpy.run_path(str(place))["handler"]
        answer = handler(event, None)
        refused = handler(event | {"headers": EVENT["headers"] | {"x-api-key": "other"}}, None)
    assert answer["statusCode"] == 200 and json.loads(answer["body"]) == client.post("/predict", json=body).json()
    assert refused["statusCode"] == 401


@pytest.mark.soak
def test_steps_of_service_image_build_environment_and_serve_with_healthy_answer(prepared, tmp_path):
    """RUN, COPY and CMD with /opt, /app, /build and /home below a temporary folder; python is ours."""
    settings = {"rounds": 20, "depth": 3, "min_leaf": 5.0, "threads": 1}
    pipeline.train(prepared, "DEMO", 5, "xgboost", mirror="off", model_settings=settings)
    given = pipeline.export(prepared, "DEMO", 5, "xgboost", formats=("bundle", "onnx")).paths["bundle"]
    places = {name: str(tmp_path / name.strip("/")) for name in ("/opt", "/app", "/build", "/home/service")}
    for place in places.values():
        Path(place).mkdir(parents=True)
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"PATH": path, "HOME": str(tmp_path), "ML_FACTORY_API_KEY": "k" * 32}
    run = partial(subprocess.run, env=environment, cwd=tmp_path)

    def moved(text: str) -> str:
        for name, place in places.items():
            text = re.sub(rf"(?<![\w.]){name}\b", place, text)
        return text

    for word, rest in instructions():
        words = shlex.split(moved(rest))
        if word == "COPY" and "--from" not in rest:
            for source in words[:-1]:
                run(["cp", "-r", given if source == "${BUNDLE}" else ROOT / source, words[-1]], check=True)
        elif word == "ENV":
            environment |= dict(one.split("=", 1) for one in words)
        elif word == "RUN" and "useradd" not in rest:
            run(["/bin/sh", "-c", moved(rest)], check=True)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        environment["PORT"] = str(found.getsockname()[1])
    last = dict(last_stage())
    check, command = (
        [moved(one) for one in json.loads(text)] for text in (last["HEALTHCHECK"].split("CMD ")[1], last["CMD"])
    )
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, **options)
    try:
        healthy, until = False, time.monotonic() + 120
        while not healthy and process.poll() is None and time.monotonic() < until:
            time.sleep(0.5)
            healthy = not run(check, capture_output=True).returncode
        process.send_signal(signal.SIGTERM)
        printed = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert healthy and process.returncode == 0 and "serving DEMO" in printed
    assert not (set(os.listdir(Path(places["/opt"], "venv", "bin"))) & {"pip", "pip3"})
