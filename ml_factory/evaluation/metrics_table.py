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
SIGNED = set(HEADS) - {"log_loss"}


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
    blocks = []
    splits = dict.fromkeys(table["split"]) if "split" in table.columns else ["test"]
    for split in splits:
        rows = table[table["split"] == split] if "split" in table.columns else table
        first = rows.iloc[0]
        used = ", used for choosing" if split == "validation" else ""
        effective = f", {first['effective_rows']:,.0f} effective" if "effective_rows" in rows.columns else ""
        blocks.append(f"{split} rows{used}: {int(first['rows']):,}{effective}")
        blocks.append(f"  {'':{NAME}} " + " ".join(f"{HEADS[name]:>9}" for name in shown))
        for _, row in rows.iterrows():
            name = str(row["name"]) if len(str(row["name"])) <= NAME else f"{str(row['name'])[: NAME - 1]}…"
            blocks.append(f"  {name:{NAME}} " + " ".join(_cell(column, row[column]) for column in shown))
    return "\n".join([*blocks, *_notes(table, shown)])


def _cell(column: str, value: float) -> str:
    if pd.isna(value):
        return f"{'-':>9}"
    return f"{value:>+9.4f}" if column in SIGNED else f"{value:>9.4f}"


def _notes(table: pd.DataFrame, shown: list[str]) -> list[str]:
    """Describe the columns, and the number of all columns."""
    notes = []
    if "gain_best" in shown:
        best = table["best_baseline"].dropna() if "best_baseline" in table.columns else []
        named = f", {best.iloc[0]}" if len(best) else ""
        notes.append(f"gain: over the best baseline{named}; nats per row, low and high 95 %")
    if "direction_gain" in shown:
        notes.append("direction: gain on the side alone, over the class prior")
    return [*notes, f"{len(table.columns)} columns in all: .columns"]
