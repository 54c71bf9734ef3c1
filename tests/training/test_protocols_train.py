"""Protocols, rewards and tools from the command line: short runs of the real thing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollout.fakes import tiny_model
from rollout.templates import QWEN, chat_tokenizer

from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.problems.demonstrations import Demonstration, DemonstrationTurn, format_observation, format_program
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.training.coldstart.demonstrations import convert_to_protocol_format
from agentrl_envs.protocols.base import make_protocol
from agentrl_envs.types import Problem

pytestmark = pytest.mark.slow

PROBLEM = Problem(id="toy", statement="What is 2 + 3?", answer="5", source="toy")
SHOWN = Demonstration(
    problem=PROBLEM,
    turns=(
        DemonstrationTurn(model=format_program("look(1)"), observation=format_observation("2")),
        DemonstrationTurn(model=format_program("final_answer(2+3)")),
    ),
)
REWARDS = """
def halves(problem, conversation, verdict):
    assert conversation.turns[0].role == "assistant" and conversation.environment_reward in (0.0, 1.0)
    return 0.5 * len(conversation.turns[0].text)


def bug(problem, conversation, verdict):
    return 1 / 0
"""


@pytest.mark.parametrize(
    ("protocol", "turns"),
    [
        (
            "torl",
            (
                DemonstrationTurn(model="```python\nlook(1)\n```\n```output", observation="\n2\n```\n"),
                DemonstrationTurn(model="```python\nprint(2+3)\n```\n```output", observation="\n5\n```\n"),
                DemonstrationTurn(model="\\boxed{5}"),
            ),
        ),
        (
            "retool",
            (
                DemonstrationTurn(
                    model="<code>\n```python\nlook(1)\n```\n</code>",
                    observation="\n\n<interpreter>\n2\n</interpreter>\n\n",
                ),
                DemonstrationTurn(
                    model="<code>\n```python\nprint(2+3)\n```\n</code>",
                    observation="\n\n<interpreter>\n5\n</interpreter>\n\n",
                ),
                DemonstrationTurn(model="<answer>\n\\boxed{5}\n</answer>"),
            ),
        ),
        ("simpletir", SHOWN.turns),
    ],
)
def test_our_demonstrations_are_shown_in_the_protocol(protocol: str, turns: tuple[DemonstrationTurn, ...]) -> None:
    settings = load_settings(overrides=[f"environment.protocol={protocol}"])
    (shown,) = convert_to_protocol_format([SHOWN], settings)
    assert (shown.problem, shown.turns) == (PROBLEM, turns)
    # And each turn means what it is meant to.
    parsed = [make_protocol(settings.environment).parse(turn.model) for turn in shown.turns]  # type: ignore[arg-type]
    assert [bool(turn.program) for turn in parsed] == [True, True, False][: len(turns)]


def test_without_tools_only_the_answer_is_shown_and_files_are_taken_as_they_are() -> None:
    (shown,) = convert_to_protocol_format([SHOWN], load_settings("reasoning"))
    assert shown.turns == (DemonstrationTurn(model="\\boxed{5}"),)
    own = load_settings("reasoning", overrides=["coldstart.demonstrations=mine.jsonl"])
    assert convert_to_protocol_format([SHOWN], own) == (SHOWN,)


def test_a_demonstration_of_an_agent_program_without_observations_is_refused() -> None:
    settings = load_settings(
        "agent:solver:run",
        overrides=["coldstart.demonstrations=mine.jsonl", "data.train.0.path=builtin:arithmetic", "data.eval=[]"],
    )
    assert convert_to_protocol_format([SHOWN], settings) == (SHOWN,)
    turns = (DemonstrationTurn(model="look"), DemonstrationTurn(model="5"))
    silent = Demonstration(problem=PROBLEM, turns=turns, location="mine.jsonl:2")
    with pytest.raises(
        SettingsError,
        match=r"mine\.jsonl:2: the turns have no observations, which .*agent:solver:run is an agent program\. Write an",
    ):
        convert_to_protocol_format([silent], settings)


SHORT = [
    "model.dtype=float32",
    "coldstart.demonstrations=null",
    "data.train.0.path=builtin:arithmetic",
    "data.eval=[]",
    "rollout.problems_per_step=2",
    "rollout.group_size=2",
    "rollout.max_turn_tokens=12",
    "algorithm.drop_zero_variance=false",
    "algorithm.void_turns=mask",
    "environment.max_turns=2",
    "evaluation.falsified=false",
    "telemetry.plots=false",
    "training.threads=1",
    "training.steps=2",
]


@pytest.fixture
def train(command_line: Any) -> Callable[..., str]:
    """A run of two steps, with the module ``rewards`` in its folder; returns what it said."""
    (command_line.folder / "rewards.py").write_text(REWARDS)

    def run(policy: Path, *arguments: str, code: int = 0) -> str:
        tiny = ["--config", "arithmetic", f"model.path={policy}", "rollout.max_prompt_tokens=800"]
        lengths = ["rollout.max_response_tokens=200", "name=short"]
        return str(command_line.run("train", *tiny, *lengths, *SHORT, *arguments, code=code))

    return run


def trajectories(command_line: Any) -> list[dict[str, Any]]:
    return list(RunDirectory(command_line.folder / "runs" / "short").read_trajectories(2))


def test_another_protocol_and_a_reward_of_ones_own(
    train: Callable[..., str], command_line: Any, random_policy: Path
) -> None:
    said = train(random_policy, "environment.protocol=torl", "--reward", "rewards:halves")
    assert "ToRL: up to 2 turns" in said
    assert (
        "nothing is evaluated, because data.eval is empty: to hold out a part of a file, set data.train.0.part=train"
        in said
    )
    rows = trajectories(command_line)
    assert len(rows) == 4
    for row in rows:
        model = [segment for segment in row["segments"] if segment["origin"] == "model"]
        assert [segment["reward"] for segment in model] == [0.0] * (len(model) - 1) + [0.5 * len(model[0]["text"])]


def test_a_bug_in_a_reward_ends_the_run_with_its_place(train: Callable[..., str], random_policy: Path) -> None:
    said = train(random_policy, "--reward", "rewards:bug", code=2)
    assert "error: the reward rewards:bug raised ZeroDivisionError: division by zero (" in said
    assert "rewards.py:8) (problem " in said
    assert "Traceback" not in said


def test_tool_calls_in_the_models_own_template(
    train: Callable[..., str], command_line: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    policy = tmp_path_factory.mktemp("chat-policy")
    tiny_model().save_pretrained(policy)
    tokenizer = chat_tokenizer(QWEN)
    tokenizer.save_pretrained(policy)
    said = train(policy, "environment.protocol=hermes")
    assert "Hermes: up to 2 turns" in said
    assert "tools: python" in said
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    for row in trajectories(command_line):
        # system and user message, and the beginning of the reply; END and START as special tokens
        assert (row["prompt_ids"].count(start), row["prompt_ids"].count(end)) == (3, 2)


def test_a_model_without_template_is_refused_before_the_run(train: Callable[..., str], random_policy: Path) -> None:
    said = train(random_policy, "environment.protocol=hermes", code=2)
    assert "error: environment.protocol=hermes, but the tokenizer of" in said
    assert "has no chat template" in said
    assert "Traceback" not in said
