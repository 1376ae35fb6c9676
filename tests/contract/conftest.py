"""Fixtures that the contract tests share with those of a folder."""

import importlib.util
from collections.abc import Iterator

import pytest

from tests.contract.doors import own_models
from tests.data.conftest import gappy_minutes, make_raw, real_markets  # noqa: F401
from tests.faults.conftest import mount  # noqa: F401
from tests.inference.conftest import bundle_file, raw_bars, trained  # noqa: F401
from tests.storage.gcs import gcs_bucket  # noqa: F401
from tests.tpu.conftest import play  # noqa: F401

if importlib.util.find_spec("torch"):  # `make matrix` has rows without it
    from tests.recipes.conftest import hub, shards  # noqa: F401
    from tests.recipes.text_cases import sdce_settings  # noqa: F401

if importlib.util.find_spec("fastapi"):
    from tests.contract.service import client, made  # noqa: F401


@pytest.fixture
def restored_models() -> Iterator[None]:
    """Forget the user's own models that a test registers."""
    with own_models():
        yield
