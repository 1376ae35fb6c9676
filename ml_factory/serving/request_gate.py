"""Checks of every request before its content is read: host, key, rate, number, size, time."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from ml_factory.errors import FactoryError
from ml_factory.serving.problems import JsonResponse, OverloadError, TooLargeError, problem_fields, problem_response
from ml_factory.serving.rate_limits import RateLimits, client_address
from ml_factory.serving.service_settings import KEY_VARIABLE, ServiceLimits, is_loopback

OPEN_PATHS = ("/", "/docs", "/health", "/openapi.json")  # without a key; they hold no market's data
Scope = dict[str, Any]
App = Callable[[Scope, Callable, Callable], Awaitable[None]]


class RequestGate:
    """ASGI application around another one, which it calls for requests that are allowed.

    rates : of each client, with the messages of its streams
    key : that clients must send as X-API-Key or Authorization: Bearer; "" for none
    loopback : the service listens on this machine alone: a request must name it so, which a page of another site that
        was given this address by its name server does not
    observe : called with (scope, status, seconds) after every answer
    """

    def __init__(
        self, app: App, limits: ServiceLimits, rates: RateLimits, *, key: str, loopback: bool,
        observe: Callable[[Scope, int, float], None],
    ):  # fmt: skip
        self._app, self._limits, self._key, self._loopback, self._observe = app, limits, key, loopback, observe
        self._rates, self._under_way = rates, 0

    async def __call__(self, scope: Scope, receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        loop, status = asyncio.get_running_loop(), 0
        began = loop.time()

        async def watched(message: Mapping) -> None:
            nonlocal status
            status = status or message.get("status", 0) or (101 if message["type"] == "websocket.accept" else 0)
            await send(message)

        try:
            refused = self._refusal(scope)
            if refused is not None:
                await _refuse(scope, receive, watched, *refused)
            elif scope["type"] == "websocket":
                await self._app(scope, receive, watched)
            else:
                await self._answer(scope, receive, watched, lambda: status)
        finally:
            self._observe(scope, status, loop.time() - began)

    async def _answer(self, scope: Scope, receive: Callable, send: Callable, status: Callable[[], int]) -> None:
        """Read the body within the limits, and let the application answer within the time."""
        if self._under_way >= self._limits.concurrent_requests:
            wanted = f"at most {self._limits.concurrent_requests}"
            await _refuse(scope, receive, send, OverloadError("Too many requests at once", wanted=wanted), 429)
            return
        self._under_way += 1
        seconds = self._limits.request_seconds
        try:
            async with asyncio.timeout(seconds):
                body = await self._read_body(scope, receive)
                check_value_count(body, self._limits)
                await self._app(scope, _replayed(body, receive), send)
        except TooLargeError as error:
            await _refuse(scope, receive, send, error, 413)
        except TimeoutError:
            if not status():
                error = OverloadError("The answer took too long", where=scope["path"], wanted=f"at most {seconds:g} s")
                await _refuse(scope, receive, send, error, 503)
        except ConnectionError:
            pass  # the client left
        finally:
            self._under_way -= 1

    async def _read_body(self, scope: Scope, receive: Callable) -> bytes:
        """Return the whole body. Raises TooLargeError."""
        declared, most = _headers(scope).get("content-length", "0"), self._limits.body_bytes
        wanted = f"at most {most:,} bytes"
        if not declared.isdigit() or int(declared) > most:
            raise TooLargeError("The request is too large", where=scope["path"][:100], got=declared[:20], wanted=wanted)
        pieces, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the client left")
            pieces.append(message.get("body", b""))
            size, more = size + len(pieces[-1]), message.get("more_body", False)
            if size > most:
                raise TooLargeError("The request is too large", where=scope["path"][:100], wanted=wanted)
        return b"".join(pieces)

    def _refusal(self, scope: Scope) -> tuple[FactoryError, int] | None:
        """Return the error and its status for a request that is not answered."""
        wait = self._rates.seconds_to_wait(client_address(scope))
        if wait:
            rate = f"at most {self._limits.requests_per_second:g} requests a second"
            return OverloadError("Too many requests of this client", seconds=wait, wanted=rate), 429
        headers = _headers(scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._loopback and not is_loopback(urlsplit(f"//{host}").hostname or "" if _is_plain(host) else ""):
            return FactoryError("This service answers this machine alone", where="the header Host", got=host[:100],
                                wanted="localhost or 127.0.0.1"), 421  # fmt: skip
        if origin is not None and (not _is_plain(origin) or urlsplit(origin).netloc != host):
            return FactoryError("Pages of other sites are not answered", where="the header Origin", got=origin[:100],
                                wanted=host[:100]), 403  # fmt: skip
        if self._key and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            return FactoryError("The API key is missing or wrong", where=scope["path"][:100],
                                next_step=f"send the server's {KEY_VARIABLE} as the header X-API-Key"), 401  # fmt: skip
        return None

    def _has_key(self, headers: Mapping[str, str]) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (token.strip() if kind.lower() == "bearer" else "")
        return hmac.compare_digest(given.encode(), self._key.encode())


def check_value_count(text: bytes | str, limits: ServiceLimits) -> None:
    """Raise TooLargeError for JSON of more lists, objects or values than a request may have, before it is parsed:
    no other request is answered meanwhile.
    """
    opening, separator = (("[", "{"), ",") if isinstance(text, str) else ((b"[", b"{"), b",")
    holders = sum(text.count(one) for one in opening)  # type: ignore[arg-type]
    for got, most, what in (
        (holders, max(limits.bars, limits.rows) + 100, "lists and objects"),
        (holders + text.count(separator), limits.values, "values"),  # type: ignore[arg-type]
    ):
        if got > most:
            raise TooLargeError(f"The request has too many {what}", got=f"{got:,}", wanted=f"at most {most:,}")


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _is_plain(text: str) -> bool:
    """Return whether the text can be taken apart as an address."""
    try:
        return bool(urlsplit(f"//{text}").hostname) or bool(urlsplit(text).hostname)
    except ValueError:
        return False


def _replayed(body: bytes, receive: Callable) -> Callable:
    """Return a `receive` that gives the body that was read, and then what comes."""
    given = False

    async def replay() -> dict:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(scope: Scope, receive: Callable, send: Callable, error: FactoryError, status: int) -> None:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if scope["type"] == "http":
        await problem_response(error, status, headers | {"Connection": "close"})(scope, receive, send)
    elif "websocket.http.response" in scope.get("extensions", {}):
        await receive()
        response = JsonResponse(problem_fields(error, status), status, headers, "application/problem+json")
        raw = response.raw_headers
        await send({"type": "websocket.http.response.start", "status": status, "headers": raw})
        await send({"type": "websocket.http.response.body", "body": response.body})
    else:
        await receive()
        await send({"type": "websocket.close", "code": 1008})
