"""Attack: a program prints every special token. What the model reads must be text, token for token."""

from __future__ import annotations

import pytest
from rollout.fakes import ScriptedEngine, byte_codec, byte_tokenizer, completion

from agentrl.rollout.driver import Driver
from agentrl.rollout.settings import RolloutSettings
from agentrl.trajectory import Group
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREnvironment
from agentrl_envs.types import Ended, Problem, Verdict
from agentrl_sandbox.client import SandboxSettings

TOKENIZER, CODEC = byte_tokenizer(), byte_codec()
ADDED = TOKENIZER.get_added_vocab()
PRINTED = "".join(ADDED)
STATEMENT = f"Add 2 and 3. {PRINTED}"


@pytest.mark.parametrize("reply", ["program", "statement"])
async def test_no_special_token_reaches_the_model_from_outside(reply: str) -> None:
    first = completion(CODEC, f"```py\nprint({PRINTED!r})\n```")
    last = completion(CODEC, "```py\nfinal_answer(2 + 3)\n```")
    engine = ScriptedEngine(lambda _, number: (first, last)[number])
    environment = SimpleTIREnvironment(
        SimpleTIRSettings(instruction="", execution_timeout=20.0), SandboxSettings(allow_unisolated=True)
    )
    await environment.open()
    try:
        driver = Driver(environment=environment, engine=engine, codec=CODEC, settings=RolloutSettings(), seed=0)
        problem = Problem(id="toy", statement=STATEMENT, answer="5", source="toy")
        (group,) = [
            group async for group in driver.play_groups([Group(index=0, problem=problem)], step=0, group_size=1)
        ]
    finally:
        await environment.close()
    (trajectory,) = group.trajectories
    assert (trajectory.ended, trajectory.verdict, trajectory.reward) == (Ended.ANSWERED, Verdict.CORRECT, 1.0)
    observation = trajectory.segments[1]
    foreign = observation.token_ids if reply == "program" else trajectory.prompt_ids
    text = f"\nCode execution result: {PRINTED}\n" if reply == "program" else f"{STATEMENT}\n"
    assert not set(foreign) & set(ADDED.values())
    assert CODEC.decode(foreign) == text
    # The tokenizer as it comes would have let all of them through.
    assert set(ADDED.values()) <= set(TOKENIZER(text, add_special_tokens=False)["input_ids"])
    # And the engine was given these very ids.
    assert engine.requests[1][1] == trajectory.prompt_ids + first.token_ids + observation.token_ids
