"""Check bars: any usual spelling in, checked UTC bars and one report out.

Other spellings of the same bars are mapped. Impossible bars (unparsable or impossible prices, rows that contradict each
other, another spacing) are refused. Unusual bars are reported and the run continues.
"""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ml_factory.argument_checks import check_settings, check_values
from ml_factory.data.bar_report import (
    SEVERITIES,
    BarFinding,
    BarReport,
    format_rows_with_times,
    hash_bars,
    pluralize_count,
    raise_on_bar_findings,
)
from ml_factory.data.parsing import (
    CONTRACT_COLUMNS,
    LEAST_STEPS,
    SPELLINGS,
    RowFault,
    bar_starts,
    check_time_zone,
    match_bar_columns,
    normalize_column_name,
    read_numbers,
    read_times,
    row_fault_findings,
)
from ml_factory.data.quality import find_quality_issues
from ml_factory.data.rolls import cumulative_roll_factors
from ml_factory.data.sessions import MINUTE_NS, PRICES, MarketSpec, resolve_market_spec
from ml_factory.errors import BarsError
from ml_factory.storage.workspace import BAR_MINUTES

_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class RawBarSpec:
    """Spelling of raw bars.

    minutes : length of a bar; None: inferred (`parsing.infer_bar_minutes`)
    zone : zone of naive timestamps, such as "America/Chicago"
    stamp : "start" or "end" of the bar
    strict : refuse what is otherwise only reported
    decimal : "." or ",", for text prices that could be read both ways
    skip_bad : leave out rows that cannot be bars, and report them, instead of refusing the file
    columns : (ours, theirs) for columns with other names, such as ("close", "Schluss")
    """

    minutes: int | None = None
    zone: str | None = None
    stamp: str = "start"
    strict: bool = False
    decimal: str | None = None
    skip_bad: bool = False
    columns: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        check_settings(self, stamp=("start", "end"), decimal=(".", ","), minutes=BAR_MINUTES)
        object.__setattr__(self, "columns", tuple((str(ours), str(theirs)) for ours, theirs in self.columns))
        for ours, _ in self.columns:
            check_values({"columns": ours}, columns=tuple(SPELLINGS))
        if self.zone is not None:
            check_time_zone(self.zone)


def validate_bars(
    raw: pd.DataFrame,
    spec: RawBarSpec | None = None,
    *,
    where: object = "",
    market: MarketSpec | None = None,
    symbol: str = "",
    calendar: str | None = None,
    tick: float | None = None,
    quality: bool = True,
) -> tuple[pd.DataFrame, BarReport]:
    """Check bars and convert them to canonical form.

    Parameters
    ----------
    raw : one row a bar, in any order: a time column or index and open, high, low, close, perhaps volume
    spec : spelling of the bars
    where : the file, for messages
    market : calendar, tick and length of bars; None: given one by one, looked up by `symbol`, or inferred from the
        first 20 sessions
    symbol : for the lookup
    calendar, tick : given facts of the market, where `market` is None
    quality : look for what is reported as well: gaps, spikes, a wrong clock

    Returns
    -------
    bars : index `timestamp` (UTC, start of bar, increasing, unique), float64 prices, and `volume` only where the source
        has any (single unknown volumes become 0); `contract` (int32) where the source names contracts, and then
        `chain`, the source's own or that of `rolls.cumulative_roll_factors`
    report : its row numbers count the rows of `raw` from 0

    Raises
    ------
    BarsError : bars are refused; its `.findings` holds all reasons
    """
    spec = spec or RawBarSpec()
    if market is not None and spec.minutes is None:
        spec = replace(spec, minutes=market.bar_minutes)
    contract = next((raw[name] for name in raw.columns if normalize_column_name(name) == "contract"), None)
    start_ns, values, findings, minutes = parse_bars(raw, spec, where)
    named = {} if contract is None else {"contract": pd.factorize(contract)[0].astype(float)}
    rows, found = _sort_and_deduplicate(start_ns, values | named, raw)
    start_ns, values = start_ns[rows], {name: column[rows] for name, column in values.items()}
    findings += [*found, *_spacing_faults(start_ns, rows, minutes)]
    raise_on_bar_findings([finding for finding in findings if finding.severity == "refused"], where)
    known_volume = values.get("volume")
    values, found = _clean_volume(values, rows, market)
    findings += found
    index = pd.DatetimeIndex(start_ns.astype("datetime64[ns]"), tz="UTC", name="timestamp")
    bars = pd.DataFrame(values, index=index)
    if contract is not None:
        contract = contract.iloc[rows]
        bars["contract"] = _factorize_contracts(contract)
        bars["chain"] = _chain(raw, rows, bars)
    volume, names = known_volume if "volume" in values else None, None if contract is None else contract.to_numpy()
    found = []
    if names is not None:
        rolls = np.flatnonzero(names[1:] != names[:-1]) + 1
        shown = ", ".join(map(str, names[rolls[:3]])) + ", ..." * (len(rolls) > 3)
        message = f"the contract changes {pluralize_count(len(rolls), 'time')} (to {shown})"
        found.append(BarFinding("roll", "reported", rolls, message))
    if quality:
        market = market or resolve_market_spec(symbol, bars, calendar=calendar, tick=tick, bar_minutes=minutes)
        prices = {name: bars[name].to_numpy() for name in PRICES}
        found = [*find_quality_issues(start_ns, prices, volume, market, minutes, spec.stamp), *found]
    findings += [replace(one, rows=rows[one.rows]) for one in found if len(one.rows)]
    if spec.strict:
        raise_on_bar_findings([finding for finding in findings if finding.severity == "reported"], where)
    findings.sort(key=lambda found: -SEVERITIES.index(found.severity))  # the most severe first
    return bars, BarReport(tuple(findings), len(bars), index[0], index[-1], minutes, hash_bars(bars))


