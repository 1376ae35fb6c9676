"""WebSocket /stream: one connection, messages answered in order, each bar acknowledged when it is on the disk."""

import logging
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect

from ml_factory.errors import FactoryError
from ml_factory.serving.problems import OverloadError, problem_response, to_json_text
from ml_factory.serving.rate_limits import client_address
from ml_factory.serving.service import Service
from ml_factory.serving.stream_messages import problem_message

_log = logging.getLogger("ml_factory")


async def answer_stream(socket: WebSocket, service: Service, feed: str) -> None:
    """Serve one connection until either side ends it."""
    if service.connections.total() >= service.limits.connections:
        wanted = f"at most {service.limits.connections}"
        await socket.send_denial_response(problem_response(OverloadError("Too many streams are open", wanted=wanted)))
        return
    service.connections[feed] += 1
    try:
        try:
            hello = await service.hello(feed)
        except FactoryError as error:
            await socket.send_denial_response(problem_response(error))
            return
        await socket.accept()
        await socket.send_text(to_json_text(hello))
        while True:
            received = await socket.receive()
            if received["type"] == "websocket.disconnect":
                return
            if service.stopping:  # this message was not read; the client sends it again
                await socket.close(1012)
                return
            if wait := service.rates.seconds_to_wait(client_address(socket.scope)):
                await _end_for_rate(socket, service.limits.requests_per_second, wait)
                return
            service.messages_under_way += 1
            try:
                reply = await _reply(service, feed, received.get("text") or "")
                await socket.send_text(to_json_text(reply))
            finally:
                service.messages_under_way -= 1
    except WebSocketDisconnect:
        return  # the client left; what it sent stays in the log
    finally:
        service.connections[feed] -= 1
        if not service.connections[feed]:
            del service.connections[feed]


async def _reply(service: Service, feed: str, text: str) -> dict[str, Any]:
    """Return the reply to a message; a problem where the service fails unexpectedly, which its log then shows."""
    try:
        return await service.answer_message(feed, text)
    except Exception as error:  # noqa: BLE001 - the connection stays open
        _log.error("A message of a stream failed", exc_info=error)
        problem = FactoryError("The service failed at this message", next_step="see its log")
        return problem_message(problem, status=500)


async def _end_for_rate(socket: WebSocket, rate: float, wait: float) -> None:
    """Reply to a message beyond the rate, and close: a later one must not be taken before it."""
    error = OverloadError("Too many messages of this client", seconds=wait, wanted=f"at most {rate:g} a second")
    await socket.send_text(to_json_text(problem_message(error)))
    await socket.close(1013, f"too many messages: connect again after {max(wait, 1):.0f} s, and continue from next")
