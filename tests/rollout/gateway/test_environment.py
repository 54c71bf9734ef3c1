"""Agent programs played by the driver: functions and commands, their failures, and exactness against a conversation."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from rollout.fakes import tiny_model
from rollout.gateway import agents
from rollout.gateway.agents import client
from rollout.gateway.chat import chat_codec, speaking
from rollout.templates import QWEN, chat_tokenizer
from shared import python_with

from agentrl.errors import SettingsError
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.driver import Driver
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.gateway import programs
from agentrl.rollout.gateway.environment import AgentEnvironment, program_for_environment
from agentrl.rollout.gateway.render import ChatRenderer
from agentrl.rollout.gateway.rollout import AgentRollout
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl.rollout.gateway.wire import AgentMessage, AgentRequest, GatewayAccess
from agentrl.rollout.settings import RolloutSettings
from agentrl.trajectory import Group, Trajectory
from agentrl_envs.adapters import verifiers_worker
from agentrl_envs.chat import MarkedText, TemplateMark
from agentrl_envs.episode import Environment
from agentrl_envs.registry import PluginError
from agentrl_envs.rewards import Conversation, WeightedRewards
from agentrl_envs.types import Ended, Problem, Step
from agentrl_sandbox.settings import SandboxSettings

AGENTS = "agent:rollout.gateway.agents"
WORKER = f"worker:{sys.executable} -m rollout.gateway.agents work"
SETTINGS = RolloutSettings(max_turn_tokens=12, max_response_tokens=4000, retries=0)


def problem(number: int = 0, statement: Callable[[int], str] = "{} + 3?".format) -> Problem:
    return Problem(id=f"toy-{number}", statement=statement(number), answer="5", source="toy")


async def play(
    env: str,
    engine: Any,
    *,
    samples: int = 1,
    problems: int = 1,
    rollout: Any = SETTINGS,
    options: Any = None,
    statement: Callable[[int], str] = "{} + 3?".format,
    greedy: bool = False,
    rewards: WeightedRewards | None = None,
    **gateway: Any,
) -> tuple[list[Group], dict[str, float], Driver]:
    tokenizer, codec = chat_codec()
    settings = AgentGatewaySettings(**{"agent_rewards": True} | gateway)
    program = program_for_environment(env, options or {}, settings)
    environment = AgentEnvironment(program, settings, ChatRenderer(tokenizer, codec))
    await environment.open()
    driver = Driver(environment=environment, engine=engine, codec=codec, settings=rollout, seed=7, rewards=rewards)
    try:
        requests = [Group(index=number, problem=problem(number, statement)) for number in range(problems)]
        groups = [group async for group in driver.play_groups(requests, step=1, group_size=samples, greedy=greedy)]
    finally:
        await environment.close()
    return sorted(groups, key=lambda group: group.index), driver.metrics(), driver


class Unverified(programs.AgentProgram):
    """Reaches the limit of generations, and has no result, like a command whose verifier crashed."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    async def run(self, rollout: AgentRollout, started: Callable[[], None]) -> float:
        started()
        async with client(rollout.access.base_url, rollout.access.api_key, max_retries=0) as policy:
            message: Any = {"role": "user", "content": rollout.policy.problem.statement}
            with contextlib.suppress(openai.APIStatusError):
                while True:
                    await policy.chat.completions.create(model="policy", messages=[message])
        raise self._failure

    def describe(self) -> str:
        return "unverified"


@pytest.mark.parametrize(
    ("failure", "ended"),
    [
        (programs.AgentFailureError("exit code 1"), Ended.TURN_LIMIT),
        (programs.ContainerOrVerifierError("the verifier crashed"), Ended.INFRASTRUCTURE_FAILURE),
    ],
)
async def test_a_rollout_that_reached_a_limit_is_excluded_if_its_verifier_failed(
    failure: Exception, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "program_for_environment", lambda *_: Unverified(failure))
    groups, _, _ = await play("", saying("hi"), max_generations=1)
    assert [row.ended for row in groups[0].trajectories] == [ended]


def saying(*texts: str) -> Any:
    return speaking(chat_codec()[1], lambda number: texts[number % len(texts)])