def parse_bars(
    raw: pd.DataFrame, spec: RawBarSpec, where: object
) -> tuple[np.ndarray, dict[str, np.ndarray], list[BarFinding], int]:
    """Parse every row, in the rows' own order; raise one BarsError that names all rows that cannot be bars.

    Returns
    -------
    (start_ns, values, findings, minutes) : UTC starts (int64 ns), prices and volume (float64), what was mapped, and the
    length of a bar
    """
    moments, values, faults, findings = _read_cells(raw, spec, where)
    raise_on_bar_findings(row_fault_findings(faults, moments), where)
    start_ns, found, minutes = bar_starts(moments, zone=spec.zone, stamp=spec.stamp, minutes=spec.minutes, where=where)
    notes = [BarFinding("source", "mapped", _NO_ROWS, note) for note in raw.attrs.get("notes", ())]
    return start_ns, values, [*notes, *findings, *found], minutes


def drop_bad_rows(raw: pd.DataFrame, spec: RawBarSpec, where: object) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the table without the rows that cannot be bars, and those rows: row, reason (the first) and text.

    Lines of a CSV that were left out when it was read are among them, with no row and their text.
    """
    reasons: dict[int, str] = {}
    for fault in _read_cells(raw, spec, where)[2]:
        for row in fault.rows.tolist():
            reasons.setdefault(row, fault.what)
    bad = [(str(row), reasons[row], ", ".join(map(str, raw.iloc[row]))) for row in sorted(reasons)]
    bad += [("", f"line {number}: another number of fields", text) for number, text in raw.attrs.get("skipped", ())]
    if len(reasons) == len(raw):
        row, reason, text = bad[0]
        step = "check zone, decimals and columns"
        raise BarsError("Every row is bad", where=where, got=f"row {row}: {text!r} ({reason})", next_step=step)
    kept = raw[~np.isin(np.arange(len(raw)), list(reasons))]  # by position: the index may be the time
    return kept, pd.DataFrame(bad, columns=["row", "reason", "text"])


def _read_cells(
    raw: pd.DataFrame, spec: RawBarSpec, where: object
) -> tuple[pd.DatetimeIndex, dict[str, np.ndarray], list[RowFault], list[BarFinding]]:
    """Return times, prices and volume of every row, the rows' faults, and what was mapped."""
    if not len(raw):
        raise BarsError("No bars", where=where or "bars", got="0 rows", next_step="give a file that holds bars")
    columns, findings = match_bar_columns(raw, where, spec.columns)
    moments, faults, found = read_times(columns.pop("timestamp"), where)
    values, more, mapped = read_numbers(columns, spec.decimal, where)
    return moments, values, [*faults, *more], [*findings, *found, *mapped]


def _factorize_contracts(contract: pd.Series) -> np.ndarray:
    """Return int32[N], the contract of each bar as a number; only its changes matter. In time order."""
    if contract.dtype.kind in "iu" and not contract.isna().any() and contract.max() < 2**31:
        return contract.to_numpy(np.int32)
    return pd.factorize(contract)[0].astype(np.int32)


def _chain(raw: pd.DataFrame, rows: np.ndarray, bars: pd.DataFrame) -> np.ndarray:
    """Return float64[N], the chain that our own roll has written, or one computed from the bars."""
    if "chain" not in raw:
        return cumulative_roll_factors(*(bars[name].to_numpy() for name in ("contract", "open", "close")))
    chain = pd.to_numeric(raw["chain"], errors="coerce").to_numpy(float)[rows]
    bad = np.flatnonzero(~(chain > 0) | ~np.isfinite(chain))
    if len(bad):
        raise BarsError(
            "A chain is made of positive factors",
            where=f"chain, row {rows[bad[0]]}",
            got=raw["chain"].iloc[rows[bad[0]]],
            next_step="leave the column out, or prepare again from the contracts (--roll)",
        )
    return chain


