"""Settings of a search for barriers, and the label spec that it returns."""

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace

from ml_factory.errors import SettingsError, refuse_damaged_content, wrong_field_error
from ml_factory.storage.json_values import parse_json
from ml_factory.targets.labels import LabelSpec

VERSION = 3  # of a label spec: 1 given by hand, 2 with the rows of a search, 3 with their bars


@dataclass(frozen=True)
class BarrierSearchSpec:
    """Search space and constraints.

    labels : horizon, costs and session rule of every trial, and the barriers of the first one
    trials : number of trials
    seed : of the proposals
    k : nearest and farthest barrier, in units of sigma * sqrt(horizon)
    symmetric : one k for both sides
    sigma_spans : spans of the volatility, in bars
    neutral : least and largest share of neutral rows
    lean : largest |long - short|, as a share of the rows; ambiguous rows are in no share
    """

    labels: LabelSpec = field(default_factory=LabelSpec)
    trials: int = 40
    seed: int = 0
    k: tuple[float, float] = (0.3, 2.0)
    symmetric: bool = True
    sigma_spans: tuple[int, ...] = (50, 100, 200)
    neutral: tuple[float, float] = (0.2, 0.4)
    lean: float = 0.1

    def __post_init__(self):
        for name in ("k", "neutral", "sigma_spans"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON brings lists
        whole = [self.trials, self.seed, *self.sigma_spans]
        right = {
            "labels": isinstance(self.labels, LabelSpec),
            "trials": _is_whole(self.trials) and self.trials >= 1,
            "seed": _is_whole(self.seed) and self.seed >= 0,
            "k": len(self.k) == 2 and all(map(_is_real, self.k)) and 0 < self.k[0] < self.k[1],
            "symmetric": isinstance(self.symmetric, bool),
            "sigma_spans": len(whole) > 2 and all(_is_whole(span) and span >= 2 for span in self.sigma_spans),
            "neutral": len(self.neutral) == 2
            and all(map(_is_real, self.neutral))
            and 0 <= self.neutral[0] < self.neutral[1] <= 1,
            "lean": _is_real(self.lean) and 0 < self.lean <= 1,
        }
        wrong = [name for name, valid in right.items() if not valid]
        if wrong:
            default = next(f for f in fields(self) if f.name == wrong[0])
            raise wrong_field_error(
                self, wrong[0], "Barriers cannot be searched like this",
                wanted=f"something like {LabelSpec() if wrong[0] == 'labels' else default.default!r}",
                next_step=f"leave {wrong[0]} out for its default",
            )  # fmt: skip

    @property
    def first_trial_parameters(self) -> dict:
        """Parameters of the first trial: the barriers of `labels`, clipped to the search space."""
        ups = {"k": self.labels.k_up} if self.symmetric else {"k_up": self.labels.k_up, "k_down": self.labels.k_down}
        span = min(self.sigma_spans, key=lambda span: abs(span - self.labels.sigma_span))
        return {name: min(max(k, self.k[0]), self.k[1]) for name, k in ups.items()} | {"sigma_span": span}

    def label_spec_of_trial(self, params: dict) -> LabelSpec:
        k_up, k_down = (params["k"],) * 2 if self.symmetric else (params["k_up"], params["k_down"])
        return replace(self.labels, k_up=k_up, k_down=k_down, sigma_span=params["sigma_span"])


@dataclass(frozen=True)
class BarrierSearchRows:
    """The rows that a search saw.

    first, last : known_at of the first and last row (ISO, UTC)
    until : the last label_end that it may have used
    count : number of rows
    moments : hash of each row's known_at and of when its label must have ended
    fingerprint : hash of every bar up to `until` and of the market's facts; data with another one does not accept the
        spec
    """

    first: str
    last: str
    until: str
    count: int
    moments: str
    fingerprint: str


@dataclass(frozen=True)
class SearchedLabelSpec:
    """A label spec, version 3: the barriers found, the search, the rows it saw and the best trial."""

    labels: LabelSpec
    search: BarrierSearchSpec
    seen_rows: BarrierSearchRows
    best: dict
    trials: int
    version: int = VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "SearchedLabelSpec":
        """Parse a label spec; raise SettingsError for another version, or a damaged one."""
        with refuse_damaged_content(SettingsError, "This label spec is damaged", next_step="search again"):
            return cls._from_stored(parse_json(text))

    @classmethod
    def _from_stored(cls, stored: dict) -> "SearchedLabelSpec":
        if stored.get("version") != VERSION:
            raise SettingsError(
                "A searched label spec of another version", where="version", got=stored.get("version"), wanted=VERSION,
                next_step="search again",
            )  # fmt: skip
        search = stored["search"] | {"labels": LabelSpec(**stored["search"]["labels"])}
        parts = {"labels": LabelSpec(**stored["labels"]), "search": BarrierSearchSpec(**search)}
        return cls(**(stored | parts | {"seen_rows": BarrierSearchRows(**stored["seen_rows"])}))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
