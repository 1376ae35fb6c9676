"""Mounts for tests, skipped visibly where a machine cannot have them."""

from collections.abc import Callable, Iterator

import pytest

from tests.faults.mount import Mount, NoMount, why_not


@pytest.fixture
def mount(tmp_path) -> Iterator[Callable[..., Mount]]:
    """mount(**settings) -> a mounted drive; all are killed and unmounted at the end."""
    reason = why_not()
    if reason:
        pytest.skip(f"no faulty mount: {reason}")
    made = []

    def make(**settings) -> Mount:
        try:
            made.append(Mount(tmp_path / f"machine-{len(made)}", **settings))
        except NoMount as error:
            pytest.skip(f"no faulty mount: {error}")
        return made[-1]

    yield make
    for one in made:
        one.unmount()
