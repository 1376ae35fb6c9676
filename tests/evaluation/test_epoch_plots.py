"""Curves of several trainings, epoch by epoch."""

import pytest

from ml_factory.evaluation.epoch_plots import draw_epoch_curves


def test_draw_epoch_curves_has_a_panel_for_each_value_and_a_curve_for_each_training():
    histories = {
        "a": [{"epoch": 1, "x": 3.0, "y": 1.0}, {"epoch": 2, "x": 2.0, "y": 1.5}],
        "b": [{"epoch": 1, "x": 1.0, "y": 0.0}],
    }
    figure = draw_epoch_curves(histories, {"x": "loss", "y": "accuracy"})
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy"]
    curves = figure.axes[0].get_lines()
    assert [list(curve.get_ydata()) for curve in curves] == [[3.0, 2.0], [1.0]]
    with pytest.raises(KeyError):
        draw_epoch_curves(histories, {"z": "none"})
