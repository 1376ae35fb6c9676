"""Backtest of a finished model: its stored out-of-sample predictions as trades, against simple strategies."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.data.bar_files import read_bars_table
from ml_factory.data.resample import ResampledBars, resample_bars, segments_between_rolls
from ml_factory.errors import SettingsError
from ml_factory.evaluation.backtest.contracts import ContractSpec, contract_spec
from ml_factory.evaluation.backtest.simulation import Backtest, CostSpec, TradingRule, session_gains
from ml_factory.evaluation.backtest.simulation import run as run_backtest
from ml_factory.evaluation.findings import cost_finding, finding_lines, sort_findings
from ml_factory.evaluation.luck import (
    deflated_sharpe,
    describe_lacking_sessions,
    min_track_record,
    probabilistic_sharpe,
    sharpe_moments,
)
from ml_factory.inference.predict import PredictionSpec
from ml_factory.lazy_module import LazyModule
from ml_factory.result import Result
from ml_factory.runs import count_trials
from ml_factory.storage.files import files, stored_path
from ml_factory.storage.json_values import fingerprint_json
from ml_factory.storage.workspace import Workspace, check_symbol, push_workspace_on_exit, require_raw_bars
from ml_factory.workflows.evaluation import prepared_dataset_baselines
from ml_factory.workflows.predictions import find_artifact_to_predict, load_predictions
from ml_factory.workflows.prepared_dataset import PreparedDataset, load_dataset

plots = LazyModule("ml_factory.evaluation.plots")  # matplotlib comes with the extra train
SHIFTS = 20
LEAST_EDGES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
FEWEST_TRADES = 30  # on validation rows, for a least edge to be chosen
SHOWN = [
    "net", "net_ticks", "sharpe", "sharpe_error", "drawdown", "trades", "break_even_ticks", "cost_ticks",
]  # fmt: skip


@push_workspace_on_exit
def backtest(
    workspace: Workspace | str | Path, symbol: str, horizon: int, model: str, *, split: str = "test",
    contract: ContractSpec | None = None, costs: CostSpec | None = None, rule: TradingRule | None = None,
    run: str = "",
) -> Result:  # fmt: skip
    """Trade the stored predictions of a finished model on the base bars, and simple strategies on the same rows.

    split : "test", or "validation", whose figures flatter since the model was chosen on it.
    contract : money facts; default: those of the symbol, with the tick of the prepared market, whose calendar holds.
    rule : default: `TradingRule`; without a horizon it has the labels', without a least edge that which earned most on
        validation rows. One that is given counts as a trial of the test rows.
    run : run id of the model; "" for the newest.
    Writes the trades (CSV) and the facts (JSON) into the run's folder: trades_path, path.
    Raises SettingsError for training rows and for meta-labels, NotPreparedError.

    The result has

    strategies : a row per strategy, columns of `backtest_metrics`: the model (`own`); always_long, flat, last_move,
        clock, and `random`, the mean over random shifts in time of the model's own forecasts: its sides, its turnover,
        no skill.
    least_edges : of the model on validation rows, a row per least edge: trades, net, break_even_ticks, cost_ticks, and
        chosen, where the rule has none.
    luck : of the model's sessions: `trials`, as of `count_trials`; `probabilistic_sharpe`, the probability that the
        true Sharpe ratio is above 0; `deflated_sharpe`, the same after so many trials without skill; `sessions_needed`
        for 95 %, `min_track_record`. NaN where sessions are too few for it; `lacking` says what they lack.
    costs, rule, by_hand : what was traded; by_hand where the rule was given.
    first, last, quick : period of the rows; True for the model of a QUICK run.
    frame, history : trades of the model and its equity, as of `Backtest`.
    curves : equity at the end of each session of the model, always_long, clock and shifted (the mean of the shifts,
        between shifted_low and shifted_high); `drawdown`, the model's deepest of the session, below 0.
    net_sentence, rule_sentence, luck_sentence, findings : what they say.
    """
    started, workspace = time.perf_counter(), Workspace(workspace)
    if split not in ("test", "validation"):
        raise SettingsError("A backtest is out of sample", where="split", got=split, wanted="test or validation")
    data = load_dataset(workspace, symbol, horizon)
    if data.kind == "meta":
        raise SettingsError("A bet of meta-labels has no side of its own", where="backtest", wanted="other labels")
    artifact = find_artifact_to_predict(workspace, check_symbol(symbol), horizon, model, run)
    stored = load_predictions(workspace, symbol, horizon, model, artifact.facts["run_id"])
    known = stored[stored["split"] == split]
    market = data.settings["market"]
    spec = replace(contract or contract_spec(symbol, tick=market["tick"]), calendar=market["calendar"])
    costs, by_hand = costs or CostSpec(), rule is not None
    rule = rule or TradingRule()
    rule = replace(rule, horizon=rule.horizon or horizon)
    base = _base_bars(workspace, data)
    forecasts = _with_barriers(data, stored)
    edges = _trade_least_edges(base, forecasts[forecasts["split"] == "validation"], spec, costs, rule)
    chosen = rule.least_edge is None
    if chosen:
        rule = replace(rule, least_edge=float(edges.loc[edges["chosen"], "least_edge"].iloc[0]))
    bars = _bars_of_rows(base, known.index, horizon)
    tested = {
        name: run_backtest(bars, table, spec, costs=costs, rule=rule)
        for name, table in ({model: known} | _baseline_sides(data, known.index)).items()
        for table in [_with_barriers(data, table)]
    }
    shifted = _run_shifted(bars, _with_barriers(data, known), spec, costs, rule)
    rows = [{"strategy": name, **one.metrics} for name, one in tested.items()]
    rows.append({"strategy": "random", **pd.DataFrame([one.metrics for one in shifted]).mean().to_dict()})
    traded: Backtest = tested[model]
    own, lacking = pd.Series(traded.metrics), describe_lacking_sessions(traded.equity, traded.trades)
    folder = stored_path(workspace.results / symbol, artifact.facts["run_id"], inside=workspace.results)
    name = "backtest" if split == "test" else f"backtest-{split}"
    name += f"-rule-{fingerprint_json(asdict(rule))[:8]}" if by_hand else ""
    trades_path, path = folder / f"{name}.csv", folder / f"{name}.json"
    files.write(trades_path, traded.trades.to_csv(index=False).encode())
    files.write_json(path, {})  # counts as a trial from here on
    luck = _luck_of_sessions(traded, count_trials(workspace, symbol), lacking)
    curves, strategies = _session_curves(model, tested, shifted), pd.DataFrame(rows)
    reported = {
        "net_sentence": _net_sentence(own), "rule_sentence": _rule_sentence(own, rule, costs, chosen),
        "luck_sentence": luck_sentence(own, luck, lacking),
        "findings": sort_findings([cost_finding(own["net"], own["break_even_ticks"], own["cost_ticks"])]),
    }  # fmt: skip
    holes, rolls, trades = (int(own[column]) for column in ("hole_exits", "roll_exits", "trades"))
    ended = f"{holes:,} of {trades:,} trades ended at the last bar before missing ones, {rolls:,} before a roll."
    seconds = time.perf_counter() - started
    table = strategies.set_index("strategy")[SHOWN].round(2).T
    lines = [
        *table.to_string().splitlines(), *([ended] if holes + rolls else []), reported["luck_sentence"],
        reported["rule_sentence"], f"trades {trades_path}", f"facts {path}",
    ]  # fmt: skip
    first = f"{model} traded on the {split} rows of {symbol} after costs, {seconds:.1f} s"
    result = Result(
        [first, *(f"  {line}" for line in lines), *finding_lines(reported["findings"])],
        figure=lambda: plots.plot_equity(curves, model),
        also={"own": own, "frame": traded.trades, "history": traded.equity, "curves": curves, **reported},
        symbol=symbol, horizon=horizon, model=model, run_id=artifact.facts["run_id"], split=split,
        contract=dict(vars(spec)), strategies=strategies, luck=luck, lacking=lacking, least_edges=edges,
        costs=asdict(costs), rule=asdict(rule), by_hand=by_hand, first=known.index[0].isoformat(),
        last=known.index[-1].isoformat(), quick=artifact.facts["run"]["quick"], trades_path=trades_path, path=path,
        seconds=seconds,
    )  # fmt: skip
    files.write_json(path, result.to_dict() | {"luck_sentence": reported["luck_sentence"]})
    return result


def _net_sentence(own: pd.Series) -> str:
    """Return the net result after costs, in a sentence."""
    return (
        f"{own['net']:+,.0f} in the contract's currency, in {own['trades']:,.0f} trades of one contract; they "
        f"break even at {own['break_even_ticks']:.2f} ticks a round trip and paid {own['cost_ticks']:.2f}."
    )


def _rule_sentence(own: pd.Series, rule: TradingRule, costs: CostSpec, chosen: bool) -> str:
    """Return the least edge and the costs, and how they were chosen, in a sentence."""
    how = "chosen on validation rows" if chosen else "a rule chosen by hand"
    fill = costs.ticks_of_fill
    return (
        f"Trades open where |p_long - p_short| is {rule.least_edge:g} or more ({how}); each fill pays "
        f"{fill:g} tick{'s' * (fill != 1)}, commission and fees: {own['cost_ticks']:.2f} ticks a round trip."
    )


def luck_sentence(own: Mapping[str, float], luck: Mapping[str, float], lacking: str) -> str:
    """Return the verdict on the net result after costs and trials, in a sentence."""
    trials, deflated, needed = int(luck["trials"]), luck["deflated_sharpe"], luck["sessions_needed"]
    tried = f"{trials} trial{'s' * (trials != 1)} on this symbol"
    if not own["net"] > 0:
        return f"No edge after costs: nothing is left ({tried})."
    if lacking:
        return f"No verdict: not enough sessions: {lacking} ({tried})."
    if deflated > 0.95:
        return f"A Sharpe ratio above 0 is {deflated:.1%} probable after {tried}, on {own['sessions']:.0f} sessions."
    enough = own["sessions"] < needed < 1e6
    more = f"; at this ratio, {needed:,.0f} would show one of a single trial" if enough else ""
    chance = f"a true Sharpe ratio above 0 is {deflated:.0%} probable"
    return f"Not certain after costs: {chance} after {tried}, on {own['sessions']:.0f} sessions{more}."


def _trade_least_edges(
    base: ResampledBars, known: pd.DataFrame, spec: ContractSpec, costs: CostSpec, rule: TradingRule
) -> pd.DataFrame:
    """Trade validation rows with each least edge; `chosen` is the one that earned most in enough trades, else 0."""
    bars = _bars_of_rows(base, known.index, rule.horizon)
    shown, rows = ["trades", "net", "break_even_ticks", "cost_ticks"], []
    for edge in LEAST_EDGES:
        found = run_backtest(bars, known, spec, costs=costs, rule=replace(rule, least_edge=edge)).metrics
        rows.append({"least_edge": edge} | {name: found[name] for name in shown})
    table = pd.DataFrame(rows)
    net = table["net"].where(table["trades"] >= FEWEST_TRADES)
    return table.assign(chosen=table.index == (net.idxmax() if net.notna().any() else 0))


def _session_curves(model: str, tested: Mapping[str, Backtest], shifted: Sequence[Backtest]) -> pd.DataFrame:
    """Return the curves of `Result`: index known_at of each session's last bar."""
    last = ~tested[model].equity["session"].duplicated(keep="last")
    curves = {name: tested[name].equity.loc[last, "equity"] for name in (model, "always_long", "clock")}
    others = np.stack([one.equity.loc[last, "equity"].to_numpy() for one in shifted])
    own, session = tested[model].equity["equity"], tested[model].equity["session"]
    below = (own - own.clip(lower=0).cummax()).groupby(session, sort=False).min().to_numpy()
    found = {"shifted": others.mean(0), "shifted_low": others.min(0), "shifted_high": others.max(0), "drawdown": below}
    return pd.DataFrame(curves).assign(**found)


