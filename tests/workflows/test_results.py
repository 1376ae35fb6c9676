"""What results print: the verdict last, in a sentence and four numbers, in 80 columns."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ml_factory.evaluation.baselines import BASELINES
from ml_factory.evaluation.verdict import ModelVerdict, model_verdict, verdict_gains_of_rows
from ml_factory.workflows.results.models import EvaluateResult, TrainResult
from ml_factory.workflows.results.summaries import summary_verdict_lines, wrap_summary_line

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


def test_train_result_summary_shows_calibration_error_and_class_shares():
    error, shares = trained(verdict_of()).summary().splitlines()[-7:-5]
    assert error == "  calibration error            0.0321"
    assert shares == "  predicted/observed  short 0.301/0.292, neutral 0.378/0.447, long 0.321/0.261"
    assert len(shares) <= 80


def test_train_result_str_fits_80_columns_except_paths():
    result = trained(verdict_of())
    assert all(len(line) <= 80 or "/" in line for line in str(result).splitlines())
    assert str(result).split() == result.summary().split()  # nothing is lost


@pytest.mark.parametrize("indent", ["", "  "])
def test_wrap_line_keeps_indent_and_whole_words(indent):
    lines = wrap_summary_line(indent + "word " * 30 + "a-hyphenated-word" * 6).splitlines()
    assert max(map(len, lines[:-1])) <= 80 and lines[-1].strip() == "a-hyphenated-word" * 6
    assert all(line.startswith(f"{indent}  ") for line in lines[1:]) and lines[0].startswith(f"{indent}word")


def test_evaluate_result_summary_ends_with_model_chosen_on_validation():
    verdicts = {name: verdict_of(name) for name in ("linear", "lstm")}
    result = EvaluateResult(
        symbol="MES", horizon=20, metrics=METRICS, report_path=Path("r"), verdicts=verdicts,
        chosen="lstm", seconds=1.0, calibration=BY_CLASS,
    )  # fmt: skip
    lines = result.summary().splitlines()
    assert lines[-5] == verdicts["lstm"].sentence and "chosen on validation rows: lstm" in lines[-8]
    assert lines[-7].endswith("0.0654") and "short 0.200/0.500" in lines[-6]
    assert lines[2].strip() == verdicts["linear"].sentence
