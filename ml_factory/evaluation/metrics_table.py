"""Metrics tables that print their main columns in 80 columns; otherwise they are plain DataFrames."""

import pandas as pd

NAME = 18  # characters of a forecast's name; longer ones are cut
HEADS = {  # column -> its heading
    "log_loss": "log loss",
    "gain_best": "gain",
    "gain_best_low": "low",
    "gain_best_high": "high",
    "direction_gain": "direction",
    "direction_low": "low",
}


class MetricsTable(pd.DataFrame):
    """A metrics table with a readable `print`; every column stays, and slices are plain DataFrames."""

    @property
    def _constructor(self):
        return pd.DataFrame

    def __repr__(self) -> str:
        return format_metrics_table(self) if {"name", "log_loss", "rows"} <= set(self.columns) else super().__repr__()


def format_metrics_table(table: pd.DataFrame) -> str:
    """Format the table in at most 80 columns: a block for each split, gains over the best baseline."""
    shown = [name for name in HEADS if name in table.columns]
    lines = []
    for split, rows in table.groupby("split", sort=False) if "split" in table.columns else [("test", table)]:
        used = ", used for choosing" if split == "validation" else ""
        effective = f", {rows['effective_rows'].iloc[0]:,.0f} effective" if "effective_rows" in rows.columns else ""
        lines.append(f"{split} rows{used}: {int(rows['rows'].iloc[0]):,}{effective}")
        lines.append(f"  {'':{NAME}} " + " ".join(f"{HEADS[name]:>9}" for name in shown))
        for row in rows.to_dict("records"):
            name = row["name"] if len(row["name"]) <= NAME else f"{row['name'][: NAME - 1]}…"
            lines.append(f"  {name:{NAME}} " + " ".join(_cell(column, row[column]) for column in shown))
    if "gain_best" in shown:
        lines.append(f"gain: over the best baseline, {table['best_baseline'].iloc[0]}; nats per row, low and high 95 %")
    if "direction_gain" in shown:
        lines.append("direction: gain on the side alone, over the class prior")
    return "\n".join([*lines, f"{len(table.columns)} columns in all: .columns"])


def _cell(column: str, value: float) -> str:
    return f"{'-' if pd.isna(value) else format(value, '.4f' if column == 'log_loss' else '+.4f'):>9}"