def test_without_a_template_messages_stand_one_below_the_other_as_in_a_cold_start() -> None:
    tokenizer, codec = chat_codec()
    tokenizer.chat_template = None
    plain = ChatRenderer(tokenizer, codec)
    said = [("system", "Be brief."), ("user", "2 + 3?"), ("assistant", "5"), ("user", "Sure?")]
    messages = tuple(AgentMessage(role=role, content=content) for role, content in said)
    layout = plain.layout(messages, AgentRequest(messages=messages), sampled=[2])
    assert layout.fill_slots([content for _, content in said]) == "Be brief.\n2 + 3?\n5\nSure?\n"
    tool = {"type": "function", "function": {"name": "look"}}
    listed = plain.layout(messages[1:2], AgentRequest(messages=messages[1:2], tools=(tool,)))
    *lines, last = listed.fill_slots(["2 + 3?"]).split("\n")
    assert (len(lines), lines[-1], last) == (2, "2 + 3?", "")


@pytest.mark.parametrize(
    "agent",
    [f"{AGENTS}:ask", f"{AGENTS}:blocking", f"agent:{sys.executable} -m rollout.gateway.agents", WORKER],
)
async def test_functions_and_commands_play_and_give_the_reward(agent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "tests")
    (group,), metrics, _ = await play(agent, saying("x", "no"), samples=2)
    assert sorted(item.reward for item in group.trajectories) == [0.0, 1.0]
    assert {item.ended for item in group.trajectories} == {Ended.ANSWERED}
    assert metrics["gateway/branches_mean"] == 1.0


async def test_a_client_that_a_module_keeps_serves_every_environment_of_the_process() -> None:
    for _ in range(2):  # as after a cold start, whose policy is evaluated first
        (group,), _, _ = await play(f"{AGENTS}:keeping", saying("x", "no"), samples=2)
        assert sorted(item.reward for item in group.trajectories) == [0.0, 1.0]


