"""Settings of the service: address, limits, folder of the feeds' state."""

import ipaddress
from dataclasses import dataclass, fields

from ml_factory.errors import SettingsError, wrong_field_error

KEY_VARIABLE = "ML_FACTORY_API_KEY"


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of the service. A request beyond them is refused with 413 or 429 and a reason.

    body_bytes : of a request, and of a message of a stream
    bars, rows : raw bars and feature rows of one request or message
    values : in the JSON of a request or message, counted by its commas and brackets before it is parsed
    requests_per_second, burst : requests and messages of one client's address, and how many may come at once
    open_connections : sockets that are open, of requests and streams; further ones are closed
    header_seconds : from the begin of a connection or request to the end of its headers
    request_seconds : from the end of a request's headers to its answer
    concurrent_requests : under way at once, of all clients
    waiting_jobs : predictions that wait for the thread of one symbol
    batch_rows : feature rows that are predicted in one call
    connections : open streams
    feeds : by name and symbol, that are open at once; idle ones are closed and come back from the disk
    stored_feeds : that have a folder on the disk
    """

    body_bytes: int = 8 * 2**20
    bars: int = 100_000
    rows: int = 4096
    values: int = 1_000_000
    requests_per_second: float = 500.0
    burst: int = 1000
    open_connections: int = 512
    header_seconds: float = 10.0
    request_seconds: float = 30.0
    concurrent_requests: int = 128
    waiting_jobs: int = 128
    batch_rows: int = 4096
    connections: int = 64
    feeds: int = 64
    stored_feeds: int = 1000

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kinds = getattr(self, field.name), int if field.type is int else int | float
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1e12:
                wanted = "a whole number above 0" if kinds is int else "a number above 0"
                raise wrong_field_error(self, field.name, "A limit is a positive number", wanted=wanted)


def is_loopback(host: str) -> bool:
    """Return whether this is a name or an address that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def parse_api_key(text: str) -> str:
    """Return the key in the value of the environment variable, without the line end that secret stores keep.

    Raises SettingsError for a key that no header can hold as it is; the message does not show it.
    """
    key = text.strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise SettingsError(
            "This key cannot be sent as a header", where=KEY_VARIABLE, got="a space, or another character than ASCII's",
            wanted="letters, digits and signs of ASCII", next_step="openssl rand -hex 32 makes a key",
        )  # fmt: skip
    return key


def check_service_address(host: str, key: str, no_key: bool) -> None:
    """Raise SettingsError for an address that other machines reach, without a key."""
    if not key and not no_key and not is_loopback(host):
        raise SettingsError(
            "Other machines reach this address, and there is no key", where="--host", got=host,
            wanted="127.0.0.1, or a key", next_step=f"set the environment variable {KEY_VARIABLE}, or add --no-key",
        )  # fmt: skip
