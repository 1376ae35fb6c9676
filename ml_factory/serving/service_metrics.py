"""Metrics of the service in the text format of Prometheus, in a registry of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ml_factory.inference.guard import KINDS

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class ServiceMetrics:
    """Counters and gauges of one service; labels take values of fixed sets only, and names of feeds."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "ml_factory_requests", "Answered requests", ("path", "method", "status"), registry=registry
        )
        self._seconds = Histogram(
            "ml_factory_request_seconds", "Seconds to the answer", ("path",), buckets=SECONDS, registry=registry
        )
        self._answers = Counter(
            "ml_factory_answers", "Answers by what the guard decided", ("symbol", "guard"), registry=registry
        )
        self._bundles = Gauge(
            "ml_factory_bundle", "1 for the bundle that answers", ("symbol", "run_id", "bundle"), registry=registry
        )
        self._alarms = Gauge(
            "ml_factory_guard_alarm", "1 while the guard finds something of this kind", ("symbol", "feed", "check"),
            registry=registry,
        )  # fmt: skip

    def observe_request(self, scope: Mapping[str, Any], status: int, seconds: float) -> None:
        """Count an answered request, by its route."""
        path = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in ("GET", "POST") else "other"
        self._requests.labels(path, method, status).inc()
        self._seconds.labels(path).observe(seconds)

    def observe_answers(self, symbol: str, answers: Sequence[Mapping]) -> None:
        """Count answers."""
        for answer in answers:
            self._answers.labels(symbol, answer["guard"]).inc()

    def render(self, bundles: Sequence[tuple[str, str, str]], guards: Sequence[Mapping]) -> bytes:
        """Return the page.

        bundles : (symbol, run, bundle)
        guards : status of each feed's guard, with `symbol` and `feed`
        """
        for names in bundles:
            self._bundles.labels(*names).set(1)
        for one in guards:
            found = {finding["kind"] for finding in one["findings"]}
            for kind in KINDS:
                self._alarms.labels(one["symbol"], one["feed"], kind).set(float(kind in found))
        return generate_latest(self._registry)
