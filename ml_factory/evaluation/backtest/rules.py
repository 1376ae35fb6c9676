"""Settings of a backtest: costs of a fill, and the rule that turns forecasts into positions."""

from dataclasses import dataclass

from ml_factory.models.base import check_settings


@dataclass(frozen=True)
class CostSpec:
    """Costs of a fill beyond commission and fees, which are the contract's.

    spread_ticks : distance of bid and ask, in ticks; each fill pays half of it
    slippage_ticks : further ticks that each fill pays
    """

    spread_ticks: float = 1.0
    slippage_ticks: float = 0.5

    def __post_init__(self) -> None:
        check_settings(self, spread_ticks="[0, inf)", slippage_ticks="[0, inf)")

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
        check_settings(
            self, horizon="[1, inf)", least_edge="[0, 1]", daily_loss_limit="(0, inf)", longest_wait_minutes="[0, inf)"
        )
