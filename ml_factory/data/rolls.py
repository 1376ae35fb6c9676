"""Join futures contracts to one continuous series: roll dates, and the chain that features use over a roll.

Two guarantees. A roll is decided only from data complete by then: volumes of finished sessions, or the expiry in the
contract's own code. And prices stay those that traded: a roll changes no bar. Next to them stands `chain`, by which
prices continue over each roll from the two closes of the last common minute before it. The usual back-adjustment
rewrites the whole past at every roll instead, which changes past features and labels.
"""

import re
from dataclasses import dataclass
from datetime import date

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_settings, check_values
from ml_factory.data.sessions import MINUTE_NS, PRICES, MarketSpec, assign_sessions
from ml_factory.errors import BarsError, SettingsError, did_you_mean

MONTH_LETTERS = "FGHJKMNQUVXZ"
_INDEX = ("ES", "MES", "NQ", "MNQ", "YM", "MYM", "RTY", "M2K")
_METALS = ("GC", "MGC", "SI", "SIL", "HG", "MHG")
# Delivery months in which a metal really trades; index futures list their quarter's months only.
ACTIVE_MONTHS = {
    **dict.fromkeys(_INDEX, (3, 6, 9, 12)),
    **dict.fromkeys(("GC", "MGC"), (2, 4, 6, 8, 12)),
    **dict.fromkeys(("SI", "SIL", "HG", "MHG"), (3, 5, 7, 9, 12)),
}
_CODE = re.compile(
    rf"^(?P<root>[A-Z0-9]*?)[-_. ]?"
    rf"(?:(?P<letter>[{MONTH_LETTERS}])(?P<digits>\d{{4}}|\d{{1,2}})|(?P<stamp>\d{{8}}|\d{{6}}|\d{{4}}-\d{{2}}))$"
)
_ROLL_COLUMNS = ("at", "previous", "contract", "why", "common", "close_previous", "close")


@dataclass(frozen=True)
class FuturesContract:
    """One futures contract.

    name : the exchange's code
    root : its market, such as "ES"
    year, month : of delivery
    expiry : last day, where it is in the code
    """

    name: str
    root: str
    year: int
    month: int
    expiry: date | None = None

    @property
    def number(self) -> int:
        """Contract as a number: 201312, or 20131220 where the day is known."""
        return int(f"{self.expiry:%Y%m%d}") if self.expiry else 100 * self.year + self.month

    def last_holding_day(self) -> date:
        """Return the last day to hold the contract (CME rulebooks; holidays are ignored).

        Index futures settle on the third Friday of their month. A metal is left by the last weekday of the month
        before, when delivery notices begin. Raises BarsError for other markets, whose codes must hold the day.
        """
        if self.expiry:
            return self.expiry
        month = f"{self.year}-{self.month:02}"
        if self.root in _INDEX:
            return np.busday_offset(month, 2, roll="forward", weekmask="Fri").item()
        if self.root in _METALS:
            return np.busday_offset(f"{month}-01", -1, roll="forward").item()
        step = f"roll by volume, or name contracts with their last day: {self.root}20131220"
        raise BarsError("The last day of this contract is not known", where=self.name, next_step=step)


def parse_contract_code(name: str, first_bar: pd.Timestamp) -> FuturesContract:
    """Parse a contract's code: ESZ3, ESZ13, ESZ2013, ES201312, ES-2013-12, ES20131220 (with its last day).

    first_bar : resolves a year of one digit: the next such year in which the contract can still be delivered
    """
    match = _CODE.match(name.strip().upper())
    if match is None:
        step = "name it as the exchange does, or with its last day: ES20131220"
        raise BarsError("The expiry cannot be read off this contract", where=name, wanted="ESZ3", next_step=step)
    if match["stamp"]:
        stamp = match["stamp"].replace("-", "")
        try:
            day = date(int(stamp[:4]), int(stamp[4:6]), int(stamp[6:] or 1))
        except ValueError as error:
            raise BarsError("Not a date of a contract", where=name, next_step="write ES20131220") from error
        return FuturesContract(name, match["root"], day.year, day.month, day if len(stamp) == 8 else None)
    month, period = MONTH_LETTERS.index(match["letter"]) + 1, 10 ** len(match["digits"])
    earliest = first_bar.year + (month < first_bar.month)
    return FuturesContract(name, match["root"], earliest + (int(match["digits"]) - earliest) % period, month)


