"""Reasoning: solve a problem in one turn, without tools. The same problems and grader as with tools."""

from __future__ import annotations

from agentrl_envs.chat.chat_format import ChatFormat
from agentrl_envs.episode import Environment
from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.protocols.factory import reasoning
from agentrl_envs.settings import ReasoningSettings, SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREpisode
from agentrl_envs.types import Problem
from agentrl_sandbox.client import SandboxSettings

__all__ = ["ReasoningEnvironment"]


class ReasoningEnvironment(Environment):
    """What the episodes of a run share: the grader and the settings."""

    def __init__(
        self,
        settings: ReasoningSettings | None = None,
        sandbox_settings: SandboxSettings | None = None,
        grader_settings: GraderSettings | None = None,
        *,
        chat: ChatFormat | None = None,
    ) -> None:
        """Nothing is run, so the sandbox's settings are not used. Raises `EpisodeUsageError` where ``chat`` lacks."""
        self.settings = settings or ReasoningSettings()
        self._grader = Grader(grader_settings or GraderSettings())
        self._protocol = reasoning(self.settings, chat)
        self._episode_settings = SimpleTIRSettings(max_turns=1)

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
