"""Money facts of markets: tick, contract multiplier, commission and exchange fees by symbol.

Trading calendar and tick come from `data.sessions`, which knows them by symbol. Fees change several times a year and
commissions by broker: those here are estimates of their size, from no price list; a file of the user's
replaces them. Multipliers are those of the exchanges' contract specifications.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ml_factory.argument_checks import DEMOS, check_file_exists, check_settings
from ml_factory.data.rolls import parse_contract_code
from ml_factory.data.sessions import resolve_market_spec
from ml_factory.errors import BarsError, SettingsError
from ml_factory.models.base import build_model_settings
from ml_factory.storage.files import files
from ml_factory.storage.json_values import parse_json


@dataclass(frozen=True)
class ContractSpec:
    """Money facts of one market.

    symbol : its name
    calendar : trading calendar, as of `MarketSpec`
    tick : price step, in units of the price
    multiplier : currency per unit of price and contract: 50 for ES, 1 for a share or a coin
    commission : of the broker, currency per contract and side
    exchange_fee : of exchange, clearing and regulator, currency per contract and side
    fee_rate : fee per side as a share of the traded value; 0 for futures
    """

    symbol: str
    calendar: str
    tick: float
    multiplier: float = 1.0
    commission: float = 0.0
    exchange_fee: float = 0.0
    fee_rate: float = 0.0

    def __post_init__(self) -> None:
        above, some = "(0, inf)", "[0, inf)"
        check_settings(self, tick=above, multiplier=above, commission=some, exchange_fee=some, fee_rate=some)

    @property
    def tick_value(self) -> float:
        """Currency of one tick of one contract."""
        return self.tick * self.multiplier


def _future(multiplier: float, commission: float, exchange_fee: float) -> dict[str, float]:
    return {"multiplier": multiplier, "commission": commission, "exchange_fee": exchange_fee}


# Root -> facts; calendar and tick are looked up. Commission per side in US dollars.
_FUTURES = {
    "MES": _future(5, 0.62, 0.37), "ES": _future(50, 1.50, 1.40),
    "MNQ": _future(2, 0.62, 0.37), "NQ": _future(20, 1.50, 1.40),
    "MGC": _future(10, 0.62, 0.62), "GC": _future(100, 1.50, 1.65),
    "MCL": _future(100, 0.62, 0.62), "CL": _future(1_000, 1.50, 1.62),
}  # fmt: skip
_FUTURES |= dict.fromkeys(DEMOS, _FUTURES["MES"])  # the synthetic market has its prices and tick
_BY_CALENDAR = {"us_equity": {"commission": 0.005, "exchange_fee": 0.0005}, "24h": {"fee_rate": 0.001}}


def contract_spec(symbol: str, *, tick: float | None = None, file: str | Path | None = None) -> ContractSpec:
    """Return the money facts of a symbol: of the user's file, else of its root (ESZ24 as ES), of shares or of coins.

    symbol : such as "CL", "ESZ24", "SPY", "BTC-USD"
    tick : price step, where it is not known by symbol, as for coins
    file : JSON, symbol or its root -> fields of `ContractSpec`, such as
        `{"ZN": {"calendar": "cme_rates", "tick": 0.015625, "multiplier": 1000, "commission": 1.5}}`
    Raises SettingsError for a symbol without known facts, without a tick, or that `file` lacks.
    """
    given = _facts_in_file(Path(file), symbol) if file else {}
    facts = _facts_by_symbol(symbol, given) | given | ({"tick": tick} if tick is not None else {})
    if facts.get("tick") is None:
        raise SettingsError(
            "The tick of this symbol is not known", where=symbol, wanted="a price step",
            next_step=f'give tick=, or a file of contracts (--contracts) with {{"{symbol}": {{"tick": 0.01}}}}',
        )  # fmt: skip
    try:
        if "calendar" in given:
            resolve_market_spec(symbol, calendar=given["calendar"])
        return build_model_settings({**facts, "symbol": symbol}, ContractSpec, where="facts")[0]
    except SettingsError as error:
        place = f"{file}, {symbol}" if file else symbol
        raise SettingsError(error.what, where=f"{place}: {error.where}", got=error.got, wanted=error.wanted,
                            next_step=error.next_step) from None  # fmt: skip


def _facts_by_symbol(symbol: str, given: Mapping) -> dict[str, Any]:
    """Return the facts known without a file. Raises SettingsError where neither they nor `given` name the market."""
    if {"calendar", "tick"} <= given.keys():
        known = {}
    else:
        try:
            market = resolve_market_spec(symbol)
        except SettingsError as error:
            raise _unknown_market(symbol) from error
        known = {"calendar": market.calendar, "tick": market.tick}
    root = symbol if symbol in _FUTURES else _root_of_code(symbol)
    money = _FUTURES.get(root) or _BY_CALENDAR.get(known.get("calendar", ""), {})
    if known and not money and "multiplier" not in given:
        raise _unknown_market(symbol)
    return known | money


def _unknown_market(symbol: str) -> SettingsError:
    example = f'{{"{symbol}": {{"calendar": "cme", "tick": 0.25, "multiplier": 5}}}}'
    return SettingsError(
        "No money facts are known for this symbol", where=symbol, wanted=", ".join((*_FUTURES, "a share, a coin")),
        next_step=f"give a file of contracts (--contracts) with {example}",
    )  # fmt: skip


def _root_of_code(symbol: str) -> str:
    """Return the root of a delivery month's code, such as ES of ESZ24; "" for another name."""
    try:
        return parse_contract_code(symbol, pd.Timestamp("2020-01-01")).root
    except BarsError:
        return ""


def _facts_in_file(path: Path, symbol: str) -> dict[str, Any]:
    """Read the facts of a symbol. Raises SettingsError for facts that no contract has, FileError for a missing file."""
    content = files.read(check_file_exists(path, "JSON, facts by symbol"))
    try:
        table = parse_json(content)
    except ValueError as error:
        raise SettingsError("This file of contracts cannot be read", where=path, got=error, wanted="JSON") from None
    if not isinstance(table, dict) or not all(isinstance(facts, dict) for facts in table.values()):
        example = '{"CL": {"multiplier": 1000, "commission": 1.5}}'
        raise SettingsError("A file of contracts holds facts by symbol", where=path, wanted=example)
    given = table.get(symbol, table.get(_root_of_code(symbol)))
    if given is None:
        raise SettingsError(
            "This file of contracts lacks the symbol", where=path, got=", ".join(table) or "no symbol", wanted=symbol,
            next_step=f'add {{"{symbol}": {{"commission": 0.85}}}}, or leave the file out',
        )  # fmt: skip
    return given
