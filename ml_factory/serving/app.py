"""The service: routes of its bundles with their feeds, metrics, errors as problem bodies, and the server process."""

import errno
import hmac
import ipaddress
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response, Security
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

import ml_factory
from ml_factory.errors import (
    CheckpointError,
    FactoryError,
    MissingPackageError,
    SettingsError,
    WorkspaceError,
    did_you_mean,
)
from ml_factory.inference.guard import KINDS, GuardSettings
from ml_factory.interrupt import Interrupted
from ml_factory.redaction import redact_values
from ml_factory.serving.feed import STATE_NAME, Feed, ServedBundle, open_state_folder, to_table
from ml_factory.serving.schemas import (
    FEED_NAME,
    FeedBars,
    FeedReply,
    OutcomeAnswer,
    OutcomeRequest,
    PredictAnswer,
    PredictRequest,
    Problem,
)
from ml_factory.storage.files import files

_COMMAND = re.compile(r"(?<![\w-])--?[a-z]|python -m |pip install")
_CORRECT = "correct the bars, and send them again; /info lists what the bundle reads"
_REPORT = "report it to who runs the service: its log has the next step"


class JsonResponse(Response):
    """Strict JSON in ASCII: half a surrogate pair in a client's text is no error here."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


def _problem_response(
    error: FactoryError, status: int | None = None, headers: Mapping[str, str] | None = None
) -> JsonResponse:
    """Return the response for an error, without secrets.

    A next step on the command line is for who runs the service, whose log has it; the client gets its own.
    """
    unable = isinstance(error, WorkspaceError | MissingPackageError)
    status = status or (503 if unable else 409 if isinstance(error, CheckpointError) else 422)
    if _COMMAND.search(error.next_step):
        if status != 422:
            _log.warning("answered with %d: %s", status, error)
        advice = _CORRECT if status == 422 else _REPORT
        error = FactoryError(error.what, where=error.where, got=error.got, wanted=error.wanted, next_step=advice)
    parts = {name: getattr(error, name) for name in ("what", "where", "got", "wanted", "next_step")}
    texts = {name: None if part is None else str(part)[:2000] for name, part in parts.items()}
    content = redact_values({"status": status, **texts, "message": str(error)[:4000]})
    return JsonResponse(content, status, headers, "application/problem+json")


def _schema_error(faults: Sequence[Mapping]) -> tuple[FactoryError, int]:
    """Return the error, and its status, for a body of another form: its first fault, of the nearest form."""
    fault = max(faults, key=lambda one: len(one["loc"]))
    if isinstance(fault.get("input"), bytes):
        return FactoryError("The body is not declared as JSON", where="the header Content-Type",
                            wanted="application/json", next_step="send it as such"), 422  # fmt: skip
    if fault.get("type") == "json_invalid" and fault["loc"]:
        return FactoryError("The body is not JSON", where=f"character {fault['loc'][-1]}",
                            got=fault.get("ctx", {}).get("error"), next_step="send one JSON object"), 400  # fmt: skip
    where = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"] if "[" not in str(part)
    ).lstrip(".")  # without names of types
    got = repr(fault["input"])[:100] if "input" in fault and fault["type"] != "missing" else None
    return FactoryError(
        "The request is not of the form that is read", where=where[:200] or "body", got=got,
        wanted=fault["msg"].removeprefix("Value error, ")[:300], next_step="see /openapi.json",
    ), 422  # fmt: skip


MOST_BYTES = 8 * 2**20  # of a body
_log = logging.getLogger("ml_factory")
_BODY = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": reason, "content": _BODY}
    for status, reason in {
        400: "The body is no JSON", 401: "The API key is missing or wrong", 409: "A stored state cannot be used",
        413: "The request is too large", 422: "The request cannot be answered", 503: "The service cannot answer now",
    }.items()
}  # fmt: skip
FeedName = Annotated[str, PathParameter(pattern=FEED_NAME)]


class _Market:
    """One symbol: its bundle, and its feeds by name. The thread that predicts holds `lock`.

    folder : of the feeds; those that it has are opened, but one whose state cannot be used, which its requests name
    """

    def __init__(self, served: ServedBundle, folder: Path):
        self.served, self.folder, self.lock = served, folder, threading.Lock()
        names = files.names(folder) if files.is_folder(folder) else []
        self.feeds = dict[str, Feed]()
        for name in names:
            if files.is_file(folder / name / STATE_NAME):
                try:
                    self.feeds[name] = self.open(name)
                except CheckpointError as error:
                    _log.warning("%s", error)

    def open(self, name: str) -> Feed:
        """Return the feed of this name; one that has no bars is not among `feeds`. Raises CheckpointError."""
        return self.feeds.get(name) or Feed(self.folder / name, self.served)


class _Metrics:
    """Counters and gauges of one service; labels take values of fixed sets only, and names of feeds."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "ml_factory_requests", "Answered requests", ("path", "method", "status"), registry=registry
        )
        self.seconds = Histogram("ml_factory_request_seconds", "Seconds to the answer", ("path",), registry=registry)
        self.answers = Counter(
            "ml_factory_answers", "Answers by what the guard decided", ("symbol", "guard"), registry=registry
        )
        self.alarms = Gauge(
            "ml_factory_guard_alarm", "1 while the guard finds something of this kind", ("symbol", "feed", "check"),
            registry=registry,
        )  # fmt: skip

    async def count(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        """Middleware that counts requests by their route."""
        began, status = time.perf_counter(), 500  # of a failure, which is answered outside
        try:
            response = await call_next(request)
            status = response.status_code
            return response
        finally:
            path = getattr(request.scope.get("route"), "path", "other")
            method = request.method if request.method in ("GET", "POST") else "other"
            self.requests.labels(path, method, status).inc()
            self.seconds.labels(path).observe(time.perf_counter() - began)


def build_app(bundles: Sequence[ServedBundle], state: Path, key: str = "", hosts: tuple[str, ...] = ("*",)) -> FastAPI:
    """Return the application that answers with these bundles, one of each symbol.

    state : folder of the feeds' state
    key : that clients must send as X-API-Key; "" for none
    hosts : by which a request may name this service. On this machine alone a page of another site, that was given this
        address by its name server, names another.
    """
    markets = {one.symbol: _Market(one, state / one.symbol) for one in bundles}
    metrics = _Metrics()
    app = FastAPI(title="ml_factory", version=ml_factory.__version__,
                  summary="Probabilities of the next move from raw bars, with a guard before each answer.")  # fmt: skip
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MOST_BYTES)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    app.middleware("http")(metrics.count)
    _add_errors(app)

    @app.get("/health")
    def health() -> JsonResponse:
        """State of the process: each of these bundles has predicted."""
        return JsonResponse({"status": "ok", "bundles": {symbol: one.served.id for symbol, one in markets.items()}})

    header = APIKeyHeader(name="X-API-Key", auto_error=False)

    async def check_key(given: Annotated[str | None, Security(header)]) -> None:
        if key and not hmac.compare_digest((given or "").encode(), key.encode()):
            raise HTTPException(401, "The API key is missing or wrong: send it as the header X-API-Key")

    guarded = APIRouter(dependencies=[Depends(check_key)], responses=_PROBLEMS)
    _add_routes(guarded, markets, metrics)
    app.include_router(guarded)
    return app


