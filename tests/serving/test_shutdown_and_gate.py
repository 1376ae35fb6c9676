"""The server's signals, its gate and its limits, in this process and without a bundle."""

import asyncio
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import uvicorn

from ml_factory.serving import feed_log
from ml_factory.serving import service as service_module
from ml_factory.serving.connections import limited_http_protocol
from ml_factory.serving.feed_log import FeedLog
from ml_factory.serving.prediction_thread import PredictionThread
from ml_factory.serving.problems import OverloadError, TooLargeError
from ml_factory.serving.rate_limits import RateLimits
from ml_factory.serving.request_gate import RequestGate, check_value_count
from ml_factory.serving.server import _Server
from ml_factory.serving.service import Service, reload_on_signal
from ml_factory.serving.service_settings import ServiceLimits
from ml_factory.serving.stream_endpoint import answer_stream


class Socket:
    """The service's side of a connection, with messages that the client has sent."""

    def __init__(self, *texts: str):
        self._texts, self.sent, self.closed, self.denied = list(texts), [], None, None
        self.scope = {"client": ("10.0.0.1", 1)}

    async def accept(self) -> None:
        pass

    async def receive(self) -> dict:
        return {"type": "websocket.receive", "text": self._texts.pop(0)}

    async def send_text(self, text: str) -> None:
        self.sent.append(json.loads(text))

    async def close(self, code: int, reason: str = "") -> None:
        self.closed, self.reason = code, reason

    async def send_denial_response(self, response) -> None:
        self.denied = response.status_code


def stub_service(answer, **fields):
    async def hello(_):
        return {"type": "hello"}

    limits = ServiceLimits()
    values = {"limits": limits, "connections": Counter(), "messages_under_way": 0, "stopping": False,
              "rates": RateLimits(limits.requests_per_second, limits.burst)}  # fmt: skip
    return SimpleNamespace(hello=hello, answer_message=answer, **values | fields)


def test_server_stopped_during_a_message_sends_its_reply_and_reads_no_other():
    async def run() -> None:
        async def slow(_feed, text):
            server._stop()
            for _ in range(5):
                await asyncio.sleep(0.02)
                assert not server.should_exit
            return {"type": "ack", "id": text}

        service, socket = stub_service(slow), Socket("first", "second")
        server = _Server(uvicorn.Config(lambda: None), service, lambda: None)
        await answer_stream(socket, service, "feed")
        assert socket.sent == [{"type": "hello"}, {"type": "ack", "id": "first"}] and socket.closed == 1012
        async with asyncio.timeout(10):
            while not server.should_exit:
                await asyncio.sleep(0.01)
        assert service.messages_under_way == service.connections.total() == 0

    asyncio.run(run())


def test_second_stop_signal_waits_for_no_reply():
    async def run() -> None:
        service = stub_service(None, messages_under_way=1)
        server = _Server(uvicorn.Config(lambda: None), service, lambda: None)
        server._stop()
        await asyncio.sleep(0.05)
        assert not server.should_exit
        server._stop()
        assert server.should_exit
        service.messages_under_way = 0

    asyncio.run(run())


def test_reload_signal_during_a_reload_reloads_once_more(monkeypatch, tmp_path):
    reloads = []

    class Markets:
        async def reload(self):
            reloads.append("begun")
            await asyncio.sleep(0.02)
            return {}

    monkeypatch.setattr(service_module, "ServedMarkets", lambda *_: Markets())

    async def run() -> None:
        service = Service([], tmp_path, durable=False, limits=ServiceLimits(), guard=None)
        first = asyncio.create_task(service.reload())
        await asyncio.sleep(0)
        with pytest.raises(OverloadError):
            await service.reload()
        await asyncio.gather(first, reload_on_signal(service))

    asyncio.run(run())
    assert reloads == ["begun"] * 2


