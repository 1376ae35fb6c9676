"""Keys that this machine knows are found and taken out of any text; ordinary text stays."""

import io
import json
import logging
import re
from pathlib import Path

import nbformat
import pytest

from ml_factory.checkpoints.manager import CheckpointManager
from ml_factory.errors import SettingsError
from tests.contract import doors
from tests.tracking.metrics_table import read_log

PACKAGE = Path(__file__).resolve().parents[2] / "ml_factory"
LONG = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
HARD = ["wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLE", 'ab"c\\d\te\u00e9"fgh']  # slashes; what JSON spells otherwise


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


NAMED = [
    "WANDB_API_KEY", "HF_TOKEN", "MY_SECRET", "PGPASSWORD", "DB_PASSWORD", "OPENAI_KEY", "GITHUB_PAT",
    "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "SECRET_KEY_BASE", "MYSQL_PWD",
    "SMTP_PASS", "SSH_PASSPHRASE", "SENTRY_DSN", "SLACK_WEBHOOK_URL", "NPM_AUTH",
    "AZURE_STORAGE_CONNECTION_STRING", "GOOGLE_CREDENTIALS", "DJANGO_SECRET_KEY", "APP_JWT", "MYAPIKEY",
    "TWINE_PASSWORD",
]  # fmt: skip
OTHERS = ["MONKEY", "TOKENIZERS_PARALLELISM", "SSH_KEY_PATH", "PASS_COUNT", "OLDPWD"]
KEY_FILES = ["/run/secrets/one", "~/.secrets/one", "./secrets/one", "C:\\secrets\\one"]
LIKE_PATHS = ["/wJalrXUtnFEMI7MDENG/bPxRfiCY", "~wJalrXUtnFEMI7MD", ".wJalrXUtnFEMI7MDENG"]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        *((name, LONG, "[redacted]") for name in NAMED), *((name, LONG, LONG) for name in OTHERS),
        *(("MY_KEY", path, path) for path in KEY_FILES),
        *(("AWS_SECRET_ACCESS_KEY", value, "[redacted]") for value in LIKE_PATHS),
    ],
)  # fmt: skip
def test_redact_replaces_values_of_secret_named_variables_and_keeps_paths_of_key_files(monkeypatch, name, value, shown):
    monkeypatch.setenv(name, f" {value}\n")
    assert doors.redact_secrets(f"see {value}, twice {value}") == f"see {shown}, twice {shown}"


def test_redact_replaces_long_netrc_passwords_and_wandb_key_follows_host(monkeypatch, bare):
    bare.write_text(f"machine wandb.example.com\n  login user\n  password {LONG}\nmachine b login c password short\n")
    assert (
        doors.redact_secrets(f"a {LONG} short") == "a [redacted] short"
    )  # what is found in ordinary text is left alone
    assert not doors.has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com:8080")
    assert doors.has_wandb_key()


def test_has_wandb_key_finds_login_written_by_wandb_client(monkeypatch, bare):
    """Whatever host the installed client talks to by default."""
    from wandb.sdk.lib import urls, wbauth

    monkeypatch.setenv("NETRC", str(bare))
    wbauth.write_netrc_auth(host=urls.DEFAULT_BASE_URL, api_key=LONG)
    assert doors.has_wandb_key()


def test_redact_replaces_longest_secret_first(monkeypatch):
    monkeypatch.setenv("A_KEY", LONG)
    monkeypatch.setenv("B_KEY", LONG + "-and-more")
    assert doors.redact_secrets(f"{LONG}-and-more") == "[redacted]"


