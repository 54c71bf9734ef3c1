"""Where the answer stands in a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_envs.protocols.texts import last_boxed_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{ 5 }", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed{4} or rather \boxed{5}", "5"),
        (r"\boxed{5} and then \boxed{6", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \\}", r"a \\"),
        (r"\boxed{x = \boxed{5}}", "5"),
        (r"stray { and } and } \boxed{5}", "5"),
        ("\\boxed{1\n2}", "1\n2"),
    ],
)
def test_last_complete_box(text: str, answer: str) -> None:
    assert last_boxed_answer(text) == answer


@pytest.mark.parametrize("text", ["", "5", r"\boxed", r"\boxed{5", r"\boxed{{5}", r"\boxed{}", r"\boxed{ }"])
def test_no_box(text: str) -> None:
    assert last_boxed_answer(text) is None


def test_an_empty_box_does_not_hide_an_answer() -> None:
    assert last_boxed_answer(r"\boxed{5} as \boxed{} asks") == "5"


balanced = st.recursive(
    st.text(st.characters(exclude_characters="{}\\", exclude_categories=["Cs"])),
    lambda inner: st.tuples(inner, inner, inner).map(lambda parts: f"{parts[0]}{{{parts[1]}}}{parts[2]}"),
)
plain = st.text(st.characters(exclude_characters="{}\\", exclude_categories=["Cs"]))


@given(before=plain, answer=balanced.filter(str.strip), after=plain)
def test_any_balanced_content_is_found_between_any_text(before: str, answer: str, after: str) -> None:
    assert last_boxed_answer(f"{before}\\boxed{{{answer}}}{after}") == answer.strip()


def test_hostile_nesting_is_one_pass() -> None:
    assert last_boxed_answer("\\boxed{" * 140_000) is None
    assert last_boxed_answer("\\boxed{" * 50_000 + "5" + "}" * 50_000) == "5"
