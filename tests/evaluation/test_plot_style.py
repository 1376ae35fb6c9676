"""Texts on the axes of plots."""

import pytest

from ml_factory.evaluation.plot_style import format_signed_tick


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1e-13, "0"), (-0.02, "−0.02"), (0.02, "+0.02"), (0.5, "+0.5"), (1e-6, "+1e-06")]
)
def test_format_signed_tick_shows_sign_of_every_value_but_0(value, text):
    assert format_signed_tick(value) == text.replace("e-", "e−")
