"""Parsing of the queries in addresses."""

from __future__ import annotations

import json
from collections.abc import Mapping

from agentrl.viewer.step_table import Search

Query = Mapping[str, str]


class QueryError(ValueError):
    """A query contains an invalid value."""


def search_of(query: Query) -> Search:
    """Parse the conditions for the rows of a table."""
    return Search(
        text=query.get("text", ""),
        problem=query.get("problem", ""),
        ended=query.get("ended", ""),
        verdict=query.get("verdict", ""),
        tool=query.get("tool", ""),
        dropped=query.get("dropped", ""),
        group=whole(query, "group"),
        least_reward=number(query, "least_reward"),
        most_reward=number(query, "most_reward"),
        least_turns=whole(query, "least_turns"),
        most_turns=whole(query, "most_turns"),
        least_staleness=whole(query, "least_staleness"),
    )


def asked_steps(stored: list[int], query: Query) -> list[int]:
    """Return the stored steps from ``first`` to ``last``. A single step is returned even if it is not stored."""
    first, last = whole(query, "first"), whole(query, "last")
    if first is not None and first == last:
        return [first]
    return [step for step in stored if (first is None or step >= first) and (last is None or step <= last)]


def position_of(text: str) -> tuple[int, int]:
    step, _, number = text.partition(":")
    if not (step.isdigit() and number.isdigit()):
        raise QueryError(f"after={text!r} is not STEP:NUMBER")
    return int(step), int(number)


def whole(query: Query, name: str) -> int | None:
    value = number(query, name)
    return None if value is None else int(value)


def number(query: Query, name: str) -> float | None:
    text = query.get(name, "")
    try:
        return float(text) if text else None
    except ValueError as error:
        raise QueryError(f"{name}={text!r} is not a number") from error


def what_if_question(query: Query) -> dict[str, object]:
    """Parse the request for another estimator: its name, its options as a JSON object, and the size of the group."""
    try:
        options = json.loads(query.get("options", "{}"))
    except ValueError as error:
        raise QueryError(f"options={query['options']!r} is not JSON") from error
    if not isinstance(options, dict):
        raise QueryError(f"options={query['options']!r} is not a JSON object")
    return {
        "ask": "what_if",
        "estimator": query.get("estimator", ""),
        "options": options,
        "size": whole(query, "size"),
    }
