"""A self-contained HTML page: no script, no request, readable on a phone, in light and dark, and on paper.

Its form is `report.html.j2`.
"""

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ml_factory.lazy_module import LazyModule
from ml_factory.redaction import redact_secrets
from ml_factory.storage.files import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Both come with the extra train.
plot_style, jinja2 = LazyModule("ml_factory.evaluation.plot_style"), LazyModule("jinja2")
TEMPLATE = Path(__file__).with_name("report.html.j2")
_PAGE = {  # colours of the page alone, as in `plot_style.COLOURS`
    "page": ("#f4f6f9", "#0e121a"), "line": ("#e1e5eb", "#28303e"), "soft": ("#f0f3f8", "#1e2532"),
    "warn": ("#fff6e0", "#2b2412"), "warnline": ("#e8c468", "#7d6420"),
}  # fmt: skip


@dataclass(frozen=True)
class HtmlSection:
    """A section of the report.

    text : paragraphs, separated by an empty line; `so` becomes code. Everything is escaped.
    figures : (caption, Figure) pairs.
    tables : (caption, DataFrame) pairs.
    notice : highlighted text, such as limits of QUICK.
    """

    title: str
    text: str = ""
    figures: "Sequence[tuple[str, Figure]]" = ()
    tables: Sequence[tuple[str, pd.DataFrame]] = ()
    notice: str = ""


def write_html_report(path: str | Path, title: str, sections: Sequence[HtmlSection], **more) -> Path:
    """Write the page of `render_html_report`, whole or not at all. The same input gives the same bytes."""
    page = render_html_report(title, sections, **more)
    files.write(path, redact_secrets(page).encode("utf-8"))
    return Path(path)


def render_html_report(
    title: str,
    sections: Sequence[HtmlSection],
    *,
    subtitle: str = "",
    answer: str = "",
    facts: Mapping[str, tuple[object, str]] | None = None,
    notice: str = "",
    footer: str = "",
) -> str:
    """Return the page as text.

    Parameters
    ----------
    answer : result of the page in one sentence, its headline; the title stands above it.
    facts : label → (value, note), such as a gain and its interval; shown as cards under the headline.
    notice : text at the top, such as limits of QUICK.
    """
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"inline": _inline, "paragraphs": _paragraphs, "cells": _table_cells, "value": _value}
    environment.globals |= {"svg": plot_style.figure_to_svg, "colours": plot_style.COLOURS | _PAGE}
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        title=title, sections=sections, subtitle=subtitle, answer=answer, facts=facts or {}, notice=notice,
        footer=footer,
    )  # fmt: skip


def _inline(text: str) -> str:
    """Return safe HTML: escaped, `code` between backticks, and a minus sign before negative numbers."""
    text = re.sub(r"(?<![^\s(])-(?=\d)", "−", html.escape(text))
    return jinja2.utils.markupsafe.Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", text))


def _paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text.strip()) if part]


def _table_cells(table: pd.DataFrame) -> list[list[tuple[str, bool]]]:
    """Return the rows of a table, the names of its columns first: (text, True where it is set to the right)."""
    plain = isinstance(table.index, pd.RangeIndex) and table.index.name is None
    # Concatenated, not `reset_index`: an index may have a column's name.
    flat = table if plain else pd.concat([table.index.to_frame(index=False), table.reset_index(drop=True)], axis=1)
    columns = [flat.iloc[:, place] for place in range(flat.shape[1])]
    right = [place > 0 and pd.api.types.is_numeric_dtype(column) for place, column in enumerate(columns)]
    head = [str(column.name).replace("_", " ") for column in columns]
    return [list(zip(row, right, strict=True)) for row in (head, *zip(*map(_column_cells, columns), strict=True))]


def _value(value: object) -> str:
    return _column_cells([value])[0]


def _column_cells(column: Sequence) -> list[str]:
    """Format the values of a column: numbers with the same digits, separated thousands, a dash for missing."""
    numbers = np.array([value for value in column if isinstance(value, float | np.floating)], dtype=np.float64)
    known = numbers[np.isfinite(numbers)]
    most = float(np.abs(known).max(initial=0.0))
    if (known == np.round(known)).all() or most >= 1000:
        form = ",.0f"
    elif most < 1e-4:
        form = ".1e"
    else:
        form = ".4f" if most < 10 else ".2f"
    return [_cell(value, form) for value in column]


def _cell(value: object, form: str) -> str:
    if pd.isna(value):
        return "–"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        form = ","
    elif isinstance(value, pd.Timestamp):
        form = "%Y-%m-%d %H:%M"
    elif not isinstance(value, float | np.floating):
        return str(value)
    elif abs(value) < 1e-12:
        form, value = form.replace("1e", "0f"), 0.0
    text = format(value, form)
    # A negative number that rounds to 0 has no sign.
    return text.removeprefix("-") if not re.search("[1-9i]", text) else re.sub("^-", "−", text)
