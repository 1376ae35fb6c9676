"""Answers of a feed's last bars, so that a bar that is sent again is acknowledged with its first answer."""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ml_factory.data.sessions import MINUTE_NS
from ml_factory.data.validation import validate_bar_columns
from ml_factory.inference.bundle import Bundle
from ml_factory.serving.tables import Columns, frame_to_answers, to_frame
from ml_factory.storage.json_values import parse_json

RECENT_BARS = 1000  # bars that are known again
_NAMES = ("symbol", "run_id", "bundle")


class RecentAnswers:
    """Bars by their values, each with the answers that it completed and the names of the bundle that gave them."""

    def __init__(self) -> None:
        self._replies: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def count_repeated(self, keys: Sequence[str]) -> int:
        """Return how many bars at the beginning are known."""
        return next((number for number, key in enumerate(keys) if key not in self._replies), len(keys))

    def remember(self, keys: Sequence[str], reply: Mapping[str, Any], moments: np.ndarray, ends: np.ndarray) -> None:
        """Keep the answers of new bars, each with the bar that completed it; bars that are known keep theirs.

        keys : of the bars
        reply : answers, and the names of their bundle
        moments : known_at of the answers, UTC ns, increasing
        ends : of the bars, UTC ns
        """
        first = max(len(keys) - RECENT_BARS, 0)
        places = np.searchsorted(moments, ends, side="right")
        for number in range(first, len(keys)):
            if keys[number] not in self._replies:
                begin = places[number - 1] if number else 0
                end = places[number] if number < len(keys) - 1 else len(moments)
                self._replies[keys[number]] = {**reply, "answers": list(reply["answers"][begin:end])}
        while len(self._replies) > RECENT_BARS:
            self._replies.popitem(last=False)

    def answers(self, keys: Sequence[str], bundle: str) -> list[dict[str, Any]]:
        """Return the first answers of known bars; those of another bundle than this one name theirs."""
        found = []
        for reply in (self._replies[key] for key in keys):
            found += reply["answers"] if reply["bundle"] == bundle else name_answers(reply)
        return found

    def all_answers(self) -> list[dict[str, Any]]:
        """Return the answers of all known bars in time order, each with its bundle."""
        found = [answer for reply in self._replies.values() for answer in name_answers(reply)]
        return sorted(found, key=lambda one: pd.Timestamp(one["known_at"]))

    def to_text(self) -> str:
        """Return the content, which `from_text` reads again."""
        return json.dumps(list(self._replies.items()))

    @classmethod
    def from_text(cls, text: str) -> "RecentAnswers":
        """Return the content of a snapshot. Raises what damaged content raises."""
        made = cls()
        made._replies = OrderedDict((key, _checked(reply)) for key, reply in parse_json(text, largest=None))
        return made


def name_answers(reply: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the answers of a reply, each with the symbol, run and id of its bundle; those that have one keep it."""
    named = {name: reply[name] for name in _NAMES}
    return [named | answer for answer in reply["answers"]]


def bar_keys(columns: Columns) -> list[str]:
    """Return the text of each bar, by which it is known again."""
    names = sorted(columns)
    return [json.dumps([names, row]) for row in zip(*(columns[name] for name in names), strict=True)]


def bar_ends(bundle: Bundle, columns: Columns) -> np.ndarray:
    """Return the ends of raw bars that the bundle has read, UTC ns."""
    start_ns, *_ = validate_bar_columns(to_frame(columns), bundle.spec.stream_bars, "bars")
    return start_ns + bundle.spec.market.bar_minutes * MINUTE_NS


def answers_and_moments(frame: pd.DataFrame) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Return the answers of predictions, and their moments (UTC ns)."""
    if not len(frame):
        return [], np.empty(0, np.int64)
    return frame_to_answers(frame), frame.index.as_unit("ns").asi8


def _checked(reply: Any) -> dict[str, Any]:
    """Return a stored reply. Raises KeyError, TypeError or ValueError for one of another form."""
    for answer in reply["answers"]:
        pd.Timestamp(answer["known_at"])
    if not all(isinstance(reply[name], str) for name in _NAMES):
        raise TypeError("names of a bundle that are no texts")
    return dict(reply)
