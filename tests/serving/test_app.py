"""The socket that the service listens on."""

import socket

from ml_factory.serving.app import _listen


def test_service_listens_on_socket_whose_answers_are_sent_at_once():
    with _listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP  # asyncio turns Nagle's delay off on such sockets alone
