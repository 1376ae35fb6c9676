"""Addresses of databases, postgresql://user@host/name and http://host:9000 of QuestDB's REST interface, and columns."""

from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, urlsplit

from ml_factory.errors import SettingsError

POSTGRES, QUESTDB = ("postgresql", "postgres"), ("http", "https")


@dataclass(frozen=True)
class DatabaseAddress:
    """Address of a database.

    shown : scheme, host and name, for messages and records: never a user, a password or an option.
    parts : of the address as given.
    """

    shown: str
    parts: SplitResult = field(repr=False)


def parse_database_address(text: str) -> DatabaseAddress:
    """Parse an address; nothing is opened. Raises SettingsError, whose message has no part of a password."""
    with suppress(ValueError):  # of a port that is no number
        parts = urlsplit(text.strip())
        host = parts.hostname or dict(parse_qsl(parts.query)).get("host", "")
        if "://" in text and (parts.scheme in POSTGRES or (parts.scheme in QUESTDB and host)):
            port = f":{parts.port}" if parts.port else ""
            return DatabaseAddress(f"{parts.scheme}://{host}{port}{parts.path.rstrip('/')}", parts)
    scheme, found, _ = text.strip().partition("://")
    raise SettingsError(
        "This is not the address of a database", where="--source", got=f"{scheme}: …" if found else "no scheme",
        wanted="postgresql://user@host/database, or http://host:9000 of QuestDB",
        next_step="the password belongs into PGPASSWORD or ~/.pgpass",
    )  # fmt: skip


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    kind : "utc" (time with a zone), "time" (without), "integer", "float", "boolean" or "text"
    stored : the database's own name of the type
    value : SQL of its values in the type of its kind
    finite : SQL of a time that is NULL where it is infinite
    """

    name: str
    kind: str
    stored: str
    value: str
    finite: str


def quoted(name: str) -> str:
    """Return a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'
