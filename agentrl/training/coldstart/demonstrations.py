"""Preparation of cold-start demonstrations: protocol format, environment observations, and rollout limits."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentrl.errors import SettingsError
from agentrl.problems.demonstrations import Demonstration, DemonstrationTurn
from agentrl.problems.settings import BUILTIN, FORMULA
from agentrl.problems.sources import fixed_evaluation_problems, load_source
from agentrl.rollout.environment import environment_tools, rewards_compare_answers
from agentrl.rollout.gateway.settings import is_agent_program
from agentrl_envs.adapters.environments import resolve_environment
from agentrl_envs.chat import plain_text_format
from agentrl_envs.episode import Environment, EnvironmentContractError
from agentrl_envs.protocols.base import TextProtocol, make_protocol
from agentrl_envs.protocols.simpletir import SimpleTIRProtocol
from agentrl_envs.registry import did_you_mean
from agentrl_envs.settings import ReasoningSettings, SimpleTIRSettings
from agentrl_envs.tool_call_formats import ParsedCall
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from agentrl.config import Settings


logger = logging.getLogger(__name__)


async def add_observations(demonstration: Demonstration, environment: Environment) -> Demonstration:
    """Return the demonstration with observations from ``environment``. Observations in the demonstration are kept.

    Raises SettingsError if the episode ends before the last turn.
    """
    if not demonstration.needs_observations:
        return demonstration
    *before, last = demonstration.turns
    played: list[DemonstrationTurn] = []
    episode = environment.episode(demonstration.problem)
    try:
        await episode.start()
        for number, turn in enumerate(before, start=1):
            step = await episode.step(turn.model)
            if step.ended is not None:
                raise SettingsError(
                    f"coldstart.demonstrations: turn {number} of {len(demonstration.turns)} of demonstration "
                    f"{demonstration.problem.id!r} ends the episode ({step.ended}), but only the last turn may end it: "
                    f"{turn.model!r:.200}"
                )
            played.append(DemonstrationTurn(model=turn.model, observation=step.observation))
    finally:
        await episode.close()
    return replace(demonstration, turns=(*played, last))


def check_no_template_tool_calls(settings: Settings, template: object) -> None:
    """Raise SettingsError if tool calls use the model's chat template, because demonstrations are plain text."""
    if template and environment_tools(settings.env) is not None:
        raise SettingsError(
            f"coldstart.demonstrations={settings.coldstart.demonstrations} is plain text, but env={settings.env} "
            f"uses the chat template of model.path={settings.model.path}: set coldstart.demonstrations=null"
        )


def check_tool_calls(demonstrations: Sequence[Demonstration], settings: Settings) -> None:
    """Raise SettingsError if a demonstration lacks a column that ``reset`` needs or calls an unknown tool.

    Calls with invalid arguments may be intended and only cause a warning.
    """
    tools = environment_tools(settings.env)
    if tools is None:
        return
    factory = resolve_environment(settings.env)
    schemas = {schema.name: schema for schema in tools.schemas}
    wrong = []
    for item in demonstrations:
        location = item.location or item.problem.id
        try:
            factory.problem_columns(item.problem)
        except EnvironmentContractError as error:
            raise SettingsError(f"{location}: {error}") from error
        for number, call in _parsed_calls(item):
            schema = schemas.get(call.name)
            if schema is None:
                hint = did_you_mean(call.name, schemas) or f"; available tools: {', '.join(schemas) or 'none'}"
                raise SettingsError(
                    f"{location}: turn {number} calls {call.name!r}, which is not a tool of env={settings.env}{hint}"
                )
            refusal = schema.find_argument_error(call.arguments if isinstance(call.arguments, dict) else {})
            wrong += [f"{location}: turn {number}: {refusal}"] if refusal else []
    if wrong:
        more = f" (and {len(wrong) - 1} more such calls)" if wrong[1:] else ""
        logger.warning("%s%s; the model is trained on this call, with the error as its observation", wrong[0], more)


def _parsed_calls(item: Demonstration) -> Iterator[tuple[int, ParsedCall]]:
    """Yield (turn number, call) for each call of a demonstration that can be parsed."""
    find = plain_text_format([]).calls.find_calls
    for number, turn in enumerate(item.turns, start=1):
        yield from ((number, call) for call in find(turn.model) if not call.error)


def environment_cache_key(settings: Settings) -> dict[str, str]:
    """Return the cache key of a user's class. The class determines the prompts and observations of a cold start."""
    if environment_tools(settings.env) is None:
        return {}
    source = resolve_environment(settings.env).source_code
    return {"env": settings.env, "source": hashlib.sha256(source).hexdigest()}


_SIMPLETIR = SimpleTIRProtocol(instruction="", observation_limit=1 << 20)
_BEFORE_OUTPUT, _AFTER_OUTPUT = _SIMPLETIR.observation("", ["\0"]).split("\0")
_PROGRAMS = {"retool": "<code>\n```python\n{}\n```\n</code>", "torl": "```python\n{}\n```\n```output"}
_ANSWERS = {"retool": "<answer>\n\\boxed{{{}}}\n</answer>", "torl": "\\boxed{{{}}}"}


