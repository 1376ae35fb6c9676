"""Parse a table of bars: columns by any usual name, times to UTC bar starts, numbers written as text to float64.

A cell that cannot be read is a fault of its row. The same faults refuse a file and name the rows that are skipped.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import pandas as pd

from ml_factory.data.bar_report import BarFinding, format_rows_with_times, raise_on_bar_findings
from ml_factory.data.sessions import MINUTE_NS, PRICES
from ml_factory.errors import BarsError, SettingsError, did_you_mean
from ml_factory.storage.workspace import BAR_MINUTES

# column -> other spellings, the first found wins
SPELLINGS = {
    "timestamp": ("datetime", "date_time", "open_time", "ts", "ts_event", "time", "date", "unix", "unix_timestamp"),
    "open": ("o", "open_price", "opening"),
    "high": ("h", "high_price", "max"),
    "low": ("l", "low_price", "min"),
    "close": ("c", "close_price", "last", "closing"),
    "volume": ("vol", "v", "tick_volume", "tickvol", "trade_volume", "base_volume"),
}
_OFFSET = re.compile(r"(?:[zZ]|UTC|GMT|[+-]\d{2}:?\d{2})$")  # 6 characters at most
_EPOCH = re.compile(r"\d{9,19}(\.\d+)?")
_CLOCKS = ("%H:%M:%S", "%H:%M", "%I:%M:%S %p", "%I:%M %p")
_TEXT_FORMATS = (
    "ISO8601",
    "%Y%m%d %H%M%S",
    *(f"{day} {clock}" for day in ("%Y.%m.%d", "%d.%m.%Y") for clock in _CLOCKS[:2]),
    *(f"{day} {clock}" for day in ("%m/%d/%Y", "%d/%m/%Y") for clock in _CLOCKS),
)
EPOCH_UNITS = {"s": (1e8, 1e11, 10**9), "ms": (1e11, 1e14, 10**6), "us": (1e14, 1e17, 10**3), "ns": (1e17, 5e18, 1)}
CONTRACT_COLUMNS = ("contract", "expiry", "instrument", "symbol")  # the first found wins
LEAST_STEPS = 3  # between bars, for a statement about their spacing
# decimal mark -> a number, whose thousands may be grouped by the other mark
_NUMBER = {
    mark: rf"[+-]?(?:[1-9]\d{{0,2}}(?:{other}\d{{3}})+(?:{point}\d*)?|\d+{point}?\d*|{point}\d+)(?:[eE][+-]?\d+)?"
    for mark, point, other in ((".", r"\.", ","), (",", ",", r"\."))
}
_EMPTY = ("", "nan", "none", "null", "<na>")
_BACK_ADJUSTED = "features and barriers use logarithms of prices; if this is a difference back-adjusted series, use "
_SKIP = "correct these rows; prepare --skip-bad leaves them out and lists them"


class RowFault(NamedTuple):
    """Rows that cannot be bars, and why.

    kind : of the finding
    rows : int64, positions in the table
    what : the fault, such as "close is not a number"
    step : advice for the user
    got : the first row's own value
    """

    kind: str
    rows: np.ndarray
    what: str
    step: str = _SKIP
    got: str = ""


def _fault(kind: str, wrong: np.ndarray, what: str, step: str = _SKIP, got: str = "") -> RowFault:
    """Return the fault of the rows where bool[N] `wrong` is True, perhaps of none."""
    return RowFault(kind, np.flatnonzero(wrong), what, step, got)


def row_fault_findings(faults: Sequence[RowFault], moments: pd.DatetimeIndex) -> list[BarFinding]:
    """Return one refusing finding for each fault that some row has, whose message shows rows and times."""
    return [
        BarFinding(one.kind, "refused", one.rows, f"{one.what} in {format_rows_with_times(one.rows, moments)}"
                   + (f": {one.got}" if one.got else ""), one.step)
        for one in faults if len(one.rows)
    ]  # fmt: skip


def _refuse(kind: str, message: str, where: object, step: str = "", rows: Sequence[int] | np.ndarray = ()) -> NoReturn:
    raise_on_bar_findings([BarFinding(kind, "refused", np.asarray(rows, np.int64), message, step)], where)


def _mapped(kind: str, message: str, rows: Sequence[int] | np.ndarray = ()) -> BarFinding:
    return BarFinding(kind, "mapped", np.asarray(rows, np.int64), message)


# ---- columns ---------------------------------------------------------------------------------------------------------


def normalize_column_name(name: object) -> str:
    """Return a column's name in lower case, without brackets or quotes, words joined by `_`."""
    return re.sub(r"[\s\-/]+", "_", str(name).strip().strip("<>\"'").strip().lower())


