"""The user's own features: a decorated function, proved to look back only before it may be used.

    @feature(memory=96)
    def close_over_mean(bars):
        return bars.close / bars.close.rolling(96).mean() - 1

The function gets a Frame (columns open, high, low, close, volume as float64, session, known_at; each a
`_CustomFeatureInput`) and returns one number a bar. `memory` is the number of bars on which a value may depend. The
proof perturbs random bars and compares; the feature is proved again on the user's own bars when they are prepared and
audited.
"""

import copy
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import _lru_cache_wrapper, lru_cache, partial
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.code_fingerprint import globals_referenced_by_code, is_user_code, user_code_hash
from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MINUTE_NS
from ml_factory.errors import LookAheadError, SettingsError, did_you_mean
from ml_factory.seeding import seeded_generator

_FEATURES: dict[str, "CustomFeature"] = {}
_PROOF_BARS, _PROOF_CUTS, _ROWS_BEFORE = 1500, 12, 8


@dataclass(frozen=True)
class CustomFeature:
    """A user-defined feature.

    name : column name
    function : bars -> values
    memory : bars on which a value may depend
    signature : hash of its source, and of what it reads from outside
    original : the function as registered
    """

    name: str
    function: Callable[[ResampledBars], np.ndarray]
    memory: int
    signature: str
    original: Callable[[ResampledBars], np.ndarray]


def feature(function: Callable | None = None, *, memory: int = 256, name: str | None = None) -> Any:
    """Register a function as a feature, after a proof that it looks back only, and at most `memory` bars.

    Raises SettingsError for an unusable name, memory or result, LookAheadError naming the bar that changed.
    """
    if function is None:
        return partial(feature, memory=memory, name=name)
    name = name or function.__name__
    if not name.isidentifier() or not name.islower():
        wanted = "small letters, digits and underscores"
        raise SettingsError("A feature cannot be called this", where="feature", got=repr(name), wanted=wanted)
    if isinstance(memory, bool) or not isinstance(memory, int) or not 1 <= memory <= _PROOF_BARS // 3:
        wanted = f"a whole number of bars from 1 to {_PROOF_BARS // 3}"
        raise SettingsError("No such memory of a feature", where=name, got=repr(memory), wanted=wanted)
    made = CustomFeature(name, function, memory, _signature(function, memory), clone_function_without_state(function))
    prove_custom_feature(made, custom_feature_proof_bars(_PROOF_BARS))
    _FEATURES[name] = made
    return function


class _CustomFeatureInput(np.ndarray):
    """A column of bars: a NumPy array with the methods of a pandas Series too (rolling, shift, ewm, diff, ...).

    Arithmetic, slices and methods that both have (mean, std) are NumPy's; rows are numbered from 0.
    """

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or not hasattr(pd.Series, name):
            raise AttributeError(f"neither a NumPy array nor a pandas Series has {name!r}")
        return getattr(pd.Series(np.asarray(self)), name)


@contextmanager
def stateless_custom_features() -> Iterator[None]:
    """Replace every feature by a copy without state from earlier calls, for the duration of the block.

    A function that returns cached values cannot be distinguished from one that looks back: it has seen the future of
    every cut. (`clone_function_without_state`.)
    """
    called = dict(_FEATURES)
    _FEATURES.update(
        {name: replace(made, function=clone_function_without_state(made.original)) for name, made in called.items()}
    )
    try:
        yield
    finally:
        _FEATURES.update(called)


def signed_custom_feature_name(name: str) -> str:
    """Return "name#source hash" of a registered feature; a name with a hash is unchanged."""
    return name if "#" in name else f"{name}#{get_custom_feature(name).signature}"


def registered_feature_names() -> list[str]:
    """List the names of the features of the user that this process knows."""
    return sorted(_FEATURES)


def own_features_line(names: Sequence[str]) -> str:
    """Return one line on features that are not built-in.

    names : with or without the hashes of their sources.
    """
    return f"features of your own, not built-in: {', '.join(name.partition('#')[0] for name in names)}"


def get_custom_feature(name: str) -> CustomFeature:
    """Return the registered feature; raise SettingsError if it is unknown or its source differs from the hash."""
    plain, _, signature = name.partition("#")
    if plain not in _FEATURES:
        step = did_you_mean(plain, _FEATURES) or (
            "run the cell or script that defines it with @feature first; on the command line name its module: --import"
        )
        raise SettingsError("This feature is not defined here", where="custom", got=repr(plain), next_step=step)
    found = _FEATURES[plain]
    if signature and signature != found.signature:
        raise SettingsError(
            "This feature is not the one the data was prepared with", where=plain, got=f"source {found.signature}",
            wanted=f"source {signature}", next_step="define it as it was, or prepare again",
        )  # fmt: skip
    return found


