"""Redaction of secrets: keys known to this machine never reach a file, a log or an output."""

import json
import logging
import os
import re
from pathlib import Path
from urllib.parse import urlparse

HIDDEN = "[redacted]"
_NAMED = re.compile(r"((_|^)(API_?KEY|KEY|TOKEN|SECRET)|PASSWORD|PASSWD)$", re.IGNORECASE)
_SHORTEST = 8  # a shorter one would match ordinary text
_PATH = re.compile(r"[/~.]|[A-Za-z]:[\\/]")  # a path of a key is no key
LOGGERS = ("ml_factory", "ml_factory.training")
WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # the client's default, before and since its version 0.31
_PASSWORD = re.compile(r"\bpassword\s+(\S+)")


def redact(text: str) -> str:
    """Return the text, which may be JSON, with every key of this machine replaced."""
    for secret in known_secrets():
        if secret.isdecimal():  # it may be a number in JSON, which must stay one
            text = re.sub(rf"(?<!\d){secret}(?!\d)", "9" * len(secret), text)
            continue
        for spelling in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]):
            text = text.replace(spelling, HIDDEN)
    return text


def known_secrets() -> list[str]:
    """Return the keys in the environment (by their variables' names) and in .netrc, longest first."""
    found = {value.strip() for name, value in os.environ.items() if _NAMED.search(name)}
    found |= set(_PASSWORD.findall(_netrc()))
    return sorted((one for one in found if len(one) >= _SHORTEST and not _PATH.match(one)), key=len, reverse=True)


class _Redacting(logging.Filter):
    """Log filter that redacts keys in messages and tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True


def guard_logs() -> None:
    """Redact all loggers of this package; called when it is imported."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, _Redacting) for one in logger.filters):
            logger.addFilter(_Redacting())


def has_wandb_key() -> bool:
    """Return True where W&B would find a key: in the environment, or in .netrc for its host."""
    given = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname
    hosts = "|".join(map(re.escape, [given] if given else WANDB_HOSTS))
    return bool(os.environ.get("WANDB_API_KEY") or re.search(rf"\bmachine\s+({hosts})(:\d+)?\s", _netrc()))


def _netrc() -> str:
    try:
        return Path(os.environ.get("NETRC") or Path.home() / ".netrc").read_text()
    except (OSError, UnicodeDecodeError, RuntimeError):
        return ""
