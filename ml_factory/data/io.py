"""Import bars from a user's file into the workspace's raw Parquet, and load them."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.data.bar_files import read_bars_table, resolve_bars_file
from ml_factory.data.bar_report import BarFinding, BarReport, pluralize_count
from ml_factory.data.parsing import CONTRACT_COLUMNS
from ml_factory.data.rolls import RollSpec, build_continuous_contract
from ml_factory.data.sessions import MarketSpec, resolve_market_spec
from ml_factory.data.validation import RawBarSpec, drop_bad_rows, parse_bars, validate_bars
from ml_factory.errors import BarsError, SettingsError
from ml_factory.lazy_module import LazyModule
from ml_factory.progress import progress_phase
from ml_factory.storage.files import files
from ml_factory.storage.workspace import Workspace, parse_raw_bars_name, require_raw_bars

pyarrow = LazyModule("pyarrow")  # a service predicts without it


def import_bars(
    source: str | os.PathLike | pd.DataFrame,
    workspace: Workspace,
    symbol: str,
    spec: RawBarSpec | None = None,
    *,
    roll: RollSpec | None = None,
    calendar: str | None = None,
    tick: float | None = None,
) -> BarReport:
    """Check bars and write them to data/raw/{SYMBOL}_1m.parquet in one step; return the report.

    Nothing is written if they are refused.

    Bars of 5 minutes go to {SYMBOL}_5m.parquet, and so on. A symbol has bars of one length: others are refused.
    Previous bars with other content are kept once, as {SYMBOL}_1m.previous.parquet. With `spec.skip_bad` the skipped
    rows are listed in {SYMBOL}_skipped.csv in the same folder.

    Parameters
    ----------
    source : a file (also gs://bucket/folder/file), or a table
    workspace, symbol : the destination
    spec : spelling of the bars
    roll : joins bars of several contracts to one series (`rolls.build_continuous_contract`); the file then also has
        `contract` and `chain` (for features)
    calendar, tick : facts of the market for rolls and findings, where they are not to be looked up by symbol
    """
    spec, path = spec or RawBarSpec(), workspace.raw_bars(symbol)
    where = "bars" if isinstance(source, pd.DataFrame) else source
    file = None if isinstance(source, pd.DataFrame) else resolve_bars_file(source)
    raw, skipped, message = read_usable_rows(source if file is None else file, spec, where)
    if roll is None:
        bars, report = validate_bars(
            raw, spec, where=where, symbol=symbol, calendar=calendar, tick=tick, quality=spec.strict
        )
    else:
        bars, report = _join_contracts(raw, roll, spec, where, symbol, calendar, tick)
    if files.is_file(path):
        _check_bar_length(path, report.minutes)
    path = workspace.raw_bars(symbol, report.minutes)
    if message:
        finding = BarFinding("skipped_rows", "mapped", np.empty(0, np.int64), message)
        report = replace(report, findings=(finding, *report.findings))
        files.write(path.with_name(f"{symbol}_skipped.csv"), skipped.to_csv(index=False).encode())
    if files.is_file(path):
        if (file is not None and os.path.samefile(path, file)) or _has_equal_bars(path, bars):
            return report  # equal bars: the backup of the previous ones stays
        files.write(previous_bars_path(path), files.read(path))
    write_bars(path, bars)
    return report


def read_usable_rows(
    source: pd.DataFrame | Path, spec: RawBarSpec, where: object
) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Read a local file, or take a table; with `spec.skip_bad` without the rows that cannot be bars.

    Returns (rows, skipped rows, the message that names the first of these, or "").
    """
    raw = source if isinstance(source, pd.DataFrame) else read_bars_table(source, skip_bad=spec.skip_bad)
    if not spec.skip_bad:
        return raw, pd.DataFrame(), ""
    count = len(raw) + len(raw.attrs.get("skipped", ()))
    raw, skipped = drop_bad_rows(raw, spec, where)
    shown = "; ".join(f"row {row}: {text!r} ({reason})" for row, reason, text in skipped.head(3).to_numpy())
    shown += "; ..." * (len(skipped) > 3)
    message = f"{pluralize_count(len(skipped), 'bad row')} of {count:,} skipped: {shown}"
    return raw, skipped, message if len(skipped) else ""


def previous_bars_path(path: Path) -> Path:
    """Return where the bars are kept that an import to `path` replaced."""
    return path.with_name(path.stem + ".previous.parquet")


def _join_contracts(
    raw: pd.DataFrame,
    roll: RollSpec,
    spec: RawBarSpec,
    where: object,
    symbol: str,
    calendar: str | None,
    tick: float | None,
) -> tuple[pd.DataFrame, BarReport]:
    """Return checked bars of one series, with `contract` and `chain`, and their report."""
    plain = {str(name).strip().lower(): name for name in raw.columns}
    named = next((plain[name] for name in CONTRACT_COLUMNS if name in plain), None)
    if named is None:
        got, step = "columns " + ", ".join(map(repr, raw.columns)), "leave --roll out for bars of one series"
        raise BarsError("These bars name no contract", where=where, got=got, wanted="contract", next_step=step)
    start_ns, values, findings, minutes = parse_bars(raw, spec, where)
    stamps = pd.DatetimeIndex(start_ns.astype("datetime64[ns]"), tz="UTC")
    table = pd.DataFrame({"timestamp": stamps, "contract": raw[named].astype(str).to_numpy()} | values)
    table = table.sort_values(["timestamp", "contract"], kind="stable").drop_duplicates().set_index("timestamp")
    market = resolve_market_spec(symbol, None if calendar else table, calendar=calendar, bar_minutes=minutes)
    joined, rolls = build_continuous_contract(table, roll, market)
    if not len(joined):
        step = "give bars of more days, or name the contract to begin with: RollSpec(first=...)"
        raise BarsError("No bars after the session that decides the first contract", where=where, next_step=step)
    # joined bars are in canonical form: no zone, stamp or spelling is to be mapped again
    plain = RawBarSpec(minutes, strict=spec.strict)
    bars, report = validate_bars(
        joined.reset_index(),
        plain,
        where=where,
        symbol=symbol,
        calendar=calendar,
        tick=tick,
        quality=spec.strict,
    )
    findings += _roll_findings(rolls, table, joined)
    return bars, replace(report, findings=(*findings, *report.findings))


def _roll_findings(rolls: pd.DataFrame, table: pd.DataFrame, joined: pd.DataFrame) -> list[BarFinding]:
    """Return findings on the joined contracts, and on pairs without a common minute."""
    count = table["contract"].nunique()
    message = f"{len(table):,} bars of {count} contracts joined into {len(joined):,}; later row numbers count these"
    findings = [BarFinding("contracts", "mapped", np.empty(0, np.int64), message)]
    for one in rolls.itertuples():
        row = np.array([joined.index.searchsorted(one.at)], np.int64)
        begin = f"{one.contract} from {one.at:%Y-%m-%d %H:%M} UTC ({one.why})"
        joint = "" if pd.isna(one.common) else f": from {one.close_previous:g} to {one.close:g} in one minute"
        findings.append(BarFinding("rolled", "mapped", row, begin + joint))
        if one.previous and not joint:
            message = f"{one.previous} and {one.contract} never traded in one minute before {one.at}: prices jump there"
            findings.append(BarFinding("unjoined_roll", "reported", row, message))
    return findings


def raw_bar_minutes(workspace: Workspace, symbol: str, given: int | None = None) -> int:
    """Return the minutes of the symbol's raw bars, by the file's name; raise SettingsError for others."""
    return _check_bar_length(require_raw_bars(workspace, symbol), given)


def _check_bar_length(path: Path, given: int | None) -> int:
    existing = parse_raw_bars_name(path.name)[1]
    if given not in (None, existing):
        raise SettingsError(
            "A symbol has raw bars of one length", where=path, got=f"bars of {given} min", wanted=f"{existing} min",
            next_step=f"move {path.name} away first, or use another workspace (--workspace)",
        )  # fmt: skip
    return existing


def load_bars(
    workspace: Workspace, symbol: str, spec: RawBarSpec | None = None, *, market: MarketSpec | None = None,
    calendar: str | None = None, tick: float | None = None, quality: bool = False,
) -> tuple[pd.DataFrame, BarReport]:  # fmt: skip
    """Read and check the bars of the workspace's raw file; return them with their report.

    market, calendar, tick : as of `validate_bars`
    quality : with gaps, spikes and the rest of what is reported

    Raises NotPreparedError when there is no such file, BarsError when it cannot be read or its bars are refused.
    """
    path = require_raw_bars(workspace, symbol)
    spec = replace(spec or RawBarSpec(), minutes=raw_bar_minutes(workspace, symbol, spec and spec.minutes))
    with progress_phase("reading") as done:
        table = read_bars_table(path)
        done(len(table))
    with progress_phase("checking", len(table)):
        return validate_bars(
            table, spec, where=path, market=market, symbol=symbol, calendar=calendar, tick=tick, quality=quality
        )


def write_bars(path: str | os.PathLike, bars: pd.DataFrame) -> None:
    """Write checked bars as Parquet in one step: a column `timestamp` (UTC, start) and then the others."""
    table = bars.reset_index()
    options = {"index": False, "compression": "zstd", "use_dictionary": ["volume", "contract", "chain"]}  # they repeat
    files.replace(path, lambda temporary: table.to_parquet(temporary, **options))


def _has_equal_bars(path: Path, bars: pd.DataFrame) -> bool:
    try:
        return pd.read_parquet(path).equals(bars.reset_index())
    except (pyarrow.ArrowException, OSError, ValueError):
        return False
