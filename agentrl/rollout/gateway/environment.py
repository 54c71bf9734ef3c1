"""Environments whose turns are requests, matched against earlier turns, so a rollout may have several trajectories.

:class:`AgentEnvironment` runs the user's program against the gateway. :class:`RerenderedEnvironment` renders a
conversation as a deployed server would: the chat template renders earlier turns. An episode's turns become requests,
which are matched and stored by the same rules (:mod:`agentrl.rollout.gateway.tree`). If the template renders an earlier
turn differently than it was sampled (for example without reasoning), the next turn starts a new sequence, which is a
branch of the rollout.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import SettingsError
from agentrl.models.chat_template import ChatTemplate, ChatTemplateError
from agentrl.models.tokenizer import TextCodec, read_end_token_ids
from agentrl.problems.settings import HARBOR
from agentrl.rollout.engines.base import EngineError
from agentrl.rollout.gateway.programs import (
    AgentFailureError,
    AgentProgram,
    ContainerOrVerifierError,
    load_agent_program,
    load_verifiers_worker,
    load_worker_program,
)
from agentrl.rollout.gateway.render import ChatRenderer, find_call_format, find_turn_end
from agentrl.rollout.gateway.rollout import AgentRollout
from agentrl.rollout.gateway.server import AgentGateway
from agentrl.rollout.gateway.settings import AGENT, VERIFIERS, WORKER, AgentGatewaySettings
from agentrl.rollout.gateway.tree import MISMATCH_REASONS
from agentrl.rollout.gateway.wire import AgentMessage, AgentRequest, GatewayRequestError, Json
from agentrl.rollout.policy import TokenPolicy, TurnPolicy
from agentrl.trajectory import Trajectory
from agentrl_envs.chat import MarkedText, TemplateMark
from agentrl_envs.episode import Environment, EnvironmentContractError, Episode, EpisodeUsageError, UnavailableError
from agentrl_envs.registry import describe_error
from agentrl_envs.settings import HarborAgentSettings, NoSettings, VerifiersSettings, validate_options
from agentrl_envs.types import Ended, Problem, Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_REWARD_SOURCES = (
    "set reward.functions, return a number from the agent function, or let a command or worker report it with "
    "gateway.agent_rewards=true"
)
_LIMIT_ENDS = (Ended.TURN_LIMIT, Ended.TOKEN_LIMIT)
_COUNTED_EVENTS = ("replayed", *(f"miss_{cause}" for cause in MISMATCH_REASONS))


def build_agent_renderer(tokenizer: PreTrainedTokenizerBase, name: str, settings: AgentGatewaySettings) -> ChatRenderer:
    """Build the renderer for the model ``name``. Its codec uses the end-of-turn marker of the chat template.

    Raises SettingsError if the file of ``gateway.chat_template`` cannot be read.
    """
    template = None
    if settings.chat_template is not None:
        try:
            template = Path(settings.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SettingsError(f"gateway.chat_template={settings.chat_template} cannot be read: {error}") from error
    options = settings.template_options
    chat = ChatTemplate(tokenizer, template=template, options=options)
    try:
        turn_end = find_turn_end(chat)
    except ChatTemplateError as error:
        raise SettingsError(
            f"the model's chat template rejects several turns ({error}): set gateway.chat_template to another template"
        ) from error
    codec = TextCodec(
        tokenizer,
        turn_end=turn_end,
        generation_ends=read_end_token_ids(name),
        shown_special_tokens=find_call_format(chat).tokens,
    )
    return ChatRenderer(tokenizer, codec, template=template, options=options)


def program_for_environment(env: str, options: Mapping[str, object], settings: AgentGatewaySettings) -> AgentProgram:
    """Return the agent program for an environment's name and options. Raises PluginError if they are invalid."""
    if env.startswith(VERIFIERS):
        return load_verifiers_worker(
            env.removeprefix(VERIFIERS), validate_options(VerifiersSettings, options), settings
        )
    if env.startswith(HARBOR):
        from agentrl.rollout.gateway.harbor import load_container_command  # imports the Docker SDK

        return load_container_command(
            env.removeprefix(HARBOR), validate_options(HarborAgentSettings, options), settings
        )
    validate_options(NoSettings, options)
    if env.startswith(WORKER):
        return load_worker_program(env.removeprefix(WORKER).strip(), settings)
    return load_agent_program(env.removeprefix(AGENT).strip(), settings)


