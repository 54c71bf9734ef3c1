"""Whole trajectories under each protocol: exact token ids and masks, and what may never become a special token."""

from __future__ import annotations

import json

import pytest
from rollout.played import END, FORGED, GRADER, PROBLEM, START, Played, play_in
from rollout.templates import QWEN, THINKING

from agentrl_envs.reasoning import ReasoningEnvironment
from agentrl_envs.settings import ReasoningSettings
from agentrl_envs.types import Ended, Verdict

TEXT_PROTOCOLS = {
    "retool": (
        "<code>\n```python\nprint(7)\n```\n</code>",
        "\n\n<interpreter>\n{}\n</interpreter>\n\n",
        "<answer>\n\\boxed{5}\n</answer>",
        "stop",
        f"2 + 3? {END}\n",
    ),
    "torl": (
        "```python\nprint(7)\n```\n```output",
        "\n{}\n```\n",
        "It is \\boxed{5}.",
        "eos",
        f"User: 2 + 3? {END}\nAssistant:",
    ),
}


@pytest.mark.parametrize("output", ["7", FORGED])
@pytest.mark.parametrize("protocol", list(TEXT_PROTOCOLS))
async def test_tokens_of_protocols_that_are_text(protocol: str, output: str) -> None:
    call, around, answer, reason, prompt = TEXT_PROTOCOLS[protocol]
    played = Played(protocol=protocol)
    first, last = played.said(call), played.said(answer, reason)
    trajectory, engine = await played.play([first, last], [output])
    codec = played.codec
    observation = codec.encode(around.format(output))
    assert trajectory.prompt_ids == codec.encode(prompt)
    assert trajectory.response_ids == first.token_ids + observation + last.token_ids
    assert trajectory.response_mask == (
        (True,) * len(first.token_ids) + (False,) * len(observation) + (True,) * len(last.token_ids)
    )
    assert engine.requests[1][1] == codec.encode(prompt) + first.token_ids + observation
    assert (trajectory.ended, trajectory.verdict, trajectory.rewards[-1]) == (Ended.ANSWERED, Verdict.CORRECT, 1.0)
    assert played.programs == ["print(7)\n"]
    # Nothing special but what the engine sampled.
    assert not played.special & {*trajectory.prompt_ids, *observation}


@pytest.mark.parametrize("output", ["7", FORGED])
@pytest.mark.parametrize("ending", ["eos", "length"])
async def test_tokens_of_tool_calls_in_a_template(ending: str, output: str) -> None:
    played = Played(QWEN, protocol="hermes")
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "print(7)"}}\n</tool_call>'
    first, last = played.said(call, ending), played.said("It is \\boxed{5}.", "eos")
    trajectory, engine = await played.play([first, last], [output], max_turn_tokens=len(first.token_ids))
    assert played.chat is not None
    codec = played.codec
    # The template's own tokens are special, what stands between them is text.
    prompt = (
        played.template_ids(played.chat.before_problem)
        + codec.encode(PROBLEM.statement)
        + played.template_ids(f"{END}\n{START}assistant\n")
    )
    closed = () if ending == "eos" else (played.id(END),)  # the model has sampled it, or it is written for it
    observation = (
        closed
        + played.template_ids(f"\n{START}user\n<tool_response>\n")
        + codec.encode(output)
        + played.template_ids(f"\n</tool_response>{END}\n{START}assistant\n")
    )
    assert trajectory.prompt_ids == prompt
    assert trajectory.response_ids == first.token_ids + observation + last.token_ids
    assert trajectory.response_mask == (
        (True,) * len(first.token_ids) + (False,) * len(observation) + (True,) * len(last.token_ids)
    )
    assert engine.requests[1][1] == prompt + first.token_ids + observation
    assert trajectory.segments[1].text == ("" if ending == "eos" else END) + (
        f"\n{START}user\n<tool_response>\n{output}\n</tool_response>{END}\n{START}assistant\n"
    )
    assert (trajectory.ended, trajectory.reward) == (Ended.ANSWERED, 1.0)
    assert sum(token in played.special for token in observation) == 3 + len(closed)
    assert played.programs == ["print(7)"]


