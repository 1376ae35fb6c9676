"""Windows equal plain slices, share the array's memory, and never reach outside it."""

import numpy as np
import pytest
import torch

from ml_factory.errors import SettingsError
from tests.contract.doors import Windows


@pytest.fixture
def x_NF() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((200, 7)).astype(np.float32)


def test_windows_equal_numpy_slices(x_NF):
    rows = np.array([4, 150, 5, 199, 150])
    windows = Windows(x_NF, rows, 5)
    wanted = np.stack([x_NF[row - 4 : row + 1] for row in rows])
    assert len(windows) == 5 and windows.shape == (5, 5, 7)
    assert (windows[:] == wanted).all() and (windows[1] == wanted[1]).all() and (windows[-2:] == wanted[-2:]).all()
    assert (windows[np.array([3, 0])] == wanted[[3, 0]]).all()
    assert (windows.gather(np.array([3, 0])).numpy() == wanted[[3, 0]]).all()
    assert (windows.gather(torch.tensor([2])).numpy() == wanted[[2]]).all()
    assert (windows.take(np.array([4, 2]))[:] == wanted[[4, 2]]).all()
    assert windows[np.array([], int)].shape == (0, 5, 7)


def test_windows_share_memory_with_array(x_NF):
    x_NF.flags.writeable = False
    windows, own = Windows(x_NF, np.arange(9, 200), 10), x_NF.copy()
    for one in (windows, windows.take([0, 1]), Windows(torch.from_numpy(own), np.arange(9, 20), 10)):
        assert one.x_NF.data_ptr() in (x_NF.ctypes.data, own.ctypes.data)


def test_windows_rows_outside_array_raise_settings_error(x_NF):
    for rows in ([3], [200], [-1]):
        with pytest.raises(SettingsError, match="reach outside"):
            Windows(x_NF, np.array(rows), 5)
    with pytest.raises(SettingsError, match="reach outside"):
        Windows(x_NF, np.array([5]), 0)
    assert len(Windows(x_NF[:3], np.array([], int), 5)) == 0


@pytest.mark.parametrize(
    "spoil", [lambda x: x.astype(np.float64), lambda x: x[:, ::2], lambda x: x[0], np.asfortranarray]
)
def test_windows_of_non_contiguous_or_non_float32_array_raise_settings_error(x_NF, spoil):
    with pytest.raises(SettingsError, match="C-contiguous float32"):
        Windows(spoil(x_NF), np.array([9]), 2)
    with pytest.raises(SettingsError, match="C-contiguous float32"):
        Windows(torch.from_numpy(x_NF).T, np.array([5]), 2)
