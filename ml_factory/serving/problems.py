"""Problem bodies: each error as JSON with what, where, got, wanted and the next step."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Response

from ml_factory.errors import CheckpointError, FactoryError, MissingPackageError, WorkspaceError
from ml_factory.redaction import redact_values

_COMMAND = re.compile(r"(?<![\w-])--?[a-z]|python -m |pip install")
_CORRECT = "correct the bars, and send them again; /info lists what the bundle reads"
_REPORT = "report it to who runs the service: its log has the next step"
_log = logging.getLogger("ml_factory")


class JsonResponse(Response):
    """Strict JSON in ASCII: half a surrogate pair in a client's text is no error here."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


def problem_response(
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


def schema_error(faults: Sequence[Mapping]) -> tuple[FactoryError, int]:
    """Return the error, and its status, for a body of another form: its first fault, of the nearest form."""
    none: Mapping[str, Any] = {"loc": (), "msg": "not of the schema"}
    fault = max(faults, key=lambda one: len(one["loc"]), default=none)
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
