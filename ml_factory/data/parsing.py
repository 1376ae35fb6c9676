"""Parse timestamps to UTC bar starts, and numbers written as text to float64."""

import re

import numpy as np
import pandas as pd

from ml_factory.data.bar_report import BarFinding, format_rows_with_times, raise_on_bar_findings
from ml_factory.data.sessions import MINUTE_NS
from ml_factory.errors import SettingsError
from ml_factory.storage.workspace import BAR_MINUTES

_OFFSET = re.compile(r"(?:[zZ]|UTC|GMT|[+-]\d{2}:?\d{2})$")
_SLASHED = ("%m/%d/%Y", "%d/%m/%Y")
_CLOCKS = ("%H:%M:%S", "%H:%M", "%I:%M:%S %p", "%I:%M %p")
TEXT_FORMATS = (
    "ISO8601",
    "%Y%m%d %H%M%S",
    "%Y.%m.%d %H:%M:%S",
    "%Y.%m.%d %H:%M",
    "%d.%m.%Y %H:%M:%S",
    "%d.%m.%Y %H:%M",
    *(f"{day} {clock}" for day in _SLASHED for clock in _CLOCKS),
)
EPOCH_UNITS = {"s": (1e8, 1e11, 10**9), "ms": (1e11, 1e14, 10**6), "us": (1e14, 1e17, 10**3), "ns": (1e17, 5e18, 1)}
_PLAUSIBLE = (pd.Timestamp("1970-01-02").value, pd.Timestamp("2100-01-01").value)
_NO_ROWS = np.empty(0, np.int64)
LEAST_STEPS = 3  # between bars, for a statement about their spacing
GROUPED = {
    ".": r"[+-]?\d{1,3}(?:,\d{3})*(?:\.\d*)?(?:[eE][+-]?\d+)?|[+-]?\d*\.?\d+(?:[eE][+-]?\d+)?",
    ",": r"[+-]?\d{1,3}(?:\.\d{3})*(?:,\d*)?(?:[eE][+-]?\d+)?|[+-]?\d*,?\d+(?:[eE][+-]?\d+)?",
}
NUMBER_WORDS = {"": "nan", "nan": "nan", "none": "nan", "null": "nan", "<na>": "nan", "inf": "inf", "-inf": "-inf"}


# ---- timestamps ------------------------------------------------------------------------------------------------------


