"""Views of prepared data (findings in the bars, frames of a row, families, certificate, splits), and of a network."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.data.io import load_bars
from ml_factory.data.quality import find_gaps
from ml_factory.data.resample import apply_roll_adjustment, asof_rows, known_at_index, resample_bars
from ml_factory.data.sessions import MarketSpec, assign_sessions
from ml_factory.datasets.store import DatasetStore, open_current_store
from ml_factory.errors import SettingsError
from ml_factory.features import custom
from ml_factory.features.build import FAMILIES, FeatureSpec, FeatureStream
from ml_factory.features.engine import column_names
from ml_factory.inference.predict import TrainedModel
from ml_factory.lazy_module import LazyModule
from ml_factory.leakage.certificate import Certificate, require_certificate
from ml_factory.models.registry import build_model_from_state, find_model_spec
from ml_factory.result import Result
from ml_factory.settings import certified_code_hash
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.workflows import predictions
from ml_factory.workflows.prepared_dataset import dataset_input_reader, load_dataset
from ml_factory.workflows.prove import stored_data_settings

PROOF_BARS, STREAM_BARS = 50_000, 50_000
BATCH = 64  # rows of a pass through the network
MIDDLE = (10, 90)  # percentiles
data_plots = LazyModule("ml_factory.evaluation.data_plots")  # matplotlib comes with the extra train
plots = LazyModule("ml_factory.evaluation.plots")


# ---- bars and frames -----------------------------------------------------------------------------------------------


def bar_findings_table(store: DatasetStore) -> pd.DataFrame:
    """List the findings in the raw bars: kind, severity, rows (how many), which of them, message."""
    columns = ["kind", "severity", "count", "which", "message"]
    return pd.DataFrame(store.facts["bars"]["findings"], columns=columns).rename(columns={"count": "rows"})


def gap_table(workspace: Workspace | str | Path, symbol: str) -> pd.DataFrame:
    """List every gap of the bars: index, the bar after it; minutes, its length; kind, its reason."""
    bars, market, _ = _bars_of(workspace, symbol)
    gaps = find_gaps(bars.index.as_unit("ns").asi8, market.calendar, market.bar_minutes)
    return pd.DataFrame({"minutes": gaps.length, "kind": gaps.kind}, index=bars.index[gaps.row])


def draw_gaps(workspace: Workspace | str | Path, symbol: str):
    """Plot every gap of the bars: time, length and reason."""
    return data_plots.plot_gaps(gap_table(workspace, symbol), title=f"{symbol}: every gap, and the reason for it")


def frame_alignment(workspace: Workspace | str | Path, symbol: str):
    """Plot the coarse bars that one base row may read: the newest of each frame that is complete at its `known_at`.

    The row is two thirds into the middle session, where every frame is mid-way.
    """
    bars, market, spec = _bars_of(workspace, symbol)
    base, *coarse = (resample_bars(bars, market, minutes) for minutes in (spec.base_minutes, *spec.frames))
    session = np.flatnonzero(base.session == base.session[len(base) // 2])
    visible = [asof_rows(base.known_at, frame.known_at) for frame in coarse]
    return data_plots.plot_frame_alignment(base, coarse, visible, int(session[2 * len(session) // 3]))


# ---- features ------------------------------------------------------------------------------------------------------


def feature_families(workspace: Workspace | str | Path, symbol: str) -> pd.DataFrame:
    """List the feature families: columns on the base frame, columns on the coarse frames, and some of their names."""
    store = open_current_store(workspace, symbol)
    spec, market = stored_data_settings(store).features, MarketSpec.from_dict(store.facts["market"])
    rows = {}
    for name in spec.families:
        own, coarse = (column_names(FAMILIES[name], market, on_coarse) for on_coarse in (False, True))
        if own:
            rows[name] = (len(own), len(coarse) * len(spec.frames), ", ".join(own[:: max(1, len(own) // 4)][:4]))
    for name in spec.custom:
        rows[name.partition("#")[0]] = (1, 0, "your own")
    return pd.DataFrame.from_dict(rows, orient="index", columns=["base", "coarse", "such as"]).rename_axis("family")


def try_feature(workspace: Workspace | str | Path, symbol: str, name: str) -> pd.Series:
    """Compute a custom feature (`features.custom.feature`) on the symbol's base bars, index known_at.

    It is proved on the newest 50,000 of these bars first. Raises LookAheadError naming the bar that changed.
    """
    bars, market, spec = _bars_of(workspace, symbol)
    base, made = apply_roll_adjustment(resample_bars(bars, market, spec.base_minutes)), custom.get_custom_feature(name)
    custom.prove_custom_feature(made, base.part(-PROOF_BARS, len(base)))
    return pd.Series(custom.compute_custom_feature(made, base), index=known_at_index(base.known_at), name=name)


def replay(workspace: Workspace | str | Path, symbol: str) -> pd.DataFrame:
    """Stream the rows of the last session as from a live feed: a `FeatureStream` that gets its bars one by one.

    They equal the rows of `load_features` bit for bit; custom features within 1e-6 of their standard deviation.
    """
    bars, market, spec = _bars_of(workspace, symbol)
    session = assign_sessions(bars.index.as_unit("ns").asi8, market.calendar).id
    last, stream = int(np.searchsorted(session, session[-1])), FeatureStream(market, spec)
    for first in range(0, last, STREAM_BARS):
        stream.push(bars.iloc[first : min(first + STREAM_BARS, last)])
    pieces = [stream.push(bars.iloc[bar : bar + 1]) for bar in range(last, len(bars))]
    index = known_at_index(np.concatenate([piece.known_at for piece in pieces]))
    return pd.DataFrame(np.concatenate([piece.values for piece in pieces]), index=index, columns=stream.names)


# ---- the proof -----------------------------------------------------------------------------------------------------


def certificate(workspace: Workspace | str | Path, symbol: str, horizon: int) -> Certificate:
    """Return the certificate that nothing looks ahead. Raises NotPreparedError without one, naming the command."""
    store = open_current_store(workspace, symbol)
    return require_certificate(
        store.folder.parent, store.facts["symbol"], horizon, subject=store.fingerprint, code=certified_code_hash()
    )


def draw_cuts(workspace: Workspace | str | Path, symbol: str, horizon: int):
    """Plot the moments after which the newest proof disturbed the future, on the price."""
    proof = certificate(workspace, symbol, horizon)
    close = open_current_store(workspace, symbol).load_row_facts()["close"]
    title = f"{symbol}: where the proof cut ({proof.describe()})"
    return data_plots.plot_cuts(close, [(pd.Timestamp(moment), why) for moment, why in proof.cuts], title=title)


# ---- splits --------------------------------------------------------------------------------------------------------


def split_figure(store: DatasetStore, horizon: int):
    """Plot the chronological split of one horizon on the price."""
    labels, splits = store.load_labels(horizon), store.load_splits(horizon)
    return data_plots.plot_split(
        store.load_row_facts()["close"],
        {name: labels.index[rows] for name, rows in splits.items()},
        title=f"{store.facts['symbol']}: the split for horizon {horizon}, drawn on the price",
    )


def draw_split(workspace: Workspace | str | Path, symbol: str, horizon: int):
    """Plot the chronological split of the symbol's prepared data."""
    return split_figure(open_current_store(workspace, symbol), horizon)