def match_bar_columns(
    raw: pd.DataFrame, where: object, given: Sequence[tuple[str, str]] = ()
) -> tuple[dict[str, pd.Series], list[BarFinding]]:
    """Return our column names with the columns of `raw` that carry them, and the findings on mapped names.

    given : (ours, theirs) as the user declares; theirs must exist
    """
    for ours, theirs in given:
        if theirs not in raw.columns:
            raise BarsError(
                "There is no such column", where=where or "bars", got=f"{ours}={theirs}",
                wanted="one of " + ", ".join(map(repr, raw.columns.tolist())),
                next_step=did_you_mean(theirs, [str(name) for name in raw.columns]),
            )  # fmt: skip
    declared = {ours: raw[theirs] for ours, theirs in given}
    named: dict[str, list] = {}
    for column in raw.columns:
        named.setdefault(normalize_column_name(column), []).append(column)
    found, mapped = {}, []
    for target, others in SPELLINGS.items():
        spelling = next((name for name in (target, *others) if name in named), None)
        if target in declared or spelling is None:
            continue
        if len(named[spelling]) > 1:
            got = ", ".join(map(repr, named[spelling]))
            raise BarsError("Two columns of one name", where=where or "bars", got=got, next_step="keep one of them")
        found[target] = raw[named[spelling][0]]
        if named[spelling][0] != target:
            mapped.append(f"{named[spelling][0]!r} as {target}")
    if "date" in named and "time" in named and not {"timestamp", "datetime"} & set(named):
        date, time = (raw[named[name][0]].astype(str).str.strip() for name in ("date", "time"))
        found["timestamp"] = date + " " + time
        mapped = [text for text in mapped if not text.endswith("as timestamp")] + ["date and time as timestamp"]
    elif "timestamp" not in found and (
        isinstance(raw.index, pd.DatetimeIndex)
        or normalize_column_name(raw.index.name) in ("timestamp", *SPELLINGS["timestamp"])
    ):
        found["timestamp"] = raw.index.to_series(index=range(len(raw)))
        mapped.append("the index as timestamp")
    found |= declared
    absent = [name for name in ("timestamp", *PRICES) if name not in found]
    if absent:
        raise BarsError(
            f"Missing column {', '.join(map(repr, absent))}",
            where=where or "bars",
            got="columns " + ", ".join(repr(name)[:60] for name in raw.columns[:20].tolist()),
            wanted="timestamp, open, high, low, close and perhaps volume",
            next_step="name them: --columns close=Schluss, or rename the columns in the first line",
        )
    mapped += [f"{theirs!r} as {ours}" for ours, theirs in given if ours != theirs]
    return found, [_mapped("columns", "columns read: " + ", ".join(mapped))] if mapped else []


# ---- times -----------------------------------------------------------------------------------------------------------


def check_time_zone(zone: str) -> None:
    """Raise SettingsError with an example for a zone that does not exist."""
    try:
        pd.Timestamp(0, tz="UTC").tz_convert(zone)
    except (KeyError, ValueError, TypeError, OSError) as error:
        step = "use a name such as 'America/Chicago', 'Europe/Berlin' or 'UTC'"
        raise SettingsError("Unknown time zone", where="zone", got=repr(zone), next_step=step) from error


