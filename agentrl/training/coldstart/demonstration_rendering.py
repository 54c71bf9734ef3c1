"""Render generated demonstrations, written as SimpleTIR's turns, in other protocols.

Files of demonstrations are used unchanged: their authors wrote them for a protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from agentrl.errors import SettingsError
from agentrl.problems.demonstrations.demonstration import Demonstration, ShownTurn
from agentrl.problems.settings import BUILTIN, FORMULA
from agentrl.rollout.environment import class_factory
from agentrl.rollout.gateway.settings import is_agent
from agentrl.training.coldstart.playing import check_calls
from agentrl_envs.protocols.base import Protocol
from agentrl_envs.protocols.factory import make_protocol
from agentrl_envs.protocols.simpletir import SimpleTIRProtocol
from agentrl_envs.settings import ReasoningSettings, SimpleTIRSettings

if TYPE_CHECKING:
    from agentrl.config import Settings

_SIMPLETIR = SimpleTIRProtocol(instruction="", observation_limit=1 << 20)
_BEFORE_OUTPUT, _AFTER_OUTPUT = _SIMPLETIR.observation("", ["\0"]).split("\0")
_PROGRAMS = {"retool": "<code>\n```python\n{}\n```\n</code>", "torl": "```python\n{}\n```\n```output"}
_ANSWERS = {"retool": "<answer>\n\\boxed{{{}}}\n</answer>", "torl": "\\boxed{{{}}}"}


def in_protocol(demonstrations: Sequence[Demonstration], settings: Settings) -> tuple[Demonstration, ...]:
    """The demonstrations of ``settings`` as their environment's protocol writes them.

    Raises SettingsError where a user's class would get demonstrations that were generated for other tools, and where
    the user's own call a tool that it does not have.
    """
    environment = settings.environment
    if not (settings.coldstart.demonstrations or "").startswith((BUILTIN, FORMULA)):
        check_calls(demonstrations, settings)
        return tuple(demonstrations)
    if isinstance(environment, ReasoningSettings) or is_agent(settings.env):
        return tuple(_answered(item) for item in demonstrations)
    if class_factory(settings.env) is not None:
        raise SettingsError(
            f"coldstart.demonstrations={settings.coldstart.demonstrations} shows nothing of the tools of "
            f"env={settings.env}: name a JSONL file of demonstrations (docs/data.md), or, for a model that calls tools "
            "by itself, model.path=... and coldstart.demonstrations=null"
        )
    if not isinstance(environment, SimpleTIRSettings) or environment.protocol not in _PROGRAMS:
        return tuple(demonstrations)
    protocol = make_protocol(environment)
    return tuple(
        Demonstration(problem=item.problem, turns=tuple(_turns(item, protocol, environment.protocol)))
        for item in demonstrations
    )


def _answered(demonstration: Demonstration) -> Demonstration:
    """The answer alone: without tools there is nothing else to show."""
    answer = f"\\boxed{{{demonstration.problem.answer}}}"
    return Demonstration(problem=demonstration.problem, turns=(ShownTurn(model=answer),))


def _turns(demonstration: Demonstration, protocol: Protocol, name: str) -> Iterator[ShownTurn]:
    """Programs and answers in the protocol's form; a ``final_answer`` becomes a print and then the answer."""
    answer = ShownTurn(model=_ANSWERS[name].format(demonstration.problem.answer))
    for turn in demonstration.turns:
        program = _SIMPLETIR.parse(turn.model).program
        if program is None:
            yield answer
            continue
        final = "final_answer(" in program
        output = str(demonstration.problem.answer) if final else _output(turn.observation)
        model = _PROGRAMS[name].format(program.replace("final_answer(", "print(").rstrip("\n"))
        yield ShownTurn(model=model, observation=protocol.observation(model, [output]))
        if final:
            yield answer


def _output(observation: str) -> str:
    return observation.removeprefix(_BEFORE_OUTPUT).removesuffix(_AFTER_OUTPUT)