def _add_routes(app: APIRouter, markets: dict[str, _Market], metrics: _Metrics) -> None:
    def feeds() -> list[dict[str, Any]]:
        """Return what the guard of every feed finds."""
        found = []
        for symbol, market in markets.items():
            with market.lock:
                found += [{"symbol": symbol, "feed": name} | feed.status() for name, feed in market.feeds.items()]
        return found

    def count(market: _Market, answers: list[dict]) -> None:
        for one in answers:
            metrics.answers.labels(market.served.symbol, one["guard"]).inc()

    @app.get("/info")
    def info() -> JsonResponse:
        """Facts of the bundles: certificate, metrics with intervals, versions; and the guard of each feed."""
        bundles = {symbol: market.served.facts for symbol, market in markets.items()}
        return JsonResponse({"version": ml_factory.__version__, "bundles": bundles, "feeds": feeds()})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def page() -> Response:
        """Metrics in the text format of Prometheus."""
        for one in feeds():
            found = {finding["kind"] for finding in one["findings"]}
            for kind in KINDS:
                metrics.alarms.labels(one["symbol"], one["feed"], kind).set(float(kind in found))
        return Response(generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.post("/predict", response_model=PredictAnswer)
    def predict(request: PredictRequest) -> JsonResponse:
        """Probabilities of the newest rows of raw bars."""
        market = _find(markets, request.symbol)
        with market.lock:
            reply = market.served.predict(request.bars, request.last, _clock(request.live))
        count(market, reply["answers"])
        return JsonResponse(reply)

    @app.post("/feeds/{name}/bars", response_model=FeedReply)
    def push(name: FeedName, request: FeedBars) -> JsonResponse:
        """The next bars of a feed, answered once they are on the disk; a bar seen before gets its answer again."""
        market = _find(markets, request.symbol)
        with market.lock:
            feed = market.open(name)
            reply = feed.push(feed.check(to_table(request.bars)), _clock(request.live))
            market.feeds[name] = feed  # one whose first bars are refused is none
        count(market, reply["answers"][reply["repeated_answers"] :])
        return JsonResponse(reply)

    @app.post("/feeds/{name}/outcomes", response_model=OutcomeAnswer)
    def outcome(name: FeedName, request: OutcomeRequest) -> JsonResponse:
        """Give the guard what happened after an answer of a feed."""
        market = _find(markets, request.symbol)
        with market.lock:
            feed = market.open(name)
            if feed.position is None:
                raise SettingsError("This feed has no bars", where="feed", got=name, wanted=", ".join(market.feeds),
                                    next_step="name the feed that gave the answer")  # fmt: skip
            return JsonResponse(feed.add_outcome(pd.Timestamp(request.known_at), request.label))


def _find(markets: dict[str, _Market], symbol: str | None) -> _Market:
    """Return the market of this symbol; None is the only one. Raises SettingsError."""
    if symbol is None and len(markets) == 1:
        return next(iter(markets.values()))
    names = ", ".join(markets)
    if symbol is None:
        raise SettingsError("Several symbols are served", where="symbol", got="none", wanted=f"one of {names}",
                            next_step="name the symbol of these bars")  # fmt: skip
    if symbol not in markets:
        raise SettingsError("No bundle of this symbol is served", where="symbol", got=symbol, wanted=names,
                            next_step=did_you_mean(symbol, markets))  # fmt: skip
    return markets[symbol]


def _clock(live: bool) -> pd.Timestamp | None:
    return pd.Timestamp.now(tz="UTC") if live else None


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(FactoryError)
    async def refused(_: Request, error: FactoryError) -> JsonResponse:
        return _problem_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JsonResponse:
        return _problem_response(*_schema_error(error.errors()))

    @app.exception_handler(HTTPException)  # also those of the router: unknown path, other method
    async def http(request: Request, error: HTTPException) -> JsonResponse:
        problem = FactoryError(str(error.detail), where=f"{request.method} {request.url.path}"[:200],
                               next_step="see /openapi.json for the requests that are answered")  # fmt: skip
        return _problem_response(problem, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JsonResponse:
        _log.error("A request failed", exc_info=error)
        problem = FactoryError("The service failed at this request", next_step="see its log")
        return _problem_response(problem, 500)


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
        # With a key the name does not matter: a proxy may hand on that of the public address.
        hosts = ("localhost", "127.0.0.1", shown) if is_loopback(host) and not key else ("*",)
        config = uvicorn.Config(
            build_app(list(bundles.values()), folder, key, hosts), log_config=None, access_log=False, ws="none",
            log_level="warning", proxy_headers=False, server_header=False, timeout_graceful_shutdown=_GRACE_SECONDS,
        )  # fmt: skip
        runs = {symbol: served.run_id for symbol, served in bundles.items()}
        announce({"url": f"http://{shown}:{listener.getsockname()[1]}", "bundles": runs})
        with suppress(Interrupted, KeyboardInterrupt):  # raised by uvicorn after it has ended by a signal
            uvicorn.Server(config).run([listener])


def is_loopback(host: str) -> bool:
    """Return whether this is a name or an address that only this machine reaches."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


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
    with ExitStack() as opened:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
            # Without its protocol asyncio leaves Nagle's delay of 40 ms on.
            found = opened.enter_context(socket.socket(family, kind, protocol))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen()
        except (OSError, UnicodeError) as error:
            used = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            raise WorkspaceError(
                "The port is in use" if used else "This address cannot be used", where=f"{host}:{port}",
                got=None if used else error, next_step="stop what uses it, or give another: --port 0 takes a free one",
            ) from error  # fmt: skip
        opened.pop_all()
    return found