def read_times(values: pd.Series, where: object) -> tuple[pd.DatetimeIndex, list[RowFault], list[BarFinding]]:
    """Return the times of a column, in a zone or naive and NaT where they cannot be read, faults and findings.

    values : datetimes, ISO or other text, epochs in s, ms, us or ns, as numbers or as text

    Raises BarsError where no row can be read, or where months and days cannot be distinguished.
    """
    text = None
    known = values.notna().to_numpy()
    if pd.api.types.is_bool_dtype(values.dtype):
        _refuse("timestamp", f"timestamp holds {values.dtype} values", where)
    if pd.api.types.is_datetime64_any_dtype(values.dtype):
        moments, how = pd.DatetimeIndex(values), "a time"
        other = moments.tz is not None and str(moments.tz) != "UTC"
        findings = [_mapped("zone", f"timestamps converted from {moments.tz} to UTC")] if other else []
    elif pd.api.types.is_numeric_dtype(values.dtype):
        moments, how, findings = _from_epochs(values[known].to_numpy(), known, where)
    else:
        text = np.array([str(one).strip() for one in values.tolist()], object)
        epoch = np.array([_EPOCH.fullmatch(one) is not None for one in text])
        if epoch.mean() > 0.5:
            whole = not any("." in one for one in text[epoch])
            numbers = text[epoch].astype("U20").astype(np.int64 if whole else float)
            moments, how, findings = _from_epochs(numbers, epoch, where)
        else:
            moments, how, findings = _from_text(text, where)
    unread, year = moments.isna() & known, moments.year
    got = "" if text is None else repr(text[unread.argmax()])[:60]
    faults = [
        _fault("timestamp", ~known, "timestamp is empty"),
        _fault("timestamp", unread, f"timestamp is not {how}", got=got),
        _fault("timestamp", (year < 1970) | (year >= 2100), "timestamp is outside the years 1970 to 2099"),
    ]
    return moments, faults, findings


def _from_epochs(
    epochs: np.ndarray, known: np.ndarray, where: object
) -> tuple[pd.DatetimeIndex, str, list[BarFinding]]:
    """Convert numbers since 1970, those of the rows `known`; the unit follows from their size and is one for all."""
    size = np.abs(epochs.astype(float))
    stamps = np.full(len(known), "NaT", "M8[ns]")
    for unit, (low, high, factor) in EPOCH_UNITS.items():
        if len(size) and size.min() >= low and size.max() < high and epochs.min() > 0:
            if epochs.dtype.kind == "f":  # to the millisecond
                stamps[known] = (np.round(epochs * (factor / 10**6)).astype(np.int64) * 10**6).view("M8[ns]")
            else:
                stamps[known] = (epochs.astype(np.int64) * factor).view("M8[ns]")
            found = [_mapped("epoch", f"timestamps read as epochs in {unit}, UTC")]
            return pd.DatetimeIndex(stamps, tz="UTC"), f"an epoch in {unit}", found
    if len(size):
        message = "timestamp holds numbers that are no epoch in s, ms, us or ns"
        step = "write timestamps as ISO text with a zone, or as epochs"
        _refuse("timestamp", f"{message} ({epochs.min()} to {epochs.max()})", where, step)
    return pd.DatetimeIndex(stamps), "a time", []


