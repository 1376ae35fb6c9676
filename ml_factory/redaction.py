"""Redaction of secrets by name and by form: no password, key or token reaches a file, a log or an output."""

import logging
import os
import re
from collections.abc import Iterable
from functools import lru_cache
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
    "PATH", "FILE", "DIR", "NAME", "TYPE", "HOST", "PORT", "SOCK", "SIZE", "TIMEOUT", "MODE", "LIMIT", "COUNT",
}  # fmt: skip
_NOT_SECRET = {"PWD", "OLDPWD", "SSH_CONNECTION"}
_SHORTEST = 8  # characters; a shorter secret would match ordinary text
_PATH = re.compile(r"(~|\.{1,2}|[A-Za-z]:)?([/\\][\w.+ -]+)+[/\\]?")
_RANDOM = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d).{16,}")  # a word of this kind is no folder's name
_ORDINARY = re.compile(r"[a-z_]{1,12}|[A-Z_]{1,12}")  # a word of ordinary text, as in AUTH_METHOD=password
_NETRC_PASSWORD = re.compile(r"\bpassword\s+(\S+)")
_URL_USER = re.compile(r"""://([^\s/:@"'\\,]{0,200})(?::([^\s"'\\,]{0,200}))?@""")
# Repetitions are bounded, so that no text takes more than linear time.
_NAME = r"[\w.-]{0,40}?(?:password|passwd|pwd|secret|token|(?:api|access|account|private)_?key|signature|credential)"
_CODE = r"(?![A-Za-z_]\w*[.(\[]|(?:None|True|False|null|true|false)\b)"  # f(token=a.b) and password=None are no secrets
_ASSIGNED = re.compile(  # ?access_token=…, password=… of a connection string, "password": "…", Authorization: Bearer …
    rf"""((?:^|[?&;#\s]){_NAME}=|[?&](?:sig|key|pwd|pass|auth)=){_CODE}[^\s"'&;,(){{}}<>\[\]]++(?![(\[])
    |((?<![\w.-]){_NAME}["']?\s{{0,3}}[=:]\s{{0,3}}["'])[^"'\\]{{4,}}(?=["'])
    |(\bauthorization["']?\s{{0,3}}[=:]\s{{0,3}}["']?(?:bearer|basic|token)\s{{1,3}}
      |\bbearer\s{{1,3}}(?=[\w.~+/=-]{{0,200}}\d))[\w.~+/=-]{{8,}}""", re.IGNORECASE | re.VERBOSE
)  # fmt: skip
# Each match of _ASSIGNED holds one of these words; most texts hold none, and looking for them is quicker.
_ASSIGNED_WORDS = (
    "password", "passwd", "pwd", "secret", "token", "key", "signature", "credential", "authorization", "bearer",
    "sig=", "pass=", "auth=",
)  # fmt: skip
_TOKEN = re.compile(  # tokens that a service marks by their beginning, JSON web tokens, private keys
    r"""(?:(?<![\w-])|(?<=\\[nrtbf])|(?<=\[\dm)|(?<=\[\d\dm))
    (?:gh[opsru]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}
    |sk-(?=[\w-]*\d)(?![\w-]*__)[\w-]{20,}|[rs]k_(?:live|test)_\w{16,}|xox[abeprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}\b
    |AIza[\w-]{35}(?![\w-])|ya29\.[\w-]{20,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{40,}|wandb_v\d_[\w-]{20,}|dckr_pat_[\w-]{20,}
    |eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}
    |-----BEGIN\ [A-Z ]*PRIVATE\ KEY-----[A-Za-z0-9+/=\s\\:,.-]*?-----END\ [A-Z ]*PRIVATE\ KEY-----)""", re.VERBOSE
)  # fmt: skip


def redact_secrets(text: str) -> str:
    """Return the text without secrets: those that this machine knows by name, and those whose form shows them (a
    password in a URL, a token of a known service). For JSON see `redact_values`.
    """
    return _redacted(text, _known_secrets())


