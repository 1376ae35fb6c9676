"""The service's key, as environments and secret stores give it."""

from pathlib import Path

import pytest

from ml_factory.errors import SettingsError
from ml_factory.serving import server
from ml_factory.serving.server import KEY_VARIABLE, parse_api_key

ROOT = Path(__file__).resolve().parents[2]


def test_api_key_with_line_end_of_secret_store_is_used_without_it(monkeypatch, tmp_path):
    used = []

    class Stopped(Exception):
        pass

    def record(service, key, hosts):
        used.append(key)
        raise Stopped

    monkeypatch.setattr(server, "Service", lambda *_, **__: None)
    monkeypatch.setattr(server, "build_app", record)
    for given in ("abc123\n", " abc123\r\n", "abc123"):
        monkeypatch.setenv(KEY_VARIABLE, given)
        with pytest.raises(Stopped):
            server.run_server([], host="127.0.0.1", port=0, no_key=False, state=tmp_path, guard=None,
                              announce=lambda _: None)  # fmt: skip
    assert used == ["abc123"] * 3
    page = (ROOT / "docs" / "cloud_run.md").read_text(encoding="utf-8")
    assert "openssl rand -hex 32 | tr -d '\\n' | gcloud secrets create" in page


@pytest.mark.parametrize("text", ["two words", "two\nlines", "a\tb", "schl\u00fcssel", "a\x00b"])
def test_api_key_that_no_header_holds_is_refused_in_one_line_without_showing_it(text):
    with pytest.raises(SettingsError, match=f"cannot be sent as a header.*{KEY_VARIABLE}") as caught:
        parse_api_key(text)
    assert "\n" not in str(caught.value) and text not in str(caught.value)


def test_blank_api_key_is_none():
    assert parse_api_key("\n") == ""