async def test_two_calls_get_two_responses_in_one_message() -> None:
    played = Played(QWEN, protocol="hermes")
    calls = [f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>" for code in "xy"]
    trajectory, _ = await played.play(
        [played.said("\n".join(calls), "eos"), played.said("\\boxed{5}", "eos")], ["one", "two"]
    )
    assert trajectory.segments[1].text == (
        f"\n{START}user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>{END}\n"
        f"{START}assistant\n"
    )
    assert [call.outcome for call in trajectory.tool_calls] == ["ok", "ok"]


async def test_thoughts_stay_in_the_conversation_as_they_were_sampled() -> None:
    played = Played(THINKING, protocol="hermes")
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(7)"}}</tool_call>'
    first = played.said(f"<think>\nNo <tool_call>yet</tool_call>\n</think>\n\n{call}", "eos")
    last = played.said("<think>\nperhaps \\boxed{4}\n</think>\n\nIt is \\boxed{5}.", "eos")
    trajectory, engine = await played.play([first, last], ["7"])
    # The template would strip the first turn's thoughts when it renders the second.
    assert trajectory.response_ids[: len(first.token_ids)] == first.token_ids
    assert engine.requests[1][1][len(trajectory.prompt_ids) :][: len(first.token_ids)] == first.token_ids
    assert (trajectory.answer, trajectory.reward) == ("5", 1.0)
    assert [call.outcome for call in trajectory.tool_calls] == ["ok"]


@pytest.mark.parametrize(
    ("turn", "error"),
    [
        ("<tool_call>{not json}</tool_call>", "there must be one JSON object"),
        ('<tool_call>{"name": "python", "arguments": {"code": "1"}}', "is not closed by </tool_call>"),
        ('<tool_call>{"name": "perl", "arguments": {}}</tool_call>', "there is no tool 'perl'; the tools are: python"),
        (
            '<tool_call>{"name": "python", "arguments": {}}</tool_call>',
            "arguments of python: 'code' is a required property",
        ),
    ],
)
async def test_a_malformed_call_is_answered_and_the_episode_goes_on(turn: str, error: str) -> None:
    played = Played(QWEN, protocol="hermes")
    trajectory, _ = await played.play([played.said(turn, "eos"), played.said("\\boxed{5}", "eos")])
    assert error in trajectory.segments[1].text
    assert (trajectory.ended, trajectory.reward, trajectory.turns) == (Ended.ANSWERED, 1.0, 2)
    assert [call.outcome for call in trajectory.tool_calls] == ["malformed"]


async def test_reasoning_is_one_turn_of_text() -> None:
    played = Played()
    environment = ReasoningEnvironment(ReasoningSettings(instruction="Think."), None, GRADER)
    only = played.said("2 + 3 = \\boxed{5}", "eos")
    trajectory, engine = await play_in(environment, played.codec, [only])
    assert trajectory.prompt_ids == played.codec.encode(f"Think.\n\n2 + 3? {END}\n")
    assert trajectory.response_ids == only.token_ids
    assert (trajectory.ended, trajectory.reward) == (Ended.ANSWERED, 1.0)
    assert engine.requests[0][2].stop == ()


@pytest.mark.parametrize(("reason", "ended"), [("eos", Ended.STOPPED), ("length", Ended.TOKEN_LIMIT)])
async def test_a_turn_without_answer_ends_by_itself_or_by_its_limit(reason: str, ended: Ended) -> None:
    played = Played()
    environment = ReasoningEnvironment(None, None, GRADER)
    only = played.said("I do not know", reason)
    trajectory, _ = await play_in(environment, played.codec, [only], max_turn_tokens=len(only.token_ids))
    assert (trajectory.ended, trajectory.reward) == (ended, 0.0)
