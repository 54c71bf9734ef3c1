"""What the grader finds equal, what it does not, and what a policy may try for a reward."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from answer_families import FAMILIES
from different_answers import DIFFERENT
from equal_answers import EQUAL

from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.protocols.simpletir import SimpleTIRProtocol
from agentrl_envs.protocols.texts import last_boxed_answer
from agentrl_envs.threads import LoopThread
from agentrl_envs.types import Verdict
from agentrl_sandbox.client import Execution

CORRECT, INCORRECT = Verdict.CORRECT, Verdict.INCORRECT
Grades = Callable[[str | None, str], Verdict]


def pairs(table: dict[str, str]) -> list[tuple[str, str, str]]:
    """``(kind, answer, gold)`` of every line."""
    rows = []
    for kind, lines in table.items():
        for line in lines.strip().splitlines():
            answer, _, gold = line.strip().rpartition(" | ")
            rows.append((kind, answer.strip(), gold.strip()))
    return rows


def family_pairs(mark: str) -> list[tuple[str, str, str]]:
    """The pairs of `FAMILIES` whose lines begin with the mark."""
    return [(kind, answer[2:], gold) for kind, answer, gold in pairs(FAMILIES) if answer[0] == mark]


def answers(path: Path) -> list[str]:
    return [json.loads(line)["answer"] for line in path.read_text("utf-8").splitlines()]


class Graded:
    """One grader for the whole module, called from outside its event loop."""

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop
        self._grader = Grader(GraderSettings(workers=2, deadline=60))

    def __call__(self, answer: str | None, gold: str) -> Verdict:
        return self._loop.run(self._grader.grade(answer, gold))

    def check_golds(self, golds: list[str]) -> dict[str, Verdict]:
        """The verdict on each gold answer."""

        async def check() -> list[Verdict]:
            return await asyncio.gather(*map(self._grader.check_reference, golds))

        return dict(zip(golds, self._loop.run(check()), strict=True))

    def close(self) -> None:
        self._loop.run(self._grader.close())
        self._loop.close()


@pytest.fixture(scope="module")
def graded() -> Iterator[Graded]:
    graded = Graded(LoopThread())
    yield graded
    graded.close()


@pytest.mark.parametrize(("kind", "answer", "gold"), [*pairs(EQUAL), *family_pairs("=")])
def test_equal(graded: Graded, kind: str, answer: str, gold: str) -> None:
    assert graded(answer, gold) is CORRECT, kind


@pytest.mark.parametrize(("kind", "answer", "gold"), [*pairs(DIFFERENT), *family_pairs("!")])
def test_different(graded: Graded, kind: str, answer: str, gold: str) -> None:
    assert graded(answer, gold) is not CORRECT, kind
    assert not Path("PWNED").exists()


@pytest.mark.parametrize(("answer", "verdict"), [(r"\det 5", INCORRECT), (r"\frac.5", Verdict.UNPARSABLE_ANSWER)])
def test_what_has_no_value_does_not_end_the_process(graded: Graded, answer: str, verdict: Verdict) -> None:
    assert graded(answer, "1") is verdict


def test_a_time_with_seconds(graded: Graded) -> None:
    gold = r"4\!:\!51\!:\!06 \text{ p.m.}"
    answers = ["4:51:06", "4:51:06 PM", "16:51:06", "4:51:06 a.m.", "4:51 p.m.", "4:51:07 p.m.", "9:42:12"]
    assert [graded(answer, gold) is CORRECT for answer in answers] == [True] * 3 + [False] * 4
    assert graded("10:20:30", "1:2:3") is CORRECT  # also a ratio


GROWING = (
    r"\sum_{k=1}^{2023} \frac{1}{k^2}",
    r"\sum_{k=1}^{2023} k^{2023}",
    r"\sum_{i=1}^{2023}\sum_{j=1}^{2023} ij",
    r"\binom{10^9}{5 \cdot 10^8}",
    r"(2023!)!",
    r"10^{10^{10^{10}}}",
    r"2023^{2023^{2023}} \bmod 1000",
    r"\sin(10^{10^{10}})",
    r"\log_{10^{1000000}} 7",
    r"(x+y+z)^{2023}",
    r"(\sqrt{2})^{10^{14}}",
)


@pytest.mark.slow
async def test_what_grows_is_bounded_before_it_is_calculated() -> None:
    grader = Grader(GraderSettings(workers=1, deadline=3.0))
    verdicts = {answer: await grader.grade(answer, "7") for answer in GROWING}
    assert {answer for answer, verdict in verdicts.items() if verdict is not INCORRECT} == set()
    await grader.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["aime24", "aime25", "amc23", "math500", "gsm8k_test"])
def test_every_gold_answer_verifies_against_itself(graded: Graded, data_dir: Path, name: str) -> None:
    verdicts = graded.check_golds(answers(data_dir / f"{name}.jsonl"))
    assert {gold for gold, verdict in verdicts.items() if verdict is not CORRECT} == set()


@pytest.mark.slow
def test_the_two_empty_answers_of_the_training_problems_are_the_only_errors(graded: Graded, data_dir: Path) -> None:
    golds = answers(data_dir / "math35_train.jsonl")
    verdicts = graded.check_golds(golds)
    assert {gold: verdict for gold, verdict in verdicts.items() if verdict is not CORRECT} == {
        "": Verdict.UNPARSABLE_GOLD
    }
    assert golds.count("") == 2


@pytest.mark.parametrize("gold", ["", "  ", r"\frac{", r"\frac{1}{2", "{" * 60 + "}" * 60, "x" * 3000, "5 # 6", "1 +"])
def test_gold_answers_that_cannot_be_read(graded: Graded, gold: str) -> None:
    assert graded.check_golds([gold]) == {gold: Verdict.UNPARSABLE_GOLD}


@pytest.mark.parametrize("gold", ["5", "0.5", r"\dfrac{1}{2}", r"\text{Evelyn}", "Monday", r"(-\infty, 2]", "x^2 + 1"])
def test_gold_answers_that_can_be_read(graded: Graded, gold: str) -> None:
    assert graded.check_golds([gold]) == {gold: CORRECT}


RESTATED = "A train covers 12 km in 3 hours. What is its speed in km/h?"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (r"\boxed{3} \boxed{12} \boxed{4} \boxed{7}", INCORRECT),  # many boxes: the last one counts
        (r"\boxed{7} \boxed{12} \boxed{3} \boxed{4}", CORRECT),
        (r"\boxed{4} and now \boxed{", CORRECT),  # an open box is no box
        (r"\boxed{}", Verdict.NO_ANSWER),
        (r"\boxed{ }", Verdict.NO_ANSWER),
        (r"\boxed{\text{}}", Verdict.UNPARSABLE_ANSWER),
        (r"\boxed{\boxed{}}", Verdict.UNPARSABLE_ANSWER),
        (r"\boxed{3, 4, 12}", INCORRECT),  # several answers in one box
        (r"\boxed{3 \text{ or } 4}", INCORRECT),
        (r"\boxed{3 or 4}", INCORRECT),
        (r"\boxed{\{3, 4\}}", INCORRECT),
        (r"\boxed{3; 4}", INCORRECT),
        (r"\boxed{3 4}", Verdict.UNPARSABLE_ANSWER),
        (r"\boxed{3 \vee 4}", Verdict.UNPARSABLE_ANSWER),
        (r"\boxed{x = 3, x = 4}", INCORRECT),
        (r"\boxed{0 = 4}", INCORRECT),
        (r"\boxed{1 \le x \le 4}", INCORRECT),
        (r"\boxed{[1, 4]}", INCORRECT),
        (r"\boxed{\pm 4}", INCORRECT),
        (r"\boxed{x}", INCORRECT),
        (r"\boxed{\text{the right answer}}", INCORRECT),
        (r"\boxed{" + RESTATED + "}", Verdict.UNPARSABLE_ANSWER),  # the question's numbers again
        (r"\boxed{12/3}", CORRECT),  # unevaluated, but equal
        (r"\boxed{12 km in 3 hours}", INCORRECT),
        (r"\boxed{answer}", INCORRECT),
        (r"\boxed{\infty}", INCORRECT),
        (r"\boxed{\text{nan}}", INCORRECT),
        ("4", Verdict.NO_ANSWER),  # no box
        ("The answer is 4.", Verdict.NO_ANSWER),
        (r"boxed{4}", Verdict.NO_ANSWER),
        (r"\\boxed{4", Verdict.NO_ANSWER),
    ],
)
def test_what_a_policy_may_try_in_its_words(graded: Graded, text: str, verdict: Verdict) -> None:
    assert graded(last_boxed_answer(text), "4") is verdict


PROTOCOL = SimpleTIRProtocol(instruction="", observation_limit=512)


def printed(execution: Callable[..., Execution], stdout: str) -> str | None:
    return PROTOCOL.printed_answer(stdout)


def test_a_box_in_a_program_is_no_answer() -> None:
    for program in (r"# \boxed{4}", r'x = "\\boxed{4}"', '"""\n\\boxed{4}\n"""', "pass  # so \\boxed{4}"):
        assert PROTOCOL.parse(f"Let me see.\n```py\n{program}\n```").answer is None
    unfinished = "Let me see.\n```py\n# \\boxed{4}\n"
    assert PROTOCOL.parse(unfinished).answer is None


def test_a_box_after_the_program_is_no_answer() -> None:
    text = "\\boxed{5}\n```py\nprint(1)\n```\nCode execution result: \\boxed{4}\n"
    assert PROTOCOL.parse(text).answer == "5"


def test_what_a_program_printed_is_an_answer_only_as_a_box(execution: Callable[..., Execution]) -> None:
    assert printed(execution, "4\n") is None
    assert printed(execution, "The answer is 4\n") is None
    assert printed(execution, "Code execution result: 4") is None
    assert printed(execution, r"\boxed{4}") == "4"  # final_answer(4) prints this


@pytest.mark.parametrize(
    ("stdout", "verdict"),
    [
        ("".join(f"\\boxed{{{number}}}\n" for number in range(100)), INCORRECT),  # every number tried
        ("\\boxed{range(100)}", Verdict.UNPARSABLE_ANSWER),
        ("\\boxed{[1, 2, 3, 4]}", INCORRECT),
        ("\\boxed{None}", INCORRECT),
        ("\\boxed{__import__('os')}", Verdict.UNPARSABLE_ANSWER),
        ("\\boxed{<object object at 0x4>}", Verdict.UNPARSABLE_ANSWER),
        ("\\boxed{Traceback (most recent call last): 4}", Verdict.UNPARSABLE_ANSWER),
        ("\\boxed{5}\n4", INCORRECT),
        ("\\boxed{4.0}", CORRECT),
        ("\\boxed{4.0000001}", CORRECT),
        ("\\boxed{4.01}", INCORRECT),
        ("\\boxed{(4,)}", CORRECT),
        ("\\boxed{(4, 4)}", INCORRECT),
    ],
)
def test_what_a_policy_may_print(
    graded: Graded, execution: Callable[..., Execution], stdout: str, verdict: Verdict
) -> None:
    assert graded(printed(execution, stdout), "4") is verdict


@pytest.mark.slow
def test_mutated_answers_neither_crash_nor_pass(data_dir: Path) -> None:
    """A share of ``benchmarks/grading_fuzz.py``; it ends with 1 where a changed answer was found correct."""
    script = Path(__file__).parents[2] / "benchmarks" / "grading_fuzz.py"
    command = [sys.executable, str(script), "--mutations", "500", "--seed", "7"]
    environment = os.environ | {"AGENTRL_DATA_DIR": str(data_dir)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "500 answers to 3632 gold answers" in done.stdout
