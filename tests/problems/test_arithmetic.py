"""The built-in problems: solvable as demonstrated, disjoint by construction, not answerable without running."""

import contextlib
import io
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.problems.arithmetic import FAMILIES, ArithmeticSource
from agentrl.problems.demonstrations import Demonstration
from agentrl.problems.rows import EmptyProblemsError, ProblemLoadError
from agentrl_envs.types import Problem

FENCE = re.compile(r"\A```py\n(.*)\n```\Z", re.DOTALL)


def run(problem: Problem, code: str) -> str:
    """What the program prints after the problem's setup, with ``final_answer`` as the protocol defines it."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(f"def final_answer(x): print('\\\\boxed{{' + str(x) + '}}')\n{problem.setup}\n{code}", {})
    return shown.getvalue().rstrip("\n")


def assert_solves(demonstration: Demonstration) -> None:
    """Each program prints the shown observation, and the last turn answers with the gold answer."""
    *looks, last = demonstration.turns
    for turn in looks:
        code = FENCE.match(turn.model)
        assert code is not None, turn.model
        assert turn.observation == f"\nCode execution result: {run(demonstration.problem, code[1])}\n"
    code = FENCE.match(last.model)
    answered = run(demonstration.problem, code[1]) if code else last.model
    assert answered == f"\\boxed{{{demonstration.problem.answer}}}"
    assert last.observation == ""


def test_every_demonstration_solves_its_problem():
    for split in ("train", "heldout"):
        for demonstration in ArithmeticSource(split=split, seed=7).demonstrations(2000):
            assert_solves(demonstration)
            assert int(demonstration.problem.answer) >= 0


@settings(max_examples=10, deadline=None)
@given(train_seed=st.integers(), heldout_seed=st.integers())
def test_no_statement_stands_on_both_sides_whatever_the_seeds(train_seed: int, heldout_seed: int):
    train, heldout = ArithmeticSource(seed=train_seed), ArithmeticSource(split="heldout", seed=heldout_seed)
    assert not {train.problem(i).statement for i in range(3000)} & {heldout.problem(i).statement for i in range(1000)}


def test_a_statement_tells_family_and_numbers():
    """What the split hashes can be read off the statement, so equal statements fall on the same side."""
    shapes: dict[str, set[str]] = {}
    for name in FAMILIES:
        source = ArithmeticSource(seed=0, families=[name])
        for index in range(300):
            masked = re.sub(r"\d+", "#", source.problem(index).statement)
            shapes.setdefault(masked, set()).add(name)
    assert all(len(names) == 1 for names in shapes.values())


def test_problems_are_a_function_of_split_seed_and_index():
    one, same, other = ArithmeticSource(seed=1), ArithmeticSource(seed=1), ArithmeticSource(seed=2)
    assert [one.problem(i) for i in (5, 3, 400)] == [same.demonstration(i).problem for i in (5, 3, 400)]
    assert [one.problem(i).statement for i in range(50)] != [other.problem(i).statement for i in range(50)]
    assert len({one.problem(i).id for i in range(500)}) == 500
    # Pinned: a saved run must find the same problems after an upgrade.
    assert ArithmeticSource(seed=0, families=["add"]).problem(0).statement == PINNED


PINNED = "There are 83 pens here. Mia brings 6 more. How many pens are there?"


def test_families_take_turns():
    counts = Counter(ArithmeticSource(seed=0).problem(i).family for i in range(10 * len(FAMILIES)))
    assert counts == dict.fromkeys(FAMILIES, 10)


def test_hidden_values_cannot_be_told_from_the_statement():
    """In every reveal family the best constant guess, and the best guess from the shown numbers, stay below 0.05."""
    revealing = [name for name in FAMILIES if ArithmeticSource(families=[name]).problem(0).setup]
    assert len(revealing) >= 3
    for name in revealing:
        source = ArithmeticSource(seed=3, families=[name])
        problems = [source.problem(i) for i in range(3000)]
        most_frequent = Counter(problem.answer for problem in problems).most_common(1)[0][1]
        assert most_frequent / len(problems) < 0.05
        stated = sum(problem.answer in re.findall(r"\d+", problem.statement) for problem in problems)
        assert stated / len(problems) < 0.05


def test_what_reveals_prints_and_returns_nothing():
    problem = ArithmeticSource(seed=0, families=["box_take"]).problem(0)
    box = re.search(r"box\((\d+)\)", problem.statement)
    assert box is not None
    assert run(problem, f"final_answer(box({box[1]}))").endswith("\\boxed{None}")
    assert run(problem, "box(1000)") == "empty"


def test_distinct_gives_different_statements_and_says_when_there_are_not_enough():
    problems = ArithmeticSource(split="heldout", seed=0).distinct_problems(256)
    assert len({problem.statement for problem in problems}) == 256
    with pytest.raises(EmptyProblemsError, match=r"only \d+ of the requested 500 heldout statements are distinct"):
        ArithmeticSource(split="heldout", seed=0, families=["note"]).distinct_problems(500)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ProblemLoadError, match=r"unknown family 'substract'.*did you mean 'subtract'"):
        ArithmeticSource(families=["substract"])
    with pytest.raises(
        ProblemLoadError, match=r"unknown split 'held-out'; valid: train, heldout; did you mean 'heldout'"
    ):
        ArithmeticSource(split="held-out")
    with pytest.raises(ProblemLoadError, match="one or more distinct names"):
        ArithmeticSource(families=[])
    with pytest.raises(IndexError, match="-1"):
        ArithmeticSource().problem(-1)


def test_corpus_holds_statement_turns_and_observations():
    (demonstration,) = ArithmeticSource(seed=0, families=["two_boxes"]).demonstrations(1)
    text = demonstration.text
    assert text.startswith(demonstration.problem.statement + "\n```py\nbox(")
    assert text.count("\nCode execution result: ") == 2
