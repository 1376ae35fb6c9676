"""Keys that this machine knows are found and taken out of any text; ordinary text stays."""

import pytest

from ml_factory.runs.keys import has_wandb_key, known_secrets, redact

LONG = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


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


def test_the_longest_first(monkeypatch):
    monkeypatch.setenv("A_KEY", LONG)
    monkeypatch.setenv("B_KEY", LONG + "-and-more")
    assert redact(f"{LONG}-and-more") == "[redacted]"
