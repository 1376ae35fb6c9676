"""Settings of a search for barriers, and the label spec that it returns."""

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace

from ml_factory.errors import SettingsError, refuse_damaged_content, wrong_field_error
from ml_factory.storage.json_values import parse_json
from ml_factory.targets.labels import LabelSpec

VERSION = 4  # of a label spec: 3 was found by trials of a sampler


@dataclass(frozen=True)
class BarrierSearchSpec:
    """Grid and constraints.

    labels : horizon, costs and session rule of the labels
    k : distances of both barriers, in units of sigma * sqrt(horizon)
    sigma_spans : spans of the volatility, in bars
    neutral : least and largest share of neutral rows
    lean : largest |long - short|, as a share of the rows; ambiguous rows are in no share
    """

    labels: LabelSpec = field(default_factory=LabelSpec)
    k: tuple[float, ...] = (0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.2, 1.4, 1.7, 2.0)
    sigma_spans: tuple[int, ...] = (50, 100, 200)
    neutral: tuple[float, float] = (0.2, 0.4)
    lean: float = 0.1

    def __post_init__(self):
        for name in ("k", "neutral", "sigma_spans"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON brings lists
        spans = self.sigma_spans
        right = {
            "labels": isinstance(self.labels, LabelSpec),
            "k": bool(self.k) and all(_is_real(k) and k > 0 for k in self.k),
            "sigma_spans": bool(spans) and all(_is_whole(span) and span >= 2 for span in spans),
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

    def grid(self) -> list[LabelSpec]:
        """Return the label spec of each point: every k with every span."""
        return [
            replace(self.labels, k_up=k, k_down=k, sigma_span=sigma_span)
            for k in self.k
            for sigma_span in self.sigma_spans
        ]


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
    """A label spec with the barriers found, the search, the rows it saw and the best point of its grid."""

    labels: LabelSpec
    search: BarrierSearchSpec
    seen_rows: BarrierSearchRows
    best: dict
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
