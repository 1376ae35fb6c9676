"""Accuracy of forecasts of training time from a short warm-up, on models and sizes that no forecast was fitted on.

    python -m benchmarks.forecasts_of_cost --data ../shared/data/bars/ES_1m.parquet --symbol ES [--models lstm tcn]

Each unit is warmed up as `plan` does it and then fitted whole, with a fixed number of epochs or rounds and no early
stopping. One JSON line a unit, and one with the median of the relative errors.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from ml_factory import pipeline
from ml_factory.argument_checks import DEMO
from ml_factory.data.synthetic import ensure_synthetic_demo_market
from ml_factory.models.registry import available_models, find_model_spec
from ml_factory.storage.workspace import Workspace
from ml_factory.workflows.fit_cost_model import (
    FitSize,
    cost_model_work,
    fit_cost_model,
    full_fit_size,
    measure_fit_cost,
)
from ml_factory.workflows.load_prepared import load_dataset

TURNS = {"tabular": ({"rounds": 80}, {"rounds": 200}), "other": ({"epochs": 2}, {"epochs": 3, "lookback": 16})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="1-minute bars; the made-up market without")
    parser.add_argument("--symbol", default=DEMO)
    parser.add_argument("--horizon", type=int, default=20)
    parser.add_argument("--models", nargs="*", default=available_models())
    given = parser.parse_args()
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(folder)
        if given.data is None:
            ensure_synthetic_demo_market(workspace, given.symbol)
        pipeline.prepare(workspace, given.symbol, (given.horizon,), data=given.data)
        data = load_dataset(workspace, given.symbol, given.horizon)
        for name in given.models:
            for settings in TURNS["tabular" if find_model_spec(name).family == "tabular" else "other"]:
                line = measure(data, name, settings | {"patience": 0})
                errors.append(line["error"])
                print(json.dumps(line), flush=True)
    print(json.dumps({"bench": "forecasts_of_cost", "units": len(errors), "median_error": float(np.median(errors))}))


def measure(data, name: str, settings: dict) -> dict:
    """Forecast and truth of one unit, in seconds."""
    whole = full_fit_size(data, name, settings, 0, False)
    forecast = fit_cost_model(data, name, settings, 0, whole).forecast(cost_model_work(name, whole)).seconds
    took = measure_fit_cost(data, name, settings, 0, FitSize(whole.rows, whole.iterations), whole).seconds
    facts = {"bench": "forecasts_of_cost", "model": name, "rows": whole.rows, **settings}
    return {**facts, "forecast_s": forecast, "took_s": took, "error": abs(forecast - took) / took}


if __name__ == "__main__":
    main()
