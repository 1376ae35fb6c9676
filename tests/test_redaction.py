"""Keys that this machine knows are found and taken out of any text; ordinary text stays."""

import json
import logging
import re
from pathlib import Path

import pytest

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import SettingsError
from ml_factory.redaction import LOGGERS, has_wandb_key, known_secrets, redact
from ml_factory.storage.atomic_files import write_json
from ml_factory.tracking.tracker import Tracker, read_log

PACKAGE = Path(__file__).resolve().parents[1] / "ml_factory"
LONG = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
HARD = ["wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLE", 'ab"c\\d\te\u00e9"fgh']  # slashes; what JSON spells otherwise


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "MY_SECRET", "PGPASSWORD", "DB_PASSWORD", "OPENAI_KEY"])
def test_by_the_names_of_variables(monkeypatch, name):
    monkeypatch.setenv(name, f" {LONG}\n")
    assert redact(f"Bearer {LONG}, twice {LONG}") == "Bearer [redacted], twice [redacted]"


@pytest.mark.parametrize("name", ["MONKEY", "KEYBOARD", "TOKENIZERS_PARALLELISM", "SSH_KEY_PATH"])
def test_other_variables_are_no_keys(monkeypatch, name):
    monkeypatch.setenv(name, LONG)
    assert LONG not in known_secrets() and redact(f"see {LONG}") == f"see {LONG}"


def test_passwords_of_netrc_and_for_whose_host(monkeypatch, bare):
    bare.write_text(f"machine wandb.example.com\n  login user\n  password {LONG}\nmachine b login c password short\n")
    assert redact(f"a {LONG} short") == "a [redacted] short"  # what is found in ordinary text is left alone
    assert not has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com:8080")
    assert has_wandb_key()


def test_the_client_s_own_login_is_found(monkeypatch, bare):
    """Whatever host the installed client talks to by default."""
    from wandb.sdk.lib import urls, wbauth

    monkeypatch.setenv("NETRC", str(bare))
    wbauth.write_netrc_auth(host=urls.DEFAULT_BASE_URL, api_key=LONG)
    assert has_wandb_key()


def test_the_longest_first(monkeypatch):
    monkeypatch.setenv("A_KEY", LONG)
    monkeypatch.setenv("B_KEY", LONG + "-and-more")
    assert redact(f"{LONG}-and-more") == "[redacted]"


@pytest.mark.parametrize("name", ["/run/secrets/one", "~/.secrets/one", "./secrets/one", "C:\\secrets\\one"])
def test_where_a_key_lies_is_no_key(monkeypatch, name):
    monkeypatch.setenv("MY_KEY", name)
    assert redact(f"read from {name}") == f"read from {name}"


@pytest.fixture(params=HARD, ids=["slashes", "quotes"])
def secret(request, monkeypatch, tmp_path):
    monkeypatch.setenv("CLOUD_SECRET", request.param)
    monkeypatch.setenv("ML_FACTORY_CACHE", str(tmp_path / "cache"))
    return request.param


def holds(secret: str, text: str) -> bool:
    return any(one in text for one in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]))


def test_no_file_of_a_run_says_a_key(secret, tmp_path):
    """A setting, a metric, a text among the metrics of a checkpoint, the summary."""
    write_json(tmp_path / "run.json", {"settings": {"note": secret, secret: 1}})
    with CheckpointManager(tmp_path / "checkpoints", run="r") as manager:
        manager.save_checkpoint("p", {"value": 1}, force=True, metrics={"note": f"from {secret}"})
    with Tracker("r", {"note": secret}, tmp_path / "log", tmp_path / "local", mirror="off") as tracker:
        tracker.log(1, {"loss": 0.5, "note": secret})
        tracker.finish({"note": secret})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    texts = {path: path.read_bytes().decode("utf-8", "replace") for path in files}
    assert [path.name for path, text in texts.items() if holds(secret, text)] == []
    said = {path.suffix for path, text in texts.items() if "[redacted]" in text}
    assert {".json", ".ckpt", ".jsonl"} <= said, "each was offered the key"


def test_a_key_of_digits_leaves_numbers_that_can_be_read(monkeypatch, tmp_path):
    monkeypatch.setenv("DOOR_KEY", "20240115")
    with Tracker("r", {"note": 20240115}, tmp_path / "log", tmp_path / "local", mirror="off") as tracker:
        tracker.log(1, {"loss": 0.20240115, "note": "dial 20240115", "count": 20240115, "other": 120240115})
    [row] = read_log(tmp_path / "log").to_dict("records")
    assert row["other"] == 120240115 and "20240115" not in json.dumps([row["loss"], row["note"], row["count"]])


def test_no_message_says_a_key(secret, caplog):
    error = SettingsError("No", where=secret, got={"note": secret})
    assert not holds(secret, str(error)) and "[redacted]" in str(error)
    for name in LOGGERS:
        logging.getLogger(name).warning("with %s inside", secret)
        try:
            raise ValueError(secret)
        except ValueError:
            logging.getLogger(name).exception("a traceback")
    assert len(caplog.records) == 2 * len(LOGGERS) and not holds(secret, caplog.text)


def test_every_logger_is_guarded():
    used = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r'getLogger\("(ml_factory[^"]*)"', path.read_text())
    }
    assert used == set(LOGGERS)
