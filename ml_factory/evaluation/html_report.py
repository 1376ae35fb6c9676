"""A self-contained HTML page: no script, no request, readable on a phone, in light and dark, and on paper."""

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

plot_style = LazyModule("ml_factory.evaluation.plot_style")  # matplotlib comes with the extra train


@dataclass(frozen=True)
class HtmlSection:
    """A section of the report.

    text : paragraphs, separated by an empty line; `so` becomes code. Everything is escaped.
    figures : Figures, or (caption, Figure) pairs.
    tables : DataFrames, or (caption, DataFrame) pairs.
    notice : highlighted text, such as limits of QUICK.
    """

    title: str
    text: str = ""
    figures: "Sequence[Figure | tuple[str, Figure]]" = ()
    tables: Sequence[pd.DataFrame | tuple[str, pd.DataFrame]] = ()
    notice: str = ""


def write_html_report(
    path: str | Path,
    title: str,
    sections: Sequence[HtmlSection],
    *,
    subtitle: str = "",
    answer: str = "",
    facts: Mapping[str, object] | None = None,
    notice: str = "",
    footer: str = "",
) -> Path:
    """Write the page, whole or not at all. The same input gives the same bytes.

    Parameters
    ----------
    answer : result of the page in one sentence, its headline; the title stands above it.
    facts : label → value, or (value, note) such as a gain and its interval; shown as cards under the headline.
    notice : text at the top, such as limits of QUICK.
    """
    shown = {"subtitle": subtitle, "answer": answer, "facts": facts or {}, "notice": notice, "footer": footer}
    page = render_html_report(title, sections, **shown)
    files.write(path, redact_secrets(page).encode("utf-8"))
    return Path(path)


def render_html_report(title, sections, *, subtitle="", answer="", facts=None, notice="", footer="") -> str:
    """Return the page as text."""
    facts = facts or {}
    keys = [f"s{number}" for number in range(1, len(sections) + 1)]
    links = "".join(f'<a href="#{key}">{_safe(part.title)}</a>' for key, part in zip(keys, sections, strict=True))
    summary_cards = "".join(_tile(name, value) for name, value in facts.items())
    body = [
        "<header>",
        f"<p class=title>{_safe(title)}</p>" if answer else "",
        f"<h1>{_inline(answer or title)}</h1>",
        f"<div class=subtitle>{_paragraphs(subtitle)}</div>" if subtitle else "",
        f'<dl class=tiles style="--columns:{_columns(len(facts))}">{summary_cards}</dl>' if summary_cards else "",
        _notice(notice),
        "</header>",
        f'<nav aria-label="Contents">{links}</nav>' if len(sections) > 1 else "",
        "<main>",
        *(_section(part, key) for key, part in zip(keys, sections, strict=True)),
        "</main>",
        f"<footer>{_paragraphs(footer)}</footer>" if footer else "",
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # the browser itself refuses any request
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_safe(title)}</title>\n<style>{_palette()}{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(line for line in body if line)
        + "\n</body>\n</html>\n"
    )


def _tile(name: str, value: object) -> str:
    value, note = value if isinstance(value, tuple) else (value, "")
    below = f"<small>{_inline(note)}</small>" if note else ""
    return f"<div class=tile><dt>{_safe(name)}</dt><dd>{_inline(_cells([value])[0])}{below}</dd></div>"


