"""The examples in the documentation of `agentrl_envs` are true."""

from __future__ import annotations

import doctest
import importlib

import pytest

PROTOCOLS = ("simpletir", "retool", "torl", "reasoning")
MODULES = (
    "types",
    "answers",
    "falsified",
    "grading.fast",
    "marked_text",
    "chat",
    *(f"protocols.{one}" for one in PROTOCOLS),
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"agentrl_envs.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
