"""Reasoning without tools: a protocol and an environment with one turn. Uses the problems and grader of SimpleTIR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_envs.chat import ChatFormat
from agentrl_envs.episode import Environment
from agentrl_envs.factory import EnvironmentFactory, TemplateUse
from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.protocols.base import ParsedTurn, TextProtocol, chat_if_required
from agentrl_envs.protocols.texts import last_boxed_answer
from agentrl_envs.settings import ReasoningSettings, SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREpisode
from agentrl_envs.types import Problem
from agentrl_sandbox.client import SandboxSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxedAnswerProtocol(TextProtocol):
    """A protocol with one turn and no programs. The last ``\\boxed`` is the answer."""

    observation_limit: int = 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Empty, because the turn ends at the end of sequence or at a token limit."""
        return ()

    def turn_complete(self, text: str) -> bool:
        """Return False, because no text ends the turn."""
        return False

    def parse(self, text: str) -> ParsedTurn:
        """Return the last boxed answer."""
        return ParsedTurn(program=None, answer=last_boxed_answer(text))

    def format_results(self, text: str, results: Sequence[str]) -> str:
        """Raise AssertionError, because no turn has a program or a call."""
        raise AssertionError("reasoning has no observations")


class ReasoningEnvironment(Environment):
    """Resources shared by the episodes of a run: the grader and the settings."""

    def __init__(
        self,
        settings: ReasoningSettings | None = None,
        sandbox_settings: SandboxSettings | None = None,
        grader_settings: GraderSettings | None = None,
        *,
        chat: ChatFormat | None = None,
    ) -> None:
        """Create the environment. ``sandbox_settings`` is ignored, because nothing is executed.

        Raises EpisodeUsageError if the settings require ``chat`` and it is missing.
        """
        self.settings = settings or ReasoningSettings()
        self._grader = Grader(grader_settings or GraderSettings())
        self._protocol = BoxedAnswerProtocol(
            instruction=self.settings.system_prompt_and_instruction, chat=chat_if_required(self.settings, chat)
        )
        self._episode_settings = SimpleTIRSettings(max_turns=1)

    def episode(self, problem: Problem) -> SimpleTIREpisode:
        """Create an episode of this problem."""
        return SimpleTIREpisode(
            problem, settings=self._episode_settings, sandbox=None, grader=self._grader, protocol=self._protocol
        )

    async def close(self) -> None:
        """Close the grader."""
        await self._grader.close()

    def describe(self) -> list[str]:
        """Return console lines about the turn limit and the grader."""
        return ["Reasoning: one turn, no tools", f"grading: {self._grader.describe()}"]


class ReasoningFactory(EnvironmentFactory[ReasoningSettings]):
    """Factory of the environment ``reasoning``."""

    def __call__(
        self, settings: ReasoningSettings, sandbox: SandboxSettings, grader: GraderSettings, chat: ChatFormat | None
    ) -> ReasoningEnvironment:
        return ReasoningEnvironment(settings, sandbox, grader, chat=chat)

    def template_use(self, settings: ReasoningSettings) -> TemplateUse | None:
        always = settings.chat == "always"
        return TemplateUse(settings=settings, setting="environment.chat=always") if always else None
