"""Synthetic markets with known true probabilities: null, planted edge.

One-minute bars of a log random walk with the intraday pattern of a trading day in volatility and volume. A hidden state
of -1, 0 or +1 lasts for hours and raises the volume whenever it is not 0. In the planted market the state also adds a
drift to the price, so recent momentum and volume reveal part of it and a model can learn it. In the null market it does
not, so no model can gain.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.argument_checks import CALENDARS, DEMO_NULL, check_settings
from ml_factory.data.io import write_bars
from ml_factory.data.sessions import CME_CALENDARS, MINUTE_NS, TRADING_HOURS, assign_sessions, scheduled_session_days
from ml_factory.seeding import seeded_generator
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace

KINDS = ("planted", "null")
STATES = np.array([-1.0, 0.0, 1.0])
STATE_PRIOR = np.array([0.25, 0.5, 0.25])
DEMO_DAYS = 290  # sessions, of which the default split's 15 % of test rows span the 8 weeks that a verdict needs
_PERSISTENCE = 0.9  # of the weather, from day to day
_VOLUME = 300  # of an average minute
_STEPS = 6  # steps of the walk inside one minute, from which high and low come

# session fraction -> relative volatility; CME: quiet night, 8:30 Chicago at 0.67, the equity close at 0.96
_SHAPES = {
    **dict.fromkeys(
        CME_CALENDARS,
        (
            [0.0, 0.02, 0.35, 0.66, 0.68, 0.73, 0.85, 0.95, 0.957, 1.0],
            [1.0, 0.6, 0.5, 0.8, 2.2, 1.6, 1.1, 1.7, 0.7, 0.5],
        ),
    ),
    "us_equity": ([0.0, 0.08, 0.5, 0.9, 1.0], [2.2, 1.2, 0.7, 1.0, 1.7]),
    "fx": ([0.0, 0.3, 0.42, 0.62, 0.72, 1.0], [0.5, 0.7, 1.3, 1.6, 1.2, 0.5]),
    "24h": ([0.0, 0.3, 0.6, 1.0], [0.8, 0.9, 1.4, 0.8]),
}


@dataclass(frozen=True)
class SyntheticSpec:
    """Settings of a synthetic market; per-minute quantities are in units of that minute's volatility.

    days : sessions
    kind : "planted" or "null"
    start : first date (the default's 60 days cross a daylight-saving change)
    edge : drift while the state is +1 or -1 (planted only)
    dwell_minutes : mean duration of a state
    volume_lift : extra volume, as a share, while the state is not 0
    minute_volatility : log return of an average minute
    shape : strength of the intraday pattern of volatility
    weather : standard deviation of the daily volatility factor. With shape 0 and weather 0 volatility is constant, so
        that in the null market no class can be predicted at all
    missing : share of minutes without a trade
    """

    days: int = 60
    kind: str = "planted"
    seed: int = 0
    calendar: str = "cme"
    start: str = "2024-01-22"
    price: float = 5000.0
    tick: float = 0.25
    edge: float = 0.10
    dwell_minutes: int = 240
    volume_lift: float = 1.0
    minute_volatility: float = 0.00027
    shape: float = 1.0
    weather: float = 0.25
    missing: float = 0.002

    def __post_init__(self) -> None:
        above_0 = dict.fromkeys(("days", "price", "tick", "dwell_minutes", "minute_volatility"), "(0, inf)")
        check_settings(self, kind=KINDS, calendar=CALENDARS, missing="[0, 0.5)", **above_0)

    @property
    def state_drift(self) -> float:
        return self.edge if self.kind == "planted" else 0.0


@dataclass(frozen=True)
class SyntheticMarket:
    """Bars and their hidden quantities; the arrays have one entry for each of M minutes, traded or not.

    bars : index timestamp (UTC, start), columns open, high, low, close, volume
    start_ns : int64[M], the minutes
    state : int8[M]
    sigma : float64[M], true log volatility of the minute
    returns : float64[M], close to close
    close_ns : int64[M], the session's close
    """

    spec: SyntheticSpec
    bars: pd.DataFrame
    start_ns: np.ndarray
    state: np.ndarray
    sigma: np.ndarray
    returns: np.ndarray
    close_ns: np.ndarray


def synthetic_bars(
    days: int = 60, kind: str = "planted", seed: int = 0, calendar: str = "cme", **settings: Any
) -> pd.DataFrame:
    """Return the bars of `synthetic_market`; the same arguments give the same bits."""
    return synthetic_market(SyntheticSpec(days=days, kind=kind, seed=seed, calendar=calendar, **settings)).bars


def synthetic_market(spec: SyntheticSpec) -> SyntheticMarket:
    """Simulate bars with their hidden state, volatility and returns."""
    rng = seeded_generator("synthetic market", spec.kind, spec.seed)
    start_ns, day, fraction, close_ns = _grid(spec)
    count = len(start_ns)
    shape = np.interp(fraction, *_SHAPES[spec.calendar]) ** spec.shape
    weather = np.exp(_slow_noise(rng, int(day[-1]) + 1, persistence=_PERSISTENCE, deviation=spec.weather))[day]
    sigma = spec.minute_volatility * shape * weather
    state = _states(rng, count, spec.dwell_minutes)
    drift = sigma * (spec.state_drift * state)
    steps = drift[:, None] / _STEPS + sigma[:, None] / np.sqrt(_STEPS) * rng.standard_normal((count, _STEPS))
    night = np.zeros(count)
    opening = np.flatnonzero(np.diff(day)) + 1
    night[opening] = 4 * sigma[opening] * rng.standard_normal(len(opening))
    returns = steps.sum(1)
    opens = np.cumsum(night) + np.cumsum(returns) - returns  # log price at each minute's open
    walk = opens[:, None] + np.cumsum(steps, axis=1)  # and after each step within the minute
    prices = np.column_stack([opens, np.c_[opens, walk].max(1), np.c_[opens, walk].min(1), walk[:, -1]])
    prices = np.maximum(np.round(spec.price * np.exp(prices) / spec.tick), 1.0) * spec.tick
    log_volume = np.log1p(spec.volume_lift * (state != 0)) + 0.5 * rng.standard_normal(count)
    volume = np.maximum(np.round(_VOLUME * shape**1.5 * np.exp(log_volume)), 1.0)
    traded = rng.random(count) >= spec.missing
    index = pd.DatetimeIndex(start_ns.astype("datetime64[ns]"), tz="UTC", name="timestamp")
    bars = pd.DataFrame(prices, index=index, columns=["open", "high", "low", "close"]).assign(volume=volume)
    return SyntheticMarket(spec, bars[traded], start_ns, state, sigma, returns, close_ns)


def _grid(spec: SyntheticSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return every minute of the first `days` sessions: start, session count, elapsed fraction of the session, close.

    Shares and currencies rest on their exchange's holidays; of CME futures some product trades on most of them.
    """
    zone, open_minute, close_minute = TRADING_HOURS[spec.calendar]
    first = pd.Timestamp(spec.start, tz=zone).tz_convert("UTC").floor("min").as_unit("ns").value
    span = spec.days * 7 // 5 + spec.days // 20 + 14  # with weekends and holidays
    start_ns = first + np.arange(span * 1440, dtype=np.int64) * MINUTE_NS
    sessions = assign_sessions(start_ns, spec.calendar)
    kept = sessions.inside
    if spec.calendar in ("us_equity", "fx"):
        kept = kept & np.isin(
            sessions.id, scheduled_session_days(spec.calendar, int(sessions.id[0]), int(sessions.id[-1]))[0]
        )
    start_ns, ids, opens, closes = start_ns[kept], sessions.id[kept], sessions.open_ns[kept], sessions.close_ns[kept]
    whole = opens >= first  # a CME day opens the evening before
    count = np.unique(ids[whole], return_inverse=True)[1]
    day = count[count < spec.days]
    kept = np.flatnonzero(whole)[: len(day)]
    start_ns, ids, opens, closes = start_ns[kept], ids[kept], opens[kept], closes[kept]
    early = np.minimum.reduceat(closes, np.flatnonzero(np.diff(ids, prepend=-1)))[day]
    traded = start_ns < early  # a scheduled early close really closes this market
    length = (close_minute - open_minute) * MINUTE_NS
    return start_ns[traded], day[traded], ((start_ns - opens) / length)[traded], early[traded]


def _slow_noise(rng: np.random.Generator, count: int, persistence: float, deviation: float) -> np.ndarray:
    """Simulate `count` values of a stationary first-order autoregression."""
    shocks = rng.standard_normal(count) * deviation
    values = np.empty(count)
    level = shocks[0]
    for k in range(count):
        level = persistence * level + np.sqrt(1 - persistence**2) * shocks[k] if k else level
        values[k] = level
    return values


def _states(rng: np.random.Generator, count: int, dwell_minutes: int) -> np.ndarray:
    """Simulate int8[count] states; each minute a new state is drawn with probability 1 / dwell_minutes."""
    drawn = rng.choice(STATES, size=count, p=STATE_PRIOR).astype(np.int8)
    renewed = rng.random(count) < 1 / dwell_minutes
    renewed[0] = True
    return drawn[np.maximum.accumulate(np.where(renewed, np.arange(count), 0))]


@dataclass(frozen=True)
class SyntheticBelief:
    """Beliefs of an observer who knows every setting, from the bars up to and including each of M minutes.

    state : float64[M, 3], P(state) in the order -1, 0, +1
    usual : float64[M], log volatility of the minute on a day of average weather: the time of day, known ahead
    weather, weather_error : float64[M], mean and standard deviation of the day's log volatility factor
    """

    state: np.ndarray
    usual: np.ndarray
    weather: np.ndarray
    weather_error: np.ndarray


def synthetic_belief(market: SyntheticMarket) -> SyntheticBelief:
    """Filter state and weather from the bars alone: prices rounded to ticks, no bar where nothing traded.

    The forward filter of the hidden chain (Rabiner 1989, section III.A), with the weather estimated before it from
    squared returns; its prior is the day before.
    """
    spec, bars = market.spec, market.bars
    start_ns, day, fraction, _ = _grid(spec)
    usual = spec.minute_volatility * np.interp(fraction, *_SHAPES[spec.calendar]) ** spec.shape
    at = np.searchsorted(start_ns, bars.index.as_unit("ns").asi8)
    seen, moves, rounding = np.zeros(len(day), bool), np.zeros(len(day)), np.zeros(len(day))
    seen[at], moves[at] = True, np.log(bars["close"] / bars["open"])
    rounding[at] = (spec.tick / bars["close"]) ** 2 / 6  # variance of the difference of two rounded prices
    weather, error = _weather(spec, day, seen, (moves**2 - rounding) / usual**2)
    variance = (usual * np.exp(weather)) ** 2
    drift = np.sqrt(variance)[:, None] * (spec.state_drift * STATES)
    log_like = -0.5 * (moves[:, None] - drift) ** 2 / (variance + rounding)[:, None]
    log_volume = np.zeros(len(day))
    log_volume[at] = np.log(bars["volume"] / (_VOLUME * (usual[at] / spec.minute_volatility) ** 1.5))
    log_like -= 0.5 * ((log_volume[:, None] - np.log1p(spec.volume_lift * (STATES != 0))) / 0.5) ** 2
    log_like[~seen] = 0.0
    like = np.exp(log_like - log_like.max(1, keepdims=True)).tolist()
    renew, prior = 1 / spec.dwell_minutes, STATE_PRIOR.tolist()
    belief, rows = prior, []
    for now in like:
        joint = [((1 - renew) * b + renew * p) * x for b, p, x in zip(belief, prior, now, strict=True)]
        total = sum(joint)
        belief = [j / total for j in joint]
        rows.append(belief)
    return SyntheticBelief(np.array(rows), usual, weather, error)


def _weather(
    spec: SyntheticSpec, day: np.ndarray, seen: np.ndarray, squares: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Estimate each day's log volatility factor, minute by minute: (mean, standard deviation), float64[M] each.

    squares : squared returns in units of the usual variance; half the logarithm of their mean over n minutes has a
        variance of 1 / 2n.
    """
    mean, precision = np.empty(len(day)), np.empty(len(day))
    before, variance = 0.0, spec.weather**2
    for minutes in np.split(np.arange(len(day)), np.flatnonzero(np.diff(day)) + 1):
        count = np.cumsum(seen[minutes])
        total = np.cumsum(np.where(seen[minutes], squares[minutes], 0.0))
        observed = 0.5 * np.log(np.maximum(total / np.maximum(count, 1), 1e-3)) + 0.5 / np.maximum(count, 1)
        prior = 1 / max(variance, 1e-12)
        precision[minutes] = prior + 2 * count
        mean[minutes] = (prior * before + 2 * count * observed) / precision[minutes]
        before, variance = _PERSISTENCE * mean[minutes[-1]], spec.weather**2 * (1 - _PERSISTENCE**2)
    return mean, 1 / np.sqrt(precision)


def oracle_probabilities(
    market: SyntheticMarket,
    known_at_ns: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    minutes: int,
    *,
    knows: str = "bars",
    paths: int = 400,
) -> np.ndarray:
    """Estimate the true P(lower barrier first, neither, upper first) within `minutes` or the session, by simulation.

    Known are the settings, the calendar and the bars complete at each moment: no later bar, nothing hidden.
    Paths take one step a minute; barriers are moved in by 0.5826 sigma (1 - 1/sqrt(6)) for the omitted steps (Broadie,
    Glasserman and Kou 1997, the continuity correction). The standard error is 0.5 / sqrt(paths).

    Parameters
    ----------
    market : a synthetic market
    known_at_ns : int64[N], the moments of prediction
    up, down : float64[N], log distances of the barriers, > 0
    minutes : horizon
    knows : "bars" starts from the filtered state (the best any model can do), "state" from the hidden one too
    paths : simulated paths for each moment

    Returns
    -------
    float64[N, 3]
    """
    spec, rng = market.spec, seeded_generator("oracle", market.spec.seed, paths)
    at = np.searchsorted(market.start_ns, known_at_ns - MINUTE_NS, side="right") - 1
    belief = synthetic_belief(market)
    start = np.eye(3)[market.state[at].astype(int) + 1] if knows == "state" else belief.state[at]
    state = STATES[(rng.random((len(at), paths, 1)) > np.cumsum(start, 1)[:, None, :2]).sum(2)]
    position, outcome = np.zeros(state.shape), np.zeros(state.shape, np.int8)
    weather = np.exp(belief.weather[at, None] + belief.weather_error[at, None] * rng.standard_normal(state.shape))
    for minute in range(1, minutes + 1):
        now = np.minimum(at + minute, len(market.start_ns) - 1)
        open_still = (at + minute < len(market.start_ns)) & (market.close_ns[now] == market.close_ns[at])
        sigma = np.where(open_still, belief.usual[now], 0.0)[:, None] * weather
        renewed = rng.random(state.shape) < 1 / spec.dwell_minutes
        state[renewed] = rng.choice(STATES, size=int(renewed.sum()), p=STATE_PRIOR)
        position += sigma * (spec.state_drift * state + rng.standard_normal(state.shape))
        nearer = 0.5826 * (1 - 1 / np.sqrt(_STEPS)) * sigma
        touched = np.where(position >= up[:, None] - nearer, 1, np.where(position <= nearer - down[:, None], -1, 0))
        outcome = np.where((outcome == 0) & open_still[:, None], touched, outcome).astype(np.int8)
    return np.stack([(outcome == side).mean(1) for side in (-1, 0, 1)], axis=1)


def ensure_synthetic_demo_market(workspace: Workspace, symbol: str, seed: int = 0, *, days: int = DEMO_DAYS) -> Path:
    """Write the raw file of `symbol` if there is none, for DEMO-NULL without an edge; return its path."""
    path = workspace.raw_bars(symbol)
    if not files.is_file(path):
        kind = "null" if symbol == DEMO_NULL else "planted"
        write_bars(path, synthetic_bars(days=days, kind=kind, seed=seed))
    return path
