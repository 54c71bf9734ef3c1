"""The forms in which models write calls, read from text: names, arguments, what stands around, what is malformed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_envs.tool_call_formats import TOOL_CALL_FORMATS, parse_parameter, remove_calls

SCHEMA = {
    "type": "object",
    "properties": {
        "code": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "items": {"type": "array", "items": {"type": "integer"}},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/Place"},
        "free": {},
    },
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}}},
}


def read(form: str, text: str) -> list[tuple[str, Any]]:
    found = TOOL_CALL_FORMATS[form].find_calls(text, lambda _: SCHEMA)
    assert all(not call.error for call in found), found
    assert all(0 <= call.start <= call.end <= len(text) for call in found)
    return [(call.name, call.arguments) for call in found]


def errors(form: str, text: str) -> list[str]:
    return [call.error for call in TOOL_CALL_FORMATS[form].find_calls(text) if call.error]


@pytest.mark.parametrize(
    ("form", "text", "around"),
    [
        (
            "hermes",
            'So.\n<tool_call>\n{"name": "f", "arguments": {"code": "</tool_call>"}}\n</tool_call>'
            '<tool_call>{"name": "g", "arguments": {}}</tool_call> ok',
            "So.\n ok",
        ),
        (
            "qwen_coder",
            "So.\n<tool_call>\n<function=f>\n<parameter=code>\n</tool_call>\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call><function=g></function></tool_call>",
            "So.",
        ),
        (
            "mistral",
            'So.[TOOL_CALLS] [{"name": "f", "arguments": {"code": "</tool_call>"}}, {"name": "g", "arguments": {}}]',
            "So.",
        ),
        (
            "mistral",
            'So.[TOOL_CALLS]f[CALL_ID]abc123xyz[ARGS]{"code": "</tool_call>"}[TOOL_CALLS]g{}',
            "So.",
        ),
        (
            "llama",
            'So.\n{"name": "f", "parameters": {"code": "</tool_call>"}}; {"name": "g", "parameters": {}}',
            "So.",
        ),
        (
            "llama",
            '<|python_tag|>{"type": "function", "name": "f", "arguments": {"code": "</tool_call>"}}\n'
            '{"name": "g", "parameters": {}}',
            "",
        ),
    ],
)
def test_two_calls_and_what_stands_around(form: str, text: str, around: str) -> None:
    assert read(form, text) == [("f", {"code": "</tool_call>"}), ("g", {})]
    assert remove_calls(text, TOOL_CALL_FORMATS[form].find_calls(text)) == around


def test_ids_are_those_that_the_model_writes() -> None:
    listed = '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc123xyz"}]'
    named = "[TOOL_CALLS]f[CALL_ID]abc123xyz[ARGS]{}"
    for text in (listed, named):
        (found,) = TOOL_CALL_FORMATS["mistral"].find_calls(text)
        assert found.id == "abc123xyz"


@pytest.mark.parametrize(
    ("form", "text", "error"),
    [
        ("hermes", "<tool_call>{1}</tool_call>", "there must be one JSON object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "is not closed by </tool_call>"),
        (
            "hermes",
            "<tool_call>[]</tool_call>",
            'a call is a JSON object with a string "name" and an object "arguments"',
        ),
        ("qwen_coder", '<tool_call>{"name": "f"}</tool_call>', "there must be <function=NAME>"),
        ("qwen_coder", "<tool_call><function=f>stray</function></tool_call>", "there must be <function=NAME>"),
        ("qwen_coder", "<tool_call><function=f></function>", "is not closed by </tool_call>"),
        ("mistral", "[TOOL_CALLS] none", "must be followed by a JSON list of calls"),
        ("mistral", "[TOOL_CALLS][3]", 'a call is a JSON object with a string "name"'),
        ("llama", '{"name": "f", "parameters": {', 'a JSON object with a string "name" and an object "parameters"'),
        ("llama", "<|python_tag|>print(1)", 'a JSON object with a string "name" and an object "parameters"'),
    ],
)
def test_malformed_calls_are_named(form: str, text: str, error: str) -> None:
    (said,) = errors(form, text)
    assert error in said


@pytest.mark.parametrize("form", list(TOOL_CALL_FORMATS))
@pytest.mark.parametrize("text", ["", "It is 5.", "f(x) = {x : x > 1}", '{"answer": 5}', "a; b"])
def test_text_without_a_call_has_none(form: str, text: str) -> None:
    assert TOOL_CALL_FORMATS[form].find_calls(text) == []


def test_bare_values_have_the_types_of_the_schema() -> None:
    written = {
        "code": "5",
        "count": " 5\n",
        "flag": "True",
        "items": "[1, 2]",
        "maybe": "None",
        "place": '{"x": 1.5}',
        "free": "[1]",
        "unknown": "5",
    }
    body = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in written.items())
    assert read("qwen_coder", f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>") == [
        (
            "f",
            {
                "code": "5",
                "count": 5,
                "flag": True,
                "items": [1, 2],
                "maybe": None,
                "place": {"x": 1.5},
                "free": "[1]",
                "unknown": "5",
            },
        )
    ]
    assert parse_parameter("many", "count", SCHEMA) == "many"  # the check of the arguments says what is wrong


TEXTS = st.text(alphabet="ab<>/[]{}\"';|\\ \n\u00e9", max_size=20)
ARGUMENTS = st.dictionaries(st.sampled_from(["code", "other"]), TEXTS, max_size=2)


@given(st.lists(st.tuples(st.sampled_from(["f", "g"]), ARGUMENTS), min_size=1, max_size=3))
def test_json_calls_are_read_as_they_were_written(calls: list[tuple[str, dict[str, str]]]) -> None:
    as_arguments = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    as_parameters = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls]
    assert read("hermes", "".join(f"<tool_call>{one}</tool_call>" for one in as_arguments)) == calls
    assert read("mistral", f"[TOOL_CALLS][{', '.join(as_arguments)}]") == calls
    assert read("llama", "; ".join(as_parameters)) == calls


@given(
    st.text(max_size=60)
    | st.lists(
        st.sampled_from(
            [
                "<tool_call>",
                "</tool_call>",
                "<function=f>",
                "</function>",
                "<parameter=code>",
                "</parameter>",
                "[TOOL_CALLS]",
                '[{"name": "f", "arguments": {}}]',
                '{"name": "f", "parameters": {}}',
                "[ARGS]",
                "<|python_tag|>",
                "\n",
                ";",
                "x",
            ]
        ),
        max_size=10,
    ).map("".join)
)
@pytest.mark.parametrize("form", list(TOOL_CALL_FORMATS))
def test_any_text_can_be_read(form: str, text: str) -> None:
    found = TOOL_CALL_FORMATS[form].find_calls(text, lambda _: SCHEMA)
    assert [call.start for call in found] == sorted(call.start for call in found)
    remove_calls(text, found)
