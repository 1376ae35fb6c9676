"""Model card of a bundle in Markdown, from the facts that the bundle holds (Mitchell et al. 2019)."""

from collections.abc import Mapping, Sequence

_INTERVAL = ("log_loss", "gain_best", "gain_best_low", "gain_best_high")


def model_card(description: Mapping) -> str:
    """Return the card.

    description : as of `inference.bundle.Bundle`.
    """
    about, spec = description, description["spec"]
    market, labels = spec["market"], spec["data"]["labels"]
    parts = "".join(f"- base model: {name}\n" for name in about["models"]) if about["stack"] else ""
    own = ", ".join(f"{name} (module {one['module']}, source {one['hash']})" for name, one in about["custom"].items())
    tick = f"{market['tick']:g}" if market["tick"] is not None else "none"
    return "\n".join([
        f"# {about['model']} on {about['symbol']}, {about['horizon']} bars ahead", "",
        "Probabilities that the next move is short, neutral or long, from raw bars. " + (about["verdict"] or ""), "",
        "## What it reads", "",
        f"- raw bars of {market['bar_minutes']} min: {about['symbol']}, calendar {market['calendar']}, tick {tick}, "
        f"volume {'yes' if market['has_volume'] else 'no'}",
        f"- {len(about['feature_names'])} features; after a cold start it waits for {about['warmup_bars']:,} base bars",
        f"- your own features: {own or 'none'}",
        f"- preprocessing: {', '.join(map(_step_name, spec['data']['preprocess']))}, fitted on the training rows", "",
        "## What it was taught", "",
        f"- labels: {labels['kind']}, {about['horizon']} bars; classes {', '.join(map(str, about['classes']))}",
        f"- raw bars {about['raw']['first']} to {about['raw']['last']}; validation from "
        f"{about['split_times']['validation']}, test from {about['split_times']['test']}, labels until "
        f"{about['split_times']['last_label']}",
        f"- limits of the training: {_pairs(about['limited']) or 'none'}",
        f"- equal to the bit when trained again: {'no: ' + '; '.join(about['inexact']) if about['inexact'] else 'yes'}",
        parts,
        "## How good it is", "",
        *_metrics(about["metrics"]), "",
        "Log loss in nats a row; the gain is over the best baseline, with its 95 % interval. The validation rows were "
        "used to choose and to calibrate: only the test rows are out of sample.", "",
        "## Look-ahead", "", f"- certificate: {about['certified']}", "",
        "## Not for", "",
        "- another symbol, another tick, adjusted prices, bars of another length: loading or predicting refuses them",
        "- advice: the probabilities carry no costs, no position sizes and no promise", "",
        "## Fingerprints and versions", "",
        f"- run {about['run_id']}; data {about['data'][:12]}; raw bars {about['raw']['hash'][:12]}",
        *(f"- {name}: {digest[:12]}" for name, digest in about["models"].items()),
        f"- made with {_pairs(about['versions'])}", "",
        "## Use", "", "```python", "from ml_factory import Bundle", "",
        f"frame = Bundle.load({about['file']!r}).predict(bars)", "```", "",
    ]).replace("\n\n\n", "\n\n")  # fmt: skip


def _step_name(step: object) -> str:
    return str(step["step"]) if isinstance(step, Mapping) else str(step)


def _pairs(values: Mapping) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _metrics(rows: Sequence[Mapping]) -> list[str]:
    """Return the table of the metrics as Markdown."""
    lines = [
        "| split | forecast | log loss | gain | low | high | rows | effective |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [_number(row.get(name), "+.4f" if "gain" in name else ".4f") for name in _INTERVAL]
        counts = [_number(row.get(name), ",.0f") for name in ("rows", "effective_rows")]
        lines.append(f"| {' | '.join([row['split'], row['name'], *cells, *counts])} |")
    return lines


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