def test_redact_password_of_url_in_environment_is_replaced_alone(monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgresql://reader:correct-horse@db.example.com/bars")
    assert (
        doors.redact_secrets("the server refused correct-horse of reader") == "the server refused [redacted] of reader"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://user:p%40ss@host/db", "postgresql://user:[redacted]@host/db"),
        ("mysql://user:a@b@host/db", "mysql://user:[redacted]@host/db"),
        ("https://ghp_abcdefghijklmnopqrstuvwx012345@github.com/a/b", "https://[redacted]@github.com/a/b"),
        ("https://host/a?private_token=abc&page=1", "https://host/a?private_token=[redacted]&page=1"),
        ("https://host/a#access_token=abc", "https://host/a#access_token=[redacted]"),
        ("https://host/a?X-Amz-Signature=abc", "https://host/a?X-Amz-Signature=[redacted]"),
        ("host=h user=u password=abc dbname=d", "host=h user=u password=[redacted] dbname=d"),
        ("Authorization: Bearer abcdefghijklmnop1234", "Authorization: Bearer [redacted]"),
        ('connect(password="abcd", user=1)', 'connect(password="[redacted]", user=1)'),
        ("{'password': 'abcd'}", "{'password': '[redacted]'}"),
        (
            "DefaultEndpointsProtocol=https;AccountKey=abc/d==;x",
            "DefaultEndpointsProtocol=https;AccountKey=[redacted];x",
        ),
        ("authorization: token abcdefgh12", "authorization: token [redacted]"),
        ("bearer abcdefghijklmnop1234", "bearer [redacted]"),
        ("postgres://u:pa/ss@host/db", "postgres://u:[redacted]@host/db"),
        ("\x1b[31mghp_abcdefghijklmnopqrstuvwx012345", "\x1b[31m[redacted]"),
        ("key sk-proj-abcdefghijklmnop1234 ends", "key [redacted] ends"),
        ("AKIAIOSFODNN7EXAMPLE", "[redacted]"),
        ("a eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK b", "a [redacted] b"),
        ('{"address": "https://u:p@h/x", "n": 1}', '{"address": "https://u:[redacted]@h/x", "n": 1}'),
    ],
)
def test_redact_secret_known_by_its_form_is_replaced(text, shown):
    assert doors.redact_secrets(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://user@host/db", "ssh://git@github.com/a/b", "git@github.com:a/b", "gs://bucket/prefix",
        "https://host/a?symbol=MES&horizon=5",
        'client(password=os.environ["DB"])', "def f(token: str, password=None): ...", "this._auth=b.c;key=function(){}",
        "sk-toggleable__label-arrow and more", "Basic characteristics/of-this", "a primary_key=3",
        "see http://localhost:8080,user@example.com", "http://localhost:8080/a@b",
        "task-risk-2024-and-more-words-behind", "2026-11-22T10:00:00Z",
        "xgboost-h20-s0-0123456789", "keyword=value",
    ],
)  # fmt: skip
def test_redact_ordinary_text_stays(text):
    assert doors.redact_secrets(text) == text


def test_redact_values_of_json_keeps_names_numbers_and_structure(monkeypatch):
    monkeypatch.setenv("APP_SECRET", "12345678")
    monkeypatch.setenv("DATABASE_URL", "postgresql://training:training@host/db")
    monkeypatch.setenv("AUTH_METHOD", "password")
    token = "ghp_abcdefghijklmnopqrstuvwx012345"
    value = {"training": "training", "rows": 12345678, "lines": [f"x\n{token}", f"\x1b[31m{token}"], "how": "password"}
    assert doors.redact_values(value) == {
        "training": "training", "rows": 12345678, "lines": ["x\n[redacted]", "\x1b[31m[redacted]"], "how": "password",
    }  # fmt: skip


def test_redacted_stream_joins_pieces_of_one_line():
    stream = io.StringIO()
    redacted = doors.RedactedStream(stream)
    print("Authorization: Bearer", "abcdefghijklmnop1234", file=redacted)
    redacted.write("50 %\r")
    assert stream.getvalue().endswith("50 %\r")  # a bar is not held back until a line ends
    redacted.write("Bearer ")
    redacted.write("abcdefghijklmnop1234")
    redacted.flush()
    assert stream.getvalue() == "Authorization: Bearer [redacted]\n50 %\rBearer [redacted]"


def test_redact_private_key_block_is_replaced():
    block = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabcd\n-----END RSA PRIVATE KEY-----"
    assert doors.redact_secrets(f"before {block} after") == "before [redacted] after"


