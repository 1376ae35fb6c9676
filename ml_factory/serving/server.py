"""The server process: its address and key, a socket, and uvicorn on it."""

import errno
import ipaddress
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn

from ml_factory.errors import SettingsError, WorkspaceError
from ml_factory.inference.guard import GuardSettings
from ml_factory.interrupt import Interrupted
from ml_factory.serving.app import build_app
from ml_factory.serving.served_bundle import ServedBundle
from ml_factory.storage.locks import acquire_lock_file, release_lock_file
from ml_factory.storage.mounts import mount_of

KEY_VARIABLE = "ML_FACTORY_API_KEY"
_GRACE_SECONDS = 30


def run_server(
    paths: Sequence[Path],
    *,
    host: str,
    port: int,
    no_key: bool,
    state: Path | None,
    guard: GuardSettings,
    announce: Callable[[dict], None],
) -> None:
    """Serve these bundles until SIGTERM or Ctrl-C; return after what was under way is finished.

    paths : files of the bundles, one of each symbol; each has predicted before requests are accepted
    port : 0 takes a free one
    state : folder of the feeds' state, which survives a restart; None: a temporary one
    announce : called with `url` and `bundles` (symbol -> run) when requests are accepted

    Raises SettingsError for an address without a key or a key that cannot be sent, WorkspaceError for a port in use,
    and as `Bundle.load`.
    """
    key = parse_api_key(os.environ.get(KEY_VARIABLE, ""))
    check_service_address(host, key, no_key)
    with _listen(host, port) as listener, open_state_folder(state) as folder:
        bundles = dict[str, ServedBundle]()
        for path in paths:
            served = ServedBundle.load(path, guard)
            if served.symbol in bundles:
                raise SettingsError(
                    f"Two bundles of {served.symbol}", where=path, got=f"a second bundle of {served.symbol}",
                    wanted="one bundle of each symbol", next_step="serve the other one by a second process",
                )  # fmt: skip
            bundles[served.symbol] = served
        shown = f"[{host}]" if ":" in host else host
        hosts = ("localhost", "127.0.0.1", shown) if is_loopback(host) else ("*",)
        config = uvicorn.Config(
            build_app(list(bundles.values()), folder, key, hosts), log_config=None, access_log=False, ws="none",
            log_level="warning", proxy_headers=False, server_header=False, timeout_graceful_shutdown=_GRACE_SECONDS,
        )  # fmt: skip
        runs = {symbol: served.run_id for symbol, served in bundles.items()}
        announce({"url": f"http://{shown}:{listener.getsockname()[1]}", "bundles": runs})
        with suppress(Interrupted, KeyboardInterrupt):  # raised by uvicorn after it has ended by a signal
            uvicorn.Server(config).run([listener])


@contextmanager
def open_state_folder(state: Path | None) -> Iterator[Path]:
    """Yield the folder of the feeds' state, which no other process writes to. Raises CheckpointError, SettingsError."""
    if state is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    if mount_of(state):
        raise SettingsError("The state of feeds is written for every bar, and wants a local disk", where="--state",
                            got=state, next_step="give a folder of a local disk")  # fmt: skip
    lock = state / "serve.lock"
    acquire_lock_file(lock, "this folder of feeds")
    try:
        yield state
    finally:
        release_lock_file(lock)


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


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address. Raises WorkspaceError where that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)  # without its protocol asyncio leaves Nagle's delay of 40 ms on
    except (OSError, UnicodeError) as error:
        raise WorkspaceError(
            "There is no such address", where=f"{host}:{port}", got=error, next_step="--host 127.0.0.1"
        ) from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen()
    except OSError as error:
        found.close()
        used = error.errno == errno.EADDRINUSE
        raise WorkspaceError(
            "The port is in use" if used else "This address cannot be used", where=f"{host}:{port}",
            got=None if used else error.strerror,
            next_step="stop what uses it, or give another: --port 0 takes a free one",
        ) from error  # fmt: skip
    return found
