"""Messages of /stream: JSON texts of the client, and the replies."""

from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import AwareDatetime, Field, TypeAdapter, ValidationError

from ml_factory.errors import FactoryError
from ml_factory.serving.feed import Feed, empty_position
from ml_factory.serving.feeds import Feeds
from ml_factory.serving.problems import problem_fields, schema_error, status_of, to_json_text
from ml_factory.serving.schemas import FIRST_MOMENT, LAST_MOMENT, BarTable, Strict, Symbol
from ml_factory.serving.served_market import ServedMarket, ServedMarkets
from ml_factory.serving.tables import check_bar_count, to_columns
from ml_factory.storage.json_values import parse_json

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


class StreamMessages:
    """Answers of the messages of one feed's connections.

    largest : bars of a message
    """

    def __init__(self, markets: ServedMarkets, feeds: Feeds, largest: int):
        self._markets, self._feeds, self._largest = markets, feeds, largest

    async def hello(self, feed: str, durable: bool) -> dict[str, Any]:
        """Return the first message of a connection: the position of every symbol."""
        positions = [await self._position(market, feed) for market in self._markets.by_symbol.values()]
        return {"type": "hello", "feed": feed, "durable": durable, "positions": positions}

    async def reply(self, feed: str, text: str) -> dict[str, Any]:
        """Return the reply to a message: an acknowledgement with the answers, or a problem."""
        number = None
        try:
            try:
                message = Message.validate_json(text)
            except ValidationError as error:
                number = _id_of(text)
                raise schema_error(error.errors(include_url=False)) from error
            number = message.id
            return {**await self._answer(feed, message), "id": number}
        except FactoryError as error:
            return {"type": "problem", **problem_fields(error, status_of(error)), "id": number}

    async def _answer(self, feed: str, message: BarsMessage | AdvanceMessage | PositionMessage) -> dict[str, Any]:
        market = self._markets.find(message.symbol)
        if isinstance(message, PositionMessage):
            return {"type": "position", **await self._position(market, feed)}
        if isinstance(message, AdvanceMessage):
            until = pd.Timestamp(message.until).tz_convert("UTC").as_unit("ns")
            reply = await self._feeds.run(
                market, feed, lambda one: one.advance(market.served, until, pd.Timestamp.now(tz="UTC")),
                market.served.named([]),
            )  # fmt: skip
            return {"type": "ack", "repeated": 0, "repeated_answers": 0, **reply}
        check_bar_count(message.bars, self._largest)
        now = pd.Timestamp.now(tz="UTC") if message.live else None

        def push(one: Feed) -> dict[str, Any]:
            return one.push(market.served, to_columns(message.bars), now)

        return {"type": "ack", **await self._feeds.run(market, feed, push)}

    async def _position(self, market: ServedMarket, feed: str) -> dict[str, Any]:
        absent = empty_position(market.served)
        return await self._feeds.run(market, feed, lambda one: one.position(market.served), absent)


def _id_of(text: str) -> Any:
    """Return the id of a message that is not of the form; None where it has none."""
    try:
        found = parse_json(text)["id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if isinstance(found, int | str) and len(to_json_text(found)) < 100 else None
