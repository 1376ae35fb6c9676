"""The application: routes of the service, and its errors as problem bodies."""

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

import ml_factory
from ml_factory.errors import FactoryError
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
from ml_factory.serving.service import Service
from ml_factory.serving.service_metrics import CONTENT_TYPE

MOST_BYTES = 8 * 2**20  # of a body
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


def build_app(service: Service, key: str = "", hosts: tuple[str, ...] = ("*",)) -> FastAPI:
    """Return the application of the service.

    key : that clients must send as X-API-Key; "" for none
    hosts : by which a request may name this service. On this machine alone a page of another site, that was given this
        address by its name server, names another.
    """
    app = FastAPI(title="ml_factory", version=ml_factory.__version__,
                  summary="Probabilities of the next move from raw bars, with a guard before each answer.")  # fmt: skip
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=MOST_BYTES)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    _add_errors(app)

    @app.middleware("http")
    async def observe(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        began = time.perf_counter()
        response = await answer(request)
        service.metrics.observe_request(request.scope, response.status_code, time.perf_counter() - began)
        return response

    @app.get("/health", response_model=Health)
    def health() -> JsonResponse:
        """State of the process: it answers with these bundles."""
        return JsonResponse(service.health())

    def check_key(given: Annotated[str | None, Security(APIKeyHeader(name="X-API-Key", auto_error=False))]) -> None:
        if key and not hmac.compare_digest((given or "").encode(), key.encode()):
            raise HTTPException(401, "The API key is missing or wrong: send it as the header X-API-Key")

    guarded = APIRouter(dependencies=[Depends(check_key)], responses=_PROBLEMS)
    _add_routes(guarded, service)
    app.include_router(guarded)
    return app


def _add_routes(app: APIRouter, service: Service) -> None:
    @app.get("/info", response_model=Info)
    def info() -> JsonResponse:
        """Facts of the bundles: certificate, metrics with intervals, versions; and the guard of each feed."""
        return JsonResponse(service.info())

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(service.metrics_page(), headers={"Content-Type": CONTENT_TYPE})

    @app.post("/predict", response_model=PredictAnswer)
    def predict(request: PredictRequest) -> JsonResponse:
        """Probabilities of the newest rows of raw bars."""
        return JsonResponse(service.predict(request))

    @app.post("/feeds/{name}/bars", response_model=FeedReply)
    def push(name: FeedName, request: FeedBars) -> JsonResponse:
        """The next bars of a feed, answered once they are on the disk; a bar seen before gets its answer again."""
        return JsonResponse(service.push(name, request))

    @app.post("/feeds/{name}/outcomes", response_model=OutcomeAnswer)
    def outcome(name: FeedName, request: OutcomeRequest) -> JsonResponse:
        """Give the guard what happened after an answer of a feed."""
        return JsonResponse(service.add_outcome(name, request))


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
