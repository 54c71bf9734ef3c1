"""The text of a SimpleTIR conversation: fences, the end of a turn, observations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_envs.protocols.simpletir import SimpleTIRProtocol
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.types import Problem
from agentrl_sandbox.client import Execution, Outcome

PROTOCOL = SimpleTIRProtocol(instruction="", observation_limit=512)


def observed(execution: Execution) -> str:
    return PROTOCOL.observation("", [PROTOCOL.result_for_model(execution)])


def prompt(instruction: str) -> str:
    problem = Problem(id="p", statement="What is 2 + 3?", answer="5", source="toy")
    return SimpleTIRProtocol(instruction=instruction, observation_limit=512).prompt(problem)


def test_prompt_is_instruction_and_statement() -> None:
    assert prompt("Solve it.") == "Solve it.\n\nWhat is 2 + 3?\n"
    assert prompt("") == "What is 2 + 3?\n"


def test_default_instruction_says_what_a_policy_must_know() -> None:
    instruction = SimpleTIRSettings().effective_instruction
    for word in (
        "step by step",
        "Python",
        "print",
        "Code execution result: ",
        "final_answer(",
        r"\boxed{",
        "```python\n",
    ):
        assert word in instruction


OPENINGS = ["```", "```py", "```python", "```Python", "```PYTHON", "```python3", "``` py", "```python   ", "```py\t"]
INDENTED_AND_INLINE = ["  ```py", "Here: ```python", "text\n```py"]


@pytest.mark.parametrize("opening", [*OPENINGS, *INDENTED_AND_INLINE])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_opening_fences(opening: str, newline: str) -> None:
    turn = f"{opening}{newline}print(1){newline}print(2){newline}```"
    assert PROTOCOL.turn_complete(turn)
    assert PROTOCOL.parse(turn).program == "print(1)\nprint(2)\n"


UNCLOSED = ["", "```", "```py", "```py\n", "text\n```", "```py\nprint('a ``` b')\n", "```py\nx = '```'"]
NOT_PYTHON = ["use ```x``` here\n", "```json\n{}\n```", "```text\n```py\n", "`````\n", "```print(1)```\n"]


@pytest.mark.parametrize("text", [*UNCLOSED, *NOT_PYTHON])
def test_incomplete_turns(text: str) -> None:
    assert not PROTOCOL.turn_complete(text)
    assert PROTOCOL.parse(text).program is None


def test_first_closed_program_is_the_program() -> None:
    turn = "```py\nprint(1)\n```\n```py\nprint(2)\n```"
    assert PROTOCOL.parse(turn).program == "print(1)\n"


def test_backticks_inside_a_line_belong_to_the_program() -> None:
    assert PROTOCOL.parse("```py\nx = '```'  # ```\nprint(x)\n```").program == "x = '```'  # ```\nprint(x)\n"


def test_a_block_in_another_language_is_text() -> None:
    turn = '```json\n{"a": 1}\n```\nNow:\n```python\nprint(1)\n```'
    assert PROTOCOL.parse(turn).program == "print(1)\n"


def test_an_indented_block_is_dedented_by_its_fence() -> None:
    assert PROTOCOL.parse("  ```py\n  if 1:\n    print(1)\n  ```").program == "if 1:\n  print(1)\n"


def test_a_blank_program_is_none() -> None:
    turn = "```py\n \n```"
    assert PROTOCOL.turn_complete(turn)
    assert PROTOCOL.parse(turn).program is None


def test_answers_count_only_in_the_models_own_words_before_the_program() -> None:
    assert PROTOCOL.parse(r"It is \boxed{5}.").answer == "5"
    assert PROTOCOL.parse("\\boxed{4}\n```py\nprint('\\boxed{6}')\n```\\boxed{7}").answer == "4"
    assert PROTOCOL.parse("```py\nprint('\\boxed{6}')\n").answer is None


def test_an_engine_that_stops_at_every_stop_string_sees_the_program_closed() -> None:
    """Generate one character at a time, stop at stop strings, go on where the protocol says so."""
    whole = "Think.\n```python\nprint('```')\nprint(2)\n```\nCode execution result: 7"
    turn, requests = "", 0
    while not (requests and PROTOCOL.turn_complete(turn)):
        requests, new = requests + 1, ""
        while not any(stop in new for stop in PROTOCOL.stop_strings):
            new += whole[len(turn) + len(new)]
        turn += new
    assert turn == "Think.\n```python\nprint('```')\nprint(2)\n```"
    assert requests == 2  # the opening fence after a newline, and the closing one


def test_a_turn_that_opens_with_its_fence_is_not_interrupted() -> None:
    assert not any(stop in "```py\nprint(1)\n" for stop in PROTOCOL.stop_strings)


lines = st.lists(st.text(st.characters(exclude_characters="`\r\n", exclude_categories=["Cs"])))
prose = lines.map("\n".join)


@given(
    before=prose,
    body=lines.map("\n".join),
    after=st.text(st.characters(exclude_categories=["Cs"])),
    tag=st.sampled_from(["", "py", "python", "Python", "PY "]),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_program_is_found_in_any_text(before: str, body: str, after: str, tag: str, newline: str) -> None:
    body = body.replace("\n", newline)
    turn = f"{before}\n```{tag}{newline}{body}{newline}```"
    assert PROTOCOL.turn_complete(turn)
    parsed = PROTOCOL.parse(turn)
    expected = body.replace("\r\n", "\n") + "\n"
    assert parsed.program == (expected if expected.strip() else None)
    assert PROTOCOL.parse(turn + after) == parsed  # what is sampled past the fence changes nothing


pieces = st.sampled_from(["`", "```", "\n", "\r", " ", "py", "x", "json", "\\boxed{", "}"])


@given(st.lists(pieces, max_size=30).map("".join))
def test_completeness_never_goes_away(text: str) -> None:
    states = [PROTOCOL.turn_complete(text[:end]) for end in range(len(text) + 1)]
    assert states == sorted(states)
    if True in states:
        assert PROTOCOL.parse(text[: states.index(True)]) == PROTOCOL.parse(text)


def test_observation_is_the_output(execution: Callable[..., Execution]) -> None:
    assert observed(execution("5\n")) == "\nCode execution result: 5\n"
    assert observed(execution("")) == "\nCode execution result: \n"
    assert observed(execution("  1\n  2\n")) == "\nCode execution result:   1\n  2\n"


def test_last_line_of_stderr_replaces_stdout(execution: Callable[..., Execution]) -> None:
    failed = execution("5\n", stderr="Traceback:\n  line 1\nNameError: name 'x'\n\n", outcome=Outcome.ERROR)
    assert observed(failed) == "\nCode execution result: NameError: name 'x'\n"


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        (Outcome.TIMEOUT, "TimeoutError"),
        (Outcome.MEMORY_LIMIT, "MemoryError"),
        (Outcome.OUTPUT_LIMIT, "OutputLimitError"),
        (Outcome.KILLED, "KilledError"),
    ],
)
def test_limits_are_said(execution: Callable[..., Execution], outcome: Outcome, word: str) -> None:
    observation = observed(execution("partial", outcome=outcome))
    assert observation.startswith(f"\nCode execution result: {word}: ")
    assert "partial" not in observation


def test_long_output_keeps_head_and_tail(execution: Callable[..., Execution]) -> None:
    exact = "a" * 512
    assert observed(execution(exact)) == f"\nCode execution result: {exact}\n"
    long = "a" * 256 + "b" + "c" * 256
    assert observed(execution(long)) == (
        "\nCode execution result: " + "a" * 256 + "\n[... output cut ...]\n" + "c" * 256 + "\n"
    )
    odd = SimpleTIRProtocol(instruction="", observation_limit=3)
    assert odd.result_for_model(execution("abcdef")) == "a\n[... output cut ...]\nef"


def test_setup_and_final_answer_stand_before_the_program() -> None:
    problem = Problem(id="p", statement="", answer="7", source="toy", setup="def reveal():\n    return 7")
    printed: list[str] = []
    source = PROTOCOL.source_to_run(problem, "final_answer(reveal())\n")
    exec(compile(source, "program", "exec"), {"print": printed.append})
    assert printed == [r"\boxed{7}"]
