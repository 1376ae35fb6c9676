"""The page asks for nothing, escapes everything, and fits a phone and the dark."""

import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from tests.contract.doors import (
    COLOURS,
    HtmlSection,
    ResampledBars,
    compute_forecast_metrics,
    data_plots,
    decile_returns,
    downsample_line,
    figure_to_svg,
    plots,
    prior_baseline_probabilities,
    recipe_plots,
    reliability_table,
    render_html_report,
    write_html_report,
)

pytestmark = pytest.mark.usefixtures("drawn")
RNG = np.random.default_rng(0)
N = 2000
INDEX = pd.date_range("2025-01-06", periods=N, freq="5min", tz="UTC", name="known_at")
CLOSE = pd.Series(5000 + RNG.normal(size=N).cumsum(), INDEX)
P = RNG.dirichlet([3, 3, 3], N)
Y = (P.cumsum(axis=1) < RNG.random((N, 1))).sum(axis=1) - 1
TABLE = compute_forecast_metrics({"prior": prior_baseline_probabilities(Y, None, N), "model": P}, Y)
_EACH = RNG.dirichlet(np.ones(20), 50)
_SPREAD = {"low": np.percentile(_EACH, 10, axis=0), "high": np.percentile(_EACH, 90, axis=0)}
SHARES = pd.DataFrame({"share": _EACH.mean(axis=0), **_SPREAD}, index=[f"feature_{i}" for i in range(20)])
ATTENTION = pd.DataFrame({"attention": _EACH.mean(axis=0), **_SPREAD}, index=pd.RangeIndex(19, -1, -1))

CURVES = ("always_long", "clock", "shifted", "shifted_low", "shifted_high", "drawdown")
EPOCHS = [{"epoch": epoch, "train_loss": 1.0, "val_loss": 1.1} for epoch in (1, 2)]
VARIANTS = [
    {"method": "dense", "p50_ms": 2.0, "bytes": 2e6, "quality": 0.9, "low": 0.8, "high": np.nan, "pareto": True},
    {"method": "int8", "p50_ms": 1.0, "bytes": 1e6, "quality": 0.7, "low": 0.6, "high": 0.8, "pareto": False},
]


def frame(minutes: int, n: int) -> ResampledBars:
    start = INDEX[0].value + np.arange(n) * minutes * 60_000_000_000
    price, whole = np.full(n, 1.0), np.zeros(n, dtype=np.int32)
    return ResampledBars(
        minutes, start, start + minutes * 60_000_000_000, price, price, price, price, None, whole, whole
    )


def all_figures() -> dict:
    base, coarse = frame(5, 120), frame(60, 10)
    seen = np.searchsorted(coarse.known_at, base.known_at, side="right") - 1
    history = pd.DataFrame({"epoch": [1, 2, 3], "train_loss": [1.1, 1.0, 0.9], "val_loss": [1.1, 1.05, 1.06]})
    folds = pd.DataFrame({"fold": [0, 1, 2], "log_loss_gain": [0.01, -0.02, 0.03], "gain_se": [0.01, 0.01, np.nan]})
    folds["name"] = "model"
    balance = pd.DataFrame({"short": [300, 20], "neutral": [300, 60], "long": [400, 20]}, index=[5, 20])
    frame_p = pd.DataFrame(P, INDEX, ["p_short", "p_neutral", "p_long"])
    return {
        "split": data_plots.plot_split(CLOSE, {"train": INDEX[:1200], "test": INDEX[1250:], "empty": INDEX[:0]}),
        "balance": data_plots.plot_label_balance(balance),
        "gaps": data_plots.plot_gaps(pd.DataFrame({"minutes": [1, 60], "kind": ["no_trade", "session"]}, INDEX[:2])),
        "cuts": data_plots.plot_cuts(CLOSE, [(INDEX[500], "gap"), (INDEX[1500], "session end")]),
        "alignment": data_plots.plot_frame_alignment(base, [coarse], [seen], row=70),
        "learning": plots.plot_learning_curves(history, best_epoch=2, prior=1.0986, resumed_from=1),
        "folds": plots.plot_fold_scores(folds),
        "metrics": plots.plot_metrics(TABLE),
        "calibration": plots.plot_calibration(reliability_table(Y, P)),
        "months": plots.plot_months(
            pd.DataFrame({"rows": 100, "gain": RNG.normal(size=18)}, pd.period_range("2024-01", periods=18, freq="M"))
        ),
        "weights": plots.plot_stack_weights(pd.DataFrame({"weight": [0.7, 0.0]}, index=["a", "b"])),
        "importances": plots.plot_importances(
            pd.DataFrame({"gain": [0.7, 0.3], "permuted": [0.02, -0.001], "spread": [0.001, 0.0]}, index=["rsi", "atr"])
        ),
        "deciles": plots.plot_deciles(decile_returns(P[:, 2] - P[:, 0], CLOSE.diff() / 5000)[0]),
        "probabilities": plots.plot_probabilities(frame_p, CLOSE),
        "shares": plots.plot_variable_shares(SHARES),
        "attention": plots.plot_attention(ATTENTION),
        "paths": plots.plot_fold_scores(folds, folds.rename(columns={"fold": "path"})),
        "equity": plots.plot_equity(CLOSE[:500].to_frame("model").assign(**dict.fromkeys(CURVES, 0.0)), "model"),
    }


