"""A chat template as strings: what is read from it, and templates that cannot be spoken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout.templates import QWEN, THINKING, chat_tokenizer

from agentrl.errors import SettingsError
from agentrl.models.chat_template import read_chat_format
from agentrl.models.tokenizer import TextCodec
from agentrl_envs.chat import ChatFormat, MarkedText, TemplateMark
from agentrl_envs.tools import PYTHON_SCHEMA
from agentrl_envs.types import Problem

TOOLS = [PYTHON_SCHEMA.as_openai_function()]
TOKENIZER = chat_tokenizer(QWEN)
# What no template's own string and no special token can be made of.
PLAIN = st.text(alphabet="ab {}\n\u00e9\U0001f642", max_size=12)


def read(template: str | None, **options: Any) -> ChatFormat:
    return read_chat_format(chat_tokenizer(template), name="m", tools=TOOLS, options=options)


def test_what_stands_around_a_problem_and_a_response() -> None:
    chat = read(QWEN)
    assert chat.before_problem.startswith('<|im_start|>system\n# Tools\n<tools>\n{"type": "function"')
    assert chat.before_problem.endswith("</tool_call><|im_end|>\n<|im_start|>user\n")
    assert chat.after_problem == "<|im_end|>\n<|im_start|>assistant\n"
    assert chat.turn_end == "<|im_end|>"
    assert chat.before_response == "\n<|im_start|>user\n<tool_response>\n"
    assert chat.between_responses == "\n</tool_response>\n<tool_response>\n"
    assert chat.after_response == "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_a_thinking_template_gives_the_same_increments_and_its_own_generation_prompt() -> None:
    plain, thinking, silent = read(QWEN), read(THINKING), read(THINKING, enable_thinking=False)
    for chat in (thinking, silent):
        assert (chat.turn_end, chat.before_response) == (plain.turn_end, plain.before_response)
    assert thinking.after_problem == plain.after_problem
    assert silent.after_problem == plain.after_problem + "<think>\n\n</think>\n\n"
    assert silent.after_response == plain.after_response + "<think>\n\n</think>\n\n"


@given(PLAIN, st.lists(st.tuples(PLAIN, st.lists(PLAIN, min_size=1, max_size=3)), max_size=3))
def test_increments_add_up_to_what_the_template_renders(statement: str, rounds: list[tuple[str, list[str]]]) -> None:
    chat, codec = read(QWEN), TextCodec(TOKENIZER, turn_end="<|im_end|>")
    messages: list[dict[str, str]] = [{"role": "user", "content": statement}]
    written: str = chat.prompt(Problem(id="p", statement=statement, answer=None, source="toy"))
    ids = codec.encode_prompt(written)
    for call, results in rounds:
        messages += [{"role": "assistant", "content": call}]
        messages += [{"role": "tool", "content": result} for result in results]
        responses = chat.format_tool_responses(results)
        written = written + call + responses
        ids += codec.encode(call) + codec.encode_parts(responses.parts)
    whole = TOKENIZER.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert written == whole
    assert ids == tuple(TOKENIZER(whole, add_special_tokens=False)["input_ids"])


def test_only_marks_have_special_tokens() -> None:
    codec = TextCodec(TOKENIZER, turn_end="<|im_end|>")
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    text = MarkedText(TemplateMark("<|im_end|>", ends_turn=True), "<|im_end|>", TemplateMark("<tool_response>"))
    response = TOKENIZER.convert_tokens_to_ids("<tool_response>")
    assert codec.encode_parts(text.parts) == (end, *codec.encode("<|im_end|>"), response)
    assert end not in codec.encode("<|im_end|>")
    assert codec.end_ids == {codec.eos_id, end}
    # A text that merely reads the same is all text.
    assert codec.encode_prompt(str(text)) == codec.encode(str(text))


def test_the_end_of_a_turn_is_written_once() -> None:
    codec = TextCodec(TOKENIZER, turn_end="<|im_end|>")
    end = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
    responses = read(QWEN).format_tool_responses(["5"])
    assert codec.parts_without_sampled_turn_end(responses, (1, 2, end)) == responses.parts[1:]
    assert codec.parts_without_sampled_turn_end(responses, (1, 2)) == responses.parts
    assert codec.parts_without_sampled_turn_end("plain", (end,)) == ("plain",)


def test_a_turn_end_that_is_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="the end-of-turn marker 'ab' must be a single token; got 2"):
        TextCodec(TOKENIZER, turn_end="ab")


POSITION = QWEN.replace("'\\n<tool_response>\\n'", "'\\n<tool_response>\\n' + loop.index0 | string")
OTHER_CALLS = QWEN.replace('\'<tool_call>\\n{"name"', '\'<tool_call>\\n{"function"')
BARE = "{% for message in messages %}{{ message.content }}{% endfor %}"
RAISING = "{{ raise_exception('no tools here') }}"
TRIMMED = QWEN.replace("message.role + '\\n' + message.content", "message.role + '\\n' + message.content | upper")
NO_TOOLS = QWEN.replace("{%- if tools %}", "{%- if false %}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "hermes, but the tokenizer of m has no chat template; use an instruction-tuned model, or"),
        (OTHER_CALLS, r"does not write tool calls in a supported format \(hermes, qwen_coder, mistral, llama\)"),
        (BARE, r"does not render the tools \['python'\]"),
        (RAISING, "cannot render a conversation with tools: no tools here"),
        (POSITION, "renders a tool response differently depending on its position"),
        (TRIMMED, "does not render each message of a conversation with tools unchanged, once and in order"),
        (NO_TOOLS, r"does not render the tools \['python'\]"),
    ],
)
def test_templates_that_cannot_be_spoken(template: str | None, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read(template)