def _from_text(text: np.ndarray, where: object) -> tuple[pd.DatetimeIndex, str, list[BarFinding]]:
    """Parse text in the format, and with or without a zone, that most rows have."""
    offsets = [_OFFSET.search(one, len(one) - 6) for one in text]
    aware = np.array([one is not None for one in offsets])
    zoned = bool(aware.mean() > 0.5)
    if zoned:
        zones = {"UTC": "Z", "GMT": "Z"}
        text = np.array([one if at is None else one[: at.start()].rstrip() + zones.get(at[0], at[0])
                         for one, at in zip(text, offsets, strict=True)], object)  # fmt: skip
    text, best, chosen = np.where(aware == zoned, text, np.nan), None, ""
    sample = text[[0, len(text) // 2, -1]]  # most formats fail on these and cost nothing more
    for form in _TEXT_FORMATS:
        exact = form if form == "ISO8601" or not zoned else form + "%z"
        if len(text) > len(sample) and pd.to_datetime(sample, format=exact, errors="coerce", utc=True).isna().all():
            continue
        moments = pd.DatetimeIndex(pd.to_datetime(text, format=exact, errors="coerce", utc=zoned))
        count, most = moments.notna().sum(), 0 if best is None else best.notna().sum()
        if best is not None and count == most and not moments.equals(best):
            message = f"timestamps such as {text[0]!r} can be read with the month first and with the day first"
            _refuse("timestamp", message, where, "write them as ISO text, for example 2024-03-01 09:30")
        if count > most:
            best, chosen = moments, form
        if form == "ISO8601" and count == len(text):
            break
    if best is None:
        step = "write timestamps as ISO text, for example 2024-03-01 09:30:00+00:00"
        _refuse("timestamp", f"timestamp cannot be read in row 0: {text[0]!r:.60}", where, step)
    how = "ISO text" if chosen == "ISO8601" else f"text of the form {chosen}"
    return best, f"{how} {'with' if zoned else 'without'} a zone", [_mapped("text_time", f"timestamps read as {how}")]


def bar_starts(
    moments: pd.DatetimeIndex, *, zone: str | None, stamp: str, minutes: int | None, where: object
) -> tuple[np.ndarray, list[BarFinding], int]:
    """Return (start_ns, findings, minutes): int64[N] ns UTC in file order, what was mapped, the length of a bar.

    Parameters
    ----------
    moments : of `read_times`, without NaT
    zone : zone of naive times; None refuses them, since a wrong guess shifts every session
    stamp : "start" or "end" of the bar
    minutes : length of a bar; None: by `infer_bar_minutes`
    where : the file, for messages

    Raises
    ------
    BarsError : an hour that the zone skips or repeats ambiguously, stamps off the grid of `minutes`
    """
    findings = []
    if moments.tz is None:
        if zone is None:
            step = "say where its clock stands, for example zone='America/Chicago' or zone='UTC' (--zone)"
            _refuse("naive", f"timestamps carry no zone (row 0 is {moments[0]})", where, step)
        moments, findings = _localize(moments, zone, where)
    elif zone is not None:
        findings.append(_mapped("zone_unused", f"zone {zone!r} was not needed: the timestamps say their own"))
    start_ns = moments.tz_convert("UTC").as_unit("ns").asi8.copy()
    if stamp == "end":
        # close times such as 09:30:59 or 09:30:59.999 mean the minute that ends a moment later
        start_ns = start_ns + np.where(-start_ns % MINUTE_NS <= 10**9, -start_ns % MINUTE_NS, 0)
    if minutes is None:
        minutes = infer_bar_minutes(start_ns)
        if minutes > 1:
            message = f"bars of {minutes} min: their usual distance, and all stand on the {minutes}-minute grid"
            findings.append(_mapped("bar_length", message))
    if stamp == "end":
        start_ns = start_ns - minutes * MINUTE_NS
        findings.append(_mapped("end_stamped", f"end-stamped bars moved back by {minutes} min to their start"))
    off = np.flatnonzero(start_ns % (minutes * MINUTE_NS))
    if len(off):
        shown = pd.DatetimeIndex(start_ns.view("M8[ns]"), tz="UTC")
        message = f"timestamps off the {minutes}-minute grid: {format_rows_with_times(off, shown)}"
        phase = np.unique(start_ns % MINUTE_NS)
        step = f"aggregate to whole {minutes}-minute bars, or declare their length (--minutes)"
        if len(phase) == 1 and phase[0] >= 59 * 10**9 and stamp == "start":
            step = "these look like close times: give stamp='end' (--stamp end)"
        _refuse("off_minute", message, where, step, off)
    return start_ns, findings, minutes


def infer_bar_minutes(stamp_ns: np.ndarray) -> int:
    """Infer the length of bars in minutes from their stamps (int64 ns, any order).

    It is the most frequent distance if that divides an hour and every stamp is a multiple of it, else 1: all stamps of
    bars of n minutes lie on the grid of n minutes, and those of shorter bars, however rare, do not.
    """
    steps = np.diff(np.sort(stamp_ns, kind="stable"))  # np.unique hashes: 15 times slower on stamps that are in order
    steps = steps[steps > 0]
    if len(steps) < LEAST_STEPS:
        return 1
    spacing, count = np.unique(steps, return_counts=True)
    usual = int(spacing[np.argmax(count)])
    fits = usual % MINUTE_NS == 0 and usual // MINUTE_NS in BAR_MINUTES and not (stamp_ns % usual).any()
    return usual // MINUTE_NS if fits else 1


def _localize(moments: pd.DatetimeIndex, zone: str, where: object) -> tuple[pd.DatetimeIndex, list[BarFinding]]:
    """Localize naive wall-clock times to `zone`; the repeated hour is resolved by the order of the file."""
    findings = [_mapped("zone", f"naive timestamps read as {zone}")]
    gone = np.flatnonzero(moments.tz_localize(zone, ambiguous=False, nonexistent="NaT").isna())
    if len(gone):
        shown = format_rows_with_times(gone, moments)
        message = f"{shown} fall in an hour that does not exist in {zone} (clocks go forward)"
        step = "the zone is another one: give the right zone, or export in UTC"
        _refuse("nonexistent_hour", message, where, step, gone)
    twice = np.flatnonzero(moments.tz_localize(zone, ambiguous="NaT").isna())
    wall, first_pass, unclear = moments.as_unit("ns").asi8, np.zeros(len(moments), bool), np.zeros(len(moments), bool)
    apart = (np.diff(twice) > 1) | (np.abs(np.diff(wall[twice])) > 12 * 60 * MINUTE_NS)  # of another year or contract
    for rows in np.split(twice, np.flatnonzero(apart) + 1):
        rows = rows[::-1] if wall[0] > wall[-1] else rows
        back = np.flatnonzero(np.diff(wall[rows]) <= 0) + 1
        if len(back) == 1:
            first_pass[rows[: back[0]]] = True
        else:
            unclear[rows] = True
    if unclear.any():
        rows = np.flatnonzero(unclear)
        message = f"{format_rows_with_times(rows, moments)} fall in the hour that occurs twice in {zone}"
        _refuse("repeated_hour", message, where, "export in UTC, or with the offset in each timestamp", rows)
    if len(twice):
        message = f"{len(twice)} bars of the hour that occurs twice in {zone} resolved by their order"
        findings.append(_mapped("repeated_hour", message, twice))
    return moments.tz_localize(zone, ambiguous=first_pass), findings


# ---- numbers ---------------------------------------------------------------------------------------------------------


def read_numbers(
    columns: dict[str, pd.Series], decimal: str | None, where: object
) -> tuple[dict[str, np.ndarray], list[RowFault], list[BarFinding]]:
    """Return price and volume columns as name -> float64[N], NaN where a cell is empty or no number, faults, findings.

    columns : name -> column of N cells
    decimal : "." or "," where the text allows both; None: inferred, one mark for all columns

    Raises BarsError for columns of another type, or where 4,500 could mean two numbers.
    """
    values, text, faults, findings = {}, {}, [], []
    for name, column in columns.items():
        if pd.api.types.is_bool_dtype(column.dtype) or pd.api.types.is_datetime64_any_dtype(column.dtype):
            _refuse("text", f"column {name} holds {column.dtype} values", where)
        if not pd.api.types.is_numeric_dtype(column.dtype):
            cells = column.astype(object).where(column.notna().to_numpy(), "").astype(str)
            text[name] = cells.str.replace(r"[\s'\u00a0\u202f\u2009]", "", regex=True)
            continue
        values[name] = column.to_numpy(np.float64, na_value=np.nan)
        if column.dtype in (np.float32, np.float16) and name != "volume":
            values[name] = _shortest_decimals(values[name])
            message = f"{name} was stored in {column.dtype} and read to its 7 significant digits"
            findings.append(_mapped("float32", message))
    unread = dict.fromkeys(columns, np.False_)
    if text:
        fractions = any(np.any(v[np.isfinite(v)] % 1 != 0) for name, v in values.items() if name != "volume")
        mark = decimal or ("." if fractions else _infer_decimal_mark(pd.concat(text.values()), where))
        for name, cells in text.items():
            infinite = cells.str.lower().isin(("inf", "-inf"))
            number = cells.str.fullmatch(_NUMBER[mark]).to_numpy(bool) | infinite.to_numpy(bool)
            unread[name] = ~number & ~cells.str.lower().isin(_EMPTY).to_numpy(bool)
            plain = cells.str.replace("," if mark == "." else ".", "", regex=False).str.replace(mark, ".", regex=False)
            values[name] = plain.where(number, "nan").to_numpy(object).astype(str).astype(np.float64)  # exact
            got = repr(cells.iloc[unread[name].argmax()])[:60]
            faults.append(_fault("text", unread[name], f"{name} is not a number", got=got))
        message = f"text in {', '.join(text)} read as numbers with {mark!r} before the decimals"
        findings.append(_mapped("text_numbers", message))
    return {name: values[name] for name in columns}, [*faults, *_impossible_values(values, unread)], findings


def _impossible_values(values: dict[str, np.ndarray], unread: dict[str, np.ndarray]) -> list[RowFault]:
    """Return faults: prices that are not finite, not positive or outside their own bar, and impossible volumes."""
    faults, usable = [], np.ones(len(values["open"]), bool)
    for name in PRICES:
        finite = np.isfinite(values[name])
        low = finite & (values[name] <= 0)
        usable &= finite & ~low
        what, step = f"{name} is zero or negative", f"{_BACK_ADJUSTED}one at the prices that traded"
        faults += [
            _fault("not_finite", ~finite & ~unread[name], f"{name} is empty, not a number or infinite"),
            _fault("not_positive", low, what, step),
        ]
    body = np.stack([values["open"], values["close"]])
    broken = usable & ((values["high"] < body.max(0)) | (values["low"] > body.min(0)))
    first = str({name: float(values[name][broken.argmax()]) for name in PRICES})
    step = f"check that the columns are not swapped, or {_SKIP}"
    faults.append(_fault("ohlc", broken, "high is not the highest or low not the lowest", step, first))
    volume = values.get("volume", np.zeros(1))
    impossible = (volume < 0) | np.isinf(volume)
    faults.append(_fault("volume", impossible, "volume is negative or infinite", f"leave the column out, or {_SKIP}"))
    return faults


def _shortest_decimals(values: np.ndarray) -> np.ndarray:
    """Restore the price that was stored as float32: its shortest decimal form (521.23, not 521.22998)."""
    usable = np.isfinite(values) & (values != 0)
    digits = np.zeros(len(values))
    digits[usable] = 6 - np.floor(np.log10(np.abs(values[usable])))
    return np.where(usable, np.round(values * 10.0**digits) / 10.0**digits, values)


def _infer_decimal_mark(cells: pd.Series, where: object) -> str:
    """Return the decimal mark under which most cells are numbers; refuse where 4,500 could mean two of them."""
    dot, comma = (cells.str.fullmatch(_NUMBER[mark]).to_numpy(bool) for mark in ".,")
    either = cells[dot & comma & cells.str.contains(",", regex=False).to_numpy(bool)]
    if dot.sum() == comma.sum() and len(either):
        message = f"{either.iloc[0]!r} can be read as a fraction or as thousands"
        _refuse("text", message, where, "give decimal=',' or decimal='.' (--decimal)")
    return "," if comma.sum() > dot.sum() else "."
