"""A real GCS emulator on the loopback interface, one for each test that asks."""

import warnings
from collections.abc import Iterator

import pytest

from ml_factory.storage import remote


@pytest.fixture
def gcs_bucket(monkeypatch) -> Iterator[str]:
    """gs:// address of an empty bucket that this process, and those it starts, reach without an account.

    The client's own warnings are not ours to make errors of: one raised inside its event loop loses an answer.
    """
    warnings.simplefilter("default")
    monkeypatch.setattr(remote, "REQUEST_SECONDS", 20.0)
    server_module = pytest.importorskip("gcp_storage_emulator.server", reason="the GCS emulator is not installed")
    server = server_module.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bars")
    server.start()
    try:
        address = f"http://127.0.0.1:{server._api._httpd.server_address[1]}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        yield "gs://bars/mine"
    finally:
        server.stop()
