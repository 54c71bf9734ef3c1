"""Single-player games of TextArena."""

from __future__ import annotations

import pytest
from shared import needed

from agentrl.problems.settings import ProblemSourceSettings
from agentrl.problems.sources import load_source
from agentrl_envs.adapters.environments import resolve_environment
from agentrl_envs.registry import PluginError
from agentrl_envs.settings import GymnasiumSettings
from agentrl_envs.types import Ended, Verdict

needed("textarena", "textarena")

GAME = "textarena:GuessTheNumber-v0"


async def test_a_game_is_played_to_its_reward() -> None:
    environment = resolve_environment(GAME)(GymnasiumSettings())
    await environment.open()
    problem = load_source(ProblemSourceSettings(path="builtin:seeds")).source.problem(4)
    episode = environment.episode(problem)
    prompt = await episode.start()
    assert "guess the number between 1 and 20" in prompt
    low, high = 1, 20
    while True:  # a search by halves needs at most five of the ten guesses
        guess = (low + high) // 2
        step = await episode.step(f"[{guess}]")
        if step.ended is not None:
            break
        assert "[" not in step.observation  # the move itself is not shown again
        low, high = (guess + 1, high) if "higher" in step.observation else (low, guess - 1)
    assert (step.ended, step.reward, step.verdict) == (Ended.ANSWERED, 1.0, Verdict.CORRECT)
    await episode.close()
    await environment.close()


async def test_episodes_of_one_problem_begin_alike_and_an_invalid_move_is_answered() -> None:
    environment = resolve_environment("textarena:Sudoku-v0-easy")(GymnasiumSettings())
    await environment.open()
    source = load_source(ProblemSourceSettings(path="builtin:seeds", split="heldout")).source
    episodes = [environment.episode(source.problem(index)) for index in (0, 0, 1)]
    first, again, other = [await episode.start() for episode in episodes]
    assert first == again != other
    step = await episodes[0].step("no move at all")
    assert step.ended is None
    assert "invalid move" in step.observation.lower()
    for episode in episodes:
        await episode.close()
    await environment.close()


def test_an_unknown_game_is_named() -> None:
    with pytest.raises(PluginError, match="no game 'GuessTheNumber-v9'; did you mean 'GuessTheNumber-v0"):
        resolve_environment("textarena:GuessTheNumber-v9")
