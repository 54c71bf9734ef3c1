"""The driver over scripted parts: exact tokens, limits, deadlines, failures, and no task left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rollout.fakes import (
    ScriptedEngine,
    ScriptedEnvironment,
    ScriptedEpisode,
    byte_codec,
    completion,
    ends,
    goes_on,
    problem,
)

from agentrl.rollout.driver import Driver
from agentrl.rollout.engines.base import EngineError
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.settings import RolloutSettings
from agentrl.trajectory import Group, Trajectory
from agentrl_envs.episode import UnavailableError
from agentrl_envs.rewards import Conversation, WeightedRewards
from agentrl_envs.types import Ended, Problem, ToolCall, Verdict
from agentrl_sandbox.client import SandboxSettings

CODEC = byte_codec()
TURN = completion(CODEC, "aEND")


def make(
    engine: ScriptedEngine,
    build: Callable[..., ScriptedEpisode],
    *,
    seed: int = 0,
    deterministic: bool = False,
    trained: bool = False,
    rewards: WeightedRewards | None = None,
    **changes: Any,
) -> tuple[Driver, ScriptedEnvironment]:
    environment = ScriptedEnvironment(build)
    settings = RolloutSettings(**changes)
    driver = Driver(
        environment=environment,
        engine=engine,
        codec=CODEC,
        settings=settings,
        seed=seed,
        deterministic=deterministic,
        trained=trained,
        rewards=rewards,
    )
    return driver, environment


def requests(count: int) -> list[Group]:
    return [Group(index=10 + number, problem=problem(number)) for number in range(count)]


async def play(driver: Driver, *, problems: int = 1, group_size: int = 1, step: int = 0) -> list[Group]:
    return [group async for group in driver.play_groups(requests(problems), step=step, group_size=group_size)]


async def one(script: Sequence[Any], steps: Sequence[Any], **changes: Any) -> tuple[Trajectory, ScriptedEngine]:
    """One trajectory: the engine's answers and the episode's steps in order."""
    engine = ScriptedEngine(lambda _, number: script[number])
    driver, environment = make(engine, lambda *_: ScriptedEpisode(steps), **changes)
    (group,) = await play(driver)
    assert [episode.closed for episode in environment.episodes] == [1] * len(environment.episodes)
    return group.trajectories[0], engine


def alone(count: int = 1) -> bool:
    return len(asyncio.all_tasks()) == count


async def test_the_worked_example() -> None:
    first, second = completion(CODEC, "aEND"), completion(CODEC, "done", "eos")
    trajectory, engine = await one([first, second], [goes_on("E0"), ends(reward=1.0)])
    prompt, observation = CODEC.encode("P"), CODEC.encode("E0")
    assert trajectory.prompt_ids == prompt
    assert trajectory.response_ids == first.token_ids + observation + second.token_ids
    assert trajectory.response_mask == (True,) * 4 + (False,) * 2 + (True,) * 5
    assert trajectory.log_probs == (*first.log_probs, 0.0, 0.0, *second.log_probs)
    assert trajectory.rewards == (0.0,) * 10 + (1.0,)
    assert [segment.text for segment in trajectory.segments] == ["aEND", "E0", "done"]
    # The engine saw exactly the tokens of the trajectory so far, and was told when it was over.
    assert [request[1] for request in engine.requests] == [prompt, prompt + first.token_ids + observation]
    assert engine.released == [engine.requests[0][0]]


def own_reward(path: str, deadline: float = 60.0) -> WeightedRewards:
    return WeightedRewards({path: 1.0}, deadline=deadline, sandbox=SandboxSettings())


def turns_told(problem: Problem, conversation: Conversation, verdict: Verdict | None) -> float:
    assert [turn.text for turn in conversation.turns] == ["aEND", "E", "aEND"]
    assert (problem.id, conversation.ended, conversation.environment_reward) == ("toy-0", Ended.TURN_LIMIT, 1.25)
    return -3.0 if verdict is None else 3.0


async def test_a_reward_of_ones_own_takes_the_place_of_the_environments() -> None:
    steps = [replace(goes_on("E"), reward=1.0), ends(Ended.TURN_LIMIT, reward=0.25)]
    told = own_reward(f"{__name__}:turns_told")
    driver, _ = make(ScriptedEngine(lambda *_: TURN), lambda *_: ScriptedEpisode(steps), rewards=told)
    (group,) = await play(driver)
    assert group.trajectories[0].rewards == (0.0,) * 8 + (-3.0,)
    assert group.trajectories[0].reward_parts == {"turns_told": -3.0}
    assert Trajectory.from_record(json.loads(json.dumps(group.trajectories[0].to_record()))) == group.trajectories[0]
    assert rollout_metrics([group])["rewards/turns_told"] == -3.0


async def never(*_: Any) -> float:
    await asyncio.Event().wait()
    return 0.0


async def test_a_reward_that_takes_too_long_is_no_data_and_no_data_gets_no_reward() -> None:
    driver, environment = make(
        ScriptedEngine(lambda *_: TURN),
        lambda *_: ScriptedEpisode([ends(reward=1.0)]),
        retries=1,
        rewards=own_reward(f"{__name__}:never", deadline=0.01),
    )
    (group,) = await play(driver)
    assert (group.trajectories[0].ended, len(environment.episodes)) == (Ended.INFRASTRUCTURE_FAILURE, 2)
    driver, _ = make(
        ScriptedEngine(lambda *_: TURN),
        lambda *_: ScriptedEpisode([ends(Ended.CANCELLED)]),
        rewards=own_reward("builtins:print"),  # which gives no number
    )
    (group,) = await play(driver)
    assert group.trajectories[0].ended is Ended.CANCELLED


async def test_tokens_past_a_stop_string_stay_as_they_were_sampled() -> None:
    past = completion(CODEC, "aEND\nxy")
    trajectory, engine = await one([past, TURN], [goes_on("E"), ends()])
    assert trajectory.segments[0].token_ids == past.token_ids
    assert engine.requests[1][1] == CODEC.encode("P") + past.token_ids + CODEC.encode("E")


async def test_a_turn_that_is_not_complete_goes_on_from_its_exact_ids() -> None:
    parts = [completion(CODEC, "aHALT", version=1), completion(CODEC, "bHALT", version=1), TURN]
    trajectory, engine = await one(parts, [ends(reward=1.0)], max_turn_tokens=50)
    (segment,) = trajectory.segments
    assert (segment.text, trajectory.turns) == ("aHALTbHALTaEND", 1)
    assert segment.token_ids == parts[0].token_ids + parts[1].token_ids + TURN.token_ids
    assert segment.log_probs == parts[0].log_probs + parts[1].log_probs + TURN.log_probs
    assert segment.version_spans == ((1, 5), (1, 5), (0, 4))
    assert [request[2].max_tokens for request in engine.requests] == [50, 45, 40]
    assert len({request[3] for request in engine.requests}) == 3


async def test_a_character_split_between_parts_is_whole_in_the_text() -> None:
    euro = CODEC.encode("\u20ac")
    head = completion(CODEC, "x")
    head = type(head)(token_ids=euro[:2], log_probs=(-0.1,) * 2, finish_reason="stop", version_spans=((0, 2),))
    tail = completion(CODEC, "xEND")
    tail = type(tail)(
        token_ids=euro[2:] + CODEC.encode("END"), log_probs=(-0.1,) * 4, finish_reason="stop", version_spans=((0, 4),)
    )
    trajectory, _ = await one([head, tail], [ends()])
    assert trajectory.segments[0].text == "\u20acEND"


async def test_turns_and_trajectories_draw_from_different_keys() -> None:
    engine = ScriptedEngine(lambda *_: TURN)
    driver, _ = make(engine, lambda *_: ScriptedEpisode([goes_on(), ends()]))
    await play(driver, problems=2, group_size=2)
    await play(driver, step=1)
    seeds = [request[3] for request in engine.requests]
    assert len(set(seeds)) == len(seeds) == 10
    other, _ = make(engine, lambda *_: ScriptedEpisode([goes_on(), ends()]), seed=1)
    await play(other)
    assert not set(seeds) & {request[3] for request in engine.requests[10:]}


async def test_what_an_episode_says_is_recorded() -> None:
    call = ToolCall(outcome="ok", seconds=0.5)
    steps = [
        goes_on(),
        ends(reward=1.0, observation="\\boxed{5}", verdict=Verdict.CORRECT, answer="5", tool_calls=(call, call)),
    ]
    trajectory, _ = await one([TURN, TURN], steps)
    assert (trajectory.verdict, trajectory.answer, trajectory.tool_calls) == (Verdict.CORRECT, "5", (call, call))
    # The last observation is appended, and the reward stands on the last model token before it.
    assert trajectory.segments[-1].text == "\\boxed{5}"
    assert trajectory.rewards == (0.0,) * 8 + (1.0,) + (0.0,) * 9


@pytest.mark.parametrize(
    ("step", "ended", "reward"),
    [
        (ends(Ended.VOID_TURN), Ended.TOKEN_LIMIT, 0.0),
        (ends(Ended.STOPPED), Ended.TOKEN_LIMIT, 0.0),
        (ends(Ended.ANSWERED, reward=1.0), Ended.ANSWERED, 1.0),
        (goes_on(), Ended.TOKEN_LIMIT, 0.0),
    ],
)
async def test_the_total_limit_in_mid_turn(step: Any, ended: Ended, reward: float) -> None:
    cut = completion(CODEC, "abcd", "length")
    trajectory, engine = await one([cut], [step], max_response_tokens=4)
    assert (trajectory.ended, trajectory.reward, trajectory.response_ids) == (ended, reward, cut.token_ids)
    assert engine.requests[0][2].max_tokens == 4


async def test_a_turn_cut_by_its_own_limit_is_what_the_episode_says() -> None:
    cut = completion(CODEC, "abcd", "length")
    trajectory, _ = await one([cut], [ends(Ended.VOID_TURN)], max_turn_tokens=4, max_response_tokens=100)
    assert trajectory.ended is Ended.VOID_TURN


async def test_a_void_turn_that_ends_by_itself_at_the_limit_is_void() -> None:
    full = completion(CODEC, "abc", "eos")
    trajectory, _ = await one([full], [ends(Ended.VOID_TURN)], max_response_tokens=4)
    assert trajectory.ended is Ended.VOID_TURN


async def test_later_turns_get_what_is_left() -> None:
    _, engine = await one([TURN, TURN], [goes_on("EE"), ends()], max_response_tokens=20, max_turn_tokens=16)
    assert [request[2].max_tokens for request in engine.requests] == [16, 14]


async def test_an_observation_that_does_not_fit_is_left_out_and_ends_the_trajectory() -> None:
    trajectory, _ = await one([TURN], [goes_on("long")], max_response_tokens=7)
    assert (trajectory.ended, trajectory.response_ids) == (Ended.TOKEN_LIMIT, TURN.token_ids)
    trajectory, _ = await one([TURN], [goes_on("fit")], max_response_tokens=7)
    assert (trajectory.ended, trajectory.length) == (Ended.TOKEN_LIMIT, 8)
    trajectory, _ = await one([TURN], [ends(reward=1.0, observation="long")], max_response_tokens=7)
    assert (trajectory.ended, trajectory.reward, trajectory.turns) == (Ended.ANSWERED, 1.0, 1)


@pytest.mark.parametrize(
    ("budget", "ended", "turns"), [(None, Ended.ANSWERED, 3), (6.0, Ended.ANSWERED, 3), (5.9, Ended.DEADLINE, 2)]
)
async def test_programs_spend_a_budget_of_seconds(budget: float | None, ended: Ended, turns: int) -> None:
    ran = replace(
        goes_on("E"), tool_calls=(ToolCall(outcome="ok", seconds=2.0), ToolCall(outcome="error", seconds=1.0))
    )
    trajectory, _ = await one([TURN] * 3, [ran, ran, ends(reward=1.0)], program_seconds=budget)
    assert (trajectory.ended, trajectory.turns, trajectory.is_excluded) == (ended, turns, False)
    assert trajectory.segments[1].text == "E"


async def test_an_environment_that_does_not_answer_is_no_data() -> None:
    trajectory, engine = await one([TURN], [asyncio.sleep(60)], environment_deadline=0.02, retries=0)
    assert (trajectory.ended, trajectory.is_excluded) == (Ended.INFRASTRUCTURE_FAILURE, True)
    assert (engine.running, alone()) == (0, True)


async def test_a_start_that_hangs_is_no_data() -> None:
    class Hanging(ScriptedEpisode):
        async def start(self) -> str:
            await asyncio.sleep(60)
            return ""

    driver, environment = make(
        ScriptedEngine(lambda *_: TURN), lambda *_: Hanging([]), environment_deadline=0.02, retries=0
    )
    (group,) = await play(driver)
    assert group.trajectories[0].ended is Ended.INFRASTRUCTURE_FAILURE
    assert environment.episodes[0].closed == 1


async def test_a_start_without_its_service_is_no_data() -> None:
    class Unavailable(ScriptedEpisode):
        async def start(self) -> str:
            raise UnavailableError("the service is gone")

    driver, environment = make(
        ScriptedEngine(lambda *_: TURN),
        lambda _, made: Unavailable([]) if made < 2 else ScriptedEpisode([ends()]),
        retries=1,
    )
    (group,) = await play(driver)
    assert group.trajectories[0].ended is Ended.INFRASTRUCTURE_FAILURE
    assert driver.last_failure == "the service is gone"
    assert [episode.closed for episode in environment.episodes] == [1, 1]


async def test_a_timeout_that_is_not_the_deadline_is_a_bug() -> None:
    with pytest.raises(TimeoutError, match="theirs"):
        await one([TURN], [TimeoutError("theirs")])


async def test_an_engine_that_fails_once_is_asked_again_from_the_start() -> None:
    trajectory, engine = await one([EngineError("gone"), TURN], [ends(reward=1.0)])
    assert (trajectory.ended, trajectory.reward) == (Ended.ANSWERED, 1.0)
    assert [request[1] for request in engine.requests] == [CODEC.encode("P")] * 2
    # The same draw is made again.
    assert engine.requests[0][3] == engine.requests[1][3]


async def test_an_engine_that_always_fails_is_no_data_after_the_retries() -> None:
    script = [TURN, EngineError("gone")] * 3
    engine = ScriptedEngine(lambda _, number: script[number])
    driver, environment = make(engine, lambda *_: ScriptedEpisode([goes_on()]), retries=2)
    (group,) = await play(driver)
    (trajectory,) = group.trajectories
    assert (trajectory.ended, trajectory.is_excluded, trajectory.reward) == (Ended.INFRASTRUCTURE_FAILURE, True, 0.0)
    assert (len(environment.episodes), len(engine.requests)) == (3, 6)
    assert [episode.closed for episode in environment.episodes] == [1, 1, 1]


async def test_a_failing_tool_is_retried_and_never_scored() -> None:
    broken = ends(Ended.INFRASTRUCTURE_FAILURE, reward=0.7)
    engine = ScriptedEngine(lambda *_: TURN)
    driver, _ = make(engine, lambda _, made: ScriptedEpisode([broken if made < 2 else ends(reward=1.0)]), retries=1)
    (group,) = await play(driver)
    assert (group.trajectories[0].is_excluded, group.trajectories[0].reward) == (True, 0.0)
    (group,) = await play(driver)
    assert group.trajectories[0].reward == 1.0


async def test_a_crash_raises_at_once_and_leaves_no_task() -> None:
    engine = ScriptedEngine(lambda name, _: TURN if name.endswith("3") else asyncio.sleep(60, TURN))
    driver, environment = make(engine, lambda *_: ScriptedEpisode([ZeroDivisionError("bug")]))
    with pytest.raises(ZeroDivisionError, match="bug"):
        await play(driver, problems=2, group_size=4)
    assert (engine.running, alone()) == (0, True)
    assert all(episode.closed for episode in environment.episodes)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_cancelling_leaves_no_task(deterministic: bool) -> None:
    engine = ScriptedEngine(lambda *_: asyncio.sleep(60))
    driver, environment = make(engine, lambda *_: ScriptedEpisode([]), deterministic=deterministic)
    task = asyncio.create_task(play(driver, problems=3, group_size=4))
    while engine.running < 12:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (engine.running, alone()) == (0, True)
    assert [episode.closed for episode in environment.episodes] == [1] * 12


async def test_leaving_the_groups_early_leaves_no_task() -> None:
    engine = ScriptedEngine(lambda name, _: TURN if "10-" in name else asyncio.sleep(60))
    driver, _ = make(engine, lambda *_: ScriptedEpisode([ends()]))
    groups = driver.play_groups(requests(3), step=0, group_size=2)
    assert (await anext(groups)).index == 10
    await groups.aclose()  # type: ignore[attr-defined]
    assert (engine.running, alone()) == (0, True)


async def test_no_more_run_at_once_than_allowed() -> None:
    engine = ScriptedEngine(lambda *_: asyncio.sleep(0.001, TURN))
    driver, _ = make(engine, lambda *_: ScriptedEpisode([goes_on(), ends()]), concurrency=5)
    groups = await play(driver, problems=4, group_size=4)
    assert (engine.most, len(groups)) == (5, 4)


async def test_a_group_comes_as_soon_as_its_last_trajectory_has_ended() -> None:
    gates = {10: asyncio.Event(), 11: asyncio.Event()}

    async def answer(name: str) -> Any:
        await gates[int(name.split("-")[1])].wait()
        return TURN

    engine = ScriptedEngine(lambda name, _: answer(name))
    driver, _ = make(engine, lambda *_: ScriptedEpisode([ends()]))
    groups = driver.play_groups(requests(2), step=5, group_size=3)
    gates[11].set()
    first = await anext(groups)
    assert (first.index, first.problem.id) == (11, "toy-1")
    assert [(item.group, item.sample, item.step) for item in first.trajectories] == [(11, 0, 5), (11, 1, 5), (11, 2, 5)]
    gates[10].set()
    assert [group.index async for group in groups] == [10]


async def test_no_turn_waits_for_another_trajectory() -> None:
    engine = ScriptedEngine(lambda name, _: asyncio.sleep(60) if name.endswith("0") else TURN)
    driver, environment = make(engine, lambda *_: ScriptedEpisode([goes_on(), goes_on(), ends()]))
    groups = driver.play_groups(requests(1), step=0, group_size=2)
    waiting = asyncio.ensure_future(anext(groups))
    while not any(len(episode.actions) == 3 for episode in environment.episodes):
        await asyncio.sleep(0.001)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert alone()


async def test_rounds_send_a_turn_of_all_together_and_sorted() -> None:
    engine = ScriptedEngine(lambda *_: TURN)

    def build(_: Any, made: int) -> ScriptedEpisode:
        slow = asyncio.sleep(0.002 * (4 - made), goes_on())
        return ScriptedEpisode([slow, *[goes_on()] * made, ends()])

    driver, _ = make(engine, build, deterministic=True, concurrency=4)
    await play(driver, problems=2, group_size=2)
    rounds = [request_id.rsplit("-", 2)[1] for request_id in engine.request_ids]
    assert rounds == ["0000"] * 4 + ["0001"] * 4 + ["0002"] * 3 + ["0003"] * 2 + ["0004"]
    for turn in range(5):
        sent = [request_id for request_id in engine.request_ids if f"-{turn:04d}-" in request_id]
        assert sent == sorted(sent)


async def test_problems_with_long_prompts_are_left_out() -> None:
    def build(_: Problem, made: int) -> ScriptedEpisode:
        return ScriptedEpisode([ends()], prompt="long" if made == 0 else "\u20ac")

    driver, environment = make(ScriptedEngine(lambda *_: TURN), build, max_prompt_tokens=3)
    requests = [Group(index=index, problem=problem(index)) for index in range(2)]
    groups = [group async for group in driver.play_groups(requests, step=0, group_size=1, skip_long=True)]
    assert [group.index for group in groups] == [1]
    assert [episode.closed for episode in environment.episodes] == [1, 1]
