"""Gate of ONNX graphs on real rows: models and a stack trained on a file's newest bars, a line of numbers each.

    python -m benchmarks.onnx_gate --data ES.parquet --symbol ES [--models xgboost lstm] [--bars 120000]

One JSON line a model: `rows` of the prepared data, spread over all its splits (at most 10,000), `difference`, the
largest of a probability on them (limit 1e-5; the likeliest class and every leaf of a tree are equal on all of them),
`threshold_rows`, further rows on, above and below a threshold of a tree or missing there, with equal leaves, which come
to `nodes_reached` of the `nodes_tried` inner nodes, of `nodes`, and `mb` of the graph. A graph that fails ends the
program with the worst row. The stack is of xgboost, linear and lstm.
"""

import argparse
import tempfile
import time
from pathlib import Path

import pandas as pd

from benchmarks.measure import digits, print_json
from ml_factory import pipeline
from ml_factory.inference.onnx_export import onnx_of_models
from ml_factory.inference.onnx_gate import check_onnx_graph
from ml_factory.models.registry import available_models, find_model_spec
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.load_prepared import load_dataset
from ml_factory.workflows.predictions import STACK, find_artifact_to_predict, load_fitted_models

HORIZON, STACKED = 20, ("xgboost", "linear", "lstm")


def model_settings(model: str) -> dict:
    return (
        {"epochs": 1}
        if find_model_spec(model).windowed
        else {"rounds": 60}
        | (
            {} if model == "linear" else {"offset": "none"}  # so that boosters keep trees on a market without an edge
        )
    )


def print_gate(workspace: Workspace, symbol: str, model: str) -> None:
    """Print the line of a finished model or stack."""
    data = load_dataset(workspace, symbol, HORIZON)
    fitted = load_fitted_models(workspace, find_artifact_to_predict(workspace, symbol, HORIZON, model, ""))
    began = time.perf_counter()
    graph = onnx_of_models(fitted, {})
    found = check_onnx_graph(graph, fitted, data.features, segment=data.segment)
    print_json(
        bench="onnx_gate", model=model, rows=found.rows, of_rows=len(data.features), lookback=fitted.lookback,
        difference=digits(found.difference), threshold_rows=found.threshold_rows, nodes=found.nodes,
        nodes_tried=found.nodes_tried, nodes_reached=found.nodes_reached, mb=digits(len(graph) / 1e6),
        seconds=digits(time.perf_counter() - began),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--symbol", default="ES")
    parser.add_argument("--models", nargs="+", default=[*available_models(), STACK])
    parser.add_argument("--bars", type=int, default=120_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace, bars = Workspace(Path(folder) / "workspace"), Path(folder) / "bars.parquet"
        pd.read_parquet(options.data).tail(options.bars).to_parquet(bars)
        pipeline.prepare(workspace, options.symbol, (HORIZON,), data=bars)
        for model in options.models:
            if model == STACK:
                settings = {name: model_settings(name) for name in STACKED}
                pipeline.stack(workspace, options.symbol, HORIZON, STACKED, folds=2, quick=True, mirror="off",
                               model_settings=settings)  # fmt: skip
            else:
                pipeline.train(workspace, options.symbol, HORIZON, model, quick=True, mirror="off",
                               model_settings=model_settings(model))  # fmt: skip
            print_gate(workspace, options.symbol, model)


if __name__ == "__main__":
    main()
