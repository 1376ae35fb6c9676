"""Lambda handler that predicts raw bars, or feature rows, with the bundle of its folder; for the container image.

POST {"bars": [...], "last": 1}     body and answer as of POST /predict of the service
GET  facts of the bundle
"""

from functools import lru_cache
from pathlib import Path

import pandas as pd
from http_event import RequestError, respond
from pydantic import ValidationError

from ml_factory.errors import FactoryError
from ml_factory.serving.schemas import PredictRequest
from ml_factory.serving.served_bundle import ServedBundle, rows_to_table
from ml_factory.serving.service_settings import ServiceLimits
from ml_factory.serving.tables import check_bar_count

BUNDLE = Path(__file__).with_name("model.bundle")
LIMITS = ServiceLimits()


def handler(event: dict, context: object = None) -> dict:
    """Return the response to an event of payload format 2.0."""
    served = load_bundle()
    return respond(event, served.facts, lambda body: predict(served, body))


@lru_cache(maxsize=1)
def load_bundle() -> ServedBundle:
    """Return the bundle; read once in each process."""
    return ServedBundle.load(BUNDLE)


def predict(served: ServedBundle, body: dict) -> dict:
    """Return the answers of one request. Raises RequestError."""
    try:
        request = PredictRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError("The body is not as wanted", where=".".join(map(str, first["loc"])) or "body",
                           got=first["msg"], wanted="a body of POST /predict") from error  # fmt: skip
    if request.symbol not in (None, served.symbol):
        raise RequestError("Another symbol is served here", where="symbol", got=request.symbol, wanted=served.symbol)
    try:
        if request.rows is None:
            check_bar_count(request.bars, LIMITS.bars)
            now = pd.Timestamp.now(tz="UTC") if request.live else None
            return served.predict_bars(request.bars, request.last, now)
        (answers,) = served.predict_rows([rows_to_table(request.rows, LIMITS.rows)])
        if isinstance(answers, FactoryError):
            raise answers
        return answers
    except FactoryError as error:
        raise RequestError(error.what, where=str(error.where or "body"), got=error.got, wanted=error.wanted) from error
