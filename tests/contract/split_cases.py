"""What the tests of splits share: labels with nothing but times, the rule word for word, the docstrings' pictures."""

import numpy as np
import pandas as pd
from hypothesis import strategies as st

MINUTE = 60_000_000_000


def labels(known_at, label_end) -> pd.DataFrame:
    """Labels with nothing but their times, in whole numbers of minutes."""
    known_at, label_end = (
        pd.DatetimeIndex(np.asarray(moments, np.int64) * MINUTE, tz="UTC") for moments in (known_at, label_end)
    )
    return pd.DataFrame({"label_end": label_end}, index=known_at.rename("known_at"))


def fixed_horizon(n: int, horizon: int) -> pd.DataFrame:
    """n rows a minute apart whose labels end `horizon` rows later."""
    return labels(range(n), range(horizon, n + horizon))


TWELVE = fixed_horizon(12, 2)


def drawn(docstring: str, name: str) -> list[str]:
    """The cells of one line of the picture, in twelve columns of three characters."""
    picture = docstring.splitlines()
    head, line = (next(text for text in picture if text.strip().startswith(what)) for what in ("row ", name))
    first = head.index(" 0 ") + 1
    return [line.ljust(first + 36)[first - 1 + 3 * i : first + 1 + 3 * i].strip() for i in range(12)]


def shown(docstring: str, fold: int) -> tuple[list[int], list[int]]:
    """(train, test) as the line of that fold shows them."""
    cells = drawn(docstring, f"fold {fold}")
    return [int(cell) for cell in cells if cell.isdigit()], [i for i, cell in enumerate(cells) if cell == "T"]


def as_lists(folds) -> list[tuple[list[int], list[int]]]:
    return [(train.tolist(), test.tolist()) for train, test in folds]


@st.composite
def any_labels(draw) -> pd.DataFrame:
    """Irregular rows; ends that are early, late, out of order, and often exactly a later row's known_at."""
    known_at = np.cumsum(draw(st.lists(st.integers(1, 4), min_size=8, max_size=60)))
    lives = draw(st.lists(st.integers(1, 12), min_size=len(known_at), max_size=len(known_at)))
    return labels(known_at, known_at + lives)


def times_of(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """int64 known_at and label_end."""
    return rows.index.as_unit("ns").asi8, pd.DatetimeIndex(rows["label_end"]).as_unit("ns").asi8


def may_stay(times: np.ndarray, ends: np.ndarray, row: int, block: np.ndarray, embargo: int) -> bool:
    """The rule, word for word, for one training row."""
    before = ends[row] < times[block].min()
    after = row - embargo >= 0 and times[row - embargo] > ends[block].max()
    return bool(before or after)
