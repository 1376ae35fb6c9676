"""What a report says in words: honest about made-up bars, limits, chosen winners and rows left out."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from ml_factory.evaluation.metrics import metrics_table
from ml_factory.targets.labels import classes_of
from ml_factory.units import pages
from ml_factory.units.dataset import gain_over

ROWS = 600


def forecasts(count: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    return {f"model{number}": random.dirichlet((2, 2, 2), ROWS) for number in range(count)}


def verdict(count: int, of: int = ROWS) -> str:
    flat = {"prior": np.full((ROWS, 3), 1 / 3)}
    table = metrics_table(forecasts(count) | flat, np.arange(ROWS) % 3 - 1, np.ones(ROWS))
    return pages.verdict(table, ROWS, of).text


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(0.01, 0.03, "beats"), (-0.03, -0.01, "is worse than"), (-0.01, 0.03, "cannot be told from")],
)
def test_a_gain_is_called_what_its_interval_allows(low, high, words):
    other = {"direction_gain": 0.0, "direction_low": -0.5, "direction_high": 0.5}
    row = pd.Series({"log_loss_gain": (low + high) / 2, "gain_low": low, "gain_high": high} | other)
    told = pages.sentence("lstm", row)
    assert f"lstm {words} the class prior" in told and "up or down, it cannot be told from the class prior" in told
    other = {"direction_gain": (low + high) / 2, "direction_low": low, "direction_high": high}
    side = pd.Series({"log_loss_gain": 0.0, "gain_low": -0.5, "gain_high": 0.5} | other)
    assert f"up or down, it {words} the class prior" in pages.sentence("lstm", side)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(0.01, 0.03, "beats"), (-0.03, -0.01, "is worse than"), (-0.01, 0.03, "cannot be told from")],
)
def test_a_stack_is_told_beside_the_plain_mean_of_its_models(low, high, words):
    flat = {"prior": np.full((ROWS, 3), 1 / 3)}
    table = metrics_table({"stack": forecasts(1)["model0"]} | flat, np.arange(ROWS) % 3 - 1, np.ones(ROWS))
    told = pages.verdict(table, ROWS, ROWS, beaten={"equal_pool": ((low + high) / 2, low, high)}).text
    assert f"stack {words} the plain mean of its models (equal_pool): {(low + high) / 2:+.4f} nats" in told
    assert ("Nothing speaks for the learnt weights" in told) == (low <= 0)
    assert "equal_pool" not in pages.verdict(table, ROWS, ROWS).text


def test_the_gain_over_another_is_that_of_the_clear_rows():
    random = np.random.default_rng(0)
    ours, other, y = random.dirichlet((2, 2, 2), 90), random.dirichlet((2, 2, 2), 90), random.integers(-1, 2, 90)
    clear, rows = random.random(90) < 0.8, np.arange(10, 80)
    data = SimpleNamespace(clear=clear, y=y, horizon=3)
    gain, low, high = gain_over(data, rows, ours[rows], other[rows])
    kept = rows[clear[rows]]
    by_hand = np.log(ours[kept, y[kept] + 1] / other[kept, y[kept] + 1])
    assert gain == pytest.approx(by_hand.mean(), abs=1e-12) and low < gain < high
    assert high - gain == pytest.approx(gain - low)
    assert gain_over(data, rows, ours[rows], ours[rows]) == (0.0, 0.0, 0.0)


def test_the_made_up_market_is_called_so_and_no_other():
    assert "made-up market" in pages.made_up_notice("DEMO")
    assert pages.made_up_notice("MES") == ""


def test_what_quick_limited_is_told():
    assert "lstm epochs: 2" in pages.quick_notice({"lstm epochs": 2})
    assert pages.quick_notice({}) == ""


def test_the_best_of_several_is_called_chosen():
    assert "chosen on them" in verdict(2)
    assert "chosen on them" not in verdict(1)


def test_rows_that_are_not_judged_are_told():
    assert "600 of the 700 test rows, those with a full input window." in verdict(1, of=700)
    assert "600 of the 600 test rows." in verdict(1)


@pytest.mark.parametrize(("count", "figures"), [(1, 1), (2, 1), (3, 3)])
def test_many_forecasts_get_a_reliability_plot_each(count, figures):
    data = SimpleNamespace(
        y=np.arange(ROWS) % 3 - 1, clear=np.ones(ROWS, bool), horizon=5, classes=classes_of("direction")
    )
    assert len(pages.calibration(data, forecasts(count), np.arange(ROWS)).figures) == figures


def test_seconds_are_read_as_seconds():
    facts = {"run_id": "train-lstm", "seconds": 1.94}
    section = pages.runs({"lstm": SimpleNamespace(facts=facts, hash="0123456789abcdef")})
    assert section.tables[0][1].loc["lstm"].tolist() == ["train-lstm", "0123456789ab", "1.9"]
