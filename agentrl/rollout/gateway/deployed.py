"""Conversations as a deployed server shows them to the model: its earlier turns as the chat template writes them.

An episode's turns become requests, like those of an agent program, so what is sampled is matched and stored by the same
rules (`agentrl.rollout.gateway.tree`). Where the template writes an earlier turn in another way than it was sampled (it
drops thoughts, or formats a call anew), the next turn begins a sequence of its own, a branch of the trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.rollout.engines.base import EngineError
from agentrl.rollout.gateway.render import ChatRenderer
from agentrl.rollout.gateway.rollout import AgentRollout
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl.rollout.gateway.wire import AgentMessage, ChatRequest, Json, WireError
from agentrl.rollout.policy import TokenPolicy, TurnPolicy
from agentrl.trajectory import Trajectory
from agentrl_envs.episode import Environment, EnvironmentContractError, Episode
from agentrl_envs.protocols.marked_text import MarkedText
from agentrl_envs.types import Ended, Problem

# The episode counts its turns and its time.
_UNLIMITED = AgentGatewaySettings(history="template", max_generations=2**31, deadline=1e9)


class DeployedHistory(Environment):
    """An environment whose conversations are shown to the model as a deployed server shows them."""

    def __init__(self, environment: Environment, renderer: ChatRenderer, tools: Sequence[Json]) -> None:
        self._environment = environment
        self._renderer = renderer
        self._tools = tools

    async def open(self) -> None:
        """Open the environment."""
        await self._environment.open()

    def episode(self, problem: Problem) -> Episode:
        """An episode of the environment."""
        return self._environment.episode(problem)

    async def rollout(self, problem: Problem, policy: TokenPolicy) -> tuple[Trajectory, ...]:  # type: ignore[override]
        """Play the environment with a policy that samples each turn after the messages so far, rendered anew."""
        chat = _MessagePolicy(policy, self._renderer, self._tools)
        try:
            return await self._environment.rollout(problem, chat)
        finally:
            await chat.requests.finish()

    async def close(self) -> None:
        """Close the environment."""
        await self._environment.close()

    def with_turns(self, max_turns: int) -> DeployedHistory:
        """The same with up to ``max_turns`` a trajectory, unless the environment has a limit of its own."""
        return DeployedHistory(self._environment.with_turns(max_turns), self._renderer, self._tools)

    def describe(self) -> list[str]:
        """The environment, and what the model sees of its earlier turns."""
        return [*self._environment.describe(), "history: earlier turns are shown as the chat template writes them"]


class _MessagePolicy(TurnPolicy[tuple[Trajectory, ...]]):
    """Samples turns as replies to requests. All turns get the reward of the last one."""

    def __init__(self, tokens: TokenPolicy, renderer: ChatRenderer, tools: Sequence[Json]) -> None:
        settings = tokens.settings
        super().__init__(problem=tokens.problem, settings=settings, fair_yield=tokens.fair_yield, calls=tokens.calls)
        context = settings.max_prompt_tokens + settings.max_response_tokens
        self.requests = AgentRollout(
            policy=tokens,
            settings=settings.model_copy(update={"max_prompt_tokens": context}),
            gateway=_UNLIMITED,
            renderer=renderer,
            most_context=context,
        )
        self._tokens = tokens
        self._tools = tuple(map(dict, tools))
        self._messages: tuple[AgentMessage, ...] = ()
        self._context: tuple[int, ...] = ()
        self._used = 0

    @property
    def used(self) -> int:
        return self._used

    def begin(self, prompt: str) -> None:
        self._tokens.measure(len(self._tokens.codec.encode_prompt(prompt)))
        self._messages = _messages(prompt)

    async def _sample(self, episode: Episode, limit: int) -> str | None:
        request = ChatRequest(
            messages=self._messages,
            tools=self._tools,
            max_tokens=limit,
            stop=episode.stop,
        )
        try:
            generation = await self.requests.reply(request, body=b"", retry=False, key=None)
        except WireError as error:
            if self.requests.stopped is not None:
                return None
            if self.requests.failure is not None:
                raise EngineError(self.requests.failure) from error
            raise EnvironmentContractError(f"environment.history=template: {error}") from error
        tokens = len(generation.completion.token_ids)
        self._used += tokens
        self._context = generation.context
        self._messages = (*self._messages, generation.reply)
        self.cut = generation.completion.finish_reason == "length"
        self.full = self.cut and tokens >= limit
        return generation.text

    def _credit(self, reward: float) -> None:
        self.requests.reward = (self.requests.reward or 0.0) + reward

    def _append(self, observation: str, most: int) -> bool:
        codec = self._tokens.codec
        tokens = len(codec.encode_parts(codec.unsampled(observation, self._context) if observation else ()))
        fits = self._used + tokens <= most
        if tokens and fits:
            self._used += tokens
            self._messages += _messages(observation)
        return fits

    def end(self, ended: Ended) -> tuple[Trajectory, ...]:
        *earlier, last = self.requests.trajectories(ended)
        return (*earlier, replace(last, verdict=self.verdict, answer=self.answer, tool_calls=tuple(self.calls)))


def _messages(text: str) -> tuple[AgentMessage, ...]:
    assert isinstance(text, MarkedText), "the settings allow protocols alone that speak whole messages"
    return tuple(AgentMessage(role=one["role"], content=one["content"]) for one in text.messages)
