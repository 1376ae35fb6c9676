"""Rate limit of each client: a bucket of tokens that fills at a constant rate."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

MOST_CLIENTS = 10_000


def client_address(scope: Mapping[str, Any]) -> str:
    """Return the address that a request or a connection came from."""
    return (scope.get("client") or ("unknown",))[0]


class RateLimits:
    """Token buckets by client; the client that was quiet longest is forgotten first.

    rate, burst : tokens a second, and the most that a client saves up
    clock : seconds that only increase
    """

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic):
        self._rate, self._burst, self._clock = rate, float(burst), clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def seconds_to_wait(self, client: str) -> float:
        """Take one token and return 0, or return the seconds until there is one."""
        now = self._clock()
        tokens, then = self._buckets.pop(client, (self._burst, now))
        tokens = min(self._burst, tokens + (now - then) * self._rate)
        wait = 0.0 if tokens >= 1 else (1 - tokens) / self._rate
        self._buckets[client] = (tokens if wait else tokens - 1, now)
        if len(self._buckets) > MOST_CLIENTS:
            self._buckets.popitem(last=False)
        return wait