def _luck_of_sessions(tested: Backtest, trials: int, lacking: str) -> dict[str, float]:
    ratio, skewness, kurtosis, count = sharpe_moments(session_gains(tested.equity))
    if lacking:
        ratio = np.nan
    shape = {"skewness": skewness, "kurtosis": kurtosis}
    return {
        "trials": trials, "probabilistic_sharpe": probabilistic_sharpe(ratio, count, **shape),
        "deflated_sharpe": deflated_sharpe(ratio, count, trials, **shape),
        "sessions_needed": min_track_record(ratio, **shape),
    }  # fmt: skip


def _base_bars(workspace: Workspace, data: PreparedDataset) -> ResampledBars:
    """Return the base bars of the symbol's raw file."""
    spec = PredictionSpec.from_stored(data.settings)
    source = require_raw_bars(workspace, data.symbol)
    raw, _ = spec.check_bars(read_bars_table(source), where=source)
    return resample_bars(raw, spec.market, spec.features.base_minutes)


def _bars_of_rows(base: ResampledBars, index: pd.DatetimeIndex, horizon: int) -> pd.DataFrame:
    """Return the base bars from the first of these rows to the horizon of the last; `contract` counts the rolls."""
    moments = index.as_unit("ns").asi8
    first = int(np.searchsorted(base.known_at, moments[0]))
    part = slice(first, int(np.searchsorted(base.known_at, moments[-1])) + horizon + 2)
    columns: Mapping[str, np.ndarray] = {name: getattr(base, name)[part] for name in ("open", "high", "low", "close")}
    start = pd.DatetimeIndex(base.start[part].view("M8[ns]"), tz="UTC", name="start")
    bars = pd.DataFrame(dict(columns), index=start).assign(segment=base.segment[part])
    bars["known_at"] = pd.DatetimeIndex(base.known_at[part].view("M8[ns]"), tz="UTC")
    return bars.assign(contract=segments_between_rolls(base)[part])