def check_finite(name: str, values: np.ndarray, first: int) -> None:
    """Raise SettingsError for values of a feature, from bar `first` on, that are not finite."""
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        advice = "divide by what cannot be 0, and fill with a neutral value"
        if bad[0] == len(values) - len(bad):
            advice = "a value that only the last bars lack looks ahead, as shift(-1) does: use earlier bars alone"
        raise SettingsError(
            "A feature is missing or infinite after its warm-up", where=get_custom_feature(name).name,
            got=f"{len(bad)} bars, first bar {first + bad[0]}", wanted="a number for each bar",
            next_step=advice,
        )  # fmt: skip


def compute_custom_feature(made: CustomFeature, bars: ResampledBars) -> np.ndarray:
    """Compute the function's values, float64[N]; raise SettingsError where it fails, or for another length."""
    try:
        values = np.asarray(made.function(_read_only(bars)), dtype=np.float64)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise SettingsError(
            "A feature of your own fails", where=f"{made.name}, {Path(last.filename).name} line {last.lineno}",
            got=f"{type(error).__name__}: {error}", next_step="correct it" if bars.volume is not None else
            "these bars have no volume: bars.volume is None. Leave this feature out, or give bars with volume",
        ) from error  # fmt: skip
    if values.shape != (len(bars),):
        raise SettingsError(
            "A feature returns one number a bar", where=made.name, got=f"shape {values.shape}", wanted=f"({len(bars)},)"
        )
    return values


def prove_custom_feature(made: CustomFeature, bars: ResampledBars) -> None:
    """Raise LookAheadError if a bar's value depends on later bars, or on more than `memory` bars.

    The bars are cut, at random and at the ends of sessions, and the bars after a cut are perturbed or lose the first:
    the values up to the cut must be the same bits. Single bars are perturbed, each bar in some pass: only the values of
    the `memory` bars from it on may change, so a look ahead in one row of a thousand is detected. And the last `memory`
    bars alone must give the value that all bars give.
    """
    random = seeded_generator(0, "custom feature", made.name)
    ends = np.flatnonzero(np.diff(bars.session)) + 1
    ends = random.permutation(ends[ends > made.memory])[: 2 * _PROOF_CUTS]
    cuts = np.unique(np.append(random.integers(made.memory + 1, len(bars) - 1, _PROOF_CUTS), ends)).tolist()
    # The shortest past comes first: a function that caches bars has not seen the future yet.
    heads = [compute_custom_feature(made, bars.part(0, cut)) for cut in cuts]
    whole = compute_custom_feature(made, bars)
    for cut, from_head in zip(cuts, heads, strict=True):
        after = np.arange(len(bars)) >= cut
        _raise_look_ahead(made, _unequal(from_head, whole[:cut]), f"the bars from {cut} on were cut off")
        for how, other in (
            ("were disturbed", _perturb_bars(bars, after, random)),
            ("lost the first", bars.map(partial(np.delete, obj=cut))),
        ):
            _raise_look_ahead(
                made, _unequal(compute_custom_feature(made, other)[:cut], whole[:cut]), f"the bars from {cut} on {how}"
            )
        _check_memory(made, bars, whole, cut)
    _perturb_single_bars(made, bars, whole, random)
    _raise_look_ahead(made, _unequal(compute_custom_feature(made, bars), whole), "the same bars came once more")


