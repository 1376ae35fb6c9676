"""The server process: a socket, uvicorn on it, and the signals that end it or reload the bundles."""

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from ml_factory.errors import SettingsError, WorkspaceError
from ml_factory.inference.guard.settings import GuardSettings
from ml_factory.serving.app import build_app
from ml_factory.serving.connections import (
    ACCEPTED_AT_ONCE,
    StreamProtocol,
    fit_connections_to_descriptors,
    limited_http_protocol,
)
from ml_factory.serving.service import Service, reload_on_signal
from ml_factory.serving.service_settings import (
    KEY_VARIABLE,
    ServiceLimits,
    check_service_address,
    is_loopback,
    parse_api_key,
)
from ml_factory.storage.files import files
from ml_factory.storage.locks import acquire_lock_file, release_lock_file
from ml_factory.storage.scratch_folder import scratch_folder

_GRACE_SECONDS = 30
_WAITING_CONNECTIONS = 512  # that the system holds until they are accepted


def run_server(
    paths: Sequence[Path],
    *,
    host: str,
    port: int,
    no_key: bool,
    state: Path | None,
    limits: ServiceLimits,
    guard: GuardSettings,
    announce: Callable[[dict], None],
) -> None:
    """Serve these bundles until SIGTERM or Ctrl-C; return after what was under way is finished.

    port : 0 takes a free one
    state : folder of the feeds' state, which survives a restart; None: a temporary one
    announce : called with `url` and `bundles` (symbol -> run) once requests are accepted

    Raises SettingsError for an address without a key or a key that cannot be sent, WorkspaceError for a port in use,
    and as `Bundle.load`.
    """
    key = parse_api_key(os.environ.get(KEY_VARIABLE, ""))
    check_service_address(host, key, no_key)
    listener = _listen(host, port)
    limits = fit_connections_to_descriptors(limits)
    with listener, open_state_folder(state) as folder:
        service = Service(paths, folder, durable=state is not None, limits=limits, guard=guard)
        app = build_app(service, key=key, loopback=is_loopback(host))
        config = uvicorn.Config(
            app, log_config=None, access_log=False, log_level="warning", lifespan="on", loop="asyncio",
            http=limited_http_protocol(limits), ws=StreamProtocol, ws_max_size=limits.body_bytes,
            ws_per_message_deflate=False, backlog=ACCEPTED_AT_ONCE, proxy_headers=False, server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )  # fmt: skip
        shown = f"[{host}]" if ":" in host else host
        facts = {
            "url": f"http://{shown}:{listener.getsockname()[1]}",
            "bundles": {symbol: run for symbol, run, _ in service.bundles()},
        }
        _Server(config, service, lambda: announce(facts)).run([listener])


@contextmanager
def open_state_folder(state: Path | None) -> Iterator[Path]:
    """Yield the folder of the feeds' state, which no other process writes to. Raises CheckpointError, SettingsError."""
    if state is None:
        with scratch_folder("feeds-") as folder:
            yield folder
        return
    if files.is_remote(state):
        raise SettingsError("The state of feeds is written for every bar, and wants a local disk", where="--state",
                            got=state, next_step="give a folder of a local disk")  # fmt: skip
    lock = state / "serve.lock"
    acquire_lock_file(lock, "this folder of feeds")
    try:
        yield state
    finally:
        release_lock_file(lock)


class _Server(uvicorn.Server):
    """uvicorn's server that stops on SIGTERM and SIGINT without raising them again, and reloads bundles on SIGHUP."""

    def __init__(self, config: uvicorn.Config, service: Service, started: Callable[[], None]):
        super().__init__(config)
        self._service, self._when_started = service, started
        self._tasks: set[asyncio.Task] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(_WAITING_CONNECTIONS)  # asyncio has set the number that it accepts at once
        self._when_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals inside the event loop."""
        loop, before = asyncio.get_running_loop(), {}
        handlers = {signal.SIGTERM: self._stop, signal.SIGINT: self._stop, signal.SIGHUP: self._start_reload}
        for number, handler in handlers.items():
            before[number] = signal.getsignal(number)
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _stop(self) -> None:
        if self._service.stopping:  # the second signal waits for no reply
            self.should_exit = True
            return
        self._service.stopping = True
        self._start(self._exit_after_replies())

    async def _exit_after_replies(self) -> None:
        """Let each stream send the reply to the message that it has read, before uvicorn closes the connections."""
        until = asyncio.get_running_loop().time() + _GRACE_SECONDS
        while self._service.messages_under_way and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)
        self.should_exit = True

    def _start_reload(self) -> None:
        self._start(reload_on_signal(self._service))

    def _start(self, job: Coroutine) -> None:
        """Run a job in the event loop, and hold its task until it has ended."""
        task = asyncio.get_running_loop().create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


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
        found.listen(_WAITING_CONNECTIONS)
    except OSError as error:
        found.close()
        used = error.errno == errno.EADDRINUSE
        raise WorkspaceError(
            "The port is in use" if used else "This address cannot be used", where=f"{host}:{port}",
            got=None if used else error.strerror,
            next_step="stop what uses it, or give another: --port 0 takes a free one",
        ) from error  # fmt: skip
    return found
