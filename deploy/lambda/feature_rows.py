"""Lambda handler that predicts feature rows by the ONNX graph of its folder; NumPy and onnxruntime alone are imported.

    POST {"rows": {"columns": [...], "values": [[...]], "known_at": [...], "segment": [...]}}
    GET  the symbol, the run, the names of the features and the look-back

`rows` is as of POST /predict of the service: unscaled features in the model's order, null where one is missing;
`known_at` (texts) is returned with the answers; `segment` (integers) changes at session ends and gaps, and a window of
a model that looks back lies inside one. The answers are those of the rows with a whole window.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
import onnxruntime
from http_event import RequestError, respond

GRAPH = Path(__file__).with_name("model.onnx")
MOST_ROWS = 4096
PROBABILITIES = ("p_short", "p_neutral", "p_long")


def handler(event: dict, context: object = None) -> dict:
    """Return the response to an event of payload format 2.0."""
    session, facts = load_graph()
    return respond(event, facts, lambda body: predict_rows(session, facts, body))


@lru_cache(maxsize=1)
def load_graph() -> tuple[onnxruntime.InferenceSession, dict]:
    """Return the session of the graph and its facts; once in each process."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(GRAPH), options, providers=["CPUExecutionProvider"])
    stored = session.get_modelmeta().custom_metadata_map
    facts = {name: stored[name] for name in ("symbol", "run_id", "model")}
    facts |= {"horizon": int(stored["horizon"]), "lookback": int(stored["lookback"])}
    return session, facts | {"features": stored["features"].split(",")}


def predict_rows(session: onnxruntime.InferenceSession, facts: dict, body: dict) -> dict:
    """Return the answers for the rows in the body. Raises RequestError."""
    others = sorted(body.keys() - {"rows", "symbol"})
    if others or not isinstance(body.get("rows"), dict):
        raise RequestError("The body has other fields", where="body", got=", ".join(others)[:200] or "no rows",
                           wanted="rows, and symbol if you like")  # fmt: skip
    if body.get("symbol") not in (None, facts["symbol"]):
        raise RequestError("Another symbol is served here", where="symbol", got=body["symbol"], wanted=facts["symbol"])
    rows = body["rows"]
    x_NF = _checked_values(rows, facts["features"])
    ends = _ends_of_windows(_per_row(rows, "segment", len(x_NF), int), len(x_NF), facts["lookback"])
    known_at = _per_row(rows, "known_at", len(x_NF), str)
    windows = ends[:, None] + np.arange(1 - facts["lookback"], 1) if facts["lookback"] else ends
    p_N3 = session.run(None, {"features": x_NF[windows]})[0] if len(ends) else np.empty((0, 3))
    answers = [dict(zip(PROBABILITIES, p.tolist(), strict=True)) for p in p_N3]
    moments = [known_at[end] if known_at else None for end in ends]
    named = [{"known_at": moment} | answer for moment, answer in zip(moments, answers, strict=True)]
    return {"symbol": facts["symbol"], "run_id": facts["run_id"], "answers": named}


def _checked_values(rows: dict, features: list[str]) -> np.ndarray:
    """Return the values, float32 (N, F), NaN where one is null. Raises RequestError."""
    others = sorted(rows.keys() - {"columns", "values", "known_at", "segment"})
    if others:
        raise RequestError("The rows have other fields", where="rows", got=", ".join(others)[:200],
                           wanted="columns, values, known_at, segment")  # fmt: skip
    columns, values = rows.get("columns"), rows.get("values")
    if columns != features:
        given = columns if isinstance(columns, list) else []
        absent, other = [one for one in features if one not in given], [one for one in given if one not in features]
        got = (
            f"no {', '.join(absent[:5])}"
            if absent
            else f"also {', '.join(map(str, other[:5]))}"
            if other
            else "the order"
        )
        raise RequestError("The columns are not the features of the model", where="rows.columns", got=got,
                           wanted=f"its {len(features)} features in its order, as GET lists them")  # fmt: skip
    if not isinstance(values, list) or not 0 < len(values) <= MOST_ROWS:
        count = f"{len(values)} rows" if isinstance(values, list) else type(values).__name__
        raise RequestError("The number of rows is out of bounds", where="rows.values", got=count,
                           wanted=f"1 to {MOST_ROWS}")  # fmt: skip
    for number, row in enumerate(values):
        if not isinstance(row, list) or len(row) != len(features):
            got = f"{len(row)} values" if isinstance(row, list) else type(row).__name__
            raise RequestError("A row has another length", where=f"rows.values[{number}]", got=got,
                               wanted=f"{len(features)} values")  # fmt: skip
        wrong = next((name for name, one in zip(features, row, strict=True) if not _is_number_or_null(one)), None)
        if wrong is not None:
            raise RequestError("A value is no number", where=f"rows.values[{number}]", got=wrong,
                               wanted="a number of 32 bits, or null where it is missing")  # fmt: skip
    x_NF = np.array([[np.nan if one is None else one for one in row] for row in values], dtype=np.float32)
    empty = np.flatnonzero(np.isnan(x_NF).all(axis=1))
    if len(empty):
        raise RequestError(
            "A row has no value at all", where=f"rows.values[{empty[0]}]", got="nulls", wanted="features"
        )
    return x_NF


def _is_number_or_null(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 3.4e38


def _per_row(rows: dict, name: str, count: int, kind: type) -> list:
    """Return the list with one entry a row; empty where it is not given. Raises RequestError."""
    given = rows.get(name)
    if given is None:
        return []
    if not isinstance(given, list) or len(given) != count or not all(type(one) is kind for one in given):
        raise RequestError(f"{name} is no list with one entry a row", where=f"rows.{name}",
                           wanted=f"{count} entries of type {kind.__name__}")  # fmt: skip
    return given


def _ends_of_windows(segment: list[int], count: int, lookback: int) -> np.ndarray:
    """Return the rows whose window of `lookback` rows lies inside one segment; all rows without a look-back."""
    ends = np.arange(count)
    if not lookback:
        return ends
    changes = [number for number in range(1, len(segment)) if segment[number] != segment[number - 1]]
    starts = np.zeros(count, dtype=np.int64)
    for change in changes:
        starts[change:] = change
    return ends[ends - starts + 1 >= lookback]