def _unequal(values: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the positions (int64) of unequal bits; missing values are equal."""
    return np.flatnonzero((values != before) & ~(np.isnan(values) & np.isnan(before)))


def _perturb_single_bars(
    made: CustomFeature, bars: ResampledBars, whole: np.ndarray, random: np.random.Generator
) -> None:
    spacing = made.memory + _ROWS_BEFORE
    number, allowed = np.arange(len(bars)), 1e-6 * _spread(whole)
    for offset in range(spacing):
        place = (number - offset) % spacing  # 0 is a disturbed bar
        values = compute_custom_feature(made, _perturb_bars(bars, place == 0, random))
        moved = ~np.isclose(values, whole, rtol=0.0, atol=allowed, equal_nan=True)
        untouched = (place >= made.memory) | (number < offset)
        _raise_look_ahead(
            made, np.flatnonzero(moved & untouched), "only later bars, or bars before its memory, changed"
        )


def _spread(values: np.ndarray) -> float:
    """Return the standard deviation of the finite values; 1 where they do not vary."""
    finite = values[np.isfinite(values)]
    return (float(finite.std()) if len(finite) else 0.0) or 1.0


def _raise_look_ahead(made: CustomFeature, wrong: np.ndarray, when: str) -> None:
    if len(wrong):
        raise LookAheadError(
            "A feature looks ahead", where=made.name, got=f"bar {wrong[0]} changed when {when}",
            wanted="the same value", next_step="use only the bar itself and earlier ones, or give a longer memory=",
        )  # fmt: skip


def _check_memory(made: CustomFeature, bars: ResampledBars, whole: np.ndarray, cut: int) -> None:
    alone, all_ = compute_custom_feature(made, bars.part(max(0, cut - made.memory), cut))[-1], whole[cut - 1]
    if not np.isclose(alone, all_, rtol=0.0, atol=1e-6 * _spread(whole), equal_nan=True):
        raise LookAheadError(
            "A feature needs more bars than its memory", where=made.name,
            got=f"{alone:.6g} at bar {cut - 1} from the last {made.memory} bars, {all_:.6g} from all",
            wanted="the same within 1e-6 of its deviation", next_step="give a longer memory=",
        )  # fmt: skip


def _perturb_bars(bars: ResampledBars, where: np.ndarray, random: np.random.Generator) -> ResampledBars:
    """Return the bars with other prices and volumes where bool[N] `where` is True."""
    factor = np.where(where, np.exp(random.normal(0.0, 0.5, len(bars))), 1.0)
    columns = {name: getattr(bars, name) for name in ("open", "high", "low", "close", "volume")}
    return replace(bars, **{name: column * factor for name, column in columns.items() if column is not None})


def custom_feature_proof_bars(count: int) -> ResampledBars:
    """Return five-minute bars of a random walk on a tick, 60 to a session: some absent, some flat."""
    random = seeded_generator(0, "custom feature", "bars")
    unchanged = random.random(count) < 0.03
    close = 100.0 + np.cumsum(np.where(unchanged, 0, random.integers(-3, 4, count))) * 0.25 + 0.002 * count
    close = np.maximum(close, 1.0)
    opens = np.append(close[0], close[:-1])
    wicks = np.where(unchanged, 0.0, random.integers(0, 3, (2, count)) * 0.25)
    day, place = np.divmod(np.arange(count), 60)
    absent = np.cumsum(random.random(count) < 0.03)
    place += absent - absent[60 * day]
    start = ((19_723 + day) * 1440 + 15 * 60 + place * 5) * MINUTE_NS
    high, low = np.maximum(opens, close) + wicks[0], np.minimum(opens, close) - np.minimum(wicks[1], 0.25)
    session = (19_723 + day).astype(np.int32)
    volume = np.where(unchanged, 0.0, np.floor(random.lognormal(4.0, 2.0, count)))
    return ResampledBars(5, start, start + 5 * MINUTE_NS, opens, high, low, close, volume, session, session)


def _read_only(bars: ResampledBars) -> ResampledBars:
    """Return read-only views of the bars, so that a function cannot change them."""

    def frozen(column: np.ndarray) -> np.ndarray:
        view = column.view(_CustomFeatureInput)
        view.flags.writeable = False
        return view

    return bars.map(frozen)


def _signature(function: Callable, memory: int) -> str:
    try:
        inspect.getsource(function)
    except (OSError, TypeError) as error:
        step = "define the function with def in a file or a notebook cell"
        raise SettingsError("The source of a feature cannot be read", where=str(function), next_step=step) from error
    return user_code_hash(function, memory)[:12]


# ---- calls that share no state ---------------------------------------------------------------------------------------


def clone_function_without_state(function: Callable) -> Callable:
    """Return a function of the same code that shares nothing a call may change; uncopyable values are shared.

    State between calls lies in a function's defaults, closure, attributes, in the globals it reads, or in those of the
    functions it calls. Files and packages that it writes to are shared.
    """
    return _copy_value(function, {}, {})


def _copy_value(value: Any, made: dict[int, tuple[Any, Any]], memo: dict) -> Any:
    """Return a copy of a value that a function reads.

    made : id -> (value, its copy), so that shared values stay shared, and alive: no other object gets their id
    memo : of `deepcopy`
    """
    if id(value) in made:
        return made[id(value)][1]
    again = partial(_copy_value, made=made, memo=memo)
    copied = value
    if isinstance(value, FunctionType):
        return _copy_function(value, made, again) if is_user_code(value) else value
    if isinstance(value, CellType):
        copied = CellType()
        made[id(value)] = value, copied
        with suppress(ValueError):  # nothing in it yet
            copied.cell_contents = again(value.cell_contents)
    elif isinstance(value, _lru_cache_wrapper):
        copied = lru_cache(**value.cache_parameters())(again(value.__wrapped__))
    elif not isinstance(value, ModuleType | type):
        with suppress(Exception):  # a lock or a connection is shared
            copied = copy.deepcopy(value, memo)
    made[id(value)] = value, copied
    return copied


def _copy_function(function: FunctionType, made: dict[int, tuple[Any, Any]], again: Callable) -> FunctionType:
    outside = function.__globals__
    _, found = made.setdefault(id(outside), (outside, dict(outside)))
    cells = tuple(map(again, function.__closure__ or ()))
    copied = FunctionType(function.__code__, found, function.__name__, None, cells)
    made[id(function)] = function, copied  # before what it reads, which may be itself
    read = globals_referenced_by_code(function.__code__) & outside.keys()
    found.update({name: again(outside[name]) for name in read})
    copied.__defaults__ = function.__defaults__ and tuple(map(again, function.__defaults__))
    copied.__kwdefaults__ = {name: again(one) for name, one in (function.__kwdefaults__ or {}).items()} or None
    copied.__dict__.update({name: again(one) for name, one in vars(function).items()})
    return copied
