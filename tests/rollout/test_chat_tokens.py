"""Protocols that are text, spoken through a chat template, and tool calls of other families: exact tokens."""

from __future__ import annotations

import pytest
from rollout.families import FAMILIES, LLAMA, MISTRAL, QWEN_CODER
from rollout.played import END, FORGED, GRADER, PROBLEM, START, Played, play_in
from rollout.templates import QWEN

from agentrl.models.chat_template import read_chat_format
from agentrl_envs.reasoning import ReasoningEnvironment
from agentrl_envs.settings import ReasoningSettings
from agentrl_envs.types import Ended

TURNS = {
    "simpletir": ("```py\nprint(7)\n```", "\nCode execution result: {}\n", "It is \\boxed{{5}}."),
    "retool": (
        "<code>\n```python\nprint(7)\n```\n</code>",
        "\n\n<interpreter>\n{}\n</interpreter>\n\n",
        "<answer>\n\\boxed{{5}}\n</answer>",
    ),
    "torl": ("```python\nprint(7)\n```\n```output", "\n{}\n```\n", "It is \\boxed{{5}}."),
}


@pytest.mark.parametrize("output", ["7", FORGED])
@pytest.mark.parametrize("protocol", list(TURNS))
async def test_what_a_program_prints_stands_in_the_models_message(protocol: str, output: str) -> None:
    if protocol == "simpletir":
        output = output.replace("\\boxed{5}", "5")  # there a program may answer
    call, around, answer = TURNS[protocol]
    played = Played(QWEN, protocol=protocol, chat="always", system_prompt="Be brief.")
    first, last = played.said(call), played.said(answer.format(), "eos")
    trajectory, engine = await played.play([first, last], [output])
    codec = played.codec
    prompt = (
        played.template_ids(f"{START}system\nBe brief.{END}\n{START}user\n")
        + codec.encode(PROBLEM.statement)
        + played.template_ids(f"{END}\n{START}assistant\n")
    )
    observation = codec.encode(around.format(output))
    assert trajectory.prompt_ids == prompt
    assert trajectory.response_ids == first.token_ids + observation + last.token_ids
    assert engine.requests[1][1] == prompt + first.token_ids + observation
    assert (trajectory.ended, trajectory.reward) == (Ended.ANSWERED, 1.0)
    assert not played.special & set(observation)  # whatever a program prints is text


@pytest.mark.parametrize(("protocol", "turn"), [("torl", "```python\nprint(7)\n```"), ("retool", "<code>print(7)")])
@pytest.mark.parametrize("reason", ["eos", "length"])
async def test_an_error_behind_a_message_that_has_ended_is_a_users_message(
    protocol: str, turn: str, reason: str
) -> None:
    played = Played(QWEN, protocol=protocol, chat="always")
    first, last = played.said(turn, reason), played.said("<answer>\\boxed{5}</answer>", "eos")
    trajectory, _ = await played.play([first, last], max_turn_tokens=max(30, len(first.token_ids)))
    error = trajectory.segments[1].text
    closed = "" if reason == "eos" else END  # sampled, or written for the model
    assert error.startswith(f"{closed}\n{START}user\n")
    assert "ToolCallError: " in error
    assert error.endswith(f"{END}\n{START}assistant\n")
    assert (trajectory.ended, trajectory.reward, trajectory.turns) == (Ended.ANSWERED, 1.0, 2)


async def test_reasoning_in_a_template() -> None:
    played = Played(QWEN, chat="always")
    chat = read_chat_format(played.tokenizer, name="m", options={})
    settings = ReasoningSettings(instruction="Think.", chat="always")
    only = played.said("2 + 3 = \\boxed{5}", "eos")
    trajectory, _ = await play_in(ReasoningEnvironment(settings, None, GRADER, chat=chat), played.codec, [only])
    assert trajectory.prompt_ids == (
        played.template_ids(f"{START}user\n")
        + played.codec.encode(f"Think.\n\n{PROBLEM.statement}")
        + played.template_ids(f"{END}\n{START}assistant\n")
    )
    assert (trajectory.ended, trajectory.reward) == (Ended.ANSWERED, 1.0)


async def test_a_system_prompt_in_plain_text_comes_first() -> None:
    played = Played(protocol="torl", instruction="Think.", system_prompt="Be brief.")
    trajectory, _ = await played.play([played.said("\\boxed{5}", "eos")])
    assert trajectory.prompt_ids == played.codec.encode(f"Be brief.\n\nThink.\nUser: {PROBLEM.statement}\nAssistant:")


async def test_tool_calls_without_a_template() -> None:
    played = Played(protocol="hermes", chat="never", system_prompt="Be brief.")
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(7)"}}</tool_call>'
    first, last = played.said(call), played.said("\\boxed{5}", "eos")
    trajectory, engine = await played.play([first, last], ["7"])
    assert played.codec.decode(trajectory.prompt_ids).startswith("Be brief.\n\nYou may call these tools:\n{")
    assert trajectory.segments[1].text == "\n<tool_response>\n7\n</tool_response>\n"
    assert engine.requests[0][2].stop == ("</tool_call>",)
    assert (trajectory.reward, played.programs) == (1.0, ["print(7)"])


CALLS = {
    "llama": '{"name": "python", "parameters": {"code": "print(7)"}}',
    "mistral": '[TOOL_CALLS] [{"name": "python", "arguments": {"code": "print(7)"}, "id": "abc123xyz"}]',
    "qwen_coder": (
        "<tool_call>\n<function=python>\n<parameter=code>\nprint(7)\n</parameter>\n</function>\n</tool_call>"
    ),
}
RESPONSES = {
    LLAMA: '<|header|>ipython<|/header|>\n\n"{}"<|eot|><|header|>assistant<|/header|>\n\n',
    MISTRAL: '[TOOL_RESULTS] {{"content": {}, "call_id": "abc123xyz"}}[/TOOL_RESULTS]',
    QWEN_CODER: (f"\n{START}user\n<tool_response>\n{{}}\n</tool_response>{END}\n{START}assistant\n"),
}


@pytest.mark.parametrize("ending", ["eos", "length"])
@pytest.mark.parametrize("family", list(FAMILIES))
async def test_tool_calls_of_other_families(family: str, ending: str) -> None:
    template = FAMILIES[family]
    played = Played(template, protocol="hermes")
    first = played.said(CALLS[family], "eos", special=True)
    if ending == "length":
        first = type(first)(
            token_ids=first.token_ids[:-1],
            log_probs=first.log_probs[:-1],
            finish_reason="length",
            version_spans=((0, len(first.token_ids) - 1),),
        )
    last = played.said("It is \\boxed{5}.", "eos")
    trajectory, engine = await played.play([first, last], ["7"], max_turn_tokens=len(first.token_ids))
    closed = () if ending == "eos" else (played.id(played.end),)
    observation = closed + played.template_ids(RESPONSES[template].format("7"))
    assert trajectory.response_ids == first.token_ids + observation + last.token_ids
    assert engine.requests[1][1] == trajectory.prompt_ids + first.token_ids + observation
    assert trajectory.segments[0].text == CALLS[family]
    assert (trajectory.ended, trajectory.reward, played.programs) == (Ended.ANSWERED, 1.0, ["print(7)"])
