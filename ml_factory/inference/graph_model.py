"""A trained model that predicts from its ONNX graph, where neither torch nor a booster is installed."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from ml_factory.errors import SettingsError
from ml_factory.inference.trained_model import TrainedModel
from ml_factory.lazy_module import import_module_or_explain
from ml_factory.models.base import softmax
from ml_factory.models.session_clock_offset import SessionClockOffset

INPUT, OUTPUT = "rows", "scores"
_BATCH = 1024  # rows whose windows are gathered at a time


@dataclass(frozen=True)
class GraphModel(TrainedModel):
    """A trained model whose class scores its graph gives.

    graph : bytes of `onnx_export.model_to_onnx`.
    """

    graph: bytes = b""

    @classmethod
    def of(cls, model: TrainedModel, graph: bytes) -> "GraphModel":
        """Return the model with its graph."""
        return cls(**{item.name: getattr(model, item.name) for item in fields(TrainedModel)}, graph=graph)

    @cached_property
    def estimator(self) -> Any:
        """The session of onnxruntime. Raises SettingsError where this onnxruntime cannot read the graph."""
        runtime = import_module_or_explain("onnxruntime")
        runtime.disable_telemetry_events()
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        try:
            return runtime.InferenceSession(self.graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise SettingsError(
                "This onnxruntime cannot read the graph", where=self.model_state["model"],
                got=" ".join(str(error).split())[:200], wanted="the version of the extra serve",
                next_step="pip install --upgrade onnxruntime",
            ) from error  # fmt: skip

    def predict_rows(self, scaled_NF: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if not len(rows):
            return super().predict_rows(scaled_NF, rows)
        parts = [rows[first : first + _BATCH] for first in range(0, len(rows), _BATCH)]
        return np.concatenate([self._predict_batch(scaled_NF, part) for part in parts])

    def _predict_batch(self, scaled_NF: np.ndarray, rows: np.ndarray) -> np.ndarray:
        windows = rows[:, None] + np.arange(1 - self.lookback, 1) if self.lookback else rows
        scores = self.estimator.run([OUTPUT], {INPUT: scaled_NF[windows]})[0].astype(np.float64)
        stored = self.model_state.get("offset")
        if stored is not None:
            offset = SessionClockOffset.from_dict(stored)
            scores += offset.log_class_shares(scaled_NF[rows, offset.column])
        return softmax(scores)
