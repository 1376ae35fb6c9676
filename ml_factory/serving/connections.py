"""Connections of the service: how many are open, how long a request's headers may take, and how large messages end."""

import asyncio
import logging
import os
import resource
from dataclasses import replace

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ml_factory.serving.service_settings import ServiceLimits

MOST_HEADER_BYTES = 2**19  # more than one reading of the socket, which may hold the end of a body too
ACCEPTED_AT_ONCE = 8  # in one turn of the event loop: each has a descriptor before it can be refused
_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
_LARGE_HEADERS = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_log = logging.getLogger("ml_factory")


def fit_connections_to_descriptors(limits: ServiceLimits) -> ServiceLimits:
    """Return the limits with as many open connections as this process has file descriptors for, and say so in the log
    where these are fewer. The system's limit is raised as far as it allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/dev/fd")) + 5 * ACCEPTED_AT_ONCE + 8
    wanted = used + limits.feeds + limits.open_connections
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return limits
    feeds = min(limits.feeds, allowed // 4)  # each that is open writes to a file
    fitting = max(min(limits.open_connections, allowed - used - feeds), 1)
    _log.warning(
        "at most %d connections are open at once, not %d, and %d feeds, not %d: this process may have %d open files; "
        "for more raise ulimit -n, about %d are enough", fitting, limits.open_connections, feeds, limits.feeds,
        allowed, wanted,
    )  # fmt: skip
    return replace(limits, open_connections=fitting, feeds=feeds)


def limited_http_protocol(limits: ServiceLimits) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol with these limits: it ends connections beyond them, before a request is read."""

    class LimitedHttpProtocol(HttpToolsProtocol):
        _headers_due: asyncio.TimerHandle | None = None
        _header_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.open_connections:
                transport.write(_REFUSAL)
                transport.close()
            else:
                self._await_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._headers_due is not None and not self.transport.is_closing():  # they have not ended
                self._header_bytes += len(data)
                if self._header_bytes > MOST_HEADER_BYTES:
                    self.transport.write(_LARGE_HEADERS)
                    self.transport.close()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._await_headers()

        def on_headers_complete(self) -> None:
            self._cancel()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            super().connection_lost(exc)

        def _await_headers(self) -> None:
            if self._headers_due is None:
                self._headers_due = self.loop.call_later(limits.header_seconds, self.transport.abort)

        def _cancel(self) -> None:
            if self._headers_due is not None:
                self._headers_due.cancel()
                self._headers_due, self._header_bytes = None, 0

    return LimitedHttpProtocol


class StreamProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket whose refusal of a message reaches a client that is still sending it.

    A connection that is closed while data arrives is reset, and the reason is lost: what comes is read and thrown away
    until the client has closed, for at most `close_timeout` seconds.
    """

    _refused = False

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def handle_parser_exception(self) -> None:
        sent = self.conn.close_sent
        if sent is None:  # before the connection was open
            super().handle_parser_exception()
            return
        self._refused = self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": sent.code, "reason": sent.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.abort)

    def eof_received(self) -> None:
        if self._refused:
            self.transport.close()
