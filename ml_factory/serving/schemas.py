"""Bodies of requests and answers, as the OpenAPI page lists them."""

import json
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints

FEED_NAME, MOST_BARS = r"^[A-Za-z0-9_-]{1,40}$", 100_000
FIRST_MOMENT, LAST_MOMENT = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
ColumnName = Annotated[str, StringConstraints(min_length=1, max_length=100)]
LARGEST = 3e38  # of 32 bits: features are, and squares of larger numbers overflow
Cell = Annotated[FiniteFloat, Field(ge=-LARGEST, le=LARGEST)] | Annotated[str, StringConstraints(max_length=100)] | None
Symbol = Annotated[str, StringConstraints(max_length=40)]
Bar = Annotated[dict[ColumnName, Cell], Field(max_length=32)]
# fail_fast: one fault of a list is reported, not one of each of its cells
BarRows = Annotated[list[Bar], Field(min_length=1, max_length=MOST_BARS, fail_fast=True)]
BarColumn = Annotated[list[Cell], Field(min_length=1, max_length=MOST_BARS, fail_fast=True)]
BarColumns = Annotated[dict[ColumnName, BarColumn], Field(min_length=1, max_length=32)]
BAR_EXAMPLE = {
    "timestamp": "2026-01-05T14:30:00Z", "open": 5000.0, "high": 5001.0, "low": 4999.5, "close": 5000.25, "volume": 120,
}  # fmt: skip
_BAR_TEXT = (
    "Raw bars in the format of the training's: a list of bars, or a list for each column (faster). "
    f"At most {MOST_BARS:,}. A bar: {json.dumps(BAR_EXAMPLE)}"
)
BarTable = Annotated[BarRows | BarColumns, Field(description=_BAR_TEXT)]


class Strict(BaseModel):
    """A body without further fields."""

    model_config = ConfigDict(extra="forbid")


class FeedBars(Strict):
    """Raw bars of one symbol. live : the newest is compared with the clock; False for history."""

    symbol: Symbol | None = None
    bars: Annotated[BarTable, Field(examples=[[BAR_EXAMPLE]])]
    live: bool = True


class PredictRequest(FeedBars):
    """Raw bars of one symbol, with as many before the first wanted row as the features need.

    last : newest rows to answer
    """

    bars: BarTable  # of no example: one bar answers nothing
    last: Annotated[int, Field(ge=1, lt=2**31)] = 1


class Answer(BaseModel):
    """Probabilities of one row; null where the guard abstains or refuses.

    known_at : the moment from which the row is known
    """

    known_at: str
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


class FeedReply(PredictAnswer):
    """Answers that the bars completed, those of bars that were seen before first.

    repeated, repeated_answers : bars that were seen before, and their answers
    lacking_bars : base bars that must still come before the first answer
    next : earliest start of the next bar
    """

    repeated: int
    repeated_answers: int
    lacking_bars: int
    next: str | None


class OutcomeRequest(Strict):
    """The label that came true after an answer of a feed: -1 short, 0 neutral, 1 long."""

    symbol: Symbol | None = None
    known_at: Annotated[AwareDatetime, Field(ge=FIRST_MOMENT, le=LAST_MOMENT)]
    label: Literal[-1, 0, 1]


class OutcomeAnswer(BaseModel):
    """remembered : whether the guard held the answer of that moment; reason : why not."""

    remembered: bool
    reason: str
    run_id: str
    bundle: str


class Problem(BaseModel):
    """Body of every error."""

    status: int
    what: str
    where: str | None
    got: str | None
    wanted: str | None
    next_step: str | None
    message: str
