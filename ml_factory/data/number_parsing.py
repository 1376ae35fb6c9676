"""Prices and volumes written as text, to float64: decimal commas, thousands separators."""

import re

import numpy as np
import pandas as pd

from ml_factory.data.report import Finding, name_rows, refuse

_NONE = np.empty(0, np.int64)
GROUPED = {
    ".": r"[+-]?\d{1,3}(?:,\d{3})*(?:\.\d*)?(?:[eE][+-]?\d+)?|[+-]?\d*\.?\d+(?:[eE][+-]?\d+)?",
    ",": r"[+-]?\d{1,3}(?:\.\d{3})*(?:,\d*)?(?:[eE][+-]?\d+)?|[+-]?\d*,?\d+(?:[eE][+-]?\d+)?",
}
WORDS = {"": "nan", "nan": "nan", "none": "nan", "null": "nan", "<na>": "nan", "inf": "inf", "-inf": "-inf"}


def read_numbers(
    columns: dict[str, pd.Series], *, decimal: str | None, where: object, shown: pd.DatetimeIndex
) -> tuple[dict[str, np.ndarray], list[Finding]]:
    """float64[N] by column name; empty cells become NaN.

    decimal : "." or "," where the text allows both readings, else None: one convention is found for all columns.
    shown : the rows' times, for messages. Raises BarsError naming column, row and text of what is no number.
    """
    values, text, findings = {}, {}, []
    for name, column in columns.items():
        if pd.api.types.is_bool_dtype(column.dtype) or pd.api.types.is_datetime64_any_dtype(column.dtype):
            refuse([Finding("text", "refused", _NONE, f"column {name} holds {column.dtype} values")], where)
        if pd.api.types.is_numeric_dtype(column.dtype):
            values[name] = column.to_numpy(np.float64, na_value=np.nan)
            if column.dtype in (np.float32, np.float16) and name != "volume":
                values[name] = _seven_digits(values[name])
                message = f"{name} was stored in {column.dtype} and read to its 7 significant digits"
                findings.append(Finding("float32", "mapped", _NONE, message))
        else:
            text[name] = plain_text(column)
    if text:
        fractions = any(np.any(v[np.isfinite(v)] % 1 != 0) for name, v in values.items() if name != "volume")
        mark = decimal or decimal_mark(text, "." if fractions else None, where)
        for name, column in text.items():
            values[name] = _parse(name, column, mark, where, shown)
        message = f"text in {', '.join(text)} read as numbers with {mark!r} before the decimals"
        findings.append(Finding("text_numbers", "mapped", _NONE, message))
    return {name: values[name] for name in columns}, findings


def plain_text(column: pd.Series) -> pd.Series:
    """The cells as text without spaces and apostrophes; "" where they are empty."""
    text = column.astype(object).where(column.notna().to_numpy(), "").astype(str)
    return text.str.replace(r"[\s'\u00a0\u202f\u2009]", "", regex=True)


def _seven_digits(values: np.ndarray) -> np.ndarray:
    """What a float32 price was before it was stored: its shortest decimal form (521.23, not 521.22998)."""
    usable = np.isfinite(values) & (values != 0)
    digits = np.zeros(len(values))
    digits[usable] = 6 - np.floor(np.log10(np.abs(values[usable])))
    return np.where(usable, np.round(values * 10.0**digits) / 10.0**digits, values)


def decimal_mark(text: dict[str, pd.Series], known: str | None, where: object) -> str:
    """The decimal mark all texts agree on; refused where 4,500 could mean two numbers."""
    together = pd.concat(text.values(), ignore_index=True)
    marked = together[together.str.fullmatch(r"[+-]?\d*[.,][\d.,]*(?:[eE][+-]?\d+)?")]
    comma, dot = marked.str.rfind(","), marked.str.rfind(".")
    both = (comma >= 0) & (dot >= 0)
    votes = set() if known is None else {known}
    if both.any():
        votes |= {","} if (comma > dot)[both].any() else set()
        votes |= {"."} if (dot > comma)[both].any() else set()
    for mark, other in ((",", "."), (".", ",")):
        alone = marked[~both & marked.str.contains(mark, regex=False)]
        if alone.str.count(re.escape(mark)).gt(1).any():
            votes.add(other)  # 1,234,567: the mark separates thousands
        elif len(alone) and not alone.str.fullmatch(rf"[+-]?[1-9]\d{{0,2}}{re.escape(mark)}\d{{3}}").all():
            votes.add(mark)  # 4500,25: not a group of thousands
    if len(votes) == 2:
        refuse([Finding("text", "refused", _NONE, "commas and dots stand for decimals in different rows")], where)
    if votes:
        return votes.pop()
    if (comma >= 0).any():
        example = marked[comma >= 0].iloc[0]
        message = f"{example!r} can be read as a fraction or as thousands"
        refuse([Finding("text", "refused", _NONE, message, "give decimal=',' or decimal='.'")], where)
    return "."


def _parse(name: str, column: pd.Series, mark: str, where: object, shown: pd.DatetimeIndex) -> np.ndarray:
    word = column.str.lower().isin(WORDS).to_numpy()
    number = column.str.fullmatch(GROUPED[mark]).to_numpy(bool)
    bad = np.flatnonzero(~word & ~number)
    if len(bad):
        message = f"{name} is not a number in {name_rows(bad, shown)}: {column.iloc[bad[0]]!r}"
        refuse([Finding("text", "refused", bad, message, "mend or drop these rows")], where)
    thousands = "," if mark == "." else "."
    plain = column.str.replace(thousands, "", regex=False).str.replace(mark, ".", regex=False)
    plain = plain.where(~word, column.str.lower().map(WORDS).fillna("nan"))
    return plain.to_numpy(object).astype(str).astype(np.float64)
