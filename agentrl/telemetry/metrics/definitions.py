"""What a metric is, and metrics of users: ``@agentrl.register_metric``."""

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
"""A metric of every training row."""


@dataclass(frozen=True)
class Metric:
    """A number of ``metrics.jsonl``, or a family of them: ``{...}`` in the name stands for any text."""

    name: str
    unit: str
    meaning: str  # one sentence or a formula
    healthy: str = ""
    when: str = EVERY_STEP  # the condition under which a training row has it
    label: str = ""  # a short one for legends
    console: str = ""  # how the progress line shows it, such as "turns {:.1f}"

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """What the metric's keys match."""
        parts = re.split(r"(\{\w+\})", self.name)
        return re.compile("".join(".+" if part.startswith("{") else re.escape(part) for part in parts))


@dataclass(frozen=True, kw_only=True)
class UserMetric:
    """A metric of a plug-in: a function of a step's trajectories, without greedy ones and those that are no data."""

    metric: Metric
    measure: Callable[[Sequence[Any]], float | None]
    plot: bool


USER_METRICS: Registry[UserMetric] = Registry("metric")
_FAILED: set[str] = set()  # metrics whose failure was reported


def register_metric(
    name: str, *, unit: str, meaning: str, healthy: str = "", console: str = "", plot: bool = True
) -> Callable[[Measure], Measure]:
    """Decorator: a number that each training step computes from its trajectories (`agentrl.trajectory.Trajectory`).

    ``name`` has a group and a slash, such as ``search/calls_mean``. The function returns None where there is nothing
    to measure. ``console`` shows the number in the progress line (``"searches {:.1f}"``), ``plot`` draws it into
    ``plots/``. A function that raises or returns no finite number is reported once; its number is missing in the row.
    """
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", name):
        raise ValueError(f"metric {name!r}: a name has a group and a slash, such as search/calls_mean")
    _check_format(name, console)

    def add(measure: Measure) -> Measure:
        metric = Metric(name, unit, meaning, healthy, console=console)
        USER_METRICS.add(name, UserMetric(metric=metric, measure=measure, plot=plot))
        return measure

    return add


def user_metrics(trajectories: Sequence[object], taken: Container[str]) -> dict[str, float]:
    """The metrics of plug-ins over a step's trajectories. Those named as one of ``taken`` are left out."""
    found = {}
    for name in USER_METRICS.names():
        try:
            if name in taken:
                raise ValueError("a metric of this name exists")
            value = USER_METRICS[name].measure(trajectories)
            if value is None:
                continue
            if not math.isfinite(value):
                raise ValueError(f"{value!r} is not finite")
            found[name] = float(value)
        except Exception as error:  # noqa: BLE001 - users' code: a missing number must not end a run
            if name not in _FAILED:
                logger.warning("metric %r is left out: %s", name, describe_error(error))
            _FAILED.add(name)
    return found


def _check_format(name: str, console: str) -> None:
    try:
        shown = console.format(0.5) if console else "0.5"
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"metric {name!r}: console={console!r} cannot format a number ({error})") from error
    if not any(sign.isdigit() for sign in shown):
        raise ValueError(f"metric {name!r}: console={console!r} shows no number; write for example 'searches {{:.1f}}'")
