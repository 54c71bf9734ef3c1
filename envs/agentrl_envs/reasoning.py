"""Reasoning: solve a problem in one turn, without tools. The same problems and grader as with tools."""

from __future__ import annotations

from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.protocols.chat import ChatFormat
from agentrl_envs.protocols.reasoning import ReasoningProtocol
from agentrl_envs.settings import ReasoningSettings, SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREpisode
from agentrl_envs.types import Problem
from agentrl_sandbox.client import SandboxSettings

__all__ = ["ReasoningEnvironment"]


class ReasoningEnvironment:
    """What the episodes of a run share: the grader and the settings."""

    def __init__(
        self,
        settings: ReasoningSettings | None = None,
        sandbox_settings: SandboxSettings | None = None,
        grader_settings: GraderSettings | None = None,
        *,
        chat: ChatFormat | None = None,
    ) -> None:
        """Neither the sandbox's settings nor ``chat`` are used: nothing is run, and the prompt is plain."""
        self.settings = settings or ReasoningSettings()
        self._grader = Grader(grader_settings or GraderSettings())
        self._protocol = ReasoningProtocol(instruction=self.settings.shown_instruction)
        self._episode_settings = SimpleTIRSettings(max_turns=1)

    async def open(self) -> None:
        """Nothing to acquire: the grader starts with the first answer."""

    def episode(self, problem: Problem) -> SimpleTIREpisode:
        """A fresh episode of this problem."""
        return SimpleTIREpisode(
            problem, settings=self._episode_settings, sandbox=None, grader=self._grader, protocol=self._protocol
        )

    async def close(self) -> None:
        """Close the grader."""
        await self._grader.close()

    def describe(self) -> list[str]:
        """That there are no tools, and how answers are graded."""
        return ["Reasoning: one turn, no tools", f"grading: {self._grader.describe()}"]