def parse_timestamps(
    values: pd.Series, *, zone: str | None, stamp: str, minutes: int | None, where: object
) -> tuple[np.ndarray, list[BarFinding], int]:
    """Parse a time column to bar starts.

    Parameters
    ----------
    values : the time column: zone-aware or naive datetimes, ISO or other text, epochs in s, ms, us or ns
    zone : zone of naive times; None refuses them, since a wrong guess shifts every session
    stamp : "start" or "end" of the bar
    minutes : length of a bar; None: by `infer_bar_minutes`
    where : the file, for messages

    Returns
    -------
    (start_ns, findings, minutes) : int64[N] ns UTC in file order, what was mapped, the length of a bar

    Raises
    ------
    BarsError : unreadable times, an hour that the zone skips or repeats ambiguously, stamps off the grid of `minutes`
    """
    if zone is not None:
        parse_time_zone(zone)
    absent = values.isna().to_numpy()
    if absent.any():
        message = f"timestamp is empty in {format_rows_with_times(np.flatnonzero(absent))}"
        raise_on_bar_findings([BarFinding("timestamp", "refused", np.flatnonzero(absent), message)], where)
    moments, findings = _to_datetimes(values, where)
    far = np.flatnonzero((moments.year < 1970) | (moments.year >= 2100))
    if len(far):
        message = f"timestamps outside the years 1970 to 2099: {format_rows_with_times(far, moments)}"
        raise_on_bar_findings([BarFinding("timestamp", "refused", far, message)], where)
    if moments.tz is None:
        if zone is None:
            step = "say where its clock stands, for example zone='America/Chicago' or zone='UTC' (--zone)"
            message = f"timestamps carry no zone (row 0 is {moments[0]})"
            raise_on_bar_findings([BarFinding("naive", "refused", _NO_ROWS, message, step)], where)
        moments, local = _localize(moments, zone, where)
        findings += local
    elif zone is not None:
        message = f"zone {zone!r} was not needed: the timestamps say their own"
        findings.append(BarFinding("zone_unused", "mapped", _NO_ROWS, message))
    start_ns = moments.tz_convert("UTC").as_unit("ns").asi8.copy()
    if stamp == "end":
        # close times such as 09:30:59.999 mean the minute that ends a moment later
        start_ns = -(-start_ns // 10**9) * 10**9
        late = start_ns % MINUTE_NS == 59 * 10**9
        start_ns = start_ns + late * 10**9
    if minutes is None:
        minutes = infer_bar_minutes(start_ns)
        if minutes > 1:
            message = f"bars of {minutes} min: their usual distance, and all stand on the {minutes}-minute grid"
            findings.append(BarFinding("bar_length", "mapped", _NO_ROWS, message))
    if stamp == "end":
        start_ns = start_ns - minutes * MINUTE_NS
        message = f"end-stamped bars moved back by {minutes} min to their start"
        findings.append(BarFinding("end_stamped", "mapped", _NO_ROWS, message))
    _refuse_off_grid(start_ns, minutes, stamp, where)
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


def parse_time_zone(zone: str) -> str:
    """Return the zone if it exists; raise SettingsError with an example otherwise."""
    try:
        pd.Timestamp(0, tz="UTC").tz_convert(zone)
    except (KeyError, ValueError, TypeError, OSError) as error:
        step = "use a name such as 'America/Chicago', 'Europe/Berlin' or 'UTC'"
        raise SettingsError("Unknown time zone", where="zone", got=repr(zone), next_step=step) from error
    return zone


def _to_datetimes(values: pd.Series, where: object) -> tuple[pd.DatetimeIndex, list[BarFinding]]:
    """Convert the time column to naive or aware datetimes."""
    if isinstance(values.dtype, pd.DatetimeTZDtype):
        moments = pd.DatetimeIndex(values)
        if str(moments.tz) == "UTC":
            return moments, []
        return moments, [BarFinding("zone", "mapped", _NO_ROWS, f"timestamps converted from {moments.tz} to UTC")]
    if pd.api.types.is_datetime64_dtype(values.dtype):
        return pd.DatetimeIndex(values), []
    if pd.api.types.is_bool_dtype(values.dtype):
        message = f"timestamp holds {values.dtype} values"
        raise_on_bar_findings([BarFinding("timestamp", "refused", _NO_ROWS, message)], where)
    if pd.api.types.is_numeric_dtype(values.dtype):
        return _from_epochs(values.to_numpy(), where)
    text = values.astype(str).str.strip()
    if text.str.fullmatch(r"\d{9,19}(\.\d+)?").all():
        whole = not text.str.contains(".", regex=False).any()
        return _from_epochs(text.to_numpy("U20").astype(np.int64 if whole else float), where)
    return _from_text(text, where)


def _from_epochs(epochs: np.ndarray, where: object) -> tuple[pd.DatetimeIndex, list[BarFinding]]:
    """Convert numbers since 1970 to datetimes; the unit follows from their size and is the same for every row."""
    size = np.abs(epochs.astype(float))
    for unit, (low, high, factor) in EPOCH_UNITS.items():
        if size.min() >= low and size.max() < high:
            if epochs.dtype.kind == "f":
                scaled = np.round(epochs * (factor / 10**6)).astype(np.int64) * 10**6  # floats: to the millisecond
            else:
                scaled = epochs.astype(np.int64) * factor
            if scaled.min() < _PLAUSIBLE[0] or scaled.max() > _PLAUSIBLE[1]:
                break
            moments = pd.DatetimeIndex(scaled.astype("datetime64[ns]"), tz="UTC")
            return moments, [BarFinding("epoch", "mapped", _NO_ROWS, f"timestamps read as epochs in {unit}, UTC")]
    got = f"{epochs.min()} to {epochs.max()}"
    message = f"timestamp holds numbers that are no epoch in s, ms, us or ns ({got})"
    step = "write timestamps as ISO text with a zone, or as epochs"
    raise_on_bar_findings([BarFinding("timestamp", "refused", _NO_ROWS, message, step)], where)
    raise AssertionError("unreachable")


def _from_text(text: pd.Series, where: object) -> tuple[pd.DatetimeIndex, list[BarFinding]]:
    """Parse text that has one format throughout; month and day are ordered only if one order is impossible."""
    aware = text.str.contains(_OFFSET).to_numpy()
    if aware.any() and not aware.all():
        few = np.flatnonzero(~aware if aware.mean() > 0.5 else aware)
        message = f"some timestamps carry a zone and some do not ({format_rows_with_times(few, text.tolist())})"
        raise_on_bar_findings([BarFinding("timestamp", "refused", few, message)], where)
    if aware.all():
        text = text.str.replace(r"\s*(?:UTC|GMT)$", "Z", regex=True)
        text = text.str.replace(r"\s+(?=(?:[zZ]|[+-]\d{2}:?\d{2})$)", "", regex=True)
    fitting, furthest = {}, 0
    for form in TEXT_FORMATS:
        with_zone = form if form == "ISO8601" or not aware.all() else form + "%z"
        sample = text.iloc[[0, len(text) // 2, -1]]  # most formats fail on these and cost nothing more
        if pd.to_datetime(sample, format=with_zone, errors="coerce", utc=True).isna().all():
            continue
        parsed = pd.to_datetime(text, format=with_zone, errors="coerce", utc=bool(aware.all()))
        bad = parsed.isna().to_numpy()
        if not bad.any():
            fitting[form] = pd.DatetimeIndex(parsed)
        furthest = max(furthest, int(bad.argmax()) if bad.any() else 0)
        if form == "ISO8601" and form in fitting:
            break
    different = {form: moments for form, moments in fitting.items() if not moments.equals(next(iter(fitting.values())))}
    if different:
        message = f"timestamps such as {text.iloc[0]!r} can be read with the month first and with the day first"
        step = "write them as ISO text, for example 2024-03-01 09:30"
        raise_on_bar_findings([BarFinding("timestamp", "refused", _NO_ROWS, message, step)], where)
    if not fitting:
        message = f"timestamp cannot be read in row {furthest}: {text.iloc[furthest]!r}"
        step = "write timestamps as ISO text, for example 2024-03-01 09:30:00+00:00"
        raise_on_bar_findings([BarFinding("timestamp", "refused", np.array([furthest]), message, step)], where)
    form, moments = next(iter(fitting.items()))
    how = "ISO text" if form == "ISO8601" else f"text of the form {form}"
    return moments, [BarFinding("text_time", "mapped", _NO_ROWS, f"timestamps read as {how}")]


def _localize(moments: pd.DatetimeIndex, zone: str, where: object) -> tuple[pd.DatetimeIndex, list[BarFinding]]:
    """Localize naive wall-clock times to `zone`; the repeated hour is resolved by the order of the file."""
    findings = [BarFinding("zone", "mapped", _NO_ROWS, f"naive timestamps read as {zone}")]
    wall = moments.as_unit("ns").asi8
    gone = np.flatnonzero(moments.tz_localize(zone, ambiguous=False, nonexistent="NaT").isna())
    if len(gone):
        message = (
            f"{format_rows_with_times(gone, moments)} fall in an hour that does not exist in {zone} (clocks go forward)"
        )
        step = "the zone is another one: give the right zone, or export in UTC"
        raise_on_bar_findings([BarFinding("nonexistent_hour", "refused", gone, message, step)], where)
    twice = np.flatnonzero(moments.tz_localize(zone, ambiguous="NaT").isna())
    first_pass = np.zeros(len(moments), bool)
    backward = len(wall) > 1 and wall[0] > wall[-1]
    for rows in np.split(twice, np.flatnonzero(np.diff(wall[twice]) > 12 * 60 * MINUTE_NS) + 1) if len(twice) else []:
        rows = rows[::-1] if backward else rows
        repeated = np.flatnonzero(np.diff(wall[rows]) <= 0) + 1
        if len(repeated) != 1:
            message = f"{format_rows_with_times(np.sort(rows), moments)} fall in the hour that occurs twice in {zone}"
            step = "export in UTC, or with the offset in each timestamp"
            raise_on_bar_findings([BarFinding("repeated_hour", "refused", np.sort(rows), message, step)], where)
        first_pass[rows[: repeated[0]]] = True
    if len(twice):
        message = f"{len(twice)} bars of the hour that occurs twice in {zone} resolved by their order"
        findings.append(BarFinding("repeated_hour", "mapped", twice, message))
    return moments.tz_localize(zone, ambiguous=first_pass), findings


def _refuse_off_grid(start_ns: np.ndarray, minutes: int, stamp: str, where: object) -> None:
    off = np.flatnonzero(start_ns % (minutes * MINUTE_NS))
    if not len(off):
        return
    shown = pd.DatetimeIndex(start_ns.view("M8[ns]"), tz="UTC")
    message = f"timestamps off the {minutes}-minute grid: {format_rows_with_times(off, shown)}"
    phase = np.unique(start_ns % MINUTE_NS)
    step = f"aggregate to whole {minutes}-minute bars, or declare their length (--minutes, BarSpec(minutes=...))"
    if len(phase) == 1 and phase[0] >= 59 * 10**9 and stamp == "start":
        step = "these look like close times: give stamp='end' (--stamp end)"
    raise_on_bar_findings([BarFinding("off_minute", "refused", off, message, step)], where)


def combine_date_and_time(table: pd.DataFrame, date: str, time: str) -> pd.Series:
    """Join a date and a time column, as several platforms export them, to one text column."""
    return table[date].astype(str).str.strip() + " " + table[time].astype(str).str.strip()


# ---- numbers ---------------------------------------------------------------------------------------------------------


def parse_numbers(
    columns: dict[str, pd.Series], *, decimal: str | None, where: object, shown: pd.DatetimeIndex
) -> tuple[dict[str, np.ndarray], list[BarFinding]]:
    """Parse price and volume columns; empty cells become NaN.

    Parameters
    ----------
    columns : name -> column of N cells
    decimal : "." or "," where the text allows both; None: inferred, one convention for all columns
    where : the file, for messages
    shown : times of the rows, for messages

    Returns
    -------
    (values, findings) : name -> float64[N], and what was mapped

    Raises
    ------
    BarsError : a cell is not a number; the message names column, row and text
    """
    values, text, findings = {}, {}, []
    for name, column in columns.items():
        if pd.api.types.is_bool_dtype(column.dtype) or pd.api.types.is_datetime64_any_dtype(column.dtype):
            raise_on_bar_findings(
                [BarFinding("text", "refused", _NO_ROWS, f"column {name} holds {column.dtype} values")], where
            )
        if pd.api.types.is_numeric_dtype(column.dtype):
            values[name] = column.to_numpy(np.float64, na_value=np.nan)
            if column.dtype in (np.float32, np.float16) and name != "volume":
                values[name] = _shortest_decimals(values[name])
                message = f"{name} was stored in {column.dtype} and read to its 7 significant digits"
                findings.append(BarFinding("float32", "mapped", _NO_ROWS, message))
        else:
            text[name] = clean_number_text(column)
    if text:
        fractions = any(np.any(v[np.isfinite(v)] % 1 != 0) for name, v in values.items() if name != "volume")
        mark = decimal or infer_decimal_mark(text, "." if fractions else None, where)
        for name, column in text.items():
            values[name] = _parse(name, column, mark, where, shown)
        message = f"text in {', '.join(text)} read as numbers with {mark!r} before the decimals"
        findings.append(BarFinding("text_numbers", "mapped", _NO_ROWS, message))
    return {name: values[name] for name in columns}, findings


def clean_number_text(column: pd.Series) -> pd.Series:
    """Return the cells as text without spaces and apostrophes; "" where they are empty."""
    text = column.astype(object).where(column.notna().to_numpy(), "").astype(str)
    return text.str.replace(r"[\s'\u00a0\u202f\u2009]", "", regex=True)


def _shortest_decimals(values: np.ndarray) -> np.ndarray:
    """Restore the price that was stored as float32: its shortest decimal form (521.23, not 521.22998)."""
    usable = np.isfinite(values) & (values != 0)
    digits = np.zeros(len(values))
    digits[usable] = 6 - np.floor(np.log10(np.abs(values[usable])))
    return np.where(usable, np.round(values * 10.0**digits) / 10.0**digits, values)


def infer_decimal_mark(text: dict[str, pd.Series], known: str | None, where: object) -> str:
    """Return the decimal mark of all texts; refuse where 4,500 could mean two numbers."""
    together = pd.concat(text.values(), ignore_index=True)
    marked = together[together.str.fullmatch(r"[+-]?\d*[.,][\d.,]*(?:[eE][+-]?\d+)?")]
    comma, dot = marked.str.rfind(","), marked.str.rfind(".")
    both = (comma >= 0) & (dot >= 0)
    votes = set() if known is None else {known}
    if both.any():
        votes |= {","} if (comma > dot)[both].any() else set()
        votes |= {"."} if (dot > comma)[both].any() else set()
    for mark, other in ((",", "."), (".", ",")):
        alone = marked[~both & marked.str.contains(mark, regex=False)]
        if alone.str.count(re.escape(mark)).gt(1).any():
            votes.add(other)  # 1,234,567: the mark separates thousands
        elif len(alone) and not alone.str.fullmatch(rf"[+-]?[1-9]\d{{0,2}}{re.escape(mark)}\d{{3}}").all():
            votes.add(mark)  # 4500,25: not a group of thousands
    if len(votes) == 2:
        raise_on_bar_findings(
            [BarFinding("text", "refused", _NO_ROWS, "commas and dots stand for decimals in different rows")], where
        )
    if votes:
        return votes.pop()
    if (comma >= 0).any():
        example = marked[comma >= 0].iloc[0]
        message = f"{example!r} can be read as a fraction or as thousands"
        raise_on_bar_findings(
            [BarFinding("text", "refused", _NO_ROWS, message, "give decimal=',' or decimal='.'")], where
        )
    return "."


def _parse(name: str, column: pd.Series, mark: str, where: object, shown: pd.DatetimeIndex) -> np.ndarray:
    word = column.str.lower().isin(NUMBER_WORDS).to_numpy()
    number = column.str.fullmatch(GROUPED[mark]).to_numpy(bool)
    bad = np.flatnonzero(~word & ~number)
    if len(bad):
        message = f"{name} is not a number in {format_rows_with_times(bad, shown)}: {column.iloc[bad[0]]!r}"
        raise_on_bar_findings([BarFinding("text", "refused", bad, message, "correct or drop these rows")], where)
    thousands = "," if mark == "." else "."
    plain = column.str.replace(thousands, "", regex=False).str.replace(mark, ".", regex=False)
    plain = plain.where(~word, column.str.lower().map(NUMBER_WORDS).fillna("nan"))
    return plain.to_numpy(object).astype(str).astype(np.float64)
