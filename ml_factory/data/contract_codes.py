"""Futures contract codes: root, delivery month, and the last day to hold the contract."""

import re
from dataclasses import dataclass
from datetime import date

import numpy as np
import pandas as pd

from ml_factory.errors import BarsError

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


@dataclass(frozen=True)
class FuturesContract:
    """One futures contract.

    name : the exchange's code
    root : its market, such as "ES"
    year, month : of delivery
    expiry : last day, where it was given or is in the code
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

    @property
    def delivery_sort_key(self) -> date:
        """Sort key: the last day where it is known, else the first of the delivery month."""
        return self.expiry or date(self.year, self.month, 1)

    def last_holding_day(self) -> date:
        """Return the last day to hold the contract (CME rulebooks; holidays are ignored).

        Index futures settle on the third Friday of their month. A metal is left by the last weekday of the month
        before, when delivery notices begin. Raises BarsError for other markets, whose days must be given.
        """
        if self.expiry:
            return self.expiry
        month = f"{self.year}-{self.month:02}"
        if self.root in _INDEX:
            return np.busday_offset(month, 2, roll="forward", weekmask="Fri").item()
        if self.root in _METALS:
            return np.busday_offset(f"{month}-01", -1, roll="forward").item()
        step = f"roll by volume, or give expiries=(({self.name!r}, 'YYYY-MM-DD'), ...)"
        raise BarsError("The last day of this contract is not known", where=self.name, next_step=step)


def parse_contract_code(name: str, first_bar: pd.Timestamp, expiry: str | None = None) -> FuturesContract:
    """Parse a contract's code: ESZ3, ESZ13, ESZ2013, ES201312, ES-2013-12, 20131220 (a last day).

    Parameters
    ----------
    name : the code
    first_bar : resolves a year of one digit: the next such year in which the contract can still be delivered
    expiry : the last day; the code then need not be readable
    """
    match = _CODE.match(name.strip().upper())
    try:
        last = date.fromisoformat(expiry) if expiry else None
        if match and match["stamp"]:
            stamp = match["stamp"].replace("-", "")
            day = date(int(stamp[:4]), int(stamp[4:6]), int(stamp[6:] or 1))
            return FuturesContract(name, match["root"], day.year, day.month, last or (day if len(stamp) == 8 else None))
    except ValueError as error:
        got = expiry or name
        raise BarsError("Not a date of a contract", where=name, got=got, next_step="write 2013-12-20") from error
    if match:
        month = MONTH_LETTERS.index(match["letter"]) + 1
        period = 10 ** len(match["digits"])
        earliest = first_bar.year + (month < first_bar.month)
        return FuturesContract(name, match["root"], earliest + (int(match["digits"]) - earliest) % period, month, last)
    if last:
        return FuturesContract(name, "", last.year, last.month, last)
    step = f"give its last day: expiries=(({name!r}, 'YYYY-MM-DD'), ...)"
    raise BarsError("The expiry cannot be read off this contract", where=name, wanted="ESZ3", next_step=step)
