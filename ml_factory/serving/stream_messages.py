"""Messages of /stream: JSON texts of the client, and the replies."""

from typing import Any

import pandas as pd
from pydantic import ValidationError

from ml_factory.errors import FactoryError
from ml_factory.serving.feed import Feed, empty_position
from ml_factory.serving.feeds import Feeds
from ml_factory.serving.problems import problem_fields, schema_error, status_of, to_json_text
from ml_factory.serving.request_gate import check_value_count
from ml_factory.serving.served_market import ServedMarket, ServedMarkets
from ml_factory.serving.service_settings import ServiceLimits
from ml_factory.serving.stream_schemas import AdvanceMessage, BarsMessage, Message, PositionMessage
from ml_factory.serving.tables import check_bar_count, to_columns
from ml_factory.storage.json_values import parse_json

LARGEST_READ_FOR_ID = 2**16  # characters of a message of another form


class StreamMessages:
    """Answers of the messages of one feed's connections."""

    def __init__(self, markets: ServedMarkets, feeds: Feeds, limits: ServiceLimits):
        self._markets, self._feeds, self._limits = markets, feeds, limits

    async def hello(self, feed: str, durable: bool) -> dict[str, Any]:
        """Return the first message of a connection: the position of every symbol."""
        positions = [await self._position(market, feed) for market in self._markets.by_symbol.values()]
        return {"type": "hello", "feed": feed, "durable": durable, "positions": positions}

    async def reply(self, feed: str, text: str) -> dict[str, Any]:
        """Return the reply to a message: an acknowledgement with the answers, or a problem."""
        number = None
        try:
            check_value_count(text, self._limits)
            try:
                message = Message.validate_json(text)
            except ValidationError as error:
                number = _id_of(text)
                raise schema_error(error.errors(include_url=False)) from error
            number = message.id
            return {**await self._answer(feed, message), "id": number}
        except FactoryError as error:
            return problem_message(error, number)

    async def _answer(self, feed: str, message: BarsMessage | AdvanceMessage | PositionMessage) -> dict[str, Any]:
        market = self._markets.find(message.symbol)
        if isinstance(message, PositionMessage):
            return {"type": "position", **await self._position(market, feed)}
        if isinstance(message, AdvanceMessage):
            until = pd.Timestamp(message.until).tz_convert("UTC").as_unit("ns")
            reply = await self._feeds.run(
                market, feed, lambda one: one.advance(market.served, until, pd.Timestamp.now(tz="UTC")),
                market.served.named([]) | {"lacking_bars": market.served.lacking_bars},
            )  # fmt: skip
            return {"type": "ack", "repeated": 0, "repeated_answers": 0, **reply}
        check_bar_count(message.bars, self._limits.bars)
        now = pd.Timestamp.now(tz="UTC") if message.live else None

        def push(one: Feed) -> dict[str, Any]:
            return one.push(market.served, to_columns(message.bars), now)

        return {"type": "ack", **await self._feeds.run(market, feed, push)}

    async def _position(self, market: ServedMarket, feed: str) -> dict[str, Any]:
        absent = empty_position(market.served)
        return await self._feeds.run(market, feed, lambda one: one.position(market.served), absent)


def problem_message(error: FactoryError, number: Any = None, status: int | None = None) -> dict[str, Any]:
    """Return the reply to a message that is refused.

    number : its id
    """
    return {"type": "problem", **problem_fields(error, status or status_of(error)), "id": number}


def _id_of(text: str) -> Any:
    """Return the id of a message that is not of the form; None where it has none."""
    if len(text) > LARGEST_READ_FOR_ID:
        return None
    try:
        found = parse_json(text)["id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if isinstance(found, int | str) and len(to_json_text(found)) < 100 else None
