"""The application: routes of the service, its bundles with their feeds, metrics, and errors as problem bodies."""

import hmac
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any

import pandas as pd
from fastapi import APIRouter, Depends, FastAPI, Path, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

import ml_factory
from ml_factory.errors import FactoryError, SettingsError, did_you_mean
from ml_factory.inference.guard import KINDS
from ml_factory.serving.feed import STATE_NAME, Feed
from ml_factory.serving.problems import JsonResponse, problem_response, schema_error
from ml_factory.serving.schemas import (
    FEED_NAME,
    FeedBars,
    FeedReply,
    Health,
    Info,
    OutcomeAnswer,
    OutcomeRequest,
    PredictAnswer,
    PredictRequest,
    Problem,
)
from ml_factory.serving.served_bundle import ServedBundle, to_table
from ml_factory.storage.files import files

MOST_BYTES = 8 * 2**20  # of a body
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_log = logging.getLogger("ml_factory")
_REASONS = {
    400: "The body is no JSON", 401: "The API key is missing or wrong", 409: "A stored state cannot be used",
    413: "The request is too large", 422: "The request cannot be answered", 503: "The service cannot answer now",
}  # fmt: skip
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": reason, "content": {"application/problem+json": {}}}
    for status, reason in _REASONS.items()
}
FeedName = Annotated[str, Path(pattern=FEED_NAME)]


class _Market:
    """One symbol: its bundle, and its feeds by name. The thread that predicts holds `lock`.

    folder : of the feeds; those that it has are opened
    """

    def __init__(self, served: ServedBundle, folder: FilePath):
        self.served, self.folder, self.lock = served, folder, threading.Lock()
        names = files.names(folder) if files.is_folder(folder) else []
        stored = [name for name in names if files.is_file(folder / name / STATE_NAME)]
        self.feeds = {name: Feed(folder / name, served) for name in stored}


class _Metrics:
    """Counters and gauges of one service; labels take values of fixed sets only, and names of feeds."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "ml_factory_requests", "Answered requests", ("path", "method", "status"), registry=registry
        )
        self.seconds = Histogram(
            "ml_factory_request_seconds", "Seconds to the answer", ("path",), buckets=_SECONDS, registry=registry
        )
        self.answers = Counter(
            "ml_factory_answers", "Answers by what the guard decided", ("symbol", "guard"), registry=registry
        )
        self.alarms = Gauge(
            "ml_factory_guard_alarm", "1 while the guard finds something of this kind", ("symbol", "feed", "check"),
            registry=registry,
        )  # fmt: skip

    async def observe(self, request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        """Count a request by its route."""
        began = time.perf_counter()
        response = await answer(request)
        path = getattr(request.scope.get("route"), "path", "other")
        self.requests.labels(path, request.method if request.method in ("GET", "POST") else "other",
                             response.status_code).inc()  # fmt: skip
        self.seconds.labels(path).observe(time.perf_counter() - began)
        return response


def build_app(
    bundles: Sequence[ServedBundle], state: FilePath, key: str = "", hosts: tuple[str, ...] = ("*",)
) -> FastAPI:
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
    app.middleware("http")(metrics.observe)
    _add_errors(app)

    @app.get("/health", response_model=Health)
    def health() -> JsonResponse:
        """State of the process: each of these bundles has predicted."""
        return JsonResponse({"status": "ok", "bundles": {symbol: one.served.id for symbol, one in markets.items()}})

    def check_key(given: Annotated[str | None, Security(APIKeyHeader(name="X-API-Key", auto_error=False))]) -> None:
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

    @app.get("/info", response_model=Info)
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
            feed = market.feeds.get(name) or Feed(market.folder / name, market.served)
            reply = feed.push(feed.check(to_table(request.bars)), _clock(request.live))
            market.feeds[name] = feed  # one whose first bars are refused is none
        count(market, reply["answers"][reply["repeated_answers"] :])
        return JsonResponse(reply)

    @app.post("/feeds/{name}/outcomes", response_model=OutcomeAnswer)
    def outcome(name: FeedName, request: OutcomeRequest) -> JsonResponse:
        """Give the guard what happened after an answer of a feed."""
        market = _find(markets, request.symbol)
        with market.lock:
            if name not in market.feeds:
                raise SettingsError("This feed has no bars", where="feed", got=name, wanted=", ".join(market.feeds),
                                    next_step="name the feed that gave the answer")  # fmt: skip
            return JsonResponse(market.feeds[name].add_outcome(pd.Timestamp(request.known_at), request.label))


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
        return problem_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JsonResponse:
        return problem_response(*schema_error(error.errors()))

    @app.exception_handler(HTTPException)  # also those of the router: unknown path, other method
    async def http(request: Request, error: HTTPException) -> JsonResponse:
        problem = FactoryError(str(error.detail), where=f"{request.method} {request.url.path}"[:200],
                               next_step="see /openapi.json for the requests that are answered")  # fmt: skip
        return problem_response(problem, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JsonResponse:
        _log.error("A request failed", exc_info=error)
        problem = FactoryError("The service failed at this request", next_step="see its log")
        return problem_response(problem, 500)
