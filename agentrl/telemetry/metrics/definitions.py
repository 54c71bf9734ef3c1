"""Definition of a metric, and registration of metrics by users: ``@agentrl.register_metric``."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from agentrl_envs.registry import Registry, describe_error

logger = logging.getLogger(__name__)
Measure = TypeVar("Measure", bound="Callable[[Sequence[Any]], float | None]")

EVERY_STEP = ""
"""Value of ``when`` for metrics that every training row has."""


@dataclass(frozen=True)
class Metric:
    """A number in ``metrics.jsonl``, or a family of numbers: ``{...}`` in the name stands for any text."""

    name: str
    unit: str
    meaning: str  # one sentence or a formula
    healthy: str = ""
    when: str = EVERY_STEP  # condition under which a training row has the metric
    label: str = ""  # short name for legends
    console: str = ""  # format in the progress line, such as "turns {:.1f}"

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Regular expression that matches the metric's keys."""
        parts = re.split(r"(\{\w+\})", self.name)
        return re.compile("".join(".+" if part.startswith("{") else re.escape(part) for part in parts))


@dataclass(frozen=True, kw_only=True)
class UserMetric:
    """A metric of a plug-in, computed from a step's trajectories without greedy and excluded ones."""

    metric: Metric
    measure: Callable[[Sequence[Any]], float | None]
    plot: bool


USER_METRICS: Registry[UserMetric] = Registry("metric")
_FAILED: set[str] = set()  # metrics whose failure has been reported


def register_metric(
    name: str, *, unit: str, meaning: str, healthy: str = "", console: str = "", plot: bool = True
) -> Callable[[Measure], Measure]:
    """Register a metric that each training step computes from its trajectories (`agentrl.trajectory.Trajectory`).

    ``name`` consists of a group and a name, such as ``search/calls_mean``. The decorated function returns None if there
    is no value. ``console`` formats the value in the progress line (``"searches {:.1f}"``), and ``plot`` draws it into
    ``plots/``. If the function raises or returns a value that is not finite, a warning is logged once and the row has
    no value.
    """
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", name):
        raise ValueError(f"metric {name!r}: a name must have a group and a slash, such as search/calls_mean")
    _check_format(name, console)

    def add(measure: Measure) -> Measure:
        metric = Metric(name, unit, meaning, healthy, console=console)
        USER_METRICS.add(name, UserMetric(metric=metric, measure=measure, plot=plot))
        return measure

    return add


def user_metrics(trajectories: Sequence[object], taken: Container[str]) -> dict[str, float]:
    """Compute the metrics of plug-ins over a step's trajectories, except those whose name is in ``taken``."""
    values = {}
    for name in USER_METRICS.names():
        try:
            if name in taken:
                raise ValueError("a metric with this name exists")
            value = USER_METRICS[name].measure(trajectories)
            if value is None:
                continue
            if not math.isfinite(value):
                raise ValueError(f"{value!r} is not finite")
            values[name] = float(value)
        except Exception as error:  # noqa: BLE001 - user code: a missing value must not end a run
            if name not in _FAILED:
                logger.warning("metric %r has no value in this run: %s", name, describe_error(error))
            _FAILED.add(name)
    return values


def _check_format(name: str, console: str) -> None:
    try:
        shown = console.format(0.5) if console else "0.5"
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"metric {name!r}: console={console!r} cannot format a number ({error})") from error
    if not any(sign.isdigit() for sign in shown):
        raise ValueError(f"metric {name!r}: console={console!r} shows no number; write for example 'searches {{:.1f}}'")
