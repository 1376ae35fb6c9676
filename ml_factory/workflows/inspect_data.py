"""Views of prepared data: findings in the bars, frames of a row, families, certificate, splits."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.data.io import load_bars
from ml_factory.data.quality import find_gaps
from ml_factory.data.resample import apply_roll_adjustment, asof_rows, known_at_index, resample_bars
from ml_factory.data.sessions import MarketSpec, assign_sessions
from ml_factory.datasets.store import DatasetStore, open_current_store
from ml_factory.features import custom
from ml_factory.features.build import FAMILIES, FeatureSpec, FeatureStream
from ml_factory.features.engine import column_names
from ml_factory.lazy_module import LazyModule
from ml_factory.leakage.certificate import Certificate, require_certificate
from ml_factory.settings import certified_code_hash
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.prepared_dataset import stored_data_settings

PROOF_BARS, STREAM_BARS = 50_000, 50_000
data_plots = LazyModule("ml_factory.evaluation.data_plots")  # matplotlib comes with the extra train


# ---- bars and frames -----------------------------------------------------------------------------------------------


def bar_findings_table(store: DatasetStore) -> pd.DataFrame:
    """List the findings in the raw bars: kind, severity, rows (how many), which of them, message."""
    columns = ["kind", "severity", "count", "which", "message"]
    return pd.DataFrame(store.facts["bars"]["findings"], columns=columns).rename(columns={"count": "rows"})


def label_balance_table(store: DatasetStore, horizons: Sequence[int]) -> pd.DataFrame:
    """Count the labels of each class, and the ambiguous ones: a row for each horizon."""
    balance = {horizon: store.facts["horizons"][str(horizon)]["balance"] for horizon in horizons}
    return pd.DataFrame(balance).T.rename_axis("horizon")


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
