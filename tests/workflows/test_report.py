"""What a report says in words: honest about made-up bars, limits, chosen winners and rows left out."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from ml_factory.evaluation.baselines import BASELINES
from ml_factory.evaluation.metrics import compute_forecast_metrics
from ml_factory.evaluation.verdict import model_verdict, verdict_gains_of_rows
from ml_factory.targets.labels import label_classes
from ml_factory.workflows import report
from ml_factory.workflows.evaluation import Evaluation, dataset_calibration_by_class

ROWS = 600
MONTHS = pd.DataFrame({"rows": [300, 200, 100], "gain": [3.0, -1.0, 1.0]}, index=["2024-01", "2024-02", "2024-03"])


def forecasts(count: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    return {f"model{number}": random.dirichlet((2, 2, 2), ROWS) for number in range(count)}


def evaluated(count: int, reference_gains: dict | None = None) -> Evaluation:
    """`count` models of random forecasts beside a flat prior, 60 days of rows five minutes apart."""
    printed, y = forecasts(count), np.arange(ROWS) % 3 - 1
    flat = {name: np.full((ROWS, 3), 1 / 3) for name in BASELINES}
    times = pd.date_range("2024-01-02", periods=ROWS, freq="145min", tz="UTC")
    table = compute_forecast_metrics(printed | flat, y, np.ones(ROWS), times=times)
    found = {
        name: model_verdict(
            name, verdict_gains_of_rows(y, p, flat, horizon=1, times_N=times), "clock", rows=ROWS, effective_rows=9
        )
        for name, p in printed.items()
    }
    return Evaluation(
        np.arange(ROWS), printed, table.reset_index().assign(split="test", used_for_choosing=False), found, "model0",
        MONTHS, (), pd.DataFrame(), 1.0, reference_gains or {}, {},
    )  # fmt: skip


def data_of(on_test: Evaluation, ret=None) -> SimpleNamespace:
    """What a page reads of the data set whose test rows were judged."""
    index = pd.date_range("2024-01-02", periods=ROWS, freq="145min", tz="UTC", name="known_at")
    ret = np.zeros(ROWS) if ret is None else ret
    return SimpleNamespace(
        labels=pd.DataFrame({"ret": ret}, index), y=np.arange(ROWS) % 3 - 1, unambiguous_mask=np.ones(ROWS, bool),
        horizon=1, classes=label_classes("direction"), settings={"data": {"features": {}}},
    )  # fmt: skip


def verdict(count: int, of: int = ROWS) -> str:
    return report.report_verdict_section(evaluated(count), of).text


def test_report_verdict_section_starts_with_sentence_and_gain_per_model():
    on_test = evaluated(2)
    text = report.report_verdict_section(on_test, ROWS).text
    for number, one in enumerate(on_test.verdicts.values()):
        paragraph = text.split("\n\n")[number]
        assert paragraph.startswith(one.sentence) and f"{one.gain_best:+.4f} ({one.gain_best_low:+.4f}" in paragraph

    def columns(two_sided):
        section = report.report_verdict_section(on_test, ROWS, two_sided=two_sided)
        return [name for _, table in section.tables for name in table]

    names = columns(True)
    assert names[:3] == ["over prior", "directional, over prior", "log_loss"], "the prior is the best baseline here"
    assert set(names) - set(columns(False)) == {"directional, over prior"}
    gains = report.report_verdict_section(on_test, ROWS).tables[0][1]
    assert gains.iloc[:, 0]["prior"] == "0" and gains.iloc[:, 0]["model0"].count("+") + gains.iloc[:, 0][
        "model0"].count("-") == 3  # fmt: skip
    assert all(f"`{name}`: " in text for name in BASELINES)


def test_report_returns_lists_deciles_of_chosen_model():
    on_test = evaluated(2)
    forecast = on_test.forecasts["model0"] @ [-1, 0, 1]
    section = report.decile_returns_section(data_of(on_test, 1e-4 * forecast), on_test)
    assert "Information coefficient of model0: +1.0000" in section.text
    ((_, table),) = section.tables
    tenth = np.sort(forecast)[-60:].mean()
    assert table.loc[10, "ret_bp"] == pytest.approx(tenth) and table.loc[10, "rows"] == 60
    assert "no deciles" in report.decile_returns_section(data_of(on_test), on_test).text  # the return is a constant


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(0.01, 0.03, "beats"), (-0.03, -0.01, "is worse than"), (-0.01, 0.03, "does not differ measurably from")],
)
def test_report_verdict_compares_stack_with_equal_pool(low, high, words):
    reported = report.report_verdict_section(evaluated(1, {"equal_pool": ((low + high) / 2, low, high)}), ROWS).text
    assert f"model0 {words} the plain mean of its models (equal_pool): {(low + high) / 2:+.4f} nats" in reported
    assert ("The learnt weights show no advantage" in reported) == (low <= 0)
    assert "equal_pool" not in report.report_verdict_section(evaluated(1), ROWS).text


def test_report_calibration_lists_class_shares_of_clear_rows():
    on_test = evaluated(2)
    data = data_of(on_test)
    data.unambiguous_mask[:300] = False
    calibrated = dataset_calibration_by_class(data, on_test.rows, on_test.forecasts)
    section = report.report_calibration_section(data, replace(on_test, calibration=calibrated))
    ((_, table),) = section.tables
    assert len(section.figures) == 1 and table.index.tolist() == ["model0"] * 3 + ["model1"] * 3
    for name, p in on_test.forecasts.items():
        mine = table.loc[name].set_index("class")
        np.testing.assert_allclose(mine["predicted"], p[300:].mean(axis=0))
        np.testing.assert_allclose(mine["observed"], 1 / 3)
        assert mine.index.tolist() == ["short", "neutral", "long"]
    assert f"{on_test.test_metrics.loc['model0', 'ece']:.3f}" in section.text
    bets = data_of(on_test)
    bets.classes = label_classes("meta")
    of_bets = replace(on_test, calibration=dataset_calibration_by_class(bets, on_test.rows, on_test.forecasts))
    assert list(report.report_calibration_section(bets, of_bets).tables[0][1]["class"]) == 2 * list(
        label_classes("meta")
    )


def test_left_out_sentence_separates_purged_and_inferred_rows():
    assert report.report_left_out_rows({"purged": 1_234, "inferred": 0}) == report.report_left_out_rows(
        {"purged": 1_234}
    )
    assert "1,234 rows whose labels reach across an edge" in report.report_left_out_rows({"purged": 1_234})
    both = report.report_left_out_rows({"purged": 8, "inferred": 5_520})
    assert "8 rows whose labels" in both and both.endswith(
        "5,520 rows of the sessions that calendar or tick were inferred from."
    )
