"""Search barriers on training rows only: distance of the barriers and span of the volatility.

Off unless called. The objective is not a model's score, which would have seen the outcomes, but the information in the
labels: the entropy of the three classes, times the rows that remain after average uniqueness, each weighted by the part
of its barrier's distance that a round trip does not cost. Near barriers give more rows that do not overlap and cost
more; balance constraints exclude one-sided and all-neutral classes.

Optuna's TPE proposes (Akiba and others 2019; constraints as in Watanabe and Hutter 2023). Each trial has its own
sampler, seeded by (seed, trial number), over the trials before it: a search that was killed continues from its record
and ends the same.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace

import numpy as np
import pandas as pd

from ml_factory.data.resample import ResampledBars
from ml_factory.data.sessions import MarketSpec
from ml_factory.errors import SettingsError
from ml_factory.lazy_module import import_module_or_explain
from ml_factory.seeding import derive_seed
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.targets.barrier_search_spec import BarrierSearchRows, BarrierSearchSpec, SearchedLabelSpec
from ml_factory.targets.label_table import average_uniqueness
from ml_factory.targets.labels import LabelSpec, triple_barrier_labels


def search_barriers_on_training_rows(
    base: ResampledBars,
    minute_bars: ResampledBars | None,
    market: MarketSpec,
    train_rows: pd.DatetimeIndex,
    spec: BarrierSearchSpec,
    *,
    evaluated: pd.DatetimeIndex | None = None,
    record: dict | None = None,
    save: Callable[[dict], None] | None = None,
    session_close: np.ndarray | None = None,
) -> SearchedLabelSpec:
    """Return the label spec with the most informative labels of the training rows, among those that keep the balance.

    Parameters
    ----------
    base : the base bars
    minute_bars : the bars inside them, None where there are none
    market : the market
    train_rows : known_at of the training rows, which are rows of `base`
    spec : the search
    evaluated : known_at of the evaluated rows (validation, test). A trial uses only labels with label_end strictly
        before the next of them, and none that ends after the last training row where no evaluated row follows. Later
        bars are removed before the first trial
    record : passed to `save` by an earlier, unfinished call; the search continues from there
    save : called after every trial with the whole record (JSON)
    session_close : as in `triple_barrier_labels`

    Raises
    ------
    SettingsError : no trial keeps the balance (the message has the nearest one), a record of another search, rows that
        do not exist, or Optuna is absent
    """
    view = _View.of(base, minute_bars, market, train_rows, evaluated, session_close)
    key = fingerprint_json({"search": asdict(spec), "seen": asdict(view.seen), "market": market.to_dict()})
    done = _record_of(key, record)
    optuna = _optuna()
    study = optuna.create_study(direction="maximize")
    space = _search_space(optuna, spec)
    for old in done:
        study.add_trial(_to_optuna_trial(optuna, space, old))
    for number in range(len(done), spec.trials):
        study.sampler = optuna.samplers.TPESampler(seed=derive_seed("barriers", spec.seed, number))
        proposed = study.ask(space) if number else None
        params = spec.first_trial_parameters if proposed is None else proposed.params
        trial = {"number": number, "params": params, **view.evaluate(spec, spec.label_spec_of_trial(params))}
        if proposed is None:
            study.add_trial(_to_optuna_trial(optuna, space, trial))
        else:
            for name, broken in trial["broken"].items():
                proposed.set_constraint(name, broken)
            study.tell(proposed, trial["value"])
        done.append(trial)
        if save is not None:
            save({"key": key, "trials": list(done)})
    best = _best(spec, done)
    return SearchedLabelSpec(spec.label_spec_of_trial(best["params"]), spec, view.seen, best, len(done))


@dataclass(frozen=True)
class _View:
    """Data that a search may see: bars up to its last moment, its rows, and when each label must have ended."""

    base: ResampledBars
    minute_bars: ResampledBars | None
    market: MarketSpec
    rows: np.ndarray  # int64[R] ns, increasing
    by: np.ndarray  # int64[R] ns, the latest label_end allowed
    session_close: np.ndarray | None
    seen: BarrierSearchRows

    @classmethod
    def of(cls, base, minute_bars, market, train_rows, evaluated, session_close) -> "_View":
        rows = np.unique(pd.DatetimeIndex(train_rows).as_unit("ns").asi8)
        others = np.unique(pd.DatetimeIndex([] if evaluated is None else evaluated).as_unit("ns").asi8)
        unknown, shared = np.setdiff1d(rows, base.known_at), np.intersect1d(rows, others)
        if not len(rows) or len(unknown) or len(shared):
            raise SettingsError(
                "Barriers cannot be searched on these rows",
                where="train_rows",
                got=f"{len(rows)} rows, {len(unknown)} without a bar, {len(shared)} of them evaluated",
                wanted="rows of the base frame, none of which is evaluated",
                next_step="give labels.index[train] and evaluated=labels.index[test]",
            )
        by = np.append(others - 1, rows[-1])[np.searchsorted(others, rows)]
        until = int(by.max())
        seen = fingerprint_searched_bars(base, minute_bars, market, until)
        base, minute_bars = _up_to(base, until), None if minute_bars is None else _up_to(minute_bars, until)
        session_close = None if session_close is None else np.asarray(session_close)[: len(base)]
        moment = [pd.Timestamp(int(t), tz="UTC").isoformat() for t in (rows[0], rows[-1], until)]
        seen = BarrierSearchRows(*moment, len(rows), _digest(rows, by), seen)
        return cls(base, minute_bars, market, rows, by, session_close, seen)

    def evaluate(self, spec: BarrierSearchSpec, labels: LabelSpec) -> dict:
        """Evaluate one trial: value (bits a training row), constraint violations (above 0) and class shares."""
        table = triple_barrier_labels(
            self.base, self.minute_bars, labels, self.market, session_close=self.session_close
        )
        known_at = table.index.as_unit("ns").asi8
        at = np.minimum(np.searchsorted(self.rows, known_at), len(self.rows) - 1)
        ends = pd.DatetimeIndex(table["label_end"]).as_unit("ns").asi8
        allowed = (self.rows[at] == known_at) & (ends <= self.by[at])
        table = table[allowed & (table["barrier"] != "ambiguous").to_numpy()]
        if not len(table):
            return {"value": 0.0, "broken": {"neutral": 1.0, "lean": 1.0}, "rows": 0}
        sides = table["label"].to_numpy()
        short, neutral, long = (float((sides == side).mean()) for side in (-1, 0, 1))
        low, high = spec.neutral
        broken = {"neutral": max(low - neutral, neutral - high), "lean": abs(long - short) - spec.lean}
        value = self._information(table, labels) / len(self.rows)
        shares = {"rows": len(table), "short": short, "neutral": neutral, "long": long}
        return {"value": value, "broken": broken, **shares}

    def _information(self, table: pd.DataFrame, labels: LabelSpec) -> float:
        """Compute the entropy of the classes in bits, times the non-overlapping rows, net of round-trip costs."""
        entry = table["entry_bar"].to_numpy()
        unique = average_uniqueness(entry + 1, table["exit_bar"].to_numpy(), len(self.base))
        cost = np.log1p(labels.cost_ticks * (self.market.tick or 0.0) / self.base.close[entry])
        distance = 0.5 * (table["up"].to_numpy() + table["down"].to_numpy())
        shares = np.bincount(table["label"].to_numpy() + 1, unique, minlength=3) / unique.sum()
        entropy = -sum(p * math.log2(p) for p in shares.tolist() if p > 0)
        return float(entropy * (unique * np.maximum(1 - cost / distance, 0)).sum())


def _up_to(frame: ResampledBars, until: int) -> ResampledBars:
    """Return the bars known by `until`."""
    count = int(np.searchsorted(frame.known_at, until, side="right"))
    arrays = {f.name: getattr(frame, f.name) for f in fields(frame)}
    return replace(frame, **{name: a[:count] for name, a in arrays.items() if isinstance(a, np.ndarray)})


def fingerprint_searched_bars(
    base: ResampledBars, minute_bars: ResampledBars | None, market: MarketSpec, until: int
) -> str:
    """Return the hex digest of the bars known by `until` (ns) and of the market's facts used for labels.

    The same whatever bars follow, so that a label spec can be matched with the data that it was searched on.
    """
    parts = [f"{market.calendar} {market.tick}".encode()]
    for frame in (base, minute_bars):
        stop = 0 if frame is None else int(np.searchsorted(frame.known_at, until, side="right"))
        names = ("known_at", "open", "high", "low", "close", "segment") if stop else ()
        parts += [np.ascontiguousarray(getattr(frame, name)[:stop]) for name in names]
    return _digest(*parts)


def _digest(*parts: np.ndarray | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _search_space(optuna, spec: BarrierSearchSpec) -> dict:
    """Return Optuna's distributions; k on a log scale."""
    sides = ("k",) if spec.symmetric else ("k_up", "k_down")
    ks = {name: optuna.distributions.FloatDistribution(*spec.k, log=True) for name in sides}
    return ks | {"sigma_span": optuna.distributions.CategoricalDistribution(spec.sigma_spans)}