async def test_a_line_that_holds_the_event_loop_of_the_agents_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Noticed(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            agents.NOTICED.set()

    handler = Noticed()
    monkeypatch.setattr(programs, "BLOCKED_LOOP_SECONDS", 0.01)
    programs.logger.addHandler(handler)
    try:
        (group,), _, _ = await play(f"{AGENTS}:rude", saying("x", "no"), samples=2)
    finally:
        programs.logger.removeHandler(handler)
    assert sorted(item.reward for item in group.trajectories) == [0.0, 1.0]
    lines, first = inspect.getsourcelines(agents.held)
    place = f"agent rollout.gateway.agents:rude: {agents.__file__}:{first + len(lines) - 1} blocked the event loop"
    (message,) = [item.message for item in caplog.records if item.message.startswith(place)]
    assert "for more than 0.01 s: assert event.wait(60)\n" in message
    assert "or make the agent a plain function, which runs in a thread" in message


async def test_branches_stand_together_with_the_rollouts_reward_which_the_last_one_carries() -> None:
    groups, metrics, _ = await play(f"{AGENTS}:branching", saying("one", "two", "three"), samples=3, problems=2)
    for group in groups:
        assert [(item.sample, item.branch) for item in group.trajectories] == [
            (s, b) for s in range(3) for b in range(2)
        ]
        reward = float(group.index == 0)
        assert [item.reward for item in group.trajectories] == [reward] * 6
        assert [sum(item.rewards) for item in group.trajectories] == [0.0, reward] * 3
        assert [sum(item.weight for item in group.trajectories if item.sample == s) for s in range(3)] == [1.0] * 3
        assert [item.turns for item in group.trajectories] == [2, 1] * 3
    assert (metrics["gateway/branches_mean"], metrics["gateway/miss_edited"]) == (2.0, 6)


async def test_a_greedy_rollout_with_branches_has_all_of_them_and_its_reward() -> None:
    engine = saying("one", "two", "three")
    (group,), _, _ = await play(f"{AGENTS}:branching", engine, samples=2, greedy=True)
    assert [(item.sample, item.branch) for item in group.trajectories] == [(s, b) for s in range(2) for b in range(2)]
    assert group.greedy is not None
    assert (group.greedy.sample, group.greedy.turns, group.greedy.reward) == (2, 3, 1.0)
    assert [sampling.temperature for _, _, sampling, _ in engine.requests].count(0.0) == 3


def sequences_told(problem: Problem, conversation: Conversation, verdict: object) -> float:
    """What a reward is shown: a hundred for each sequence, and one for each message in them."""
    assert conversation.sequences[-1] == conversation.turns
    return sum(100.0 + len(messages) for messages in conversation.sequences)


async def test_a_reward_sees_all_sequences_of_a_rollout() -> None:
    name = "rollout.gateway.test_environment:sequences_told"
    rewards = WeightedRewards({name: 1.0}, deadline=60.0, sandbox=SandboxSettings())
    (group,), _, _ = await play(f"{AGENTS}:branching", saying("one", "two", "three"), rewards=rewards)
    # reply, question, reply; and the branch's reply
    assert [item.reward for item in group.trajectories] == [204.0, 204.0]
    assert [sum(item.rewards) for item in group.trajectories] == [0.0, 204.0]


def length_of_the_last_reply(problem: Problem, conversation: Conversation, verdict: object) -> float:
    return float(len(conversation.turns[-1].text))


SPY = """
import json, os, pathlib, sys
import rollout.gateway.agents  # from the trainer's PYTHONPATH, which is relative
seen = {"variables": sorted(os.environ), "files": os.listdir(), "problem": json.loads(os.environ["AGENTRL_PROBLEM"])}
pathlib.Path(sys.argv[1]).write_text(json.dumps(seen))
pathlib.Path("notes.txt").write_text("of this rollout")
sys.argv[1:] = []
exec(open(rollout.gateway.agents.__file__).read())
"""


async def test_a_command_sees_neither_answer_nor_credentials_nor_the_runs_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "tests")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("JUDGE_KEY", "handed over")
    (tmp_path / "spy.py").write_text(SPY)
    command = f"agent:{sys.executable} {os.path.relpath(tmp_path / 'spy.py')} {tmp_path / 'seen.json'}"
    rewards = WeightedRewards(
        {"rollout.gateway.test_environment:length_of_the_last_reply": 1.0}, deadline=60.0, sandbox=SandboxSettings()
    )
    more = {"agent_rewards": False, "agent_environment": ["JUDGE_KEY"]}
    (group,), _, _ = await play(command, saying("xxx"), rewards=rewards, **more)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["problem"] == {"id": "toy-0", "statement": "0 + 3?", "messages": [], "info": {}}
    assert seen["files"] == []
    assert {"OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "JUDGE_KEY", "PATH"} <= set(seen["variables"])
    assert not {"HF_TOKEN", "AGENTRL_REWARD_URL"} & set(seen["variables"])
    # The program prints 1.0, its own opinion; the function's value counts.
    assert [item.reward for item in group.trajectories] == [3.0]


async def test_a_command_starts_for_a_statement_with_a_null_character() -> None:
    access = GatewayAccess(name="r", base_url="http://127.0.0.1/v1", api_key="key", model="policy")
    variables = programs.agent_environment_variables(problem(0, "\0{} + 3?".format), access, AgentGatewaySettings())
    async with programs.temporary_agent_directory() as directory:
        shell = ["sh", "-c", 'echo "$AGENTRL_STATEMENT"']
        process = await programs.start_process(shell, variables, directory=directory, stdout=asyncio.subprocess.PIPE)
        assert await process.communicate() == (b"0 + 3?\n", None)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (f"{AGENTS}:crashing", "the agent raised KeyError: 'no such tool'"),
        (f"{AGENTS}:silent", "the agent returned no reward"),
        (f"{AGENTS}:extravagant", ":extravagant returned the reward 1e+308; valid: a number from -1,000,000 to 1,000"),
        ("agent:echo 1e308", "echo returned the reward 1e+308; valid: a number"),
        ("agent:echo nan", "echo returned the reward nan; valid: a number"),
    ],
)
async def test_an_agent_that_fails_is_no_data(agent: str, said: str) -> None:
    (group,), _, driver = await play(agent, saying("x"))
    (trajectory,) = group.trajectories
    assert trajectory.ended is Ended.INFRASTRUCTURE_FAILURE
    assert said in str(driver.last_failure)


