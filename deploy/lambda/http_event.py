"""Events of a Lambda Function URL or an HTTP API (payload format 2.0): the body of a request, and the response.

Standard library only.
"""

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from typing import Any

LARGEST_BODY = 6 * 2**20  # bytes; AWS takes no larger one


class RequestError(Exception):
    """A request that is refused.

    what, where, got, wanted : one line each; None where there is nothing to say.
    """

    def __init__(self, what: str, *, where: str | None = None, got: object = None, wanted: str | None = None):
        super().__init__(what)
        self.fields = {"what": what, "where": where, "got": None if got is None else str(got)[:500], "wanted": wanted}


def respond(event: Mapping, facts: Mapping, answer: Callable[[dict], Mapping]) -> dict[str, Any]:
    """Return the response to an event: 200 with the answer, or 400 with what, where, got and wanted.

    facts : the answer to GET.
    answer : body of a POST -> its answer; raises RequestError.
    """
    try:
        method = _method(event)
        if method == "GET":
            return _response(200, facts)
        if method != "POST":
            raise RequestError("This method is not served", where="method", got=method, wanted="GET or POST")
        return _response(200, answer(_body(event)))
    except RequestError as error:
        return _response(400, error.fields)


def _method(event: Mapping) -> str:
    try:
        return str(event["requestContext"]["http"]["method"])
    except (KeyError, TypeError) as error:
        raise RequestError(
            "This event is no HTTP request", where="requestContext.http.method", got=f"no {error}",
            wanted="payload format 2.0 of a Function URL or an HTTP API",
        ) from error  # fmt: skip


def _body(event: Mapping) -> dict:
    """Return the JSON object in the body of a request."""
    text = event.get("body") or ""
    if not isinstance(text, str):
        raise RequestError("The body is no text", where="body", got=type(text).__name__, wanted="text")
    if event.get("isBase64Encoded"):
        try:
            text = base64.b64decode(text, validate=True).decode("utf-8")
        except (binascii.Error, ValueError) as error:
            raise RequestError("The body is no base64 of UTF-8", where="body", got=error, wanted="base64") from error
    if len(text) > LARGEST_BODY:
        raise RequestError("The body is too large", where="body", got=f"{len(text)} bytes",
                           wanted=f"at most {LARGEST_BODY}")  # fmt: skip
    try:
        body = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError("The body is no JSON", where="body", got=error, wanted="a JSON object") from error
    if not isinstance(body, dict):
        raise RequestError("The body is no JSON object", where="body", got=type(body).__name__, wanted="an object")
    return body


def _refuse_constant(name: str) -> float:
    raise RequestError(
        "This is no value of JSON", where="body", got=name, wanted="a number, or null where it is missing"
    )


def _response(status: int, content: Mapping) -> dict[str, Any]:
    return {
        "statusCode": status, "headers": {"content-type": "application/json"}, "isBase64Encoded": False,
        "body": json.dumps(content, allow_nan=False),
    }  # fmt: skip
