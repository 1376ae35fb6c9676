"""Probabilities of feature rows from an ONNX graph, where neither torch nor a booster is installed."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.datasets.row_selection import mask_rows_with_full_window
from ml_factory.errors import SettingsError
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.lazy_module import import_module_or_explain

# What the graphs are written in.
OPSET, ML_OPSET, IR, ML = 20, 5, 10, "ai.onnx.ml"
INPUT, OUTPUT = "features", "probabilities"
TREES = "TreeEnsemble"


@dataclass(frozen=True)
class OnnxModels:
    """A graph of `inference.onnx_export`, with the calls of `FittedModels`.

    graph : its bytes.
    lookback : rows of the window it reads; 0 for single rows.
    threads : of onnxruntime.
    """

    graph: bytes
    lookback: int
    threads: int = 1

    @cached_property
    def session(self) -> Any:
        """The session of onnxruntime. Raises SettingsError where this onnxruntime cannot read the graph."""
        runtime = import_module_or_explain("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = self.threads, 3
        try:
            return runtime.InferenceSession(self.graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise SettingsError(
                "This onnxruntime cannot read the graph", where="onnx", got=" ".join(str(error).split())[:200],
                wanted="the version of the extra serve", next_step="pip install --upgrade onnxruntime",
            ) from error  # fmt: skip

    def predict_features(
        self, features: pd.DataFrame, *, segment: np.ndarray, rows: np.ndarray | None = None,
        batch: int = 1024,
    ) -> pd.DataFrame:  # fmt: skip
        """Return the probabilities of every row with a whole window; arguments as of `predict.predict_features`."""
        x_NF = np.ascontiguousarray(features.to_numpy(dtype=np.float32))
        rows = np.arange(len(x_NF), dtype=np.int64) if rows is None else rows
        if self.lookback:
            rows = rows[mask_rows_with_full_window(segment, rows, self.lookback)]
        p_N3 = np.empty((len(rows), 3))
        for first in range(0, len(rows), batch):
            p_N3[first : first + batch] = self.predict_rows(x_NF, rows[first : first + batch])
        return pd.DataFrame(p_N3, index=features.index[rows], columns=PROBABILITIES)

    def predict_rows(self, x_NF: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return probabilities, float64 (len(rows), 3), of some of the unscaled rows; each has its window before it."""
        if self.lookback:
            rows = rows[:, None] + np.arange(1 - self.lookback, 1)
        return self.session.run(None, {self.session.get_inputs()[0].name: x_NF[rows]})[0]