@dataclass(frozen=True)
class RollSpec:
    """Rules for the change to a later contract.

    by : "volume": at a session's open, into the later contract that traded most in the session completed before it, if
        that was more than the present contract. "date": at the open of the session `days_before` weekdays before the
        contract's last day, into the nearest one that lasts longer. Never back to an earlier contract
    days_before : 6 is the custom for index futures, the Thursday of the week before the third Friday
    months : delivery months to use, such as (3, 6, 9, 12); None: all by volume, the active ones by date
    first : contract to begin with; None: the first session only decides the contract and gives no bars
    forced : (contract, moment) pairs: roll into it at this minute, whatever the rule gives
    """

    by: str = "volume"
    days_before: int = 6
    months: tuple[int, ...] | None = None
    first: str | None = None
    forced: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        check_settings(self, by=("volume", "date"), days_before="[0, inf)")
        for month in self.months or ():
            check_values({"months": month}, months=tuple(range(1, 13)))
        for name, moment in self.forced:
            if pd.Timestamp(moment).tz is None:
                step = f"write it with its zone, such as {moment}+00:00"
                raise SettingsError("A forced roll without a zone", where=f"forced {name}", got=moment, next_step=step)


def build_continuous_contract(
    table: pd.DataFrame, spec: RollSpec, market: MarketSpec
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Join the contracts in `table` to one series.

    Rows up to a moment are the same bits whatever comes after it. Labels and windows stop where `contract` changes.

    Parameters
    ----------
    table : index UTC bar starts (a minute once for each contract, in time order), `contract` (the exchange's code),
        open, high, low, close > 0 and, to roll by volume, volume
    spec : the rules
    market : calendar and length of bars

    Returns
    -------
    bars : each minute once: traded prices, volume, `contract` (int32, such as 201403) and `chain`: prices times it have
        no step at any roll, for features
    rolls : one row for each change: at (UTC), previous ("" at the first), contract, why ("first", "volume", "date" or
        "forced"), common (the minute whose closes join them; NaT where the two never traded in one minute: the chain
        continues from the last close, and with it the market's own move over that gap is left out) and the two closes
    """
    start_ns, code, contracts = _read_table(table)
    opens, volume, seen, days = _by_session(table, start_ns, code, len(contracts), market, spec)
    changes = _roll_events(spec, contracts, opens, days, volume, seen, start_ns)
    position = np.searchsorted([at for at, _, _ in changes], start_ns, side="right") - 1
    held = np.array([which for _, which, _ in changes] + [-1])  # position -1, before the beginning, holds none
    rows = np.flatnonzero(code == held[position])
    chain, rolls = _join(table, start_ns, code, rows, position[rows], changes, market.bar_minutes)
    bars = table.iloc[rows][[name for name in (*PRICES, "volume") if name in table]].rename_axis("timestamp")
    numbers = np.array([contract.number for contract in contracts], np.int32)
    bars = bars.assign(contract=numbers[code[rows]], chain=chain)
    names = [contract.name for contract in contracts]
    rolls = [(at, "" if old is None else names[old], names[new], *rest) for at, old, new, *rest in rolls]
    kinds = dict.fromkeys(("previous", "contract", "why"), str) | dict.fromkeys(("close_previous", "close"), float)
    found = pd.DataFrame(rolls, columns=list(_ROLL_COLUMNS)).astype(kinds)
    moments = {column: pd.to_datetime(found[column], utc=True).dt.as_unit("ns") for column in ("at", "common")}
    return bars, found.assign(**moments)


def cumulative_roll_factors(contract: np.ndarray, opens: np.ndarray, close: np.ndarray) -> np.ndarray:
    """Return float64[N], the factors by which prices continue at each roll from the previous contract's last close.

    For a series whose contracts were joined elsewhere by an unknown rule: the step at its rolls is left out of every
    return, and with it the market's own move over that gap.
    """
    steps = np.ones(len(close))
    rolls = np.flatnonzero(contract[1:] != contract[:-1]) + 1
    steps[rolls] = close[rolls - 1] / opens[rolls]
    return np.cumprod(steps)


# ---- roll dates ------------------------------------------------------------------------------------------------------


def _read_table(table: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, list[FuturesContract]]:
    """Return starts, the contract of each row as a position, and the contracts in order of expiry."""
    start_ns = table.index.as_unit("ns").asi8
    found, names = pd.factorize(table["contract"])
    _, first = np.unique(found, return_index=True)
    contracts = [parse_contract_code(str(name), table.index[row]) for name, row in zip(names, first, strict=True)]
    roots = sorted({contract.root for contract in contracts})
    if len(roots) > 1:
        step = "write each market to a file of its own"
        raise BarsError("Contracts of several markets", where="contract", got=", ".join(roots), next_step=step)
    expiry = [(one.expiry or date(one.year, one.month, 1), one.name) for one in contracts]  # or of the delivery month
    order = sorted(range(len(contracts)), key=expiry.__getitem__)
    code = np.argsort(order)[found]
    again = np.flatnonzero(pd.DataFrame({"start": start_ns, "code": code}).duplicated())
    if len(again):
        got = f"{table.index[again[0]]} twice for {names[found[again[0]]]}"
        raise BarsError("A contract has each minute once", where="contract", got=got, next_step="keep the right row")
    return start_ns, code, [contracts[which] for which in order]


def _by_session(
    table: pd.DataFrame, start_ns: np.ndarray, code: np.ndarray, count: int, market: MarketSpec, spec: RollSpec
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return for S sessions: open (int64 ns), volume[S, C], whether a contract traded before it [S, C], day."""
    sessions = assign_sessions(start_ns, market.calendar)
    days, first, session = np.unique(sessions.id, return_index=True, return_inverse=True)
    if spec.by == "volume" and "volume" not in table:
        raise BarsError("Without volume there is no roll by volume", where="volume", next_step="roll by date")
    cell = session * count + code
    size = len(days) * count
    traded = np.nan_to_num(table["volume"].to_numpy(float)) if "volume" in table else None
    volume = np.bincount(cell, weights=traded, minlength=size).reshape(-1, count)
    bars = np.bincount(cell, minlength=size).reshape(-1, count)
    seen = np.cumsum(bars, axis=0) - bars > 0
    return sessions.open_ns[first], volume, seen, days


def _roll_events(
    spec: RollSpec, contracts: list[FuturesContract], opens: np.ndarray, days: np.ndarray, volume: np.ndarray,
    seen: np.ndarray, start_ns: np.ndarray,
) -> list[tuple[int, int, str]]:  # fmt: skip
    """Return (moment, contract, why) of every change in time order; the first is the beginning."""
    months = set(spec.months or (ACTIVE_MONTHS.get(contracts[0].root, ()) if spec.by == "date" else ()))
    allowed = np.array([not months or contract.month in months for contract in contracts])
    if not allowed.any():
        got = ", ".join(contract.name for contract in contracts[:5])
        raise BarsError("No contract of these delivery months", where="months", got=got, wanted=sorted(months))
    by_date = contracts if spec.by == "date" else []
    last = np.array([contract.last_holding_day() for contract in by_date], "datetime64[D]")
    names = [contract.name for contract in contracts]
    moments = [(pd.Timestamp(moment).as_unit("ns").value, name) for name, moment in spec.forced]
    forced = [(at, _position(name, names, "forced")) for at, name in moments if at <= start_ns[-1]]
    changes = [] if spec.first is None else [(int(opens[0]), _position(spec.first, names, "first"), "first")]
    # a forced roll at an open comes after the rule's own
    events = sorted([(int(at), 0, k) for k, at in enumerate(opens)][1:] + [(at, 1, which) for at, which in forced])
    for at, is_forced, which in events:
        present = changes[-1][1] if changes else -1
        if is_forced:
            if which < present:
                step = "a roll never goes back: leave it out"
                raise SettingsError("A forced roll to an earlier contract", where=names[which], next_step=step)
            chosen, why = which, "forced"
        else:
            later = allowed & (np.arange(len(names)) > present)
            if spec.by == "volume":
                chosen = _most_traded(volume[which - 1], later, present)
            else:
                left = np.busday_count(days[which].astype("datetime64[D]"), last)
                chosen = _nearest(left > spec.days_before, later & seen[which], present)
            why = spec.by if changes else "first"
        if chosen != present:
            changes.append((at, int(chosen), why))
    return changes


def _most_traded(volume: np.ndarray, later: np.ndarray, present: int) -> int:
    """Return the later contract with the highest volume if it exceeds the present one's; the nearer of two."""
    best = int(np.argmax(np.where(later, volume, -1.0)))
    beaten = volume[present] if present >= 0 else 0.0
    return best if later[best] and volume[best] > beaten else present


def _nearest(lasting: np.ndarray, later: np.ndarray, present: int) -> int:
    """Return the nearest contract that lasts long enough; the present one while it does, or if none is available."""
    if present >= 0 and lasting[present]:
        return present
    able = np.flatnonzero(later & lasting)
    return int(able[0]) if len(able) else present


def _position(name: str, names: list[str], where: str) -> int:
    if name not in names:
        raise SettingsError("No such contract", where=where, got=name, next_step=did_you_mean(name, names))
    return names.index(name)


# ---- chain over rolls ------------------------------------------------------------------------------------------------


def _join(
    table: pd.DataFrame, start_ns: np.ndarray, code: np.ndarray, rows: np.ndarray, change: np.ndarray, changes: list,
    bar_minutes: int,
) -> tuple[np.ndarray, list[tuple]]:  # fmt: skip
    """Return chain[N] of the kept rows, and the rolls.

    change : which change each kept row comes after
    """
    opens, close = (table[name].to_numpy(float) for name in ("open", "close"))
    chain, rolls, link, loose = np.ones(len(rows)), [], 1.0, False
    for k, (at, which, why) in enumerate(changes):
        previous = changes[k - 1][1] if k else None
        pair = _last_common(start_ns, code, at - bar_minutes * MINUTE_NS, previous, which) if k else None
        old, new = (close[pair[0]], close[pair[1]]) if pair else (np.nan, np.nan)
        rolls.append((at, previous, which, why, start_ns[pair[0]] if pair else None, old, new))
        loose |= pair is None
        link *= old / new if pair else 1.0
        first, stop = np.searchsorted(change, [k, k + 1])
        if first == stop:
            continue
        if loose and first:  # the two never traded in one minute: on from the last close
            link = chain[first - 1] * close[rows[first - 1]] / opens[rows[first]]
        chain[first:stop], loose = link, False
    return chain, rolls


def _last_common(
    start_ns: np.ndarray, code: np.ndarray, until: int, previous: int, which: int
) -> tuple[int, int] | None:
    """Return the rows of two contracts in the last bar that both have and that begins by `until`."""
    end = int(np.searchsorted(start_ns, until, side="right"))
    old, new = (np.flatnonzero(code[:end] == one) for one in (previous, which))
    _, in_old, in_new = np.intersect1d(start_ns[old], start_ns[new], assume_unique=True, return_indices=True)
    return (int(old[in_old[-1]]), int(new[in_new[-1]])) if len(in_old) else None
