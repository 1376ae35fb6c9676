"""How many examples the tests with drawn damage and kills try: ML_FACTORY_TEST_PROFILE = dev, ci or campaign."""

import os

from hypothesis import HealthCheck, Phase, settings

PROFILE = os.environ.get("ML_FACTORY_TEST_PROFILE", "dev")


def examples(dev: int, ci: int, campaign: int) -> settings:
    """The same examples at each call in `dev` and `ci`, others each time in `campaign`; none are remembered.

    With 0 of them only what the test's own `@example` says is tried.
    """
    count = {"dev": dev, "ci": ci, "campaign": campaign}[PROFILE]
    return settings(
        max_examples=max(count, 1), phases=tuple(Phase) if count else (Phase.explicit,),
        derandomize=PROFILE != "campaign", database=None, deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )  # fmt: skip
