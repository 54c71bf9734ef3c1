"""The Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from agentrl_sandbox.types import Execution, Outcome

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)


class Metrics:
    """The metrics of one gateway, with a registry of its own so that gateways in one process do not mix."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        counted = "answered calls by outcome"
        self._outcomes = Counter("agentrl_sandbox_executions", counted, ["outcome"], registry=registry)
        for outcome in Outcome:
            self._outcomes.labels(outcome.value)
        program, name = "wall clock time of programs", "agentrl_sandbox_execution_seconds"
        self._seconds = Histogram(name, program, buckets=_SECONDS, registry=registry)
        answer, name = "time from a call's arrival to its answer, including the queue", "agentrl_sandbox_answer_seconds"
        self._answer_seconds = Histogram(name, answer, buckets=_SECONDS, registry=registry)
        refused = "rejected calls by HTTP status"
        self._refused = Counter("agentrl_sandbox_refused", refused, ["status"], registry=registry)

    def gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        """Add a number that is read whenever Prometheus scrapes."""
        Gauge(f"agentrl_sandbox_{name}", meaning, registry=self._registry).set_function(value)

    def ran(self, execution: Execution, answer_seconds: float) -> None:
        self._outcomes.labels(execution.outcome.value).inc()
        self._seconds.observe(execution.seconds)
        self._answer_seconds.observe(answer_seconds)

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