FIGURES = all_figures()


class Page(HTMLParser):
    """Collects tags, attributes, ids and the text a reader sees."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in {"meta", "br", "path", "use"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_data(self, data):
        self.text.append(data)


def test_html_report_loads_nothing_has_unique_ids_and_two_values_of_each_colour():
    parts = [HtmlSection(name, f"About `{name}`.", [("A caption.", figure)]) for name, figure in FIGURES.items()]
    text = render_html_report("Title", [*parts, HtmlSection("Numbers", tables=[("All metrics", TABLE)])])
    page = Page(text)
    assert not page.open and not set(page.tags) & {"script", "link", "img", "iframe", "object", "embed", "base"}
    for tag, name, value in page.attributes:
        if name in {"src", "href", "xlink:href", "srcset", "action", "data"}:
            assert value.startswith("#"), f"<{tag} {name}={value}>"
        assert not name.startswith("on")
    assert not re.search(r"https?:|@import|url\((?!#)", text) and "default-src 'none'" in text
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {a or b for a, b in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text)} <= set(ids)
    for name in set(re.findall(r"var\(--([a-z]+)\)", text)) - {"font", "mono", "columns"}:
        assert len(re.findall(rf"--{name}:#", text)) == 2, name
    assert len({light for light, _ in COLOURS.values()}) == len(COLOURS), "two names for one colour cannot be parted"


@pytest.mark.parametrize("name", FIGURES)
def test_to_svg_figure_is_small_and_uses_css_colours(name):
    svg = figure_to_svg(FIGURES[name], "x")
    assert len(svg) < 100_000
    assert not re.search(r"#[0-9a-fA-F]{6}\b", svg), "a colour that would stay the same in the dark"
    assert "DejaVu" not in svg and "<style" not in svg
    left, top, width, height = map(float, re.search(r'viewBox="([^"]+)"', svg)[1].split())
    assert (left, top) == (0, 0) and 325 <= width <= 335 and height > 60
    # A word cut off at the right edge would begin beyond it.
    starts = [float(x) for x in re.findall(r'<text[^>]* x="([-\d.]+)"', svg)]
    assert starts and all(0 <= x <= width for x in starts)


def test_html_report_text_from_input_is_escaped():
    evil = '<script>alert("1")</script> & $x^2$'
    table = pd.DataFrame({evil: [evil]}, index=pd.Index([evil], name=evil))
    drawn = plots.plot_metrics(TABLE.rename(index={"model": evil}))
    assert "".join(Page(figure_to_svg(drawn, "x")).text).count(evil) == 1, "a dollar sign starts no formula"
    text = render_html_report(
        evil,
        [HtmlSection(evil, evil, [(evil, drawn)], [(evil, table)], notice=evil), HtmlSection("b")],
        subtitle=evil,
        facts={evil: (evil, evil)},
        notice=evil,
        footer=evil,
    )
    page = Page(text)
    assert "script" not in page.tags and not page.open
    assert "".join(page.text).count(evil) >= 14


COLUMNS = {
    "small": ([0.012345, np.nan], ["0.0123", "–"]), "count": ([1234567, -3], ["1,234,567", "−3"]),
    "said": ([True, False], ["yes", "no"]), "tiny": ([1e-7, -1.8e-16], ["1.0e-07", "0"]),
    "big": ([123456.7, np.inf], ["123,457", "inf"]), "when": ([INDEX[0], pd.NaT], ["2025-01-06 00:00", "–"]),
    "loss": ([0.5, -12.25], ["0.50", "−12.25"]), "net": ([-1234.4, 0.2], ["−1,234", "0"]),
    "zero": ([-1e-9, 2.0], ["0.0000", "2.0000"]), "two_words": (["a_b", ""], ["a_b", ""]),
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
def test_html_report_column_has_one_number_of_digits_and_numbers_on_the_right(name):
    values, words = COLUMNS[name]
    table = pd.DataFrame({name: values}, index=pd.Index([7, 8], name="row_name"))
    page = render_html_report("t", [HtmlSection("s", tables=[("", table)])]).split("<table")[1].split("</table")[0]
    assert [text for text in map(str.strip, Page(f"<table{page}").text) if text] == [
        "row name", name.replace("_", " "), "7", words[0], "8", *filter(None, words[1:])
    ]  # fmt: skip
    numbers = pd.api.types.is_numeric_dtype(table[name])
    assert [("class=num" in cell) for cell in page.split("</thead>")[0].split("<th ")[1:]] == [False, numbers]


def test_html_report_headline_is_the_answer_and_cards_show_intervals():
    facts = {"gain": ("-0.0100", "-0.0010 to <0.02"), "rows": (1234, "")}
    text = "DEMO-NULL lost -0.5 (-1 to +2) on 2025-01-02."
    page = render_html_report("DEMO: xgboost", [HtmlSection("s", text)], answer="No edge: `x` is worse.", facts=facts)
    assert "<p class=title>DEMO: xgboost</p>\n<h1>No edge: <code>x</code> is worse.</h1>" in page
    assert "<dt>gain</dt><dd>−0.0100<small>−0.0010 to &lt;0.02</small></dd>" in page
    assert "<dt>rows</dt><dd>1,234</dd>" in page and "DEMO-NULL lost −0.5 (−1 to +2) on 2025-01-02." in page


def test_write_report_same_input_gives_same_bytes(tmp_path):
    def written() -> bytes:
        figure = data_plots.plot_split(CLOSE, {"train": INDEX[:1200], "test": INDEX[1250:]})
        sections = [HtmlSection("s", "one\n\ntwo", [("", figure)], [("", TABLE)])]
        return write_html_report(tmp_path / "r.html", "t", sections, facts={"a": (1, "")}).read_bytes()

    first = written()
    assert written() == first and b"<p>one</p><p>two</p>" in first


def test_outline_of_long_series_keeps_extremes_and_ends():
    values = RNG.normal(size=100_000)
    keep = downsample_line(values)
    assert len(keep) <= 1502 and (np.diff(keep) > 0).all()
    assert {int(values.argmin()), int(values.argmax()), 0, 99_999} <= set(keep)
    assert downsample_line(values[:10]).tolist() == list(range(10))


@pytest.mark.parametrize(
    "figure",
    [
        recipe_plots.draw_labelled_rows({"train": {"a": [3, 40], "b": [7]}, "test": {"a": [9]}}, "t", "words"),
        recipe_plots.draw_class_results(EPOCHS, list("aab"), list("abb"), {"model": 0.7, "other": 0.5}, "t"),
        recipe_plots.draw_epoch_curves({"one": EPOCHS, "two": EPOCHS}, {"val_loss": "loss", "train_loss": "loss"}),
        recipe_plots.draw_compression(VARIANTS, "accuracy", "t"),
    ],
)
def test_figures_of_recipes_render_with_words_inside(figure):
    svg = figure_to_svg(figure, "x")
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])
    starts = [float(x) for x in re.findall(r'<text[^>]* x="([-\d.]+)"', svg)]
    assert 615 < width < 625 and starts and all(0 <= x <= width for x in starts)


def test_figures_with_few_rows_render_as_svg():
    short = pd.DataFrame([[0.2, 0.3, 0.5]] * 2, INDEX[:2], ["p_short", "p_neutral", "p_long"])
    assert "<svg" in figure_to_svg(plots.plot_probabilities(short, CLOSE), "x")
    assert "<svg" in figure_to_svg(data_plots.plot_split(CLOSE[:2], {"train": INDEX[:1], "test": INDEX[1:2]}), "x")
    few = compute_forecast_metrics({"prior": P[:5], "model": P[:5]}, Y[:5])
    assert "<svg" in figure_to_svg(plots.plot_metrics(few), "x")
