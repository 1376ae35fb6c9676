"""Windows x_BTF over an array of rows, sliced without copying until they are gathered.

B windows in a batch, T = lookback time steps (oldest first), F features, N rows of the array.
"""

import warnings

import numpy as np
import torch

from ml_factory.errors import SettingsError


class Windows:
    """len(rows) windows; window i is x_NF[rows[i] - lookback + 1 : rows[i] + 1].

    Parameters
    ----------
    x_NF : float32 C-contiguous array or tensor in host memory; not copied
    rows : int64 positions of the windows' last rows, each >= lookback - 1 (`row_selection.mask_rows_with_full_window`)
    lookback : T >= 1
    """

    def __init__(self, x_NF: np.ndarray | torch.Tensor, rows: np.ndarray, lookback: int):
        self.x_NF = _as_tensor(x_NF)
        self.rows = np.ascontiguousarray(rows, dtype=np.int64)
        self.lookback = int(lookback)
        n, features = self.x_NF.shape
        least, most = self.lookback - 1, n - 1
        outside = self.rows.size and (self.rows.min() < least or self.rows.max() > most)
        if self.lookback < 1 or self.rows.ndim != 1 or outside:
            raise SettingsError(
                "These windows reach outside the data",
                where=f"lookback={lookback}, {n} rows",
                got=f"last rows from {self.rows.min()} to {self.rows.max()}" if self.rows.size else "no rows",
                wanted=f"last rows from {least} to {most}",
                next_step="keep rows with a whole window (datasets.row_selection.mask_rows_with_full_window)",
            )
        # One entry per possible window, all overlapping in the same memory.
        self._all_STF = self.x_NF.as_strided((max(n - least, 0), self.lookback, features), (features, features, 1))
        self._starts_B = torch.from_numpy(self.rows - least)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(windows, T, F)."""
        return len(self.rows), self.lookback, self.x_NF.shape[1]

    def gather(self, positions: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Return x_BTF float32 of the windows at `positions` (into `rows`)."""
        starts_B = self._starts_B.index_select(0, torch.as_tensor(positions, dtype=torch.int64))
        return self._all_STF.index_select(0, starts_B)

    def take(self, positions: np.ndarray) -> "Windows":
        """Return the windows at `positions`, on the same memory."""
        return Windows(self.x_NF, self.rows[np.asarray(positions)], self.lookback)

    def __getitem__(self, key: int | slice | np.ndarray) -> np.ndarray:
        """Return a NumPy copy: (T, F) for a number, (B, T, F) for a slice or an array."""
        positions = np.arange(len(self.rows))[key]
        picked = self.gather(np.atleast_1d(positions)).numpy()
        return picked[0] if np.ndim(positions) == 0 else picked


def _as_tensor(x_NF: np.ndarray | torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory; (N, F) float32, contiguous rows."""
    with warnings.catch_warnings():
        # A memory-mapped file is read-only, and so are we.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        x = torch.as_tensor(x_NF)
    if x.ndim != 2 or x.dtype != torch.float32 or not x.is_contiguous():
        raise SettingsError(
            "Windows cannot be sliced from this array",
            where="x_NF",
            got=f"{x_NF.dtype} of shape {tuple(x_NF.shape)}",
            wanted="a C-contiguous float32 array of shape (rows, features)",
            next_step="np.ascontiguousarray(x, dtype=np.float32)",
        )
    return x