def _columns(summary_cards: int) -> int:
    """Return the number of cards in a row, so that no row is left with a single one."""
    return -(-summary_cards // -(-summary_cards // 5))


def _section(part: HtmlSection, key: str) -> str:
    pieces = [f'<section id="{key}">', f"<h2>{_safe(part.title)}</h2>", _paragraphs(part.text), _notice(part.notice)]
    figures = [item if isinstance(item, tuple) else ("", item) for item in part.figures]
    drawn = "".join(_figure(caption, figure, f"{key}f{number}") for number, (caption, figure) in enumerate(figures, 1))
    pieces.append(f"<div class=figures>{drawn}</div>" if drawn else "")
    for item in part.tables:
        caption, table = item if isinstance(item, tuple) else ("", item)
        pieces.append(_table(caption, table))
    return "\n".join(piece for piece in [*pieces, "</section>"] if piece)


def _figure(caption: str, figure: "Figure", name: str) -> str:
    label = f' aria-label="{_safe(caption)}"' if caption else ""
    below = f"<figcaption>{_inline(caption)}</figcaption>" if caption else ""
    return f"<figure{label}>{plot_style.figure_to_svg(figure, name)}{below}</figure>"


def _table(caption: str, table: pd.DataFrame) -> str:
    """Render a table that scrolls sideways in its own box, its first column fixed."""
    plain = isinstance(table.index, pd.RangeIndex) and table.index.name is None
    # Concatenated, not `reset_index`: an index may have a column's name.
    flat = table if plain else pd.concat([table.index.to_frame(index=False), table.reset_index(drop=True)], axis=1)
    numeric = [i > 0 and pd.api.types.is_numeric_dtype(flat.iloc[:, i]) for i in range(flat.shape[1])]
    head = "".join(
        f"<th scope=col{' class=num' if right else ''}>{_safe(_words(name))}</th>"
        for name, right in zip(flat.columns, numeric, strict=True)
    )
    rows = []
    for record in zip(*(_cells(flat.iloc[:, i]) for i in range(flat.shape[1])), strict=True):
        cells = []
        for place, (value, right) in enumerate(zip(record, numeric, strict=True)):
            tag = "th scope=row" if place == 0 else "td"
            kind = " class=num" if right else ""
            cells.append(f"<{tag}{kind}>{_inline(value)}</{tag[:2]}>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    above = f"<caption>{_inline(caption)}</caption>" if caption else ""
    body = f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class=scroll tabindex=0 role=region aria-label="{_safe(caption or "table")}">{body}</div>'


# ---- text -----------------------------------------------------------------------------------------------------


def _safe(value: object) -> str:
    return html.escape(str(value), quote=True)


def _inline(text: str) -> str:
    """Escape text, with `code` between backticks, and a minus sign before negative numbers."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", re.sub(r"(?<![^\s(])-(?=\d)", "−", _safe(text)))


def _paragraphs(text: str) -> str:
    return "".join(f"<p>{_inline(part.strip())}</p>" for part in re.split(r"\n\s*\n", text) if part.strip())


def _notice(text: str) -> str:
    return f"<div class=notice role=note>{_paragraphs(text)}</div>" if text else ""


def _words(name: object) -> str:
    """Format a column's name: log_loss → log loss."""
    return " · ".join(map(str, name)) if isinstance(name, tuple) else str(name).replace("_", " ")


def _cells(column: Sequence) -> list[str]:
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
    if value is None or value is pd.NaT or (isinstance(value, float | np.floating) and np.isnan(value)):
        return "–"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, float | np.floating):
        text = format(float(value), form if abs(value) >= 1e-12 else form.replace("1e", "0f"))
        return text.replace("-", "−", 1) if value < 0 and re.search("[1-9i]", text) else text.removeprefix("-")
    if isinstance(value, int | np.integer):
        return f"{value:,}".replace("-", "−")
    if isinstance(value, pd.Timestamp):
        return value.strftime("%Y-%m-%d %H:%M")
    return str(value)


# ---- style -----------------------------------------------------------------------------------------------------


def _palette() -> str:
    """Return the colours of figures and page as CSS variables, light and dark."""
    light = "".join(f"--{name}:{pair[0]};" for name, pair in plot_style.COLOURS.items())
    dark = "".join(f"--{name}:{pair[1]};" for name, pair in plot_style.COLOURS.items())
    light += "--page:#f4f6f9;--line:#e1e5eb;--soft:#f0f3f8;--warn:#fff6e0;--warnline:#e8c468"
    dark += "--page:#0e121a;--line:#28303e;--soft:#1e2532;--warn:#2b2412;--warnline:#7d6420"
    return f":root{{color-scheme:light dark;{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"


STYLE = """
:root{--font:Inter,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
*{box-sizing:border-box}
html{scroll-behavior:smooth;-webkit-text-size-adjust:100%;scroll-padding-top:4rem}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.6 var(--font)}
header,main,footer{max-width:1000px;margin:0 auto;padding:0 1.5rem}
header{padding-top:3.25rem;padding-bottom:1.5rem}
h1{font-size:2.15rem;line-height:1.18;letter-spacing:-.022em;margin:0;font-weight:700;overflow-wrap:anywhere}
.title{margin:0 0 .4rem;color:var(--muted);font-size:.95rem;overflow-wrap:anywhere}
.subtitle{margin:.7rem 0 0;font-size:1.06rem;overflow-wrap:anywhere}
.subtitle p{margin:.25rem 0;max-width:46rem}.subtitle p+p{color:var(--muted);font-size:.95rem}
.tiles{display:grid;grid-template-columns:repeat(var(--columns),minmax(0,1fr));gap:.75rem;margin:1.75rem 0 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:.8rem 1rem .85rem}
.tile dt{color:var(--muted);font-size:.78rem}
.tile dd{margin:.1rem 0 0;font-size:1.18rem;font-weight:600;letter-spacing:-.012em;font-variant-numeric:tabular-nums;
overflow-wrap:anywhere;line-height:1.3}
.tile small{display:block;color:var(--muted);font-size:.8rem;font-weight:400;letter-spacing:0}
nav{position:sticky;top:0;z-index:2;display:flex;gap:.35rem;overflow-x:auto;scrollbar-width:none;
padding:.6rem max(1.5rem,calc((100% - 1000px)/2 + 1.5rem));
background:color-mix(in srgb,var(--page) 86%,transparent);backdrop-filter:blur(10px);
border-bottom:1px solid var(--line)}
nav a{flex:none;color:var(--muted);text-decoration:none;font-size:.88rem;padding:.28rem .7rem;border-radius:999px}
nav a:hover,nav a:focus-visible{background:var(--soft);color:var(--ink)}
section{background:var(--card);border:1px solid var(--line);border-radius:16px;padding:1.6rem 1.75rem 1.75rem;
margin:1.4rem 0}
h2{font-size:1.32rem;line-height:1.3;letter-spacing:-.014em;margin:0 0 .4rem}
p{margin:.4rem 0 .8rem;max-width:44rem}
section p{color:var(--muted)}
code{font:.88em var(--mono);background:var(--soft);border-radius:5px;padding:.1em .35em;overflow-wrap:anywhere}
.notice{background:var(--warn);border:1px solid var(--warnline);border-radius:12px;padding:.7rem 1rem;margin:1rem 0}
.notice p{margin:0;color:var(--ink);font-size:.94rem;max-width:none}.notice p+p{margin-top:.4rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1.25rem 2rem}
figure{margin:1.5rem 0 0;max-width:38rem}
figure svg{display:block;width:100%;height:auto}
figure svg *{stroke-linejoin:round;stroke-linecap:butt}
figcaption,caption{color:var(--muted);font-size:.9rem;line-height:1.5}
figcaption{margin:.5rem 0 0;max-width:44rem}
.scroll{overflow-x:auto;margin:1.5rem 0 0;border:1px solid var(--line);border-radius:12px;
background:linear-gradient(90deg,transparent,var(--card) 70%) 100% 0/40px 100% no-repeat local,
linear-gradient(270deg,var(--line),transparent) 100% 0/14px 100% no-repeat scroll}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{caption-side:top;text-align:left;padding:.75rem 1rem;border-bottom:1px solid var(--line);color:var(--ink);
font-weight:600}
th,td{padding:.5rem .65rem;text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}
thead th{white-space:normal;line-height:1.3;
color:var(--muted);font-weight:500;font-size:.82rem;vertical-align:bottom;background:var(--soft)}
tbody tr:last-child>*{border-bottom:0}
tbody th{font-weight:600}
th:first-child{position:sticky;left:0;background:var(--card);padding-left:1rem}
thead th:first-child{background:var(--soft)}
.num{text-align:right}
footer{color:var(--muted);font-size:.86rem;padding-top:.5rem;padding-bottom:3rem}
@media (max-width:640px){
header,main,footer{padding-left:1rem;padding-right:1rem}
header{padding-top:2rem;padding-bottom:1rem}
h1{font-size:1.62rem}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:.6rem}
.tile{padding:.65rem .8rem}.tile dd{font-size:1.02rem}
nav{padding-left:1rem;padding-right:1rem}
section{padding:1.15rem 1rem 1.2rem;border-radius:14px;margin:1rem 0}
th,td{padding:.45rem .55rem;white-space:normal}
}
@media print{body{background:#fff}nav{display:none}section{break-inside:avoid;border:0;padding:0}
.scroll{overflow:visible;border:0}table{font-size:.7rem}th,td{padding:.25rem .4rem;white-space:normal}}
"""