def test_each_reload_logs_old_and_new_bundle_in_one_line(monkeypatch, tmp_path, caplog):
    class Markets:
        async def reload(self):
            return {"DEMO": {"before": "aaaa", "after": "bbbb", "changed": True},
                    "MES": {"before": "cccc", "after": "cccc", "changed": False}}  # fmt: skip

    monkeypatch.setattr(service_module, "ServedMarkets", lambda *_: Markets())
    service = Service([], tmp_path, durable=False, limits=ServiceLimits(), guard=None)
    asyncio.run(service.reload())
    wanted = ["reloaded DEMO: bundle bbbb, before aaaa", "reloaded MES: bundle cccc, before cccc (unchanged)"]
    assert caplog.messages == wanted
    asyncio.run(reload_on_signal(service))
    assert caplog.messages == wanted * 2


def test_stream_beyond_connections_is_denied():
    socket = Socket()
    asyncio.run(answer_stream(socket, stub_service(None, connections=Counter(feed=64)), "feed"))
    assert socket.denied == 429


def statuses(gate: RequestGate, *requests: tuple[str, str, str]) -> list[int]:
    """Statuses of requests (kind, path, key) that are sent at once."""

    async def one(kind: str, path: str, key: str) -> int:
        found = []

        async def send(message):
            found.append(message.get("status", 101 if message["type"] == "websocket.accept" else None))

        async def receive():
            return {"type": "http.request", "body": b""}

        headers = [(b"host", b"localhost"), (b"x-api-key", key.encode())]
        scope = {"type": kind, "path": path, "headers": headers, "client": ("10.0.0.1", 1),
                 "extensions": {"websocket.http.response": {}}}  # fmt: skip
        await gate(scope, receive, send)
        return found[0]

    async def run() -> list[int]:
        return await asyncio.gather(*(one(*request) for request in requests))

    return asyncio.run(run())


def opened_gate(**limits) -> RequestGate:
    async def app(scope, _receive, send):
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
        else:
            await asyncio.sleep(0.02)
            await send({"type": "http.response.start", "status": 200})

    allowed = ServiceLimits(**limits)
    rates = RateLimits(allowed.requests_per_second, allowed.burst)
    return RequestGate(app, allowed, rates, key="right", loopback=False, observe=lambda *_: None)


def test_gate_asks_streams_for_the_key_too():
    requests = [(kind, path, key) for kind, path in (("websocket", "/stream"), ("http", "/predict"))
                for key in ("wrong", "right")]  # fmt: skip
    assert statuses(opened_gate(), *requests) == [401, 101, 401, 200]


def test_gate_refuses_requests_beyond_rate_whatever_their_key():
    limits = {"requests_per_second": 0.001, "burst": 2}
    for key, answered in (("right", 200), ("wrong", 401)):
        assert statuses(opened_gate(**limits), *[("http", "/predict", key)] * 3) == [answered, answered, 429]


def test_stream_messages_beyond_the_rate_of_requests_get_problem_and_close():
    limits, answered = ServiceLimits(requests_per_second=0.01, burst=4), []

    async def answer(_feed, text):
        answered.append(text)
        return {"type": "ack", "id": None}

    rates = RateLimits(limits.requests_per_second, limits.burst)
    assert rates.seconds_to_wait("10.0.0.1") == 0  # a request of the same client
    socket = Socket("1", "2", "3", "4", "5")
    asyncio.run(answer_stream(socket, stub_service(answer, limits=limits, rates=rates), "feed"))
    _, *replies, problem = socket.sent
    assert answered == ["1", "2", "3"] and len(replies) == 3
    assert (problem["type"], problem["status"], problem["id"]) == ("problem", 429, None)
    assert "wanted at most 0.01 a second. Next: send it again after 100 s" in problem["message"]
    assert socket.closed == 1013 and "connect again after 100 s" in socket.reason and len(socket.reason) < 124
    assert socket._texts == ["5"]  # not read: a later bar is not taken before the one that was refused


