"""Which estimators are compared: names with options, checked before anything is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.algorithms import ESTIMATORS, AlgorithmError, UnknownNameError
from agentrl.errors import SettingsError

EXCLUDED = {"gae": "it needs a critic trained for this policy, which the laboratory does not have"}
"""Registered estimators that cannot be measured on rollouts of a policy alone, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One estimator with its options; ``label`` is what the user wrote."""

    label: str
    name: str
    options: dict[str, Any]


def read_choices(texts: Sequence[str]) -> tuple[Choice, ...]:
    """The estimators written as ``name`` or ``name:option=value:option=value``; all that can be measured if none is.

    Raises SettingsError that names the nearest known name or option.

    >>> read_choices(["tir_otb:leave_one_out=true"])[0].options
    {'leave_one_out': True}
    """
    chosen = list(texts) or [name for name in ESTIMATORS.names() if name not in EXCLUDED]
    twice = sorted({text for text in chosen if chosen.count(text) > 1})
    if twice:
        raise SettingsError(f"--estimators: {', '.join(twice)} is given twice")
    return tuple(_read(text) for text in chosen)


def _read(text: str) -> Choice:
    name, *parts = text.split(":")
    if name in EXCLUDED:
        raise SettingsError(f"--estimators: {name} cannot be measured here: {EXCLUDED[name]}")
    options = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not equals:
            raise SettingsError(f"--estimators: {text}: options are written option=value, for example tail=carry")
        options[option] = _value(value)
    try:
        ESTIMATORS[name].make_options(f"estimator {name!r}", options)
    except (AlgorithmError, UnknownNameError, TypeError) as error:
        raise SettingsError(f"--estimators: {text}: {error}") from error
    return Choice(label=text, name=name, options=options)


def _value(text: str) -> Any:
    known = {"true": True, "false": False, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text
