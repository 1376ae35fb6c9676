"""Latency of a bundle's predictions, one core: the models' own libraries, their ONNX graph, and its int8 form.

    python -m benchmarks.inference [--models xgboost linear lstm] [--days 30] [--bars 300] [--repeats 3]

Trains small models on the demo market in a temporary workspace. One JSON line for each model and form, both forms in
turns:
  bar_p50_ms, bar_p99_ms  wall of one raw bar that completes a row, with its features, by `PredictionStream.push`
  rows_per_s              of 4,096 feature rows at once, the best of the repeats
  mb                      the bundle's bytes without the graph, or the graph's
  cold_cpu_s, imports_cpu_s  CPU seconds of a process that loads the bundle and predicts, and of one that imports the
                          same modules of the same libraries; in turns, medians of the repeats
  log_loss                on the test rows; int8 (networks alone) has int8 weights of matrix products
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from onnxruntime.quantization import QuantType, quantize_dynamic

from benchmarks.measure import best, digits, in_turns, print_json
from ml_factory import pipeline
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.evaluation.metrics import PROBABILITIES
from ml_factory.features.build import FeatureRows, build_features
from ml_factory.inference.bundle import Bundle
from ml_factory.inference.predict import GraphModel
from ml_factory.inference.stream import PredictionStream
from ml_factory.storage.workspace import Workspace

HORIZON, ROWS = 20, 4096
NETWORKS = ("lstm", "gru", "tcn", "patchtst", "itransformer", "tft")
COLD = "import sys, pandas; from ml_factory import Bundle"
COLD += "; Bundle.load(sys.argv[1]).predict(pandas.read_parquet(sys.argv[2]))"
LIST = COLD + "; print(*(name for name in sys.modules if name.partition('.')[0] not in ('ml_factory', '__main__')))"
IMPORTS = """
import importlib, sys
from contextlib import suppress
for name in sys.argv[1].split():
    with suppress(Exception):  # names that a package put there itself
        importlib.import_module(name)
"""


def as_graph(bundle: Bundle, name: str, graph: bytes) -> Bundle:
    """Return the bundle predicting with this graph, as where the model's library is not installed."""
    other = replace(bundle, graphs={name: graph})
    models = {name: GraphModel.of(bundle.fitted.models[name], graph)}
    vars(other)["fitted"] = replace(bundle.fitted, models=models)
    return other


def int8(graph: Path) -> bytes:
    """Return the graph with int8 weights of its matrix products."""
    out = graph.with_suffix(".int8.onnx")
    quantize_dynamic(graph, out, weight_type=QuantType.QInt8)
    return out.read_bytes()


def bar_seconds(bundle: Bundle, bars: pd.DataFrame, count: int) -> list[float]:
    """Return the wall seconds of each of the last `count` bars that completed a row."""
    stream, taken = PredictionStream(bundle), []
    stream.push(bars.iloc[:-count])
    for number in range(len(bars) - count, len(bars)):
        bar = bars.iloc[number : number + 1]
        began = time.perf_counter()
        rows = stream.push(bar)
        if len(rows):
            taken.append(time.perf_counter() - began)
    return taken


def child_cpu(code: str, *arguments: object) -> float:
    """CPU seconds of a Python process with one thread."""
    before = os.times()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=True, capture_output=True, env=env)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def cold_start(bundle: Path, bars: Path, repeats: int) -> dict[str, float]:
    """CPU seconds of a cold start and of the imports alone, the two in turns."""
    listed = subprocess.run([sys.executable, "-c", LIST, bundle, bars], check=True, capture_output=True, text=True)
    calls = {"cold_cpu_s": (COLD, bundle, bars), "imports_cpu_s": (IMPORTS, listed.stdout)}
    taken = [{name: child_cpu(*call) for name, call in calls.items()} for _ in range(repeats)]
    return {name: digits(statistics.median(one[name] for one in taken)) for name in calls}


def log_loss(bundle: Bundle, matrix: FeatureRows, labels: pd.Series) -> float:
    """Mean log loss on the rows of these labels."""
    p = bundle.fitted.predict_features(matrix.to_frame(), segment=matrix.segment)
    labels = labels[labels.index.isin(p.index)]
    p_N3 = p.loc[labels.index, PROBABILITIES].to_numpy()
    return float(-np.log(np.clip(p_N3[np.arange(len(labels)), labels.to_numpy() + 1], 1e-12, 1)).mean())


def measure(workspace: Workspace, model: str, options: argparse.Namespace) -> None:
    """Print the lines of one model."""
    # Without the clock offset: on a market without an edge a booster that starts from it keeps no tree.
    threads = {"threads": 1, "offset": "none"}
    pipeline.train(workspace, "DEMO", HORIZON, model, quick=True, mirror="off", model_settings=threads)
    paths = pipeline.export(workspace, "DEMO", HORIZON, model, formats=("bundle", "onnx")).paths
    bundle = Bundle.load(paths["bundle"])
    forms = {"native": bundle, "onnx": as_graph(bundle, model, bundle.graphs[model])}
    if model in NETWORKS:
        forms["int8"] = as_graph(bundle, model, int8(paths["onnx"]))
    sizes = {name: len((one.graphs if name != "native" else one.models)[model]) for name, one in forms.items()}
    bars = pd.read_parquet(workspace.raw_bars("DEMO"))
    matrix = build_features(bundle.spec.check_bars(bars)[0], bundle.spec.market, bundle.spec.features)
    features = matrix.to_frame().iloc[-ROWS:]
    facts = {"segment": matrix.segment[-ROWS:]}
    splits, labels = (load(workspace, "DEMO", HORIZON) for load in (pipeline.load_splits, pipeline.load_labels))
    runs = in_turns(
        {name: lambda one=one: one.fitted.predict_features(features, **facts) for name, one in forms.items()},
        options.repeats + 1,
    )
    waits = {name: bar_seconds(one, bars, options.bars) for name, one in forms.items()}
    cold = cold_start(paths["bundle"], workspace.raw_bars("DEMO"), options.repeats)
    for name, one in forms.items():
        p50, p99 = np.percentile(waits[name], [50, 99]) * 1e3
        line = {
            "bench": "inference", "model": model, "side": name, "bar_p50_ms": digits(p50), "bar_p99_ms": digits(p99),
            "rows_per_s": round(len(features) / best(runs[name][1:]).wall), "mb": digits(sizes[name] / 1e6),
            "log_loss": digits(log_loss(one, matrix, labels["label"].iloc[splits["test"]]), 6),
        }  # fmt: skip
        if name == "native":
            line |= cold
        print_json(**line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["xgboost", "lightgbm", "catboost", "linear", "lstm"])
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--bars", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(folder)
        ensure_synthetic_demo_market(workspace, "DEMO", days=options.days)
        pipeline.prepare(workspace, "DEMO", (HORIZON,))
        for model in options.models:
            measure(workspace, model, options)


if __name__ == "__main__":
    main()
