"""What results print: the verdict last, in a sentence and four numbers, in 80 columns."""

from pathlib import Path

import numpy as np
import pandas as pd

from ml_factory.evaluation.baselines import BASELINES
from ml_factory.evaluation.verdict import ModelVerdict, model_verdict, verdict_gains_of_rows
from ml_factory.workflows.results.models import TrainResult
from ml_factory.workflows.results.summaries import summary_verdict_lines

RNG = np.random.default_rng(1)


def verdict_of(model: str = "xgboost", kind: str = "triple_barrier") -> ModelVerdict:
    y, times = RNG.integers(-1, 2, 900), pd.date_range("2024-01-02", periods=900, freq="2h", tz="UTC")
    flat = {name: np.full((900, 3), 1 / 3) for name in BASELINES}
    gains = verdict_gains_of_rows(y, RNG.dirichlet((3, 3, 3), 900), flat, horizon=2, times_N=times)
    return model_verdict(model, gains, "clock", rows=900, effective_rows=451.2, kind=kind)


METRICS = pd.DataFrame(
    [
        ("validation", "lstm", 0.6), ("test", "clock", 0.5), ("test", "xgboost", 0.0321),
        ("test", "lstm", 0.0654),
    ],
    columns=["split", "name", "ece"],
)  # fmt: skip
BY_CLASS = pd.DataFrame({
    "name": ["xgboost"] * 3 + ["lstm"] * 3, "class": ["short", "neutral", "long"] * 2,
    "predicted": [0.301, 0.378, 0.321, 0.2, 0.3, 0.5], "observed": [0.292, 0.447, 0.261, 0.5, 0.3, 0.2],
})  # fmt: skip


def trained(verdict: ModelVerdict | None) -> TrainResult:
    folder = Path("/a/long/path") / ("y" * 70)
    return TrainResult(
        symbol="MES", horizon=20, model="xgboost", run_id="r", metrics=METRICS, calibration=BY_CLASS,
        history=pd.DataFrame(), best_epoch=1, resumed_from=None, exact=True, inexact_because=[],
        reused=False, limited={"rounds": 3},
        artifact=folder, artifact_hash="", predictions_path=folder, predictions_hash="", report_path=folder,
        verdict=verdict, seconds=1.0,
    )  # fmt: skip


def test_train_result_summary_ends_with_verdict_and_four_numbers():
    verdict = verdict_of()
    sentence, *numbers = trained(verdict).summary().splitlines()[-5:]
    assert sentence == verdict.sentence
    wanted = (f"{verdict.gain_best:+.4f}", f"{verdict.direction_gain:+.4f}", "900", "451")
    names = ("gain over the best baseline", "directional gain", "rows evaluated", "effective rows")
    for line, name, value in zip(numbers, names, wanted, strict=True):
        assert line.strip().startswith(name) and line.removeprefix(f"  {name}").split()[0] == value
    assert f"({verdict.gain_best_low:+.4f} to {verdict.gain_best_high:+.4f})  clock" in numbers[0]
    assert f"({verdict.direction_low:+.4f} to {verdict.direction_high:+.4f})" in numbers[1]


def test_verdict_lines_of_meta_labels_omit_directional_gain():
    assert len(summary_verdict_lines(verdict_of(kind="meta"))) == 4
    assert not any("directional" in line for line in summary_verdict_lines(verdict_of(kind="meta")))
    assert summary_verdict_lines(None) == [] and trained(None).summary().splitlines()[-3].startswith("  report ")


def test_train_result_str_fits_80_columns_except_paths():
    result = trained(verdict_of())
    assert all(len(line) <= 80 or "/" in line for line in str(result).splitlines())
    assert str(result).split() == result.summary().split()  # nothing is lost