def _bars_of(workspace: Workspace | str | Path, symbol: str) -> tuple[pd.DataFrame, MarketSpec, FeatureSpec]:
    """Return the checked bars that the current data set was prepared from, its market, and settings of its features."""
    store = open_current_store(workspace, symbol)
    market, settings = MarketSpec.from_dict(store.facts["market"]), stored_data_settings(store)
    bars, _ = load_bars(Workspace(workspace), store.facts["symbol"], settings.bars, market=market)
    return bars, market, settings.features


# ---- a network (TFT: Lim et al. 2021, section 7); F features, T steps ----------------------------------------------


def explain(
    workspace: Workspace | str | Path, symbol: str, horizon: int, model: str, *, rows: int = 512, run: str = ""
) -> Result:
    """Explain the newest finished network of the prepared data on validation rows.

    rows : number of evenly spaced validation rows, at most.
    run : run id; "" for the newest on this data.
    Raises SettingsError for a model without windows, NotPreparedError where none is finished.

    The result has, None and [] where the network has no explanation,

    shares : index feature; share of the variable selection (sum 1), low and high (percentiles 10 and 90 of the rows),
        largest first.
    attention : index bars_back; attention, low, high.
    rows : number of rows that were explained.
    pictures : two figures, variables and attention over time.
    """
    started, workspace, symbol = time.perf_counter(), Workspace(workspace), check_symbol(symbol)
    if not find_model_spec(model).windowed:
        raise SettingsError(
            "Only networks have an explanation", where="model", got=model, wanted="a network",
            next_step="use the importances of the result of train()",
        )  # fmt: skip
    data = load_dataset(workspace, symbol, horizon)
    artifact = predictions.find_artifact_to_predict(workspace, symbol, horizon, model, run, data.fingerprint)
    fitted = build_model_from_state(TrainedModel.from_state(artifact.load_state()).model_state)
    explain_method = getattr(fitted.network, "explain", None)
    facts = {"symbol": symbol, "horizon": horizon, "model": model}
    if explain_method is None:
        none = {"rows": 0, "shares": None, "attention": None, "seconds": time.perf_counter() - started}
        return Result([f"{model} has no explanation; MODEL = 'tft' has one"], also={"pictures": []}, **facts, **none)
    usable = data.splits["validation"][data.full_window_mask(fitted.lookback)[data.splits["validation"]]]
    some = usable[np.unique(np.linspace(0, len(usable) - 1, min(rows, len(usable))).astype(np.int64))]
    windows = dataset_input_reader(data, data.scaler, fitted)(some)
    share_NF, attention_NT = _shares_and_attention(explain_method, windows)
    shares = _mean_and_middle(share_NF, "share", pd.Index(data.features.columns, name="feature"))
    shares = shares.sort_values("share", ascending=False, kind="stable")
    attention = _mean_and_middle(
        attention_NT, "attention", pd.RangeIndex(fitted.lookback - 1, -1, -1, name="bars_back")
    )
    selects = ", ".join(f"{name} {share:.1%}" for name, share in shares["share"].head(5).items())
    seconds, newest = time.perf_counter() - started, attention.loc[0, "attention"]
    line = (
        f"{model} on {len(some):,} validation rows of {symbol}: selects {selects}; "
        f"{newest:.0%} of its attention is on the newest of {len(attention)} bars ({seconds:.1f} s)"
    )
    pictures = [plots.plot_variable_shares(shares), plots.plot_attention(attention)]
    return Result(
        [line], also={"pictures": pictures}, **facts, rows=len(some), shares=shares, attention=attention,
        seconds=seconds,
    )  # fmt: skip


def _shares_and_attention(explain_method: Callable, windows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return (variable shares (N, F), mean over the window's steps; attention of the answer (N, T))."""
    pieces = []
    for first in range(0, len(windows), BATCH):
        part = windows.take(np.arange(first, min(first + BATCH, len(windows))))
        shares_BTF, attention_BT = explain_method(part.gather(np.arange(len(part))))
        pieces.append((shares_BTF.mean(dim=1).numpy(), attention_BT.numpy()))
    share, attention = zip(*pieces, strict=True)
    return np.concatenate(share), np.concatenate(attention)


def _mean_and_middle(values_NX: np.ndarray, name: str, index: pd.Index) -> pd.DataFrame:
    low, high = np.percentile(values_NX, MIDDLE, axis=0)
    mean = values_NX.mean(axis=0, dtype=np.float64)
    return pd.DataFrame({name: mean, "low": low, "high": high}, index=index)
