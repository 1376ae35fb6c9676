"""What must never reach a file, a log or an output: the keys that this machine knows."""

import os
import re
from pathlib import Path
from urllib.parse import urlparse

HIDDEN = "[redacted]"
_NAMED = re.compile(r"((_|^)(API_?KEY|KEY|TOKEN|SECRET)|PASSWORD|PASSWD)$", re.IGNORECASE)
_SHORTEST = 8  # a shorter one would be found in ordinary text
_PASSWORD = re.compile(r"\bpassword\s+(\S+)")


def redact(text: str) -> str:
    """The text without any key of this machine, should one have come into a setting, a metric or a message."""
    for secret in known_secrets():
        text = text.replace(secret, HIDDEN)
    return text


def known_secrets() -> list[str]:
    """The keys in the environment (by their variables' names) and in .netrc, longest first."""
    found = {value.strip() for name, value in os.environ.items() if _NAMED.search(name)}
    found |= set(_PASSWORD.findall(_netrc()))
    return sorted((one for one in found if len(one) >= _SHORTEST and "/" not in one), key=len, reverse=True)


def has_wandb_key() -> bool:
    """Whether W&B would find a key here: in the environment, or in .netrc for the host it talks to."""
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    return bool(os.environ.get("WANDB_API_KEY")) or f"machine {host}" in " ".join(_netrc().split())


def _netrc() -> str:
    try:
        return Path(os.environ.get("NETRC") or Path.home() / ".netrc").read_text()
    except (OSError, UnicodeDecodeError, RuntimeError):
        return ""
