"""The application: routes of the service, and its errors as problem bodies."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import ml_factory
from ml_factory.errors import FactoryError
from ml_factory.serving.pages import DOCS_PAGE, DOCS_POLICY, STATUS_PAGE, STATUS_POLICY
from ml_factory.serving.problems import JsonResponse, problem_response, schema_error
from ml_factory.serving.request_gate import RequestGate
from ml_factory.serving.schemas import (
    Health,
    Info,
    OutcomeAnswer,
    OutcomeRequest,
    PredictAnswer,
    PredictRequest,
    Problem,
    Reloaded,
    Status,
)
from ml_factory.serving.service import Service
from ml_factory.serving.service_metrics import CONTENT_TYPE
from ml_factory.serving.service_settings import KEY_VARIABLE
from ml_factory.serving.stream_endpoint import answer_stream
from ml_factory.serving.stream_schemas import describe_stream

_log = logging.getLogger("ml_factory")
PAGE_HEADERS = {
    "Content-Type": "text/html; charset=utf-8", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
}  # fmt: skip
_REASONS = {
    400: "The body is no JSON", 401: "The API key is missing or wrong", 403: "Not allowed from there",
    409: "A stored state or a bundle cannot be used", 413: "The request is too large",
    421: "Another host is named", 422: "The request cannot be answered", 429: "Too many requests",
    503: "The service cannot answer now",
}  # fmt: skip
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": reason, "content": {"application/problem+json": {}}}
    for status, reason in _REASONS.items()
}


def build_app(service: Service, *, key: str = "", loopback: bool = True) -> RequestGate:
    """Return the ASGI application of the service; arguments as of `RequestGate`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = _DescribedApp(
        title="ml_factory", version=ml_factory.__version__, docs_url=None, redoc_url=None, lifespan=lifespan,
        summary="Probabilities of the next move from raw bars, with a guard before each answer.",
        description=f"Where {KEY_VARIABLE} is set for the server, send it as the header X-API-Key.",
    )  # fmt: skip
    _add_errors(app)
    _add_routes(app, service, may_reload=bool(key) or loopback)
    _add_pages(app, service)
    observe = service.metrics.observe_request
    return RequestGate(app, service.limits, service.rates, key=key, loopback=loopback, observe=observe)


class _DescribedApp(FastAPI):
    """Application whose OpenAPI page describes the stream too."""

    def openapi(self) -> dict[str, Any]:
        return describe_stream(super().openapi())


def _add_routes(app: FastAPI, service: Service, *, may_reload: bool) -> None:
    @app.get("/health", responses={200: {"model": Health}, **_problems(429)})
    async def health() -> JsonResponse:
        """State of the process, and whether every bundle is loaded."""
        return JsonResponse(service.health(), 200 if service.ready else 503)

    @app.get("/info", responses={200: {"model": Info}, **_problems(401, 429)})
    async def info() -> JsonResponse:
        """Facts of the bundles: certificate, metrics with intervals, versions, and the settings of the guard."""
        return JsonResponse(service.info() | {"limits": asdict(service.limits)})

    @app.post("/predict", responses={200: {"model": PredictAnswer}, **_problems(*_REASONS)})
    async def predict(request: PredictRequest) -> JsonResponse:
        """Probabilities of the newest rows of raw bars, or of feature rows."""
        return JsonResponse(await service.predict(request))

    @app.post("/outcome", responses={200: {"model": OutcomeAnswer}, **_problems(*_REASONS)})
    async def outcome(request: OutcomeRequest) -> JsonResponse:
        """Give the guard what happened after an answer of a stream."""
        return JsonResponse(await service.add_outcome(request))

    @app.post("/reload", responses={200: {"model": Reloaded}, **_problems(401, 403, 409, 422, 429, 503)})
    async def reload() -> JsonResponse:
        """Read the bundles' files again and replace the bundles, between two answers."""
        if not may_reload:
            raise HTTPException(403, "Without a key only this machine reloads the bundles: send SIGHUP to the server")
        return JsonResponse({"bundles": await service.reload()})

    @app.websocket("/stream")
    async def stream(socket: WebSocket, feed: str = "default") -> None:
        await answer_stream(socket, service, feed)


def _add_pages(app: FastAPI, service: Service) -> None:
    @app.get("/status", responses={200: {"model": Status}, **_problems(401, 429)})
    async def status() -> JsonResponse:
        """Last answers, and the state of the guard of each feed."""
        return JsonResponse(await service.status())

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}, **_problems(401, 429)})
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(await service.metrics_page(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(STATUS_PAGE, headers=PAGE_HEADERS | {"Content-Security-Policy": STATUS_POLICY})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(DOCS_PAGE, headers=PAGE_HEADERS | {"Content-Security-Policy": DOCS_POLICY})


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: PROBLEMS[status] for status in statuses}


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(FactoryError)
    async def refused(_: Request, error: FactoryError) -> JsonResponse:
        return problem_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JsonResponse:
        return problem_response(schema_error(error.errors()))

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
