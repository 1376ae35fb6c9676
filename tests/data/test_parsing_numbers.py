"""Numbers written as text: decimal commas, thousands, and what cannot be told."""

import numpy as np
import pandas as pd
import pytest

from ml_factory.data.parsing import parse_numbers
from ml_factory.errors import BarsError


def read(decimal=None, **columns):
    shown = pd.date_range("2024-03-05", periods=len(next(iter(columns.values()))), freq="1min", tz="UTC")
    series = {name: pd.Series(values) for name, values in columns.items()}
    values, findings = parse_numbers(series, decimal=decimal, where="test.csv", shown=shown)
    return values, {finding.kind for finding in findings}


def test_parse_numbers_numeric_columns_return_unchanged():
    values, kinds = read(open=[1.5, 2.25], volume=[3, 4])
    assert values["open"].tolist() == [1.5, 2.25] and values["volume"].dtype == np.float64 and kinds == set()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (["4500.25", "4501"], [4500.25, 4501.0]),
        (["4500,25", "4501"], [4500.25, 4501.0]),
        (["4,500.25", "4,501.00"], [4500.25, 4501.0]),
        (["4.500,25", "4.501,5"], [4500.25, 4501.5]),
        (["1,234,567", "1,234,568"], [1234567.0, 1234568.0]),
        (["1.234.567", "1.234.568"], [1234567.0, 1234568.0]),
        (["4 500,25", "4\u00a0501,00"], [4500.25, 4501.0]),
        (["4'500.25", "4501.5"], [4500.25, 4501.5]),
        (["1.25e3", "-2E-1"], [1250.0, -0.2]),
        ([".5", "0.123"], [0.5, 0.123]),
        (["0,123", "0,5"], [0.123, 0.5]),
    ],
)
def test_parse_numbers_text_in_any_notation_returns_values(text, wanted):
    values, kinds = read(close=text)
    assert values["close"].tolist() == wanted and kinds == {"text_numbers"}


def test_parse_numbers_ambiguous_column_uses_notation_of_other_column():
    values, _ = read(close=["4,500", "4,501"], high=["4,500.5", "4,501.5"])
    assert values["close"].tolist() == [4500.0, 4501.0]
    values, _ = read(close=["4,500", "4,501"], high=[4500.5, 4501.5])
    assert values["close"].tolist() == [4500.0, 4501.0]


def test_parse_numbers_ambiguous_separator_raises_unless_decimal_given():
    with pytest.raises(BarsError, match=r"'4,500' can be read as a fraction or as thousands.*decimal=','"):
        read(close=["4,500", "4,501"])
    assert read(decimal=",", close=["4,500", "4,501"])[0]["close"].tolist() == [4.5, 4.501]
    assert read(decimal=".", close=["4,500", "4,501"])[0]["close"].tolist() == [4500.0, 4501.0]


def test_parse_numbers_mixed_decimal_notation_raises_bars_error():
    with pytest.raises(BarsError, match="different rows"):
        read(close=["4500,25", "4501.25"])


def test_parse_numbers_invalid_text_error_names_column_row_and_text():
    with pytest.raises(BarsError, match=r"high is not a number in row 1 \(2024-03-05 00:01:00\+00:00\): 'n\.a\.'"):
        read(close=["1.5", "1.5"], high=["1.5", "n.a."])


def test_parse_numbers_empty_cells_return_nan():
    values, _ = read(close=["1.5", "", None, "NaN", "inf"])
    assert np.isnan(values["close"][1:4]).all() and np.isinf(values["close"][4])


def test_parse_numbers_float32_prices_round_to_shortest_decimals():
    prices = np.round(np.random.default_rng(0).uniform(0.01, 90000, 500), 2)
    prices = np.round(prices / 10 ** np.floor(np.log10(prices)), 6) * 10 ** np.floor(np.log10(prices))
    values, kinds = read(close=prices.astype(np.float32))
    shortest = np.array([float(str(price)) for price in prices.astype(np.float32)])
    assert kinds == {"float32"} and (values["close"] == shortest).mean() > 0.99
    assert np.abs(values["close"] / shortest - 1).max() < 1e-15 + 1e-7


def test_parse_numbers_accepts_nullable_float_and_rejects_bool():
    assert read(close=pd.array([1.5, None], dtype="Float64"))[0]["close"][0] == 1.5
    with pytest.raises(BarsError, match="bool"):
        read(close=[True, False])