def redact_values(value: Any) -> Any:
    """Return JSON values with every text in them redacted; numbers stay."""
    return _redacted_values(value, _known_secrets())


def _redacted_values(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        return _redacted(value, secrets)
    if isinstance(value, dict):
        return {_redacted_values(name, secrets): _redacted_values(one, secrets) for name, one in value.items()}
    return [_redacted_values(one, secrets) for one in value] if isinstance(value, list | tuple) else value


def _redacted(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        if secret in text:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])", HIDDEN, text)
    if "://" in text:
        text = _URL_USER.sub(_without_password, text)
    folded = text.casefold().replace("ı", "i")  # as re.IGNORECASE compares
    if any(word in folded for word in _ASSIGNED_WORDS):
        text = _ASSIGNED.sub(lambda found: f"{found[1] or found[2] or found[3]}{HIDDEN}", text)
    return _TOKEN.sub(HIDDEN, text)


def _known_secrets() -> list[str]:
    """Return the secrets in the environment (variables whose names say so, passwords of URLs) and in .netrc, longest
    first; computed again only where one of the two has changed.
    """
    try:
        stamp = os.stat(_netrc_path()).st_mtime_ns
    except (OSError, RuntimeError):
        stamp = 0
    return _find_secrets(tuple(os.environ.items()), stamp)


@lru_cache(maxsize=1)
def _find_secrets(environment: tuple[tuple[str, str], ...], netrc_stamp: int) -> list[str]:
    found = {value.strip() for name, value in environment if _names_secret(name, value.strip())}
    for _, value in environment:
        found |= {password for _, password in _URL_USER.findall(value) if not _ORDINARY.fullmatch(password)}
    found |= set(_NETRC_PASSWORD.findall(_netrc()))
    return sorted((one for one in found if len(one) >= _SHORTEST and not _is_path(one)), key=len, reverse=True)


def _names_secret(name: str, value: str) -> bool:
    name = name.upper()
    words = name.split("_")
    if name in _NOT_SECRET or words[-1] in _OTHER_WORDS:
        return False
    named = not _SECRET_WORDS.isdisjoint(words[-2:]) and not _ORDINARY.fullmatch(value)
    return named or name.endswith(_SECRET_SUFFIXES)


def _is_path(value: str) -> bool:
    """Return True for the path of a file that holds a secret; a secret may begin with / or . as well."""
    return bool(_PATH.fullmatch(value)) and not any(_RANDOM.fullmatch(word) for word in re.split(r"[/\\]", value))


def _without_password(found: re.Match[str]) -> str:
    user, password = found[1], found[2]
    if password and not re.match(r"\d+/", password):  # host:port/path@…
        return f"://{user}:{HIDDEN}@"
    return f"://{HIDDEN}@" if len(user) >= 20 else found[0]  # a token in the place of the user


class RedactedStream:
    """A text stream that redacts what is written to it, line by line: a secret may come in several pieces."""

    def __init__(self, stream: TextIO):
        self._stream, self._line = stream, ""

    def write(self, text: str) -> int:
        *lines, self._line = re.split(r"(?<=[\n\r])", self._line + text)
        if lines:
            self._stream.write(redact_secrets("".join(lines)))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if self._line:
            line, self._line = self._line, ""
            self._stream.write(redact_secrets(line))
        self._stream.flush()

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
        logging.getLogger(name).addFilter(_Redacting())


def has_wandb_key() -> bool:
    """Return True where W&B would find a key: in the environment, or in .netrc for its host."""
    given = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname
    hosts = "|".join(map(re.escape, [given] if given else WANDB_HOSTS))
    return bool(os.environ.get("WANDB_API_KEY") or re.search(rf"\bmachine\s+({hosts})(:\d+)?\s", _netrc()))


def _netrc_path() -> Path:
    return Path(os.environ.get("NETRC") or Path.home() / ".netrc")


def _netrc() -> str:
    try:
        return _netrc_path().read_text()
    except (OSError, UnicodeDecodeError, RuntimeError):
        return ""
