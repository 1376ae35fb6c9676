"""The application: routes of the service, and its errors as problem bodies."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, WebSocket
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import ml_factory
from ml_factory.errors import FactoryError
from ml_factory.serving.problems import JsonResponse, problem_response, schema_error
from ml_factory.serving.request_gate import RequestGate
from ml_factory.serving.schemas import Health, Info, PredictAnswer, PredictRequest, Problem
from ml_factory.serving.service import Service
from ml_factory.serving.service_settings import KEY_VARIABLE
from ml_factory.serving.stream_endpoint import answer_stream

_log = logging.getLogger("ml_factory")
_REASONS = {
    400: "The body is no JSON", 401: "The API key is missing or wrong", 413: "The request is too large",
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

    app = FastAPI(
        title="ml_factory", version=ml_factory.__version__, docs_url=None, redoc_url=None, lifespan=lifespan,
        summary="Probabilities of the next move from raw bars, with a guard before each answer.",
        description=f"Where {KEY_VARIABLE} is set for the server, send it as the header X-API-Key.",
    )  # fmt: skip
    _add_errors(app)
    _add_routes(app, service)
    return RequestGate(app, service.limits, key=key, loopback=loopback, observe=service.observe_request)


def _add_routes(app: FastAPI, service: Service) -> None:
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

    @app.websocket("/stream")
    async def stream(socket: WebSocket, feed: str = "default") -> None:
        await answer_stream(socket, service, feed)


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: PROBLEMS[status] for status in statuses}


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(FactoryError)
    async def refused(_: Request, error: FactoryError) -> JsonResponse:
        return problem_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JsonResponse:
        return problem_response(schema_error(error.errors()), 422)

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
