"""Settings of a backtest: costs of a fill, and the rule that turns forecasts into positions."""

import math
from dataclasses import dataclass

from ml_factory.errors import wrong_field_error


@dataclass(frozen=True)
class CostSpec:
    """Costs of a fill beyond commission and fees, which are the contract's.

    spread_ticks : distance of bid and ask, in ticks; each fill pays half of it
    slippage_ticks : further ticks that each fill pays
    """

    spread_ticks: float = 1.0
    slippage_ticks: float = 0.5

    def __post_init__(self) -> None:
        for name in ("spread_ticks", "slippage_ticks"):
            if not 0 <= getattr(self, name) < math.inf:
                raise wrong_field_error(self, name, "Ticks of a cost are 0 or more", wanted="a number of 0 or more")

    @property
    def ticks_of_fill(self) -> float:
        """Ticks that a fill pays."""
        return self.spread_ticks / 2 + self.slippage_ticks


@dataclass(frozen=True)
class TradingRule:
    """Rule that turns forecasts into positions of one contract.

    horizon : bars that a position is held at most, the bar of its fill included; None: until another exit
    least_edge : least |p_long - p_short| of a forecast that opens a position
    reverse : a forecast of the other side closes the position and opens its own; False: it is ignored
    barriers : exit at the label's barriers, columns `up` and `down` of the forecasts, where they have them
    flat_at_session_end : close at the last bar of the scheduled session, and open nothing across its edge
    daily_loss_limit : currency; a session that loses as much at a bar's close is flat from the next open and stays so
    longest_wait_minutes : a forecast without a bar that starts so soon after it expires
    """

    horizon: int | None = None
    least_edge: float = 0.0
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
            "daily_loss_limit": (limit is None or 0 < limit < math.inf, "None or currency above 0"),
            "longest_wait_minutes": (0 <= self.longest_wait_minutes < math.inf, "0 or more"),
        }
        for name, (right, wanted) in checks.items():
            if not right:
                raise wrong_field_error(self, name, "No rule of a backtest", wanted=wanted)
