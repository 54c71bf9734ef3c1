"""Conversations as a deployed server shows them to the model: its earlier turns as the chat template writes them.

An episode's turns become requests, like those of an agent program, so what is sampled is matched and stored by the same
rules (`agentrl.rollout.gateway.tree`). Where the template writes an earlier turn in another way than it was sampled (it
drops thoughts, or formats a call anew), the next turn begins a sequence of its own, a branch of the trajectory.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import Engine, EngineError
from agentrl.rollout.gates import FairYield
from agentrl.rollout.gateway.export import RolloutPlace
from agentrl.rollout.gateway.render import ChatRenderer
from agentrl.rollout.gateway.rollout import AgentRollout
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl.rollout.gateway.wire import AgentMessage, ChatRequest, Json, WireError
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.turn_loop import SampledTurn, TurnLoop
from agentrl.trajectory import Trajectory
from agentrl_envs.chat.chat_format import ChatFormat
from agentrl_envs.episode import Environment, EnvironmentContractError, Episode, TurnLimited
from agentrl_envs.protocols.marked_text import MarkedText
from agentrl_envs.types import Problem

# The episode counts its turns and its time.
_UNLIMITED = AgentGatewaySettings(history="template", max_generations=2**31, deadline=1e9)


@dataclass(frozen=True, kw_only=True)
class DeployedChat:
    """A chat template for a protocol, and for whole conversations with ``tools``."""

    format: ChatFormat
    renderer: ChatRenderer
    tools: tuple[Json, ...]


class DeployedHistory:
    """An environment whose conversations are shown to the model as a deployed server shows them."""

    def __init__(self, environment: Environment, chat: DeployedChat) -> None:
        self._environment = environment
        self._chat = chat

    async def open(self) -> None:
        """Open the environment."""
        await self._environment.open()

    def episode(self, problem: Problem) -> Episode:
        """An episode of the environment."""
        return self._environment.episode(problem)

    async def close(self) -> None:
        """Close the environment."""
        await self._environment.close()

    def with_turns(self, max_turns: int) -> DeployedHistory:
        """The same with up to ``max_turns`` a trajectory, unless the environment has a limit of its own."""
        if not isinstance(self._environment, TurnLimited):
            return self
        return DeployedHistory(self._environment.with_turns(max_turns), self._chat)

    def describe(self) -> list[str]:
        """The environment, and what the model sees of its earlier turns."""
        return [*self._environment.describe(), "history: earlier turns are shown as the chat template writes them"]

    async def play(
        self,
        place: RolloutPlace,
        *,
        engine: Engine,
        settings: RolloutSettings,
        gate: Callable[[str], Awaitable[None]],
        fair_yield: FairYield,
        measure: Callable[[int], None],
    ) -> tuple[tuple[Trajectory, ...], str | None]:
        """The sequences of one trajectory, and why it failed if it did for reasons outside the policy."""
        context = settings.max_prompt_tokens + settings.max_response_tokens
        renderer = self._chat.renderer
        rollout = AgentRollout(
            place=place,
            settings=settings.model_copy(update={"max_prompt_tokens": context}),
            gateway=_UNLIMITED,
            engine=engine,
            renderer=renderer,
            gate=gate,
            most_context=context,
        )
        sampler = _MessageSampler(rollout=rollout, tools=self._chat.tools, codec=renderer.codec, measure=measure)
        turns = TurnLoop(problem=place.problem, sampler=sampler, settings=settings, fair_yield=fair_yield)
        try:
            ended = await turns.play(self._environment)
        finally:
            await rollout.finish()
        rollout.reward = sampler.reward
        rows = rollout.trajectories(ended)
        last = replace(rows[-1], verdict=turns.verdict, answer=turns.answer, tool_calls=tuple(turns.calls))
        return (*rows[:-1], last), turns.failure


@dataclass(kw_only=True, slots=True)
class _MessageSampler:
    """The messages of one conversation. The rewards of all turns are those of the last one."""

    rollout: AgentRollout
    tools: tuple[Json, ...]
    codec: TextCodec
    measure: Callable[[int], None]
    messages: tuple[AgentMessage, ...] = ()
    used: int = 0
    reward: float = 0.0
    context: tuple[int, ...] = field(default=())

    def begin(self, prompt: str) -> None:
        self.measure(len(self.codec.encode_prompt(prompt)))
        self.messages = _messages(prompt)

    async def sample(self, episode: Episode, limit: int) -> SampledTurn | None:
        request = ChatRequest(
            messages=self.messages,
            tools=tuple(map(dict, self.tools)),
            max_tokens=limit,
            stop=episode.stop,
        )
        try:
            generation = await self.rollout.reply(request, body=b"", retry=False, key=None)
        except WireError as error:
            if self.rollout.stopped is not None:
                return None
            if self.rollout.failure is not None:
                raise EngineError(self.rollout.failure) from error
            raise EnvironmentContractError(f"environment.history=template: {error}") from error
        tokens = len(generation.completion.token_ids)
        self.used += tokens
        self.context = generation.context
        self.messages = (*self.messages, generation.reply)
        cut = generation.completion.finish_reason == "length"
        return SampledTurn(text=generation.text, cut=cut, full=cut and tokens >= limit)

    def credit(self, reward: float) -> None:
        self.reward += reward

    def observe(self, text: str, most: int) -> bool:
        parts = self.codec.unsampled(text, self.context) if text else ()
        tokens = len(self.codec.encode_parts(parts))
        fits = self.used + tokens <= most
        if tokens and fits:
            self.used += tokens
            self.messages += _messages(text)
        return fits

    def close(self) -> None:
        """Nothing: the rollout releases what the engine holds."""


def _messages(text: str) -> tuple[AgentMessage, ...]:
    assert isinstance(text, MarkedText), "the settings allow protocols alone that speak whole messages"
    return tuple(AgentMessage(role=one["role"], content=one["content"]) for one in text.messages)
