"""Trading calendar, session ids, daylight saving."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MarketSpec:
    """What holds for a market whatever file is read: stored once, never re-read off a whole file.

    calendar : "cme" (17:00-16:00 Chicago), "us_equity" (9:30-16:00 New York) or "24h" (UTC days).
    tick : price step, or None where prices follow none.  has_volume : whether volume means something.
    hole_minutes : a silence inside a session longer than this is a hole.
    source : field -> "given" | "lookup" | "inferred".
    """

    symbol: str
    calendar: str
    tick: float | None
    has_volume: bool
    hole_minutes: int = 60
    source: tuple[tuple[str, str], ...] = ()
