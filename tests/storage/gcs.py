"""A real GCS emulator on the loopback interface, one for each test that asks."""

import re
import warnings
from collections.abc import Iterator

import pytest

from ml_factory.storage import remote


class _ExactParser:
    """The emulator's parser of uploads. The client ends a part with a bare line feed, so a carriage return that is the
    file's last byte looks like half of the line's end, and was lost: here each part gets a whole line's end.
    """

    def __init__(self, parser: type):
        self._parser = parser()

    def parsebytes(self, data: bytes):
        boundary = re.search(rb'boundary="?([^";\s]+)', data)[1]
        return self._parser.parsebytes(data.replace(b"\n--" + boundary, b"\r\n--" + boundary))


@pytest.fixture
def gcs_bucket(monkeypatch) -> Iterator[str]:
    """gs:// address of an empty bucket that this process, and those it starts, reach without an account.

    The client's own warnings are not ours to make errors of: one raised inside its event loop loses an answer.
    """
    warnings.simplefilter("default")
    monkeypatch.setattr(remote, "REQUEST_SECONDS", 20.0)
    server_module = pytest.importorskip("gcp_storage_emulator.server", reason="the GCS emulator is not installed")
    parser = server_module.BytesParser
    monkeypatch.setattr(server_module, "BytesParser", lambda: _ExactParser(parser))
    server = server_module.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bars")
    server.start()
    try:
        address = f"http://127.0.0.1:{server._api._httpd.server_address[1]}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        yield "gs://bars/mine"
    finally:
        server.stop()
