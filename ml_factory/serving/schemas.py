"""Bodies of requests and answers, as the OpenAPI page lists them."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, model_validator

MOST_COLUMNS = 4096
FIRST_MOMENT, LAST_MOMENT = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
ColumnName = Annotated[str, StringConstraints(min_length=1, max_length=100)]
LARGEST = 3e38  # of 32 bits: features are, and squares of larger numbers overflow
Cell = Annotated[FiniteFloat, Field(ge=-LARGEST, le=LARGEST)] | Annotated[str, StringConstraints(max_length=100)] | None
Symbol = Annotated[str, StringConstraints(max_length=40)]
FeedName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,40}$")]
Bar = Annotated[dict[ColumnName, Cell], Field(max_length=32)]
# fail_fast: one fault of a list is reported, not one of each of its cells
BarRows = Annotated[list[Bar], Field(min_length=1, fail_fast=True)]
BarColumn = Annotated[list[Cell], Field(min_length=1, fail_fast=True)]
BarColumns = Annotated[dict[ColumnName, BarColumn], Field(min_length=1, max_length=32)]
FeatureValues = Annotated[list[FiniteFloat | None], Field(fail_fast=True)]
Segment = Annotated[int, Field(ge=-(2**31), lt=2**31)]
BAR_EXAMPLE = {
    "timestamp": "2026-01-05T14:30:00Z", "open": 5000.0, "high": 5001.0, "low": 4999.5, "close": 5000.25, "volume": 120,
}  # fmt: skip
_BAR_TEXT = (
    "Raw bars in the format of the training's: a list of bars, or a list for each column (faster). "
    "At most `limits.bars` of /info."
)
BarTable = Annotated[BarRows | BarColumns, Field(description=_BAR_TEXT, examples=[[BAR_EXAMPLE]])]


class Strict(BaseModel):
    """A body without further fields."""

    model_config = ConfigDict(extra="forbid")


class FeatureRows(Strict):
    """Feature rows in time order, at most `limits.rows` of /info, with the columns of the model in its order (`/info`).

    segment : number of each row's stretch, which changes at session ends and gaps; None: one stretch. Windows of a
        model that looks back lie inside one.
    """

    columns: Annotated[list[ColumnName], Field(min_length=1, max_length=MOST_COLUMNS, fail_fast=True)]
    values: Annotated[list[FeatureValues], Field(min_length=1, fail_fast=True)]
    known_at: Annotated[list[datetime], Field(fail_fast=True)] | None = None
    segment: Annotated[list[Segment], Field(fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> "FeatureRows":
        wrong = next((row for row, values in enumerate(self.values) if len(values) != len(self.columns)), None)
        if wrong is not None:
            raise ValueError(f"row {wrong} has {len(self.values[wrong])} values for {len(self.columns)} columns")
        for name in ("known_at", "segment"):
            given = getattr(self, name)
            if given is not None and len(given) != len(self.values):
                raise ValueError(f"{name} has {len(given)} entries for {len(self.values)} rows")
        return self


class PredictRequest(Strict):
    """Raw bars, or feature rows, of one symbol.

    live : the newest bar is compared with the clock; False for history
    last : newest rows to answer, of raw bars
    """

    symbol: Symbol | None = None
    bars: BarTable | None = None
    rows: FeatureRows | None = None
    live: bool = True
    last: Annotated[int, Field(ge=1, lt=2**31)] = 1

    @model_validator(mode="after")
    def _check_one(self) -> "PredictRequest":
        if (self.bars is None) == (self.rows is None):
            raise ValueError("give either bars or rows")
        return self


class Answer(BaseModel):
    """Probabilities of one row; null where the guard abstains or refuses.

    known_at : the moment from which the row is known; null for feature rows without moments
    """

    known_at: str | None
    p_short: float | None
    p_neutral: float | None
    p_long: float | None
    split: str | None = None
    side: float | None = None
    guard: Literal["ok", "warn", "abstain", "refuse"]
    reason: str


class PredictAnswer(BaseModel):
    """Answers of one bundle."""

    symbol: str
    run_id: str
    bundle: str
    answers: list[Answer]


class Health(BaseModel):
    """State of the process: it answers; `ready` once every bundle is loaded."""

    status: Literal["ok", "stopping"]
    ready: bool
    bundles: dict[str, str]


class Problem(BaseModel):
    """Body of every error."""

    status: int
    what: str
    where: str | None = None
    got: str | None = None
    wanted: str | None = None
    next_step: str | None = None
    message: str


class Info(BaseModel):
    """Facts of the bundles that are served, by symbol, and the limits."""

    version: str
    bundles: dict[str, dict[str, Any]]
    limits: dict[str, float]
    state: str | None


class OutcomeRequest(Strict):
    """The label that came true after an answer of a stream: -1 short, 0 neutral, 1 long."""

    symbol: Symbol | None = None
    feed: FeedName = "default"
    known_at: Annotated[AwareDatetime, Field(ge=FIRST_MOMENT, le=LAST_MOMENT)]
    label: Literal[-1, 0, 1]


class OutcomeAnswer(BaseModel):
    """remembered : whether the guard held the answer of that moment; reason : why not."""

    remembered: bool
    reason: str
    run_id: str
    bundle: str


class BundleName(BaseModel):
    """Bundle that answers for a symbol."""

    symbol: str
    run_id: str
    bundle: str


class Status(BaseModel):
    """Last answers, the newest first, and the guards of the open feeds."""

    streams: int
    bundles: list[BundleName]
    answers: list[dict[str, Any]]
    guards: list[dict[str, Any]]


class Change(BaseModel):
    """Ids of a symbol's bundle before and after a reload."""

    before: str
    after: str
    changed: bool


class Reloaded(BaseModel):
    """Changes by symbol."""

    bundles: dict[str, Change]
