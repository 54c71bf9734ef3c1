"""Falsified observations: the model is lied to, the grader is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentrl_envs.adapters.falsified import FalsifiedEpisode, falsify_numbers
from agentrl_envs.chat import MarkedText, TemplateMark
from agentrl_envs.episode import Episode
from agentrl_envs.types import Ended, Step
from agentrl_sandbox.client import Execution

PROGRAM = "```py\nprint(2)\n```"


@given(st.text(), st.integers(0, 1 << 30))
def test_every_number_changes_and_nothing_else(text: str, seed: int) -> None:
    lie = falsify_numbers(text, seed)
    assert lie == falsify_numbers(text, seed)
    assert len(lie) == len(text)
    assert re.split("[0-9]+", lie) == re.split("[0-9]+", text)
    truths, lies = re.findall("[0-9]+", text), re.findall("[0-9]+", lie)
    assert all(truth != told for truth, told in zip(truths, lies, strict=True))


def test_leading_digits_stay_leading() -> None:
    assert all(falsify_numbers("42", seed)[0] != "0" for seed in range(200))
    assert {falsify_numbers("1", seed) for seed in range(200)} == set("023456789")


async def test_only_the_observation_is_falsified(play: Callable[..., Any], execution: Callable[..., Execution]) -> None:
    inner, _ = play(execution("123\n"), execution("\\boxed{5}\n"))
    episode = FalsifiedEpisode(inner, seed=1)
    assert isinstance(episode, Episode)
    assert (episode.stop_strings, episode.turn_complete(PROGRAM)) == (inner.stop_strings, True)
    assert await episode.start() == "What is 2 + 3?\n"
    told = (await episode.step(PROGRAM)).observation
    assert re.fullmatch(r"\nCode execution result: [0-9]{3}\n", told)
    assert "123" not in told
    twin = await episode.fork()
    assert isinstance(twin, FalsifiedEpisode)
    await twin.close()
    last = await episode.step(PROGRAM)
    assert (last.reward, last.answer, last.ended) == (1.0, "5", Ended.ANSWERED)
    assert "5" not in last.observation
    await episode.close()


async def test_the_marks_of_a_template_are_not_falsified() -> None:
    class Marked:
        """An episode that only answers."""

        async def step(self, action: str) -> Step:
            return Step(
                observation=MarkedText(TemplateMark("<|1|>", ends_turn=True), "12", TemplateMark("<2>")),
                reward=0.0,
                ended=None,
            )

    shown = (await FalsifiedEpisode(Marked(), seed=1).step("x")).observation  # type: ignore[arg-type]
    assert isinstance(shown, MarkedText)
    assert shown.parts == (TemplateMark("<|1|>", ends_turn=True), falsify_numbers("12", 1), TemplateMark("<2>"))