async def test_an_agent_that_crashes_in_every_rollout_ends_the_run_with_its_traceback() -> None:
    groups, _, driver = await play(f"{AGENTS}:crashing", saying("x"), samples=2, problems=2)
    with pytest.raises(SettingsError, match="step 1: every rollout failed with the same error") as raised:
        driver.raise_if_all_crashed(groups, "step 1")
    assert "agents.py" in str(raised.value)
    assert str(raised.value).endswith("KeyError: 'no such tool'")
    groups, _, driver = await play(f"{AGENTS}:silent", saying("x"))
    driver.raise_if_all_crashed(groups, "step 1")


async def test_a_prompt_without_room_for_a_reply_is_no_data_and_says_so() -> None:
    short = RolloutSettings(max_prompt_tokens=4, retries=0)
    (group,), _, driver = await play(f"{AGENTS}:endless", saying("x"), rollout=short)
    assert group.trajectories[0].is_excluded
    assert str(driver.last_failure).startswith("the rollout contains no tokens to train on: a context of 25 tokens")


async def test_a_worker_says_why_a_rollout_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "tests")
    groups, _, driver = await play(WORKER, saying("x"), problems=2, statement=lambda number: "2 + 3?" * number)
    assert [group.trajectories[0].is_excluded for group in groups] == [True, False]
    assert driver.last_failure == "the agent failed: there are no words"


async def test_a_worker_that_ends_is_no_data() -> None:
    (group,), _, driver = await play("worker:sh -c 'exit 3'", saying("x"))
    assert group.trajectories[0].is_excluded
    assert driver.last_failure == "the worker sh -c 'exit 3' ended with exit code 3"


TASKS = """
import verifiers.v1 as vf


class AddData(vf.TaskData):
    total: int = 0


class AddTask(vf.Task[AddData]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(str(self.data.total) in trace.last_reply)


class AddTaskset(vf.Taskset[AddTask, vf.TasksetConfig]):
    def load(self):
        for number in range(2):
            yield AddTask(AddData(prompt=f"{number} + 3?", total=number + 3), self.config.task)


__all__ = ["AddTaskset"]
"""


async def test_a_task_set_of_verifiers_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = python_with("verifiers")
    (tmp_path / "adding.py").write_text(TASKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = saying("It is 4.")
    groups, _, driver = await play("verifiers:adding", engine, samples=2, problems=2, options={"python": python})
    assert driver.last_failure is None
    assert [[item.reward for item in group.trajectories] for group in groups] == [[0.0, 0.0], [1.0, 1.0]]
    codec = chat_codec()[1]
    assert all("0 + 3?" in codec.decode(item.prompt_ids) for item in groups[0].trajectories)


async def test_a_worker_of_verifiers_asks_again_where_the_gateway_does_not_answer() -> None:
    answers: list[Exception | None] = [TimeoutError("timed out"), None, ConnectionRefusedError("gone")]

    class Asking(verifiers_worker.RolloutWorker):
        async def _post(self, path: str, body: Any) -> None:
            if (answer := answers.pop(0)) is not None:
                raise answer

    class Tasks:
        taskset = ()
        serving = contextlib.nullcontext

    with pytest.raises(ExceptionGroup) as raised:
        await Asking(Tasks(), "http://127.0.0.1", 1).play_rollouts()  # type: ignore[arg-type]
    assert raised.group_contains(ConnectionRefusedError)
    assert answers == []


async def test_a_policy_that_uses_up_its_turns_is_truncated_and_not_a_failure() -> None:
    (group,), _, _ = await play(f"{AGENTS}:endless", saying("x"), max_generations=3)
    (trajectory,) = group.trajectories
    assert (trajectory.ended, trajectory.turns, trajectory.reward) == (Ended.TURN_LIMIT, 3, 0.0)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("agent:no_such_module:run", "there is no module 'no_such_module'"),
        (f"{AGENTS}:ADD", "is a dict, expected a function"),
        (f"{AGENTS}:wrong", "must be callable as run(problem, *, base_url, api_key, model)"),
        ("agent:", "write agent:module:function"),
        ("agent:'open", "is not a valid command: No closing quotation"),
        ("worker:'open", "is not a valid command: No closing quotation"),
        ("worker:", "write 'worker:COMMAND', or worker:external for workers that you start yourself"),
        ("worker:external", "needs AGENTRL_GATEWAY_KEY, the key that workers use to fetch rollouts"),
        ("verifiers:", "write verifiers:TASKSET"),
        ("verifiers:adding", "needs environment.python, the Python of a virtual environment with verifiers 0.4"),
    ],
)
def test_an_agent_that_is_none_is_one_message(env: str, message: str) -> None:
    with pytest.raises(PluginError) as raised:
        program_for_environment(env, {}, AgentGatewaySettings())
    assert message in str(raised.value)