def convert_to_protocol_format(
    demonstrations: Sequence[Demonstration], settings: Settings
) -> tuple[Demonstration, ...]:
    """Return the demonstrations of ``settings`` in the format of the environment's protocol.

    Raises SettingsError if the environment is a class and the demonstrations are generated, because generated
    demonstrations call different tools. For a file of demonstrations, also raises the errors of
    :func:`check_tool_calls`, and SettingsError if an agent program would have to create the observations.
    """
    environment = settings.environment
    if not (settings.coldstart.demonstrations or "").startswith((BUILTIN, FORMULA)):
        check_tool_calls(demonstrations, settings)
        unplayable = (
            [item for item in demonstrations if item.needs_observations] if is_agent_program(settings.env) else []
        )
        if unplayable:
            raise SettingsError(
                f"{unplayable[0].location or unplayable[0].problem.id}: the turns have no observations, which "
                f"cannot be generated because env={settings.env} is an agent program. Write an observation for every "
                "turn except the last, or use a demonstration with a single turn"
            )
        return tuple(demonstrations)
    if isinstance(environment, ReasoningSettings) or is_agent_program(settings.env):
        return tuple(_reduce_to_answer(item) for item in demonstrations)
    if environment_tools(settings.env) is not None:
        raise SettingsError(
            f"coldstart.demonstrations={settings.coldstart.demonstrations} contains no calls to the tools of "
            f"env={settings.env}: set a JSONL file of demonstrations (docs/how-to/data.md), or, for a model that calls "
            "tools by itself, set model.path=... and coldstart.demonstrations=null"
        )
    if not isinstance(environment, SimpleTIRSettings) or environment.protocol not in _PROGRAMS:
        return tuple(demonstrations)
    protocol = make_protocol(environment)
    return tuple(
        Demonstration(
            problem=item.problem, turns=tuple(_turns_in_protocol_format(item, protocol, environment.protocol))
        )
        for item in demonstrations
    )


def _reduce_to_answer(demonstration: Demonstration) -> Demonstration:
    """Reduce a demonstration to its answer, for environments without tools."""
    answer = f"\\boxed{{{demonstration.problem.answer}}}"
    return Demonstration(problem=demonstration.problem, turns=(DemonstrationTurn(model=answer),))


def _turns_in_protocol_format(
    demonstration: Demonstration, protocol: TextProtocol, name: str
) -> Iterator[DemonstrationTurn]:
    """Yield turns in the protocol's format. A ``final_answer`` call becomes two turns: ``print``, then the answer."""
    answer = DemonstrationTurn(model=_ANSWERS[name].format(demonstration.problem.answer))
    for turn in demonstration.turns:
        program = _SIMPLETIR.parse(turn.model).program
        if program is None:
            yield answer
            continue
        final = "final_answer(" in program
        output = str(demonstration.problem.answer)
        if not final:
            output = turn.observation.removeprefix(_BEFORE_OUTPUT).removesuffix(_AFTER_OUTPUT)
        model = _PROGRAMS[name].format(program.replace("final_answer(", "print(").rstrip("\n"))
        yield DemonstrationTurn(model=model, observation=protocol.observation(model, [output]))
        if final:
            yield answer


_SAMPLE = 64  # number of problems of each source whose length is checked


@dataclass(frozen=True, kw_only=True)
class EncodedDemonstration:
    """A tokenized demonstration: prompt, response, and the mask of model tokens in the response."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[bool, ...]

    @property
    def longest_turn(self) -> int:
        """Number of tokens of the longest model turn."""
        return max((len(list(run)) for of_model, run in itertools.groupby(self.response_mask) if of_model), default=0)


def problems_for_length_check(settings: Settings) -> list[Problem]:
    """Return evenly spaced problems of each training source that needs no download."""
    answered = rewards_compare_answers(settings)
    return [
        problem
        for entry in settings.data.train
        if entry.is_local
        for problem in fixed_evaluation_problems(
            load_source(entry, seed=settings.seed, answered=answered).source, _SAMPLE
        )
    ]


def warn_of_exceeded_token_limits(
    settings: Settings, prompts: Sequence[int], rows: Sequence[EncodedDemonstration]
) -> None:
    """Warn of prompts and demonstrations that exceed the token limits of rollouts.

    Raises SettingsError if all ``prompts`` exceed the limit, because no problem would be left to train on.
    """
    rollout = settings.rollout
    longest = max(prompts, default=0)
    if min(prompts, default=0) > rollout.max_prompt_tokens:
        raise SettingsError(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens}, but each of the {len(prompts)} prompts of "
            f"data.train is longer, up to {longest} tokens: set it to at least {longest}"
        )
    for setting, lengths, what in (
        ("max_prompt_tokens", prompts, "prompts of data.train are longer and are skipped"),
        ("max_response_tokens", [len(row.response_ids) for row in rows], "demonstrations have longer responses"),
        ("max_turn_tokens", [row.longest_turn for row in rows], "demonstrations have a longer turn"),
    ):
        limit = getattr(rollout, setting)
        over = sum(length > limit for length in lengths)
        if over:
            logger.warning(
                "rollout.%s=%d: %d of %d %s; set rollout.%s=%d to fit all of them",
                setting, limit, over, len(lengths), what, setting, max(lengths),
            )  # fmt: skip
