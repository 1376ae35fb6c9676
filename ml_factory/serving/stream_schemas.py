"""Messages of /stream in both directions, and how the OpenAPI page describes them."""

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, Field, TypeAdapter
from pydantic.json_schema import models_json_schema

from ml_factory.serving.schemas import (
    FIRST_MOMENT,
    LAST_MOMENT,
    BarTable,
    FeedName,
    PredictAnswer,
    Problem,
    Strict,
    Symbol,
)

MessageId = Annotated[int, Field(ge=-(2**53), le=2**53)] | Annotated[str, Field(max_length=100)] | None


class BarsMessage(Strict):
    """The next bars of a symbol. live : the newest is compared with the clock; False for history."""

    type: Literal["bars"]
    id: MessageId = None
    symbol: Symbol | None = None
    bars: BarTable
    live: bool = True


class AdvanceMessage(Strict):
    """All bars that began before `until` were sent: answers of bars that are complete then."""

    type: Literal["advance"]
    id: MessageId = None
    symbol: Symbol | None = None
    until: Annotated[AwareDatetime, Field(ge=FIRST_MOMENT, le=LAST_MOMENT)]


class PositionMessage(Strict):
    """From which bar on a symbol's feed continues."""

    type: Literal["position"]
    id: MessageId = None
    symbol: Symbol | None = None


Message = TypeAdapter(Annotated[BarsMessage | AdvanceMessage | PositionMessage, Field(discriminator="type")])


class FeedPosition(BaseModel):
    """next : earliest start of the next bar; null where none came."""

    symbol: str
    next: str | None
    run_id: str
    bundle: str


class HelloMessage(BaseModel):
    """First message of the service. durable : acknowledged bars survive a restart of the service."""

    type: Literal["hello"]
    feed: str
    durable: bool
    positions: list[FeedPosition]


class AckMessage(PredictAnswer):
    """Reply to bars, which are on the disk now, and to advance; an answer of another bundle names its own.

    repeated : bars at the beginning that were sent before
    repeated_answers : of them, before the new answers
    lacking_bars : bars, counted as `warmup_bars` of /info, that must still come at least before the first answer
    """

    type: Literal["ack"]
    id: MessageId
    repeated: int
    repeated_answers: int
    lacking_bars: int


class PositionReply(FeedPosition):
    """Reply to position."""

    type: Literal["position"]
    id: MessageId


class ProblemMessage(Problem):
    """Reply to a message that is refused; the feed is as before it."""

    type: Literal["problem"]
    id: MessageId


SENT = (BarsMessage, AdvanceMessage, PositionMessage)
RECEIVED = (HelloMessage, AckMessage, PositionReply, ProblemMessage)
CLOSE_CODES = {
    "1007": "A text is not UTF-8.",
    "1009": "A message is larger than body_bytes; the reason has both sizes. Send the bars in parts.",
    "1012": "The service stops. Messages without a reply were not read: connect again, and continue from `next`.",
    "1013": "More messages than requests_per_second, after a problem of status 429. Connect again after the seconds "
    "that it names, and continue from `next`.",
}
_ABOUT = """A WebSocket. The service sends `hello` first. The client then sends one message after another, each a
JSON text of one kind of `sent`; the service replies to each, in their order, with `ack`, `position` or `problem`,
and the `id` of the message. A bar is acknowledged once it is on the disk; one that is sent again, with the same
values, gets its first answer again. After a lost connection send on from `next` of `hello`. Key, host and limits
are those of the other requests; before the connection is open a refusal is an HTTP answer (401, 403, 421, 422,
429) with a Problem."""


def describe_stream(page: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI page with the extension `x-websockets`, which describes /stream, and its messages' schemas."""
    form = "#/components/schemas/{model}"
    kinds: Any = [(kind, "validation") for kind in (*SENT, *RECEIVED)]
    _, made = models_json_schema(kinds, ref_template=form)
    schemas = page.setdefault("components", {}).setdefault("schemas", {})
    for name, schema in made["$defs"].items():
        schemas.setdefault(name, schema)
    sent, received = (
        {kind.model_fields["type"].annotation.__args__[0]: {"$ref": form.format(model=kind.__name__)} for kind in kinds}
        for kinds in (SENT, RECEIVED)
    )
    schema = TypeAdapter(FeedName).json_schema() | {"default": "default"}
    feed = {"name": "feed", "in": "query", "required": False, "schema": schema}
    page["x-websockets"] = {
        "/stream": {
            "description": " ".join(_ABOUT.split()), "parameters": [feed], "sent": sent, "received": received,
            "closeCodes": CLOSE_CODES,
        }
    }  # fmt: skip
    return page