MORE = ("and <|im_end|> then?", "again", "last")


class ChatEpisode:
    """Three turns in the chat template's words, none of which depends on what the model says."""

    stop_strings: tuple[str, ...] = ()

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._turns = 0

    def turn_complete(self, text: str) -> bool:
        return False

    async def start(self) -> str:
        return MarkedText(TemplateMark("<|im_start|>user\n"), self._problem.statement, TemplateMark(REPLY))

    async def step(self, action: str) -> Step:
        self._turns += 1
        if self._turns == 3:
            return Step(observation="", reward=0.5, ended=Ended.ANSWERED)
        end = TemplateMark("<|im_end|>", ends_turn=True)
        observation = MarkedText(end, TemplateMark("\n<|im_start|>user\n"), MORE[self._turns - 1], TemplateMark(REPLY))
        return Step(observation=observation, reward=0.0, ended=None)

    async def fork(self) -> ChatEpisode:
        raise AssertionError("the driver forks no episode")

    async def close(self) -> None:
        """Nothing to release."""


REPLY = "<|im_end|>\n<|im_start|>assistant\n"


class ChatEnvironment(Environment):
    async def open(self) -> None: ...

    def episode(self, problem: Problem) -> ChatEpisode:
        return ChatEpisode(problem)

    async def close(self) -> None: ...

    def describe(self) -> list[str]:
        return []


async def three_turns(problem: Problem, *, base_url: str, api_key: str, model: str) -> float:
    """The same three turns, by messages."""
    async with client(base_url, api_key) as policy:
        messages: Any = [{"role": "user", "content": problem.statement}]
        for more in MORE:
            reply = await policy.chat.completions.create(model=model, messages=messages)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
            messages += [{"role": "user", "content": more}]
    return 0.5


async def test_a_single_sequence_is_bitwise_what_the_driver_plays_and_what_a_forward_says() -> None:
    model = tiny_model()
    codec = TextCodec(chat_tokenizer(QWEN), turn_end="<|im_end|>")

    def engine() -> TransformersEngine:
        return TransformersEngine(model, codec, SETTINGS)

    requests = [Group(index=0, problem=problem())]
    first = engine()
    driver = Driver(environment=ChatEnvironment(), engine=first, codec=codec, settings=SETTINGS, seed=7)
    (group,) = [group async for group in driver.play_groups(requests, step=1, group_size=1)]
    await first.close()
    (expected,) = group.trajectories
    second = engine()
    (played,), _, _ = await play("agent:rollout.gateway.test_environment:three_turns", second)
    await second.close()
    (found,) = played.trajectories
    assert comparable(found) == comparable(expected)
    assert found.turns == 3
    with torch.no_grad():
        (scored,) = model(torch.tensor([[*found.prompt_ids, *found.response_ids]])).logits.log_softmax(-1)
    said = zip(found.response_ids, found.response_mask, found.log_probs, strict=True)
    for place, (token, sampled, log_prob) in enumerate(said, start=len(found.prompt_ids) - 1):
        assert not sampled or log_prob == pytest.approx(float(scored[place, token]), abs=1e-5)


def comparable(item: Trajectory) -> Trajectory:
    return replace(item, seconds=0.0)