def _sort_and_deduplicate(start_ns: np.ndarray, values: dict, raw: pd.DataFrame) -> tuple[np.ndarray, list[BarFinding]]:
    """Return the rows to keep, in time order, each minute once, and findings; contradicting rows are refused."""
    order = np.argsort(start_ns, kind="stable")
    findings = []
    back = np.flatnonzero(np.diff(start_ns) < 0) + 1
    if len(back):
        message = f"rows were not in time order and have been sorted ({len(back):,} steps back, first at row {back[0]})"
        findings.append(BarFinding("unsorted", "mapped", back, message))
    again = np.flatnonzero(np.diff(start_ns[order]) == 0) + 1
    if not len(again):
        return order, findings
    differ = np.zeros(len(again), bool)
    for column in values.values():
        now, before = column[order[again]], column[order[again - 1]]
        differ |= ~((now == before) | (np.isnan(now) & np.isnan(before)))
    shown = pd.DatetimeIndex(start_ns.view("M8[ns]"), tz="UTC")
    if differ.any():
        rows = np.sort(order[again[differ]])
        message = f"{format_rows_with_times(rows, shown)} contradict another row of the same minute"
        step = "keep the right one of them"
        contract = next((c for c in raw.columns if normalize_column_name(c) in CONTRACT_COLUMNS), None)
        if contract is not None:
            step = f"the file holds several values of {contract!r}: join them into one series (--roll volume), or "
            step += "write one of them to a file of its own"
        findings.append(BarFinding("conflict", "refused", rows, message, step))
    same = np.sort(order[again[~differ]])
    if len(same):
        message = f"{len(same):,} rows repeat another row exactly and were left out (first: row {same[0]})"
        findings.append(BarFinding("duplicate", "mapped", same, message))
    return np.delete(order, again), findings


def _spacing_faults(start_ns: np.ndarray, rows: np.ndarray, minutes: int) -> list[BarFinding]:
    """Return findings on bars of another length than declared, in the whole file or in a part of it."""
    steps = np.diff(start_ns) // MINUTE_NS
    if not len(steps):
        return []
    spacing, count = np.unique(steps, return_counts=True)
    usual = int(spacing[np.argmax(count)])
    if usual != minutes and len(steps) >= LEAST_STEPS:
        message = f"the bars are {usual} minutes apart, not {minutes}"
        step = f"give {minutes}-minute bars"
        if usual in BAR_MINUTES:
            step += f", or declare their length: --minutes {usual}, in data/raw by the "
            step += f"name of the file: SYMBOL_{usual}m.parquet"
        return [BarFinding("spacing", "refused", _NO_ROWS, message, step)]
    # one other spacing over a stretch: a single silence is legal, thirty equal steps in a row are not
    edges = np.flatnonzero(np.diff(steps, prepend=-1, append=-1) != 0)
    length = np.diff(edges)
    odd = np.flatnonzero((length >= 30) & (steps[edges[:-1]] != minutes) & (steps[edges[:-1]] <= 60))
    if not len(odd):
        return []
    first = int(edges[odd[0]])
    at = pd.Timestamp(start_ns[first], tz="UTC")
    message = f"mixed spacing: from row {rows[first]} ({at}) on, {length[odd[0]]} steps of {steps[first]} minutes "
    message += f"among {minutes}-minute bars"
    longer = rows[np.flatnonzero(np.repeat(np.isin(np.arange(len(length)), odd), length))]
    return [BarFinding("spacing", "refused", longer, message, "give one spacing throughout")]


def _clean_volume(
    values: dict[str, np.ndarray], rows: np.ndarray, market: MarketSpec | None
) -> tuple[dict[str, np.ndarray], list[BarFinding]]:
    """Leave out an empty volume column, and replace single unknown values by 0."""
    volume = values.get("volume")
    if volume is None:
        return values, [BarFinding("no_volume", "mapped", _NO_ROWS, "no volume column: volume features are left out")]
    unknown = np.isnan(volume)
    declared = market is not None and market.has_volume
    if not declared and (unknown | (volume == 0)).all():
        prices = {name: column for name, column in values.items() if name != "volume"}
        message = "volume is empty or zero throughout: volume features are left out"
        return prices, [BarFinding("no_volume", "mapped", _NO_ROWS, message)]
    if not unknown.any():
        return values, []
    message = f"volume is unknown in {int(unknown.sum()):,} of {len(volume):,} bars and taken as 0 there"
    settled = values | {"volume": np.where(unknown, 0.0, volume)}
    return settled, [BarFinding("partial_volume", "reported", rows[unknown], message)]
