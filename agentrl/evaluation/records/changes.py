"""Differences between the provenance of two evaluations, and the keys in which comparable evaluations may differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COMPARABLE = (
    "model.",
    "seed",
    "packages.",
    "sampling.n",
    "benchmarks.",
    "engine.",
    "environment.sandbox",
    "sandbox.url",
)
"""Keys, or prefixes of keys, in which two comparable runs may differ. All other keys are the protocol."""


def differences(
    first: Mapping[str, object], second: Mapping[str, object], *, but: Sequence[str] = ()
) -> list[tuple[str, object, object]]:
    """List (dotted key, first value, second value) of every difference, except in the keys or prefixes in ``but``."""
    before, after = flat(first), flat(second)
    return [
        (key, before.get(key, "(absent)"), after.get(key, "(absent)"))
        for key in dict.fromkeys([*before, *after])
        if before.get(key, "(absent)") != after.get(key, "(absent)") and not any(_under(key, name) for name in but)
    ]


def flat(record: Mapping[str, object], path: str = "") -> dict[str, object]:
    """Flatten a nested mapping to dotted keys.

    >>> flat({"a": {"b": 1, "c": {}}, "d": [2]})
    {'a.b': 1, 'd': [2]}
    """
    keys: dict[str, object] = {}
    for key, value in record.items():
        here = f"{path}.{key}" if path else key
        keys |= flat(value, here) if isinstance(value, Mapping) else {here: value}
    return keys


def _under(key: str, name: str) -> bool:
    return key == name or (name.endswith(".") and key.startswith(name))
