"""``agentrl.play``: an environment answers given turns as in training, without a model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import agentrl
from agentrl.errors import SettingsError
from agentrl.problems.rows import ProblemFieldError
from agentrl_envs.types import Ended


class Boxes:
    """A look into a box, then an answer."""

    def reset(self, boxes: dict[str, int], answer: str) -> None:
        self._boxes, self._answer, self._right = boxes, answer, False

    def look(self, box: str) -> int:
        """Looks into a box.

        Args:
            box: its colour
        """
        return self._boxes[box]

    def step(self, text: str) -> None:
        self._right = text.strip() == self._answer

    def get_reward(self) -> float:
        return float(self._right)


LOOK = '<tool_call>\n{"name": "look", "arguments": {"box": "red"}}\n</tool_call>'
ROW = {"problem": "What is in the red box?", "answer": "8", "boxes": {"red": 8}}


def test_a_class_answers_turns_and_the_conversation_can_be_read() -> None:
    played = agentrl.play(Boxes, ROW, [LOOK, "8"], environment={"list_tools": False})
    assert (played.reward, played.ended, len(played.steps)) == (1.0, Ended.ANSWERED, 2)
    observation = "<tool_response>\n8\n</tool_response>"
    assert str(played).split("--- ") == [
        "",
        "prompt\nWhat is in the red box?\n",
        f"model\n{LOOK}\n",
        f"observation\n{observation}\n",
        "model\n8\n=== answered, reward 1",
    ]


async def test_a_row_brings_its_turns_and_a_loop_may_run() -> None:
    await asyncio.sleep(0)
    played = agentrl.play(Boxes, {**ROW, "turns": [{"model": LOOK}]})
    assert (played.turns, played.reward, played.ended) == ((LOOK,), 0.0, None)
    assert str(played).endswith("=== not ended, reward 0")


def test_the_settings_of_a_file_and_an_environment_by_name(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("environment: {instruction: Be brief.}\n")
    played = agentrl.play("reasoning", {"problem": "2 + 3?", "answer": 5}, [r"\boxed{5}"], config=config)
    assert played.prompt.startswith("Be brief.")
    assert (played.reward, played.ended) == (1.0, Ended.ANSWERED)


def test_what_cannot_be_played_is_said() -> None:
    with pytest.raises(SettingsError, match=r"the conversation ended \(answered\) before turn 2: '9'"):
        agentrl.play(Boxes, ROW, ["8", "9"])
    with pytest.raises(SettingsError, match="an agent program, which generates its own turns"):
        agentrl.play("agent:asyncio:run", ROW, [])
    with pytest.raises(SettingsError, match="the row's turns must be a list of objects"):
        agentrl.play(Boxes, {**ROW, "turns": ["8"]})
    with pytest.raises(ProblemFieldError, match="the row: no field for the problem"):
        agentrl.play(Boxes, {"boxes": {}}, [])
