"""Chat templates of other families: calls, responses, roles and system prompts, as their templates write them."""

from __future__ import annotations

from typing import Any

import pytest
from rollout.families import FAMILIES, LLAMA, MISTRAL, TOKENS, family_tokenizer
from rollout.templates import QWEN, chat_tokenizer

from agentrl.errors import SettingsError
from agentrl.models.chat_template import read_chat_format
from agentrl.models.tokenizer import TextCodec
from agentrl_envs.chat import ChatFormat, TemplateMark
from agentrl_envs.tools import PYTHON_SCHEMA
from agentrl_envs.types import Problem

TOOLS: list[Any] = [PYTHON_SCHEMA.as_openai_function()]
CALL: Any = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abc123xyz", "type": "function", "function": {"name": "python", "arguments": {"code": "print(7)"}}}
    ],
}
RESPONSE = {"role": "tool", "content": 'It is "7"\n', "name": "python", "tool_call_id": "abc123xyz"}
ENDS = {"llama": "<|eot|>", "mistral": "</s>", "qwen_coder": "<|im_end|>"}


def read(template: str, **options: Any) -> ChatFormat:
    return read_chat_format(family_tokenizer(template), name="m", options={}, **{"tools": TOOLS, **options})


def problem(*messages: tuple[str, str]) -> Problem:
    told = [{"role": role, "content": content} for role, content in messages]
    return Problem(
        id="p",
        statement="2 + 3?",
        answer="5",
        source="toy",
        messages=told,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_call_and_its_response_are_what_the_template_writes(family: str) -> None:
    template = FAMILIES[family]
    chat, tokenizer = read(template), family_tokenizer(template)
    asked = {"role": "user", "content": "2 + 3?"}
    whole = tokenizer.apply_chat_template(
        [asked, CALL, RESPONSE], tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    before = tokenizer.apply_chat_template([asked], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert chat.prompt(problem()) == before
    behind = chat.format_tool_responses([RESPONSE["content"]], ["abc123xyz"])
    turn = whole.removeprefix(before).removesuffix(behind)  # what the model samples, but for the end of its turn
    assert before + turn + behind == whole
    (found,) = chat.calls.find_calls(turn, lambda _: PYTHON_SCHEMA.parameters)
    assert (found.name, found.arguments) == ("python", {"code": "print(7)"})
    assert (chat.calls.name, chat.turn_end, chat.quoted) == (family, ENDS[family], family == "llama")
    codec = TextCodec(tokenizer, turn_end=chat.turn_end, shown_special_tokens=chat.calls.tokens)
    assert codec.encode_prompt(chat.prompt(problem())) == tuple(
        tokenizer(before, add_special_tokens=False)["input_ids"]
    )
    sampled = tuple(tokenizer(turn, add_special_tokens=False)["input_ids"])
    assert codec.decode(sampled) == turn  # the special tokens of a call are part of what is read


def test_two_responses_carry_the_ids_of_their_calls() -> None:
    chat = read(MISTRAL)
    shown = chat.format_tool_responses(
        ["a", "b"], ["abc123xyz", "[TOOL_CALLS]"]
    )  # an id that would be a token is not taken over
    assert shown == (
        '</s>[TOOL_RESULTS] {"content": a, "call_id": "abc123xyz"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS] {"content": b, "call_id": "call00000"}[/TOOL_RESULTS]'
    )
    assert shown.parts[0] == TemplateMark("</s>", ends_turn=True)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize(
    "roles", [("user",), ("system", "user"), ("user", "assistant", "user"), ("system", "user", "assistant", "user")]
)
def test_a_problems_messages_keep_their_roles(family: str, roles: tuple[str, ...]) -> None:
    template = FAMILIES[family]
    tokenizer = family_tokenizer(template)
    chat = read(template, tools=[])
    messages = [(role, f"{role} {place}") for place, role in enumerate(roles)]
    told = [{"role": role, "content": content} for role, content in messages]
    prompt = chat.prompt(problem(*messages), lambda text: f"Solve: {text}")
    told[-1]["content"] = f"Solve: {told[-1]['content']}"
    assert prompt == tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    marked = [part for part in prompt.parts if isinstance(part, TemplateMark)]
    assert len(marked) == len(roles) + 1  # contents are plain text, whatever they spell


def test_the_system_prompt_is_for_problems_that_bring_none() -> None:
    chat = read_chat_format(chat_tokenizer(QWEN), name="m", options={}, system="Be brief.")
    assert chat.prompt(problem()) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    own = chat.prompt(problem(("system", "Be long."), ("user", "2 + 3?")))
    assert "Be brief." not in own
    assert "Be long." in own
    assert "Be brief." in chat.prompt(problem(("user", "a"), ("assistant", "b"), ("user", "c")))


def test_a_reply_of_the_environment_is_a_users_message() -> None:
    chat, tokenizer = read(LLAMA, system="Be brief."), family_tokenizer(LLAMA)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "6"},
        {"role": "user", "content": "No."},
    ]
    whole = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert chat.prompt(problem()) + "6" + chat.format_user_reply("No.") == whole


def test_a_template_that_moves_its_tools_has_no_place_for_a_second_user() -> None:
    assert read(MISTRAL).user is None
    assert read(MISTRAL, tools=[]).user == ("[INST] ", "[/INST]")
    assert read(MISTRAL, tools=[], system="Be brief.").user is None
    assert read(MISTRAL, tools=[], system="Be brief.").turn_end == "</s>"


def test_without_tools_any_template_will_do_and_without_one_none() -> None:
    other = QWEN.replace('\'<tool_call>\\n{"name"', '\'<tool_call>\\n{"function"')
    assert read_chat_format(chat_tokenizer(other), name="m", options={}).turn_end == "<|im_end|>"
    with pytest.raises(SettingsError, match=r"environment.chat=always, but the tokenizer of m has no chat template"):
        read_chat_format(chat_tokenizer(None), name="m", options={}, setting="environment.chat=always")


def test_families_have_tokens_of_their_own() -> None:
    for template, tokens in TOKENS.items():
        tokenizer = family_tokenizer(template)
        assert all(len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1 for token in tokens)
