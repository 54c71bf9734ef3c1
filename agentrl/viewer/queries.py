"""What the query of an address asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping

from agentrl.viewer.step_table import Search

Query = Mapping[str, str]


class QueryError(ValueError):
    """An address whose query has a value that cannot be read."""


def search_of(given: Query) -> Search:
    """What the rows of a table must be."""
    return Search(
        text=given.get("text", ""),
        problem=given.get("problem", ""),
        ended=given.get("ended", ""),
        verdict=given.get("verdict", ""),
        tool=given.get("tool", ""),
        dropped=given.get("dropped", ""),
        group=whole(given, "group"),
        least_reward=number(given, "least_reward"),
        most_reward=number(given, "most_reward"),
        least_turns=whole(given, "least_turns"),
        most_turns=whole(given, "most_turns"),
        least_staleness=whole(given, "least_staleness"),
    )


def asked_steps(stored: list[int], given: Query) -> list[int]:
    """The stored steps from ``first`` to ``last``; a single step is asked for even where it is not stored."""
    first, last = whole(given, "first"), whole(given, "last")
    if first is not None and first == last:
        return [first]
    return [step for step in stored if (first is None or step >= first) and (last is None or step <= last)]


def position_of(text: str) -> tuple[int, int]:
    step, _, number = text.partition(":")
    if not (step.isdigit() and number.isdigit()):
        raise QueryError(f"after={text!r} is not STEP:NUMBER")
    return int(step), int(number)


def whole(given: Query, name: str) -> int | None:
    value = number(given, name)
    return None if value is None else int(value)


def number(given: Query, name: str) -> float | None:
    text = given.get(name, "")
    try:
        return float(text) if text else None
    except ValueError as error:
        raise QueryError(f"{name}={text!r} is not a number") from error


def what_if_question(given: Query) -> dict[str, object]:
    """The question for another estimator: its name, its options as a JSON object, and the rollouts to take."""
    try:
        options = json.loads(given.get("options", "{}"))
    except ValueError as error:
        raise QueryError(f"options={given['options']!r} is no JSON") from error
    if not isinstance(options, dict):
        raise QueryError(f"options={given['options']!r} is no JSON object")
    return {
        "ask": "what_if",
        "estimator": given.get("estimator", ""),
        "options": options,
        "size": whole(given, "size"),
    }
