"""Environments that are classes and whose methods do not return: the rollout is given up, and the log says where."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from rollout.fakes import byte_codec, completion
from rollout.played import PROBLEM, play_in

from agentrl_envs.adapters.environments import resolve_environment
from agentrl_envs.grading import GraderSettings
from agentrl_envs.settings import EnvironmentOptions
from agentrl_envs.types import Ended
from agentrl_sandbox.client import SandboxSettings


class Plain:
    """The method named by ``where`` does not return until the test lets it go."""

    let_go = threading.Event()
    where = ""

    def reset(self, **columns: Any) -> None:
        self._wait("reset")

    def step(self, text: str) -> tuple[str, float, bool]:
        self._wait("step")
        return "", 0.0, True

    def get_reward(self) -> float:
        self._wait("get_reward")
        return 1.0

    def _wait(self, method: str) -> None:
        if method == self.where:
            self.let_go.wait()


class Coroutines(Plain):
    async def step(self, text: str) -> Any:  # type: ignore[override]
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("kind", "method"), [("Plain", "reset"), ("Plain", "step"), ("Plain", "get_reward"), ("Coroutines", "step")]
)
async def test_a_method_that_never_returns_is_given_up_at_the_deadline_by_name(
    kind: str, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Plain, "let_go", threading.Event())
    monkeypatch.setattr(Plain, "where", method)
    name = f"{__name__}:{kind}"
    factory = resolve_environment(name)
    section = factory.validate_section(EnvironmentOptions())
    environment = factory(section, SandboxSettings(), GraderSettings(workers=1), None)
    codec = byte_codec()
    trajectory, _ = await play_in(
        environment, codec, [completion(codec, "so", "eos")], environment_deadline=1.0, retries=0
    )
    Plain.let_go.set()
    assert trajectory.ended is Ended.INFRASTRUCTURE_FAILURE
    (record,) = caplog.records
    assert record.getMessage() == (
        f"problem {PROBLEM.id}: {method}() of environment {name!r} did not respond within 1 s "
        "(rollout.environment_deadline)"
    )
