"""The figures in README's picture, compared with a run of today on the same made-up market."""

import json
from pathlib import Path

import pytest
from PIL import Image

from ml_factory import Workspace, pipeline

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "report.png"
AGAIN = ("xgboost", "lstm")  # the stack and its third model take minutes
BASELINES = ("prior", "last_move", "clock", "clock_volatility")


@pytest.mark.notebooks
@pytest.mark.slow
def test_readme_picture_metrics_match_new_run(tmp_path):
    with Image.open(PICTURE) as picture:
        shown = json.loads(picture.text["metrics"])
    assert set(shown) == {*AGAIN, *BASELINES, "patchtst", "stack"}
    workspace = Workspace(tmp_path)
    pipeline.prepare(workspace, "DEMO", (20,))
    for model in AGAIN:
        pipeline.train(workspace, "DEMO", 20, model, quick=True, mirror="off")
    found = pipeline.evaluate(workspace, "DEMO", 20).metrics
    found = found[found["split"] == "test"].set_index("name")
    for name in (*AGAIN, *BASELINES):
        tolerance = 1e-2 if name in AGAIN else 1e-4  # other processors round models otherwise
        for column, value in shown[name].items():
            there = pytest.approx(value, abs=tolerance, nan_ok=True)
            assert found.loc[name, column] == there, f"{name}, {column}: make the picture again with `make picture`"
