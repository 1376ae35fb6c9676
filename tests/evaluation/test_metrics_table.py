"""A metrics table reads in 80 columns and is otherwise a plain DataFrame."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.evaluation.metrics import MetricsTable, format_metrics_table

COLUMNS = ("log_loss", "accuracy", "log_loss_gain", "gain_low", "gain_best", "gain_best_low", "gain_best_high")


def table(name: str = "xgboost") -> MetricsTable:
    rows = []
    for split in ("validation", "test"):
        for who in (name, "prior", "clock_volatility"):
            row = {"split": split, "name": who, "best_baseline": "clock", "rows": 12_345, "effective_rows": 678.9}
            row |= dict.fromkeys(COLUMNS, -0.01234) | {"direction_gain": 0.00019, "direction_low": -1.25}
            rows.append(row)
    return MetricsTable(pd.DataFrame(rows))


@pytest.mark.parametrize("name", ["xgboost", "a_network_of_my_own_with_a_long_name"])
def test_metrics_table_as_text_fits_80_columns_with_headline(name):
    text = str(table(name))
    assert max(map(len, text.splitlines())) <= 80
    assert "validation rows, used for choosing: 12,345, 679 effective" in text and "test rows: 12,345" in text
    row = next(line for line in text.splitlines() if line.startswith(f"  {name[:12]}"))
    assert row.split()[1:] == ["-0.0123", "-0.0123", "-0.0123", "-0.0123", "+0.0002", "-1.2500"]
    assert "best baseline, clock" in text and f"{len(table().columns)} columns in all" in text


def test_metrics_table_operations_return_plain_dataframe():
    one = table()
    plain = pd.DataFrame(one)
    pd.testing.assert_frame_equal(one, plain, check_frame_type=False)
    part = one.loc[one["split"] == "test", ["name", "log_loss"]]
    assert type(part) is pd.DataFrame and type(one.set_index("name")) is pd.DataFrame
    assert one.to_string() == plain.to_string() and one.to_dict("records") == plain.to_dict("records")
    assert repr(MetricsTable({"a": [1]})) == repr(pd.DataFrame({"a": [1]}))


def test_metrics_text_omits_absent_values_and_columns():
    one = table().drop(columns=["gain_best", "gain_best_low", "gain_best_high", "split", "effective_rows"])
    one["direction_gain"] = np.nan
    text = format_metrics_table(one)
    assert text.startswith("test rows: 12,345\n") and "best baseline" not in text
    assert [line.split() for line in text.splitlines()][2] == ["xgboost", "-0.0123", "-", "-1.2500"]
