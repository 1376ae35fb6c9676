"""Lambda handler that predicts raw bars with the bundle of its folder; for the container image.

POST {"bars": [...], "last": 1}     body and answer as of POST /predict of the service; errors are its problem bodies
GET  facts of the bundle

Events of a Lambda Function URL or an HTTP API (payload format 2.0).
"""

import base64
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from ml_factory.errors import FactoryError
from ml_factory.serving.app import schema_error
from ml_factory.serving.feed import ServedBundle
from ml_factory.serving.schemas import PredictRequest

BUNDLE = Path(__file__).with_name("model.bundle")


def handler(event: dict, context: object = None) -> dict[str, Any]:
    """Return the response to an event: 200 with the answer, or 400 with what, where, got and wanted."""
    served = load_bundle()
    method = event.get("requestContext", {}).get("http", {}).get("method")
    try:
        if method not in ("GET", "POST"):
            raise FactoryError("This event is not answered", where="requestContext.http.method", got=method,
                               wanted="GET or POST in payload format 2.0")  # fmt: skip
        status, answer = 200, served.facts if method == "GET" else predict(served, event)
    except FactoryError as error:
        fields = {"what": error.what, "where": error.where, "got": error.got, "wanted": error.wanted}
        status, answer = 400, {name: None if value is None else str(value) for name, value in fields.items()}
    body = json.dumps(answer, allow_nan=False)
    return {"statusCode": status, "headers": {"content-type": "application/json"}, "body": body}


@lru_cache(maxsize=1)
def load_bundle() -> ServedBundle:
    """Return the bundle; read once in each process."""
    return ServedBundle.load(BUNDLE)


def predict(served: ServedBundle, event: dict) -> dict[str, Any]:
    """Return the answers of one request. Raises FactoryError."""
    body = event.get("body") or ""
    try:
        request = PredictRequest.model_validate_json(base64.b64decode(body) if event.get("isBase64Encoded") else body)
    except ValidationError as error:
        raise schema_error(error.errors())[0] from error
    except ValueError as error:
        raise FactoryError("The body is no base64", where="body", got=error, wanted="base64") from error
    if request.symbol not in (None, served.symbol):
        raise FactoryError("Another symbol is served here", where="symbol", got=request.symbol, wanted=served.symbol)
    now = pd.Timestamp.now(tz="UTC") if request.live else None
    return served.predict(request.bars, request.last, now)
