"""Several frames at once: which rows each column is read at."""

import numpy as np
import pytest
import torch

from ml_factory.datasets.windows import Windows
from ml_factory.errors import SettingsError
from ml_factory.models.frames import Frames, several_frames, strides_of
from ml_factory.models.registry import _SPECS, build_model, register_model
from ml_factory.models.sequence import LSTM, RecurrentSpec


def test_strides_are_read_off_the_columns_names():
    columns = ["rsi_14", "atr", "rsi_14@15m", "rsi_14@60m", "atr@60m", "rsi_14@4h", "rsi_14@1d"]
    assert strides_of(columns, 5) == ((1, 2), (3, 1), (12, 2), (1, 2))
    assert strides_of(columns[:4], 1) == ((1, 2), (15, 1), (60, 1))


def test_each_column_is_read_at_its_own_pace_up_to_the_last_row():
    """Columns hold the number of their row: 10 rows, strides 1 and 4, so 3 steps."""
    x_BTF = torch.arange(10.0)[None, :, None].expand(2, -1, 3)
    frames = Frames(((1, 2), (4, 1)), features=3, lookback=10)
    y_BLF = frames(x_BTF)
    assert frames.steps == 3 and y_BLF.shape == (2, 3, 3)
    assert y_BLF[0].T.tolist() == [[7, 8, 9], [7, 8, 9], [1, 5, 9]]


def test_an_hourly_column_is_read_hour_by_hour():
    """A column that changes every 12 rows, as-of joined: each step is another hour's bar, the newest last."""
    hours = np.repeat(np.arange(8), 12)[5:]
    x_BTF = torch.tensor(hours[None, :61, None], dtype=torch.float32)
    told = Frames(((12, 1),), 1, 61)(x_BTF)[0, :, 0].tolist()
    assert told == [0, 1, 2, 3, 4, 5]


def test_any_network_behind_it_is_a_model_like_the_others():
    strides = ((1, 2), (3, 2))
    register_model("lstm_frames", several_frames(LSTM, strides), family="sequence", check=False)
    try:
        rng = np.random.default_rng(0)
        x_NF, rows = rng.normal(size=(300, 4)).astype(np.float32), np.arange(30, 300)
        y = np.sign(x_NF[rows - 9, 3]).astype(int)  # 9 rows ago, which a window of 4 base rows cannot see
        model = build_model(
            "lstm_frames", lookback=10, hidden=16, epochs=20, batch=32, lr=0.01, device="cpu", threads=1
        )
        model.fit(Windows(x_NF, rows, 10), y)
        assert model.network.network.rnn.input_size == 4 and model.network.frames.steps == 4
        assert (model.predict_proba(Windows(x_NF, rows, 10)).argmax(1) - 1 == y).mean() > 0.9
    finally:
        del _SPECS["lstm_frames"]


def test_frames_of_other_columns_are_refused():
    with pytest.raises(SettingsError, match=r"\[strides\]"):
        Frames(((1, 2), (4, 1)), features=4, lookback=10)
    with pytest.raises(SettingsError, match=r"\[strides\]"):
        several_frames(LSTM, ((0, 3),))(3, 10, 3, RecurrentSpec())
