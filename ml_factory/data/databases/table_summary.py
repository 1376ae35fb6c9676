"""Count, ends and content hash of the rows that are exported, and the checks that come before the first row."""

from collections.abc import Sequence
from dataclasses import dataclass

from ml_factory.data.databases.columns import Column, format_time_value
from ml_factory.errors import BarsError, SettingsError


@dataclass(frozen=True)
class TableSummary:
    """The selected rows, as the database counts them.

    first, last : values of the time column
    content_hash : sum of the hashes of the rows (`row_hash`); None where the database cannot compute it
    """

    rows: int
    first: float | None
    last: float | None
    content_hash: str | None


def check_one_symbol(symbols: Sequence[str | None], where: str) -> str | None:
    """Return the only symbol of a table. Raises SettingsError where there are several: that is not one market."""
    if len(symbols) > 1:
        names = ", ".join(sorted(str(one) for one in symbols)[:10])
        raise SettingsError("This table has bars of several symbols", where=where, got=names,
                            next_step="choose one with --symbol")  # fmt: skip
    return symbols[0] if symbols else None


def check_summary(summary: TableSummary, timeless: int, where: str, time: Column, symbol: str | None) -> None:
    """Raise BarsError for a selection without rows, or with rows that have no time (`timeless`)."""
    if timeless:
        raise BarsError(
            "Rows without a time cannot be bars", where=f"{where}, column {time.name}",
            got=f"{timeless:,} rows that are NULL or infinite there",
            next_step="correct them, or give a view without them",
        )  # fmt: skip
    if not summary.rows:
        got = "0 rows" + ("" if symbol is None else f" of the symbol {symbol!r}")
        raise BarsError("No rows to export", where=where, got=got, next_step="check --symbol, --start and --end")


def summary_differences(wanted: TableSummary, got: TableSummary, time: Column) -> list[str]:
    """Return in words where a file differs from its table."""

    def shown(one: TableSummary) -> dict[str, object]:
        ends = {"first time": one.first, "last time": one.last}
        times = {name: None if at is None else format_time_value(at, time) for name, at in ends.items()}
        return {"rows": one.rows, **times, "content hash": one.content_hash}

    pairs = zip(shown(wanted).items(), shown(got).values(), strict=True)
    return [f"{name} {other} in the file, {one} in the database" for (name, one), other in pairs if one != other]
