"""The fixtures of raw bars."""

from tests.raw_bars import gappy_minutes, make_raw, real_markets  # noqa: F401
