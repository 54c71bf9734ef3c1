"""The examples in the documentation of `agentrl_envs` are true."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = ("types", "answers", "falsified", "grading.fast", "protocols.simpletir")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"agentrl_envs.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
