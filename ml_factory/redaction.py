"""Redaction of secrets by name and by form: no password, key or token reaches a file, a log or an output."""

import json
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlparse

HIDDEN = "[redacted]"
LOGGERS = ("ml_factory", "ml_factory.training")
WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # the client's default, before and since its version 0.31
# An environment variable holds a secret when one of the last two words of its name is in the first set, or its name
# ends in one of the suffixes, unless its last word is in the second set.
_SECRET_WORDS = {
    "KEY", "APIKEY", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASS", "PWD", "PASSPHRASE", "CREDENTIAL",
    "CREDENTIALS", "PAT", "AUTH", "DSN", "COOKIE", "JWT", "WEBHOOK", "CONNECTION",
}  # fmt: skip
_SECRET_SUFFIXES = ("PASSWORD", "PASSWD", "PASSPHRASE", "TOKEN", "SECRET", "APIKEY")
_OTHER_WORDS = {
    "PATH",
    "FILE",
    "DIR",
    "NAME",
    "TYPE",
    "HOST",
    "PORT",
    "SOCK",
    "SIZE",
    "TIMEOUT",
    "MODE",
    "LIMIT",
    "COUNT",
}
_NOT_SECRET = {"PWD", "OLDPWD", "SSH_CONNECTION"}
_SHORTEST = 8  # characters; a shorter secret would match ordinary text
_PATH = re.compile(r"(~|\.{1,2}|[A-Za-z]:)?([/\\][\w.+ -]+)+[/\\]?")
_RANDOM = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d).{16,}")  # a word of this kind is no folder's name
_NETRC_PASSWORD = re.compile(r"\bpassword\s+(\S+)")
_URL_USER = re.compile(r"""://([^\s/:@"'\\]*)(?::([^\s/"'\\]*))?@""")
_ASSIGNED = re.compile(  # ?access_token=…, &api_key=…, #token=…, and password=… of a connection string
    r"""([?&;#](?:[\w.-]*(?:token|secret|password|passwd|api_?key|access_?key|signature|credential|auth)|sig|key|pwd|pass)=
    |\b(?:password|passwd|pwd)=)[^&;\s"'#\\]+""", re.IGNORECASE | re.VERBOSE
)  # fmt: skip
_TOKEN = re.compile(  # tokens that a service marks by their beginning, JSON web tokens, headers, private keys
    r"""(?<![\w-])(?:gh[opsru]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}
    |[rs]k_(?:live|test)_\w{16,}|xox[abeprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}
    |npm_[A-Za-z0-9]{20,}|pypi-[\w-]{40,}|wandb_v\d_[\w-]{20,}|dckr_pat_[\w-]{20,}
    |eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}|(?<=Bearer\ )[\w.~+/=-]{16,}|(?<=Basic\ )[\w+/=-]{16,}
    |-----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?-----END\ [A-Z ]*PRIVATE\ KEY-----)""", re.DOTALL | re.VERBOSE
)  # fmt: skip


def redact_secrets(text: str) -> str:
    """Return the text, which may be JSON, without secrets: those that this machine knows by name, and those whose
    form shows them (a password in a URL, a token of a known service).
    """
    for secret in known_secrets():
        if secret.isdecimal():  # it may be a number in JSON, which must stay one
            text = re.sub(rf"(?<!\d){secret}(?!\d)", "9" * len(secret), text)
            continue
        for spelling in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]):
            text = text.replace(spelling, HIDDEN)
    text = _URL_USER.sub(_without_password, text)
    return _TOKEN.sub(HIDDEN, _ASSIGNED.sub(rf"\1{HIDDEN}", text))


def known_secrets() -> list[str]:
    """Return the secrets in the environment (variables whose names say so, passwords of URLs) and in .netrc, longest
    first.
    """
    found = {value.strip() for name, value in os.environ.items() if _names_secret(name)}
    for value in os.environ.values():
        found |= {password for _, password in _URL_USER.findall(value)}
    found |= set(_NETRC_PASSWORD.findall(_netrc()))
    return sorted((one for one in found if len(one) >= _SHORTEST and not _is_path(one)), key=len, reverse=True)


def _names_secret(name: str) -> bool:
    name = name.upper().removesuffix("_ID") if name.upper().endswith("KEY_ID") else name.upper()
    words = name.split("_")
    if name in _NOT_SECRET or words[-1] in _OTHER_WORDS:
        return False
    return name.endswith(_SECRET_SUFFIXES) or not _SECRET_WORDS.isdisjoint(words[-2:])


def _is_path(value: str) -> bool:
    """Return True for the path of a file that holds a secret; a secret may begin with / or . as well."""
    return bool(_PATH.fullmatch(value)) and not any(_RANDOM.fullmatch(word) for word in re.split(r"[/\\]", value))


def _without_password(found: re.Match[str]) -> str:
    user, password = found[1], found[2]
    if password:
        return f"://{user}:{HIDDEN}@"
    return f"://{HIDDEN}@" if len(user) >= 20 else found[0]  # a token in the place of the user


class RedactedStream:
    """A text stream that redacts all that is written to it."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redact_secrets(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Redacting(logging.Filter):
    """Log filter that redacts keys in messages and tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact_secrets(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = redact_secrets(logging.Formatter().formatException(record.exc_info))
        return True


def redact_logs() -> None:
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
