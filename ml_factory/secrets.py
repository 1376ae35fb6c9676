"""What must never reach a file, a log or an output: the keys that this machine knows."""

import json
import logging
import os
import re
from pathlib import Path
from urllib.parse import urlparse

HIDDEN = "[redacted]"
_NAMED = re.compile(r"((_|^)(API_?KEY|KEY|TOKEN|SECRET)|PASSWORD|PASSWD)$", re.IGNORECASE)
_SHORTEST = 8  # a shorter one would be found in ordinary text
_PATH = re.compile(r"[/~.]|[A-Za-z]:[\\/]")  # where a key lies is no key
LOGGERS = ("ml_factory", "ml_factory.training")
WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # the client's default, before and since its version 0.31
_PASSWORD = re.compile(r"\bpassword\s+(\S+)")


def redact(text: str) -> str:
    """The text, which may be JSON, without any key of this machine, should one have come into a setting, a metric or a
    message."""
    for secret in known_secrets():
        if secret.isdecimal():  # it may be a number of the JSON, which must stay one
            text = re.sub(rf"(?<!\d){secret}(?!\d)", "9" * len(secret), text)
            continue
        for spelling in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]):
            text = text.replace(spelling, HIDDEN)
    return text


def known_secrets() -> list[str]:
    """The keys in the environment (by their variables' names) and in .netrc, longest first."""
    found = {value.strip() for name, value in os.environ.items() if _NAMED.search(name)}
    found |= set(_PASSWORD.findall(_netrc()))
    return sorted((one for one in found if len(one) >= _SHORTEST and not _PATH.match(one)), key=len, reverse=True)


class _Redacting(logging.Filter):
    """A logger with this says no key, in a message or in a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True


def guard_logs() -> None:
    """From now on no logger of ours says a key; done when the package is imported."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, _Redacting) for one in logger.filters):
            logger.addFilter(_Redacting())


def has_wandb_key() -> bool:
    """Whether W&B would find a key here: in the environment, or in .netrc for the host it talks to."""
    given = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname
    hosts = "|".join(map(re.escape, [given] if given else WANDB_HOSTS))
    return bool(os.environ.get("WANDB_API_KEY") or re.search(rf"\bmachine\s+({hosts})(:\d+)?\s", _netrc()))


def _netrc() -> str:
    try:
        return Path(os.environ.get("NETRC") or Path.home() / ".netrc").read_text()
    except (OSError, UnicodeDecodeError, RuntimeError):
        return ""
