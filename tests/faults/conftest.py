"""A mount for tests, skipped visibly where a machine cannot have one."""

from collections.abc import Iterator

import pytest

from tests.faults.mount import Mount, why_not


@pytest.fixture
def mount(tmp_path) -> Iterator[Mount]:
    """A mounted drive; killed and unmounted at the end."""
    if reason := why_not():
        pytest.skip(f"no mount: {reason}")
    try:
        made = Mount(tmp_path / "machine")
    except RuntimeError as error:
        pytest.skip(f"no mount: {error}")
    yield made
    made.heal()
    made.unmount()
