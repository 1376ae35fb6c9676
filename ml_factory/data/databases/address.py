"""Addresses of databases: postgresql://user@host/name, and http://host:9000 of QuestDB's REST interface."""

from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from ml_factory.errors import SettingsError

POSTGRES_SCHEMES, QUESTDB_SCHEMES = ("postgresql", "postgres"), ("http", "https")
# A server that is gone is noticed within a minute, and names are text in one encoding.
_POSTGRES_OPTIONS = {
    "connect_timeout": "15", "keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3",
    "client_encoding": "UTF8", "fallback_application_name": "ml_factory",
}  # fmt: skip


@dataclass(frozen=True)
class DatabaseAddress:
    """Address of a database.

    shown : scheme, host and name, for messages and records: never a user, a password or an option.
    text : as given.
    """

    shown: str
    text: str = field(repr=False)

    @property
    def is_questdb(self) -> bool:
        """Return whether this is QuestDB's REST interface."""
        return self.parts.scheme in QUESTDB_SCHEMES

    @property
    def parts(self) -> SplitResult:
        """The parts of the text."""
        return urlsplit(self.text)

    @property
    def login(self) -> tuple[str, str]:
        """User and password in the text, "" where there is none."""
        return unquote(self.parts.username or ""), unquote(self.parts.password or "")

    def libpq_uri(self) -> str:
        """Return the text as libpq reads it, with a limit of time for each answer of the network."""
        given = dict(parse_qsl(self.parts.query, keep_blank_values=True))
        return self.parts._replace(query=urlencode(_POSTGRES_OPTIONS | given, quote_via=quote)).geturl()


def parse_database_address(text: str) -> DatabaseAddress:
    """Parse an address; nothing is opened. Raises SettingsError, whose message has no part of a password."""
    wanted = "postgresql://user@host/database, or http://host:9000 of QuestDB"
    step = "the password belongs into PGPASSWORD or ~/.pgpass"
    try:
        parts = urlsplit(text.strip())
        port = parts.port
    except ValueError as error:
        raise SettingsError("This is not the address of a database", where="--source", got="text that is no address",
                            wanted=wanted, next_step=step) from error  # fmt: skip
    if parts.scheme not in POSTGRES_SCHEMES + QUESTDB_SCHEMES or not text.strip().startswith(f"{parts.scheme}://"):
        got = f"{parts.scheme}:" if parts.scheme and "@" not in parts.scheme else "text without a scheme"
        raise SettingsError("This is not the address of a database", where="--source", got=got if text else "nothing",
                            wanted=wanted, next_step=step)  # fmt: skip
    if parts.scheme in QUESTDB_SCHEMES and not parts.hostname:
        raise SettingsError("This address names no host", where="--source", wanted=wanted)
    host = (parts.hostname or dict(parse_qsl(parts.query)).get("host", "")) + (f":{port}" if port else "")
    return DatabaseAddress(f"{parts.scheme}://{host}{parts.path.rstrip('/')}", text.strip())
