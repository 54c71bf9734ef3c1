"""Forked rollouts: exact tokens of the branches, weights, failures, limits and reproducibility."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from rollout.fakes import ScriptedEngine, ScriptedEpisode, assert_routed, byte_codec, completion, ends, goes_on, problem
from rollout.test_driver import make

from agentrl.errors import SettingsError
from agentrl.rollout.engines.base import Completion, EngineError
from agentrl.rollout.environment import check_episode_can_fork
from agentrl.rollout.filters import FilterRules, filter_groups
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.settings import BranchingSettings, RolloutSettings
from agentrl.trajectory import Group
from agentrl_envs.adapters.environments import resolve_environment
from agentrl_envs.episode import UnavailableError
from agentrl_envs.grading import GraderSettings
from agentrl_envs.settings import EnvironmentOptions
from agentrl_envs.types import Ended, Step
from agentrl_sandbox.client import SandboxSettings

CODEC = byte_codec()


class ForkedEpisode(ScriptedEpisode):
    """Ends with the reward that the action names (``r1``, ``r0``), and continues after anything else."""

    def __init__(self) -> None:
        super().__init__([])

    async def step(self, action: str) -> Step:
        self.actions.append(action)
        if "fail" in action:
            raise UnavailableError("no sandbox")
        if "void" in action:
            return ends(Ended.VOID_TURN)
        return ends(reward=float(action[1])) if action.startswith("r") else goes_on()

    async def fork(self) -> ForkedEpisode:
        twin = ForkedEpisode()
        twin.actions = list(self.actions)
        FORKED.append(twin)
        return twin


FORKED: list[ForkedEpisode] = []


async def played(
    said: dict[str, list[Any]], *, rollouts: int = 1, deterministic: bool = False, seed: int = 0, **branching: Any
) -> tuple[list[Group], ScriptedEngine]:
    """Rollouts whose branches say ``said``, by the numbers of the branch at each fork: "" for the root, "0.1"."""
    FORKED.clear()
    engine = ScriptedEngine(lambda name, count: said[name.partition(".")[2]][count])
    driver, environment = make(
        engine,
        lambda *_: ForkedEpisode(),
        deterministic=deterministic,
        seed=seed,
        retries=0,
        trained=True,
        branching=BranchingSettings(**{"width": 2, **branching}),
    )
    waiting = iter([(Group(index=3, problem=problem(0), size=rollouts, step=1), number) for number in range(rollouts)])

    async def jobs() -> tuple[Group, int] | None:
        return next(waiting, None)

    groups = [group async for group in driver.play_jobs(jobs, rollouts=rollouts)]
    assert all(episode.closed for episode in (*environment.episodes, *FORKED))
    assert set(engine.released) == {name for name, *_ in engine.requests}
    return groups, engine


async def test_every_edge_has_the_routes_of_all_its_tokens() -> None:
    engine = ScriptedEngine(lambda name, count: turn("r1" if "." in name else ("a", "b")[count]))
    driver, _ = make(engine, lambda *_: ForkedEpisode(), trained=True, branching=BranchingSettings(width=2, where=(2,)))
    driver.routed = True
    waiting = iter([(Group(index=3, problem=problem(0), step=1), 0)])

    async def jobs() -> tuple[Group, int] | None:
        return next(waiting, None)

    (group,) = [group async for group in driver.play_jobs(jobs, rollouts=1)]
    assert len(group.trajectories) == 3
    for item in group.trajectories:
        assert_routed(item)


def turn(text: str) -> Completion:
    return completion(CODEC, f"{text}END")


def tree(group: Group) -> list[tuple[int, int, Ended, float | None]]:
    return [(item.parent, item.fork, item.ended, item.path_weight) for item in group.trajectories]


SAID = {"": [turn("a")], "0": [turn("b"), turn("r1")], "1": [turn("r0")]}


async def test_the_branches_of_a_fork_continue_the_same_tokens() -> None:
    (group,), engine = await played(SAID)
    root, first, second = group.trajectories
    assert tree(group) == [(-1, 0, Ended.FORKED, 1.0), (0, 4, Ended.ANSWERED, 0.5), (0, 4, Ended.ANSWERED, 0.5)]
    assert first.prompt_ids == second.prompt_ids == root.prompt_ids + root.response_ids
    assert [segment.text for segment in root.segments] == ["aEND", "E"]
    assert [segment.text for segment in first.segments] == ["bEND", "E", "r1END"]
    assert [item.reward for item in group.trajectories] == [0.5, 1.0, 0.0]
    assert [item.receives_reward for item in group.trajectories] == [False, True, True]
    assert [item.weight for item in group.trajectories] == pytest.approx([4 / 11.5, 4.5 / 11.5, 2.5 / 11.5], abs=0.1)
    assert sum(item.weight for item in group.trajectories) == pytest.approx(1.0)
    assert [episode.actions for episode in FORKED] == [["aEND", "bEND", "r1END"], ["aEND", "r0END"]]
    assert len({seed for *_, seed in engine.requests}) == 4  # each turn of each branch has its own random numbers


async def test_metrics_of_forked_rollouts_by_hand() -> None:
    (group,), _ = await played(SAID)
    metrics = rollout_metrics([group])
    assert metrics["reward/mean"] == 0.5
    assert (metrics["rollout/forked"], metrics["rollout/leaves_mean"]) == (1, 2)
    assert metrics["rollout/fork_width_mean"] == 2
    # Edges of 5, 4 + 1 + 5 and 5 tokens; the root is on two paths.
    assert metrics["rollout/fork_sharing"] == (2 * 5 + 10 + 5) / 20
    (plain,), _ = await played({"": [turn("r1")]})
    assert "rollout/forked" not in rollout_metrics([plain])


async def test_forks_at_several_turns_share_the_limit_of_leaves() -> None:
    said = {
        "": [turn("a")],
        **{f"{n}": [turn("b")] if n < 1 else [turn("b"), turn("r1")] for n in range(2)},
        **{f"0.{n}": [turn("r1")] for n in range(2)},
    }
    (group,), _ = await played(said, where=(1, 2), leaves=3)
    assert [item.path_weight for item in group.trajectories] == [1.0, 0.5, 0.25, 0.25, 0.5]
    assert [item.parent for item in group.trajectories] == [-1, 0, 1, 1, 0]


async def test_forks_after_uncertain_turns() -> None:
    unsure = replace(turn("a"), log_probs=(-2.0, -1.0, -2.0, -1.0))
    said = {"": [turn("b"), unsure], "0": [turn("r1")], "1": [turn("r0")]}
    for rule, forks in (("entropy>1.4", True), ("entropy>1.6", False), ("energy>0.7", True), ("energy>0.8", False)):
        said[""] = [turn("b"), unsure, turn("r1")]
        (group,), _ = await played(said, where=rule, leaves=2)
        assert [item.ended is Ended.FORKED for item in group.trajectories] == (
            [True, False, False] if forks else [False]
        )
        assert group.trajectories[0].turns == (2 if forks else 3)


async def test_few_live_branches_play_the_same_tree() -> None:
    said = {
        "": [turn("a")],
        **{f"{n}": [turn("b")] for n in range(3)},
        **{f"{n}.{m}": [turn(f"r{m % 2}")] for n in range(3) for m in range(3)},
    }
    trees = []
    for live, most in ((9, 9), (3, 3), (2, 2), (1, 1)):
        for deterministic in (False, True):
            groups, engine = await played(
                said, rollouts=2, width=3, where=(1, 2), live=live, deterministic=deterministic
            )
            assert engine.most <= 2 * most
            trees.append([[replace(item, seconds=0.0) for item in group.trajectories] for group in groups])
    assert all(one == trees[0] for one in trees)


async def test_a_failed_branch_leaves_a_fork_with_fewer_branches() -> None:
    said = {"": [turn("a")], "0": [EngineError("gone")], "1": [turn("r1")], "2": [turn("r0")]}
    (group,), _ = await played(said, width=3)
    assert [item.path_weight for item in group.trajectories] == [1.0, 0.0, 0.5, 0.5]
    assert group.trajectories[1].ended is Ended.INFRASTRUCTURE_FAILURE
    assert group.trajectories[0].reward == 0.5
    rules = FilterRules(void_turns="exclude", truncated="train", accuracy_range=None, drop_zero_variance=True)
    (kept,), counts = filter_groups([group], rules)
    assert [item.branch for item in kept.trajectories] == [0, 2, 3]
    assert counts["excluded"] == 1


async def test_a_rollout_without_any_finished_branch_is_excluded() -> None:
    said = {"": [turn("a")], "0": [EngineError("gone")], "1": [turn("fail")]}
    (group,), _ = await played(said)
    (only,) = group.trajectories
    assert (only.ended, only.branches, only.path_weight) == (Ended.INFRASTRUCTURE_FAILURE, 1, None)


@pytest.mark.parametrize("use", ["exclude", "mask"])
async def test_filters_apply_to_the_ends_of_branches(use: Any) -> None:
    said = {
        "": [turn("a")],
        "0": [turn("b")],
        "1": [turn("r0")],
        "0.0": [turn("void")],
        "0.1": [turn("void")],
        "1.0": [],
    }
    (group,), _ = await played(said, where=(1, 2))
    rules = FilterRules(void_turns=use, truncated="train", accuracy_range=None, drop_zero_variance=False)
    (kept,), counts = filter_groups([group], rules)
    assert counts["void"] == 2
    if use == "exclude":  # the fork below branch 0 has no end left
        assert [(item.branch, item.path_weight) for item in kept.trajectories] == [(0, 1.0), (4, 1.0)]
    else:
        assert [item.path_weight for item in kept.trajectories] == [1.0, 0.5, 0.25, 0.25, 0.5]
        assert kept.masked == {(0, 2), (0, 3)}


async def test_forked_rollouts_repeat_with_their_seed_and_in_rounds() -> None:
    made = []
    for _ in range(2):
        groups, engine = await played(SAID, rollouts=3, deterministic=True)
        made.append((groups, engine.requests, engine.request_ids))
        assert len({(name, seed) for name, _, _, seed in engine.requests}) == len(engine.requests)
    first, second = made
    assert first[1:] == second[1:]
    # A round contains one turn of every open branch of every rollout, sorted by name.
    assert [name.partition("-000003-")[2] or name for name in first[2]] == [
        name.partition("-000003-")[2] or name for name in second[2]
    ]
    assert first[2][:3] == sorted(first[2][:3])
    assert first[2][3:9] == sorted(first[2][3:9])


async def test_without_a_fork_rollouts_are_as_before() -> None:
    (group,), _ = await played({"": [turn("a"), turn("r1")]}, where=(5,))
    (only,) = group.trajectories
    assert (only.branches, only.path_weight, only.weight) == (1, None, 1.0)


async def test_only_rollouts_that_may_fork_count_as_their_leaves() -> None:
    async def most_at_once(*, forks: bool) -> int:
        FORKED.clear()
        engine = ScriptedEngine(lambda *_: asyncio.sleep(0.001, turn("r1")))
        driver, _ = make(
            engine, lambda *_: ForkedEpisode(), trained=forks, concurrency=8, branching=BranchingSettings(width=4)
        )
        requests = [Group(index=number, problem=problem(number)) for number in range(12)]
        assert len([group async for group in driver.play_groups(requests, step=0, group_size=1)]) == 12
        return engine.most

    assert await most_at_once(forks=True) == 2
    assert await most_at_once(forks=False) == 8  # evaluations


async def test_cancelling_ends_every_branch() -> None:
    FORKED.clear()

    async def never() -> Completion:
        await asyncio.Event().wait()
        raise AssertionError

    engine = ScriptedEngine(lambda name, _: turn("a") if "." not in name else never())
    driver, environment = make(engine, lambda *_: ForkedEpisode(), trained=True, branching=BranchingSettings(width=3))
    waiting = iter([(Group(index=3, problem=problem(0), step=1), 0)])

    async def jobs() -> tuple[Group, int] | None:
        return next(waiting, None)

    async def play() -> list[Group]:
        return [group async for group in driver.play_jobs(jobs, rollouts=1)]

    task = asyncio.create_task(play())
    while engine.running < 3:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.running == 0
    assert all(episode.closed for episode in (*environment.episodes, *FORKED))


class Locked:
    """Cannot be copied, unless a subclass has ``fork``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def reset(self) -> None: ...

    def press(self) -> str:
        """Press the button."""
        return "pressed"


class Forkable(Locked):
    def fork(self) -> Forkable:
        return Forkable()


async def test_a_class_that_cannot_be_copied_is_named_before_the_run_starts() -> None:
    settings = RolloutSettings(branching=BranchingSettings(width=2))
    for name in ("Forkable", "Locked"):
        factory = resolve_environment(f"{__name__}:{name}")
        environment = factory(factory.validate_section(EnvironmentOptions()), SandboxSettings(), GraderSettings(), None)
        if name == "Forkable":
            await check_episode_can_fork(environment, problem(0), settings)
            continue
        with pytest.raises(SettingsError) as refused:
            await check_episode_can_fork(environment, problem(0), settings)
        for part in ("rollout.branching.width=2", "copying Locked raised TypeError: cannot pickle '_thread.lock'"):
            assert part in str(refused.value)