def _to_optuna_trial(optuna, space: dict, trial: dict):
    """Convert a trial of the record to an Optuna trial."""
    return optuna.trial.create_trial(
        params=trial["params"], distributions=space, value=trial["value"], constraints=trial["broken"]
    )


def _record_of(key: str, record: dict | None) -> list[dict]:
    if record is None:
        return []
    if record.get("key") != key:
        raise SettingsError(
            "The record belongs to another search",
            where="record",
            got=str(record.get("key"))[:10],
            wanted=f"{key[:10]}, that of these settings, bars and rows",
            next_step="leave record out to start again",
        )
    return list(record["trials"])


def _best(spec: BarrierSearchSpec, trials: list[dict]) -> dict:
    """Return the best trial without violations, the first of equals."""
    kept = [trial for trial in trials if max(trial["broken"].values()) <= 0]
    if kept:
        return max(kept, key=lambda trial: trial["value"])
    near = min(trials, key=lambda trial: sum(max(broken, 0) for broken in trial["broken"].values()))
    shares = ", ".join(f"{name} {near.get(name, 0):.1%}" for name in ("short", "neutral", "long"))
    raise SettingsError(
        f"None of {len(trials)} trials keeps the balance asked for",
        where=f"barriers for {spec.labels.horizon} bars",
        got=f"{shares} at the nearest, with {near['params']}",
        wanted=f"neutral {spec.neutral[0]:.0%} to {spec.neutral[1]:.0%}, |long - short| at most {spec.lean:.0%}",
        next_step="widen neutral, lean or k, or use more trials; without a search the given barriers stand",
    )


def _optuna():
    """Import Optuna on demand, with its log messages off."""
    optuna = import_module_or_explain("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
