"""Several frames at once: which rows each column is read at."""

import numpy as np
import pytest
import torch

from ml_factory.datasets.windows import Windows
from ml_factory.errors import SettingsError
from ml_factory.features.build import FeatureSpec
from ml_factory.models.multi_timeframe_network import TimeframeSplitter, frame_strides, multi_timeframe_network_class
from ml_factory.models.registry import (
    _SPECS,
    available_models,
    build_model,
    build_model_from_state,
    check_model,
    find_model_spec,
    register_model,
)
from ml_factory.models.sequence import LSTM, RecurrentSpec
from ml_factory.models.transformer import PatchTSTSpec
from ml_factory.storage.serialization import deserialize_state, serialize_state


def test_strides_of_column_names_gives_stride_and_count_per_frame():
    columns = ["rsi_14", "atr", "rsi_14@15m", "rsi_14@60m", "atr@60m", "rsi_14@4h", "rsi_14@1d"]
    assert frame_strides(columns, 5) == ((1, 2), (3, 1), (12, 2), (1, 2))
    assert frame_strides(columns[:4], 1) == ((1, 2), (15, 1), (60, 1))


def test_frames_module_reads_each_column_at_frame_stride_up_to_last_row():
    """Columns hold the number of their row, and a thousand times their own: 10 rows, strides 1 and 4."""
    x_BTF = torch.arange(10.0)[None, :, None] + 1000 * torch.arange(4.0)
    frames = TimeframeSplitter(((1, 1), (4, 1), (1, 2)), features=4, lookback=10)
    minutes_bars_BLF, coarse_BLF = frames(x_BTF.expand(2, -1, -1))
    assert frames.steps == [10, 3] and frames.widths == [3, 1]
    assert minutes_bars_BLF[1].T.tolist() == [[column + row for row in range(10)] for column in (0, 2000, 3000)]
    assert coarse_BLF[1].T.tolist() == [[1001, 1005, 1009]]


def test_frames_module_stride_12_reads_one_step_per_hour():
    """A column that changes every 12 rows, as-of joined: each step is another hour's bar, the newest last."""
    hours = np.repeat(np.arange(8), 12)[5:]
    x_BTF = torch.tensor(hours[None, :61, None], dtype=torch.float32)
    (reported,) = TimeframeSplitter(((12, 1),), 1, 61)(x_BTF)
    assert reported[0, :, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_network_with_frames_setting_uses_frames_and_saves_setting():
    rng = np.random.default_rng(0)
    x_NF, rows = rng.normal(size=(90, 4)).astype(np.float32), np.arange(30, 90)
    y, windows = rng.integers(-1, 2, 60), Windows(x_NF, rows, 10)
    settings = {"lookback": 10, "epochs": 2, "batch": 32, "device": "cpu", "threads": 1, "hidden": 8}
    model = build_model("lstm", frames=[[1, 2], [3, 2]], **settings)
    model.fit(windows, y)
    p = model.predict_proba(windows)
    # Every number of the window that a frame has is felt: all rows of its columns, every third of the others.
    x_BTF = windows.gather(np.arange(4)).requires_grad_()
    model.network(x_BTF).sum().backward()
    felt_TF = (x_BTF.grad != 0).all(dim=0)
    assert felt_TF[:, :2].all() and felt_TF[:, 2:].any(dim=1).tolist() == [at % 3 == 0 for at in range(10)]
    state = model.get_state()
    assert (
        state["settings"]["frames"] == [[1, 2], [3, 2]] and "frames" not in build_model("lstm").get_state()["settings"]
    )
    again = build_model_from_state(deserialize_state(serialize_state(state)))
    np.testing.assert_array_equal(again.predict_proba(windows), p)


@pytest.mark.parametrize("name", [name for name in available_models() if find_model_spec(name).windowed])
def test_check_model_of_network_with_frames_passes(name):
    small = {"patchtst": {"patch": 8, "width": 8, "inner": 16}, "itransformer": {"width": 16}}.get(name, {})
    assert len(check_model(name, frames=((1, 3), (3, 3)), **small)) == 7


@pytest.mark.parametrize("name", [name for name in available_models() if find_model_spec(name).windowed])
def test_network_with_default_feature_frames_has_finite_outputs(name):
    """In the default window an hourly column has 3 steps, fewer than a PatchTST's patch."""
    data = FeatureSpec()
    columns = ["rsi_14", "atr", *(f"rsi_14@{minutes}m" for minutes in data.frames)]
    model = build_model(name, frames=frame_strides(columns, data.base_minutes))
    network = model.kind(len(columns), model.lookback, 3, model.network_spec)
    assert network.frames.steps == [32, 11, 6, 3]
    x_BTF = torch.randn(2, model.lookback, len(columns), requires_grad=True)
    logits_BC = network.eval()(x_BTF)
    logits_BC.square().sum().backward()
    assert logits_BC.shape == (2, 3) and torch.isfinite(logits_BC).all()
    assert (x_BTF.grad[:, -1] != 0).all()  # each frame is felt


def test_patchtst_short_frame_uses_shorter_patch():
    kind = build_model("patchtst", frames=((1, 2), (3, 1), (12, 1))).kind
    each = kind(4, 32, 3, PatchTSTSpec()).each
    assert [(part.patches.length, part.patches.stride) for part in each.values()] == [(16, 8), (11, 8), (3, 3)]


def test_register_model_of_several_frames_is_checked_with_frames_column_count():
    columns = ["rsi_14", "atr", "macd", "rsi_14@15m", "rsi_14@60m"]
    register_model("lstm_frames", multi_timeframe_network_class(LSTM, frame_strides(columns, 5)), family="sequence")
    try:
        assert build_model("lstm_frames").kind.features == 5
    finally:
        del _SPECS["lstm_frames"]


def test_frames_not_matching_columns_raise_settings_error():
    with pytest.raises(SettingsError, match=r"\[frames\]"):
        TimeframeSplitter(((1, 2), (4, 1)), features=4, lookback=10)
    with pytest.raises(SettingsError, match=r"\[lookback\].*more than 12 rows"):
        multi_timeframe_network_class(LSTM, ((1, 2), (12, 1)))(3, 12, 3, RecurrentSpec())
    for given in (True, ((0, 3),), ((1,),), "hours"):
        with pytest.raises(SettingsError, match=r"\[frames\]"):
            build_model("lstm", frames=given)