def test_gate_refuses_body_of_many_values_before_it_is_parsed():
    parsed = []

    async def app(_scope, _receive, _send):
        parsed.append(1)

    async def run(body: bytes, **limits) -> dict:
        sent = []

        async def receive():
            return {"type": "http.request", "body": body}

        async def send(message):
            sent.append(message)

        rates = RateLimits(100.0, 100)
        gate = RequestGate(app, ServiceLimits(**limits), rates, key="", loopback=False, observe=lambda *_: None)
        await gate({"type": "http", "method": "POST", "path": "/predict", "headers": [(b"host", b"a")]}, receive, send)
        return {"status": sent[0]["status"], **json.loads(sent[1]["body"])} if sent else {}

    for body, what in (
        (b'{"bars": [' + b"[]," * 101_000 + b"[]]}", "lists and objects"), (b"[" * 8_000_000, "lists and objects"),
        (b'{"bars": [' + b"0," * 1_000_000 + b"0]}", "values"),
    ):  # fmt: skip
        found = asyncio.run(run(body))
        assert found["status"] == 413 and found["what"] == f"The request has too many {what}" and not parsed
        with pytest.raises(TooLargeError):
            check_value_count(body.decode(), ServiceLimits())
    assert asyncio.run(run(b'{"bars": [' + b"0," * 900_000 + b"0]}")) == {} and parsed == [1]
    assert asyncio.run(run(b'{"bars": [0, 0, 0]}', values=3))["status"] == 413


def test_gate_refuses_requests_beyond_those_under_way():
    assert statuses(opened_gate(concurrent_requests=2), *[("http", "/predict", "right")] * 3) == [200, 200, 429]


def test_prediction_thread_refuses_jobs_beyond_its_limit():
    async def run() -> None:
        thread, held = PredictionThread("test", 1), asyncio.Event()
        loop = asyncio.get_running_loop()
        first = asyncio.create_task(thread.run(lambda: asyncio.run_coroutine_threadsafe(held.wait(), loop).result(10)))
        await asyncio.sleep(0)
        with pytest.raises(OverloadError, match="Too many predictions wait"):
            await thread.run(int)
        held.set()
        await first
        thread.close()

    asyncio.run(run())


def test_feed_log_record_is_on_the_disk_before_append_returns(tmp_path, monkeypatch):
    flushed, flush = [], feed_log.flush_to_disk
    monkeypatch.setattr(feed_log, "flush_to_disk", lambda descriptor: (flushed.append(descriptor), flush(descriptor)))
    log = FeedLog(tmp_path)
    for number in range(1, 4):
        before = len(flushed)
        log.append("bars", 1, {"columns": {"close": [float(number)]}})
        assert len(flushed) > before
    log.close()


def test_connections_without_headers_are_closed_and_those_beyond_the_limit_refused():
    async def app(_scope, _receive, send):
        await asyncio.sleep(0.6)  # longer than the headers may take
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def run() -> None:
        limits = ServiceLimits(open_connections=3, header_seconds=0.3)
        config = uvicorn.Config(app, http=limited_http_protocol(limits), lifespan="off", log_config=None)
        config.load()
        state = uvicorn.server.ServerState()
        server = await asyncio.get_running_loop().create_server(
            lambda: config.http_protocol_class(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        place = server.sockets[0].getsockname()
        async with server, asyncio.timeout(30):
            pairs = [await asyncio.open_connection(*place) for _ in range(4)]
            for (_, writer), text in zip(
                pairs, (b"", b"GET / HTTP/1.1\r\nHost: a\r\n", b"GET / HTTP/1.1\r\n\r\n"), strict=False
            ):
                writer.write(text)
            try:
                got = [await asyncio.gather(reader.read(12), return_exceptions=True) for reader, _ in pairs]
            finally:
                for _, writer in pairs:
                    writer.close()
        assert [b"" if isinstance(one, ConnectionError) else one for (one,) in got] == [
            b"", b"", b"HTTP/1.1 204", b"HTTP/1.1 503"
        ]  # fmt: skip

    asyncio.run(run())
