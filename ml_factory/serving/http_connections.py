"""Connections of the service: how many are open, and how long one may take to send a request's headers."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ml_factory.serving.service_settings import ServiceLimits

_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


def limited_http_protocol(limits: ServiceLimits) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol with these limits: it ends connections beyond them, before a request is read."""

    class LimitedHttpProtocol(HttpToolsProtocol):
        _headers_due: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.open_connections:
                transport.write(_REFUSAL)
                transport.close()
            else:
                self._await_headers()

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
                self._headers_due = None

    return LimitedHttpProtocol