def test_command_line_prints_no_password_of_data_address(call):
    address = "https://user:correct-horse@127.0.0.1:9/bars.parquet?token=battery-staple"
    code, out, error = call("prepare", "--data", address, "--symbol", "MES")
    assert code != 0 and "127.0.0.1:9" in out + error
    assert "correct-horse" not in out + error and "battery-staple" not in out + error


def test_run_notebook_with_secret_as_parameter_leaves_none_in_executed_copy(tmp_path):
    token = "ghp_abcdefghijklmnopqrstuvwx012345"
    cell = nbformat.v4.new_code_cell("#@title Parameters\nSYMBOL: str = ''", metadata={"tags": ["parameters"]})
    cells = [cell, nbformat.v4.new_code_cell("print(SYMBOL)")]
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), tmp_path / "a.ipynb")
    out = doors.run_suite_notebook(tmp_path / "a.ipynb", tmp_path / "out.ipynb", {"SYMBOL": token})
    assert token not in out.read_text() and out.read_text().count("[redacted]") >= 2


@pytest.fixture(params=HARD, ids=["slashes", "quotes"])
def secret(request, monkeypatch, tmp_path):
    monkeypatch.setenv("CLOUD_SECRET", request.param)
    monkeypatch.setenv("ML_FACTORY_CACHE", str(tmp_path / "cache"))
    return request.param


def holds(secret: str, text: str) -> bool:
    return any(one in text for one in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]))


def test_run_files_with_secret_in_settings_or_metrics_hold_no_secret(secret, tmp_path):
    """A setting, a metric, a text among the metrics of a checkpoint, the summary."""
    doors.files.write_json(tmp_path / "run.json", {"settings": {"note": secret, secret: 1}})
    with CheckpointManager(tmp_path / "checkpoints", run="r") as manager:
        manager.save_checkpoint("p", {"value": 1}, force=True, metrics={"note": f"from {secret}"})
    with doors.Tracker("r", {"note": secret}, tmp_path / "log", tmp_path / "local", mirror="off") as tracker:
        tracker.log(1, {"loss": 0.5, "note": secret})
        tracker.finish({"note": secret})
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    texts = {path: path.read_bytes().decode("utf-8", "replace") for path in written}
    assert [path.name for path, text in texts.items() if holds(secret, text)] == []
    printed = {path.suffix for path, text in texts.items() if "[redacted]" in text}
    assert {".json", ".ckpt", ".jsonl"} <= printed, "each was offered the key"


def test_tracker_with_numeric_secret_redacts_texts_and_keeps_numbers(monkeypatch, tmp_path):
    monkeypatch.setenv("DOOR_KEY", "20240115")
    with doors.Tracker("r", {"note": 20240115}, tmp_path / "log", tmp_path / "local", mirror="off") as tracker:
        tracker.log(1, {"loss": 0.20240115, "note": "dial 20240115", "count": 20240115, "other": 120240115})
    [row] = read_log(tmp_path / "log").to_dict("records")
    assert row["other"] == 120240115 and (row["count"], row["note"]) == (20240115, "dial [redacted]")


def test_error_and_log_messages_with_secret_are_redacted(secret, caplog):
    error = SettingsError("No", where=secret, got={"note": secret})
    assert not holds(secret, str(error)) and "[redacted]" in str(error)
    for name in doors.LOGGERS:
        logging.getLogger(name).warning("with %s inside", secret)
        try:
            raise ValueError(secret)
        except ValueError:
            logging.getLogger(name).exception("a traceback")
    assert len(caplog.records) == 2 * len(doors.LOGGERS) and not holds(secret, caplog.text)


def test_loggers_of_the_package_are_redacted():
    sources = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert set(re.findall(r'getLogger\("(ml_factory[^"]*)"', sources)) == set(doors.LOGGERS)


@pytest.mark.parametrize("piece", ["a.b-c_", "password ", "://a:", "bearer ", "eyJ", '"password": "', "sk-", "x "])
def test_redact_of_long_repetitive_text_ends(piece):
    """A rule of quadratic cost meets the time limit of a test here."""
    assert doors.redact_secrets(piece * (300_000 // len(piece)))
