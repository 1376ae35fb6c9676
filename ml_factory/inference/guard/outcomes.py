"""Calibration of predictions whose outcomes come back: a likelihood ratio against the model's own probabilities.

Each outcome multiplies the capital of an alternative by its probability of what happened over the model's: too sure,
not sure enough, or a class too rare or too frequent. While the model's probabilities are right, the capital has
expectation 1 (an e-process). Labels that overlap are no separate outcomes: rows are dealt to as many lanes as a label
has bars, each lane has its own capital, and the mean over lanes and alternatives is an e-value again (Vovk and Wang
(2021), "E-values: calibration, combination and applications", Annals of Statistics 49, theorem 3.2). A lane below 1
restarts, as CUSUM does, so the log capital is compared with that of validation rows.
"""

from collections.abc import Collection, Mapping

import numpy as np

from ml_factory.errors import SettingsError

REMEMBERED = 10_000  # predictions that wait for their outcome
_POWERS = (0.5, 2.0)
_TILTS = (0.5, 2.0)
ALTERNATIVES = len(_POWERS) + 3 * len(_TILTS)


class OutcomeCheck:
    """Capital against the calibration of the predictions of one feed.

    lanes : rows that a label spans
    classes : the labels that there are
    """

    def __init__(self, lanes: int, classes: Collection[int] = (-1, 0, 1)):
        self._classes = sorted(classes)
        self._capital = np.full((lanes, ALTERNATIVES), 1.0 / ALTERNATIVES)
        self._waiting: dict[int, tuple[float, float, float, int]] = {}
        self._rows, self.outcomes, self.log_loss, self.expected = 0, 0, 0.0, 0.0

    def remember(self, known_at: np.ndarray, p_N3: np.ndarray) -> None:
        """Keep predictions, whose moments are UTC ns, until their outcomes come."""
        for moment, p in zip(known_at.tolist(), p_N3.tolist(), strict=True):
            self._waiting[moment] = (*p, self._rows % len(self._capital))
            self._rows += 1
        for moment in list(self._waiting)[: max(len(self._waiting) - REMEMBERED, 0)]:
            del self._waiting[moment]

    def add(self, known_at: int, label: int) -> float | None:
        """Return the log capital after an outcome; None where no such prediction waits."""
        if label not in self._classes:
            wanted = " or ".join(map(str, self._classes))
            raise SettingsError("There is no such outcome", where="label", got=label, wanted=wanted)
        one = self._waiting.pop(known_at, None)
        if one is None:
            return None
        p, lane = np.maximum(np.array(one[:3]), 1e-6), int(one[3])
        p /= p.sum()
        capital = self._capital[lane] * (_alternatives(p)[:, label + 1] / p[label + 1])
        total = float(capital.sum())
        self._capital[lane] = capital * min(max(1.0, 1.0 / total), 1e100 / total)
        self.outcomes += 1
        self.log_loss += float(-np.log(p[label + 1]))
        self.expected += float(-(p * np.log(p)).sum())
        return self.log_capital

    @property
    def log_capital(self) -> float:
        """Log of the mean capital; at least 0."""
        return float(np.log(max(self._capital.sum() / len(self._capital), 1.0)))

    def get_state(self) -> dict:
        waiting = np.array([[*one] for one in self._waiting.values()], np.float64).reshape(-1, 4)
        return {
            "capital": self._capital.copy(), "moments": np.array(list(self._waiting), np.int64), "waiting": waiting,
            "rows": self._rows, "outcomes": self.outcomes, "log_loss": self.log_loss, "expected": self.expected,
        }  # fmt: skip

    def load_state(self, state: Mapping) -> None:
        self._capital = np.array(state["capital"], np.float64).reshape(self._capital.shape)
        waiting = np.array(state["waiting"], np.float64).reshape(-1, 4).tolist()
        moments = np.array(state["moments"], np.int64).tolist()
        lanes = len(self._capital)
        self._waiting = {
            moment: (short, neutral, long, int(lane) % lanes)
            for moment, (short, neutral, long, lane) in zip(moments, waiting, strict=True)
        }  # fmt: skip
        self._rows, self.outcomes = int(state["rows"]), int(state["outcomes"])
        self.log_loss, self.expected = float(state["log_loss"]), float(state["expected"])


def _alternatives(p: np.ndarray) -> np.ndarray:
    """Return the probabilities of each alternative, float64 (ALTERNATIVES, 3)."""
    rows = [p**power for power in _POWERS]
    rows += [np.where(np.arange(3) == place, p * tilt, p) for place in range(3) for tilt in _TILTS]
    table = np.stack(rows)
    return table / table.sum(axis=1, keepdims=True)
