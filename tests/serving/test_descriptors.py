"""More connections than the process may have open files: the server stays, and serves again when they end."""

import socket
from contextlib import ExitStack

from tests.serving.conftest import running_server


def test_server_with_more_half_open_connections_than_descriptors_serves_again_when_they_close(made):
    few = ("sh", "-c", 'ulimit -n 128 && exec "$@"', "sh")
    with running_server(made.bundles["DEMO", "linear"], prefix=few) as server:
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with server.client() as client, ExitStack() as opened:
            assert client.get("/health").status_code == 200
            for _ in range(140):
                one = opened.enter_context(socket.create_connection(address, timeout=30))
                one.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            assert client.get("/health").status_code == 200  # a connection that was open before
            assert server.process.poll() is None
        with server.client() as client:
            assert client.get("/health").status_code == 200
            assert client.get("/info").status_code == 200