def _with_barriers(data: PreparedDataset, table: pd.DataFrame) -> pd.DataFrame:
    """Return forecasts with the distances of their labels' barriers, which are known with the row."""
    if not {"up", "down"} <= set(data.labels.columns):
        return table
    return table.assign(**{name: data.labels.loc[table.index, name] for name in ("up", "down")})


def _baseline_sides(data: PreparedDataset, index: pd.DatetimeIndex) -> dict[str, pd.DataFrame]:
    """Return the forecasts of the simple strategies on these rows; the clock's shares are of training rows alone."""
    rows = data.labels.index.get_indexer(index)
    clock = prepared_dataset_baselines(data, data.splits["train"], rows)["clock"]
    sides = {
        "always_long": np.ones(len(rows)), "flat": np.zeros(len(rows)),
        "last_move": np.sign(np.nan_to_num(data.last_move[rows])),
    }  # fmt: skip
    return {name: pd.DataFrame({"side": side}, index=index) for name, side in sides.items()} | {
        "clock": pd.DataFrame({"p_short": clock[:, 0], "p_long": clock[:, 2]}, index=index)
    }


def _run_shifted(
    bars: pd.DataFrame, known: pd.DataFrame, spec: ContractSpec, costs: CostSpec, rule: TradingRule
) -> list[Backtest]:
    """Trade circular shifts of the forecasts by a random number of rows.

    The same sides follow each other, so the turnover stays, which a shuffle of single rows would multiply.
    """
    found, rng, names = [], np.random.default_rng(0), ["p_short", "p_long"]
    for shift in rng.integers(1, max(len(known), 2), SHIFTS):
        shifted = known.assign(**{name: np.roll(known[name].to_numpy(), shift) for name in names})
        found.append(run_backtest(bars, shifted, spec, costs=costs, rule=rule))
    return found
