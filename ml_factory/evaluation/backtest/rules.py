"""Settings of a backtest: costs of a fill, and the rule that turns forecasts into positions."""

import math
from dataclasses import dataclass

import numpy as np

from ml_factory.errors import wrong_field_error

HOURS = 24
HOUR_NS = 3_600_000_000_000


@dataclass(frozen=True)
class CostSpec:
    """Costs of a fill beyond commission and fees, which are the contract's.

    spread_ticks : distance of bid and ask, in ticks; each fill pays half of it
    slippage_ticks : further ticks that each fill pays
    spread_by_hour, slippage_by_hour : 24 numbers of ticks, by the UTC hour in which the bar of the fill starts; they
        replace `spread_ticks` and `slippage_ticks`
    """

    spread_ticks: float = 1.0
    slippage_ticks: float = 0.5
    spread_by_hour: tuple[float, ...] = ()
    slippage_by_hour: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("spread_ticks", "slippage_ticks"):
            if not 0 <= getattr(self, name) < math.inf:
                raise wrong_field_error(self, name, "Ticks of a cost are 0 or more", wanted="a number of 0 or more")
        for name in ("spread_by_hour", "slippage_by_hour"):
            hours = getattr(self, name)
            if len(hours) not in (0, HOURS) or not all(0 <= ticks < math.inf for ticks in hours):
                raise wrong_field_error(
                    self, name, "Costs by hour are one per UTC hour", wanted="24 numbers of 0 or more"
                )

    def ticks_of_fill(self, start_ns: np.ndarray) -> np.ndarray:
        """Return the ticks that a fill in each bar pays, float64 (N,).

        start_ns : starts of the bars, int64 ns UTC
        """
        hour = start_ns // HOUR_NS % HOURS
        spread, slippage = (
            np.asarray(by_hour, float)[hour] if by_hour else np.full(len(start_ns), ticks)
            for by_hour, ticks in (
                (self.spread_by_hour, self.spread_ticks), (self.slippage_by_hour, self.slippage_ticks),
            )
        )  # fmt: skip
        return spread / 2 + slippage


@dataclass(frozen=True)
class TradingRule:
    """Rule that turns forecasts into positions.

    horizon : bars that a position is held at most, the bar of its fill included; None: until another exit
    least_edge : least |p_long - p_short| of a forecast that opens a position
    max_contracts : most contracts held at a time, all of one side; each forecast opens one
    reverse : a forecast of the other side closes the position and opens its own; False: it is ignored
    barriers : exit at the label's barriers, columns `up` and `down` of the forecasts, where they have them
    flat_at_session_end : close at the last bar of the scheduled session, and open nothing across its edge
    daily_loss_limit : currency; a session that loses as much at a bar's close is flat from the next open and stays so
    longest_wait_minutes : a forecast without a bar that starts so soon after it expires
    """

    horizon: int | None = None
    least_edge: float = 0.0
    max_contracts: int = 1
    reverse: bool = True
    barriers: bool = True
    flat_at_session_end: bool = True
    daily_loss_limit: float | None = None
    longest_wait_minutes: float = 60.0

    def __post_init__(self) -> None:
        limit = self.daily_loss_limit
        checks = {
            "horizon": (self.horizon is None or self.horizon >= 1, "None or 1 bar or more"),
            "least_edge": (0 <= self.least_edge <= 1, "0 to 1"),
            "max_contracts": (1 <= self.max_contracts <= 1_000, "1 to 1,000"),
            "daily_loss_limit": (limit is None or 0 < limit < math.inf, "None or currency above 0"),
            "longest_wait_minutes": (0 <= self.longest_wait_minutes < math.inf, "0 or more"),
        }
        for name, (right, wanted) in checks.items():
            if not right:
                raise wrong_field_error(self, name, "No rule of a backtest", wanted=wanted)