class _PromptOnlyEpisode:
    """An episode that contains only a prompt, because the agent program conducts the conversation."""

    stop_strings: tuple[str, ...] = ()

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    def turn_complete(self, text: str) -> bool:
        return True

    async def start(self) -> str:
        return self._prompt

    async def step(self, action: str) -> Step:
        raise EpisodeUsageError("conversations of an agent program cannot be played turn by turn")

    async def fork(self) -> _PromptOnlyEpisode:
        return _PromptOnlyEpisode(self._prompt)

    async def close(self) -> None:
        """Do nothing, because there are no resources to release."""


class AgentEnvironment(Environment):
    """The environment of an agent program: the program, gateway and chat template shared by all its rollouts."""

    def __init__(self, program: AgentProgram, settings: AgentGatewaySettings, renderer: ChatRenderer | None) -> None:
        """Configure the environment without opening it.

        ``renderer``: None for an environment that only returns prompts in plain text.
        """
        self._program = program
        if program.trusted:
            settings = settings.model_copy(update={"agent_columns": None, "agent_rewards": True})
        self._settings = settings
        self._renderer = renderer
        self._gateway = AgentGateway(settings)
        self._counts: Counter[str] = Counter()
        self.crashes: dict[str, str] = {}  # newest traceback by exception type and location

    async def open(self) -> None:
        """Start the gateway and the program. Raises SettingsError if the gateway's address is not available."""
        if self._renderer is not None:
            await self._gateway.open()
            await self._program.open(self._gateway)

    def episode(self, problem: Problem) -> _PromptOnlyEpisode:
        """Return an episode that contains only the prompt, for demonstrations."""
        return _PromptOnlyEpisode(self._build_prompt_text(problem))

    def _build_prompt_text(self, problem: Problem) -> MarkedText:
        if self._renderer is None:
            return MarkedText(problem.statement, TemplateMark("\n"))
        roles = [(str(one["role"]), str(one["content"])) for one in problem.messages] or [("user", problem.statement)]
        messages = tuple(AgentMessage(role=role, content=content) for role, content in roles)
        layout = self._renderer.layout(messages, AgentRequest(messages=messages))
        return MarkedText(*layout.interleave_contents([message.content for message in messages]))

    async def close(self) -> None:
        """Stop the program and the gateway. May be called more than once."""
        await self._program.close()
        await self._gateway.close()

    def describe(self) -> list[str]:
        """Return lines for the console about the program and the training of its sequences."""
        settings = self._settings
        kept = "kept as sampled" if settings.history == "keep" else "rendered by the chat template"
        return [
            f"{self._program.describe()}; up to {settings.max_generations} generations in {settings.deadline:g} s",
            f"gateway: model {settings.model!r}, earlier replies are {kept}; a rollout's sequences have a total "
            "weight of 1, and token-level baselines count tokens from the start of the conversation",
        ]

    async def rollout(self, problem: Problem, policy: TokenPolicy) -> tuple[Trajectory, ...]:  # type: ignore[override]
        """Run the program once. The policy answers the program's requests.

        Raises UnavailableError if the rollout is excluded and PromptTooLongError if the prompt is too long.
        """
        assert self._renderer is not None, "an environment without a renderer only returns prompts"
        policy.record_prompt_length(len(policy.codec.encode_prompt(self._build_prompt_text(problem))))
        rollout = AgentRollout(policy=policy, settings=policy.settings, gateway=self._settings, renderer=self._renderer)
        failure = await self._run_program(rollout)
        trajectories = rollout.build_trajectories(Ended.ANSWERED if failure is None else Ended.INFRASTRUCTURE_FAILURE)
        self._add_counts(rollout, trajectories)
        if failure is None and trajectories[-1].is_excluded:
            failure = f"the rollout contains no tokens to train on{rollout.stop_reason}"
        if failure is not None:
            raise UnavailableError(failure)
        return trajectories

    async def _run_program(self, rollout: AgentRollout) -> str | None:
        """Run the program to completion. Returns the reason for excluding the rollout, or None."""
        self._gateway.register_rollout(rollout)
        failure: str | None = None
        crash: Exception | None = None
        try:
            async with asyncio.timeout(None) as limit:

                def start_clock() -> None:
                    rollout.restart_deadline_clock()
                    limit.reschedule(asyncio.get_running_loop().time() + self._settings.deadline)

                reward = await self._program.run(rollout, start_clock)
            rollout.reward = rollout.reward if reward is None else reward
        except TimeoutError:
            failure = f"the agent took longer than {self._settings.deadline:g} s (gateway.deadline)"
        except AgentFailureError as error:
            failure, crash = str(error), error
        except Exception as error:  # noqa: BLE001  (whatever a user's program raises)
            failure, crash = f"the agent raised {describe_error(error)}", error
        finally:
            self._gateway.unregister_rollout(rollout)
            await rollout.reject_further_requests()
        self._record_crash(rollout, crash)
        failure = failure or rollout.abandon_reason
        if failure is None and rollout.reward is None and not rollout.policy.rewarded_later:
            failure = f"the agent returned no reward ({_REWARD_SOURCES})"
        reached_limit = rollout.stopped in _LIMIT_ENDS and not isinstance(crash, ContainerOrVerifierError)
        if failure is not None and rollout.reward is None and reached_limit:
            return None  # the policy used up its turns or tokens: a truncation without reward
        return None if failure is None else rollout.failure or failure

    def _record_crash(self, rollout: AgentRollout, crash: Exception | None) -> None:
        """Record an exception of the program, unless an engine failure or a limit caused the exception."""
        if crash is None or rollout.failure is not None or rollout.stopped is not None:
            self.crashes.clear()
        elif isinstance(crash, AgentFailureError):  # the key is the first line, which contains a command's exit code
            self.crashes[str(crash).partition("\n")[0]] = str(crash)
        else:
            frame = traceback.extract_tb(crash.__traceback__)[-1]
            key = f"{type(crash).__name__} {frame.filename}:{frame.lineno}"
            self.crashes[key] = "".join(traceback.format_exception(crash)).rstrip()

    def _add_counts(self, rollout: AgentRollout, trajectories: tuple[Trajectory, ...]) -> None:
        generations = rollout.tree.generations
        sampled = {one.id: len(one.completion.token_ids) for one in generations}
        self._counts += rollout.counts
        self._counts["rollouts"] += 1
        self._counts["branches"] += len(trajectories)
        self._counts["generations"] += len(generations)
        self._counts["undelivered"] += sum(one.delivered is False for one in generations)
        self._counts["tokens"] += sum(sampled.values())
        self._counts["not_trained"] += sum(sampled[one.id] for one in generations if not one.is_trained)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the rollouts since the last call, or {} if there were none."""
        counts, self._counts = self._counts, Counter()
        if not counts["rollouts"]:
            return {}
        return {
            "gateway/branches_mean": counts["branches"] / counts["rollouts"],
            "gateway/generations_mean": counts["generations"] / counts["rollouts"],
            "gateway/undelivered": counts["undelivered"],
            "gateway/not_trained_share": counts["not_trained"] / max(1, counts["tokens"]),
            **{f"gateway/{name}": counts[name] for name in _COUNTED_EVENTS},
        }


class RerenderedEnvironment(Environment):
    """An environment that renders conversations as a deployed server would."""

    def __init__(self, environment: Environment, renderer: ChatRenderer, tools: Sequence[Json]) -> None:
        self._environment = environment
        self._renderer = renderer
        self._tools = tools

    async def open(self) -> None:
        await self._environment.open()

    def episode(self, problem: Problem) -> Episode:
        return self._environment.episode(problem)

    async def rollout(self, problem: Problem, policy: TokenPolicy) -> tuple[Trajectory, ...]:  # type: ignore[override]
        """Play the environment with a policy that renders all messages again before each turn."""
        chat = _RerenderingPolicy(policy, self._renderer, self._tools)
        try:
            return await self._environment.rollout(problem, chat)
        finally:
            await chat.requests.reject_further_requests()

    async def close(self) -> None:
        await self._environment.close()

    def with_turns(self, max_turns: int) -> RerenderedEnvironment:
        """Return a copy with at most ``max_turns`` turns per trajectory, unless the environment has its own limit."""
        return RerenderedEnvironment(self._environment.with_turns(max_turns), self._renderer, self._tools)

    def describe(self) -> list[str]:
        """Return lines for the console about the environment and the rendering of earlier turns."""
        return [*self._environment.describe(), "history: earlier turns are rendered by the chat template"]


class _RerenderingPolicy(TurnPolicy[tuple[Trajectory, ...]]):
    """Policy that samples turns as replies to requests. The last turn carries the sum of all rewards."""

    def __init__(self, tokens: TokenPolicy, renderer: ChatRenderer, tools: Sequence[Json]) -> None:
        settings = tokens.settings
        super().__init__(problem=tokens.problem, settings=settings, throttle=tokens.throttle, calls=tokens.calls)
        context = settings.max_prompt_tokens + settings.max_response_tokens
        self.requests = AgentRollout(
            policy=tokens,
            settings=settings.model_copy(update={"max_prompt_tokens": context}),
            gateway=AgentGatewaySettings(history="template"),
            renderer=renderer,
            max_context=context,
        )
        self._tokens = tokens
        self._tools = tuple(map(dict, tools))
        self._messages: tuple[AgentMessage, ...] = ()
        self._context: tuple[int, ...] = ()
        self._response_token_count = 0

    @property
    def response_tokens(self) -> int:
        return self._response_token_count

    def begin(self, prompt: str) -> None:
        self._tokens.record_prompt_length(len(self._tokens.codec.encode_prompt(prompt)))
        self._messages = _read_messages(prompt)

    async def _sample_turn(self, episode: Episode, limit: int) -> str | None:
        request = AgentRequest(
            messages=self._messages,
            tools=self._tools,
            max_tokens=limit,
            stop=episode.stop_strings,
        )
        try:
            # The gateway's limits on turns and time are not checked, because the episode has its own.
            generation = await self.requests.sample_reply(request)
        except GatewayRequestError as error:
            if self.requests.stopped is not None:
                return None
            if self.requests.failure is not None:
                raise EngineError(self.requests.failure) from error
            raise EnvironmentContractError(f"environment.history=template: {error}") from error
        tokens = len(generation.completion.token_ids)
        self._response_token_count += tokens
        self._context = generation.context_tokens
        self._messages = (*self._messages, generation.reply)
        self.turn_truncated = generation.completion.finish_reason == "length"
        self.context_full = self.turn_truncated and tokens >= limit
        return generation.text

    def _record_turn_reward(self, reward: float) -> None:
        self.requests.reward = (self.requests.reward or 0.0) + reward

    def _append_observation(self, observation: str) -> bool:
        codec = self._tokens.codec
        tokens = len(
            codec.encode_parts(codec.parts_without_sampled_turn_end(observation, self._context) if observation else ())
        )
        fits = self._response_token_count + tokens <= self.settings.max_response_tokens
        if tokens and fits:
            self._response_token_count += tokens
            self._messages += _read_messages(observation)
        return fits

    def end(self, ended: Ended) -> tuple[Trajectory, ...]:
        *earlier, last = self.requests.build_trajectories(ended)
        return (*earlier, replace(last, verdict=self.verdict, answer=self.answer, tool_calls=tuple(self.calls)))


def _read_messages(text: str) -> tuple[AgentMessage, ...]:
    assert isinstance(text, MarkedText), "the settings allow only protocols that exchange whole messages"
    return tuple(AgentMessage(role=one["role"], content=one["content"]) for one in text.messages)
