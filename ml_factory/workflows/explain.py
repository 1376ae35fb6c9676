"""`explain`: what a network reads, from itself (TFT: Lim et al. 2021, section 7).

F features, T steps.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.errors import SettingsError
from ml_factory.inference.predict import TrainedModel
from ml_factory.lazy_module import LazyModule
from ml_factory.models.registry import find_model_spec
from ml_factory.result import Result
from ml_factory.storage.workspace import Workspace, check_symbol
from ml_factory.workflows import predictions
from ml_factory.workflows.prepared_dataset import dataset_input_reader, load_dataset

BATCH = 64  # rows of a pass through the network
MIDDLE = (10, 90)  # percentiles
plots = LazyModule("ml_factory.evaluation.plots")  # matplotlib comes with the extra train


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
    fitted = TrainedModel.from_state(artifact.load_state()).estimator
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
