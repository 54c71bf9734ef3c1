"""maj@n: whether the most frequent answer is correct. Answers are grouped by mathematical equality.

Samples without an answer and samples excluded from the data do not vote. An answer that takes too long to compare
counts as a vote for its own spelling. Ties are split evenly, so a problem's score is a share and not a random draw. All
correct answers are one answer; the grader decides which of the others are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl_envs.types import Verdict


class Grades(Protocol):
    """The part of a grader that is needed here."""

    async def grade(self, answer: str | None, gold: str) -> Verdict: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """The votes on one problem: for the correct answer, for each distinct wrong one (most votes first), and for none.

    >>> Tally(correct=3, wrong=(3, 1), silent=1).majority
    0.5
    """

    correct: int
    wrong: tuple[int, ...]
    silent: int = 0

    @property
    def majority(self) -> float:
        """1 if the correct answer has the most votes, a share of 1 if it is tied for the most, 0 otherwise."""
        most = max((self.correct, *self.wrong))
        if self.correct == 0 or self.correct < most:
            return 0.0
        return 1 / (1 + self.wrong.count(most))


async def tally(samples: Sequence[tuple[str | None, Verdict]], grader: Grades) -> Tally:
    """Count the votes on one problem from each sample's answer and verdict.

    A wrong answer joins the first group, in order of decreasing frequency of spellings, whose answer the grader finds
    equal to it. The outcome therefore depends on the order of samples only between equally frequent spellings.
    """
    votes = [
        (answer.strip(), verdict)
        for answer, verdict in samples
        if answer is not None and verdict is not Verdict.NO_ANSWER and not verdict.is_no_data
    ]
    correct = sum(verdict is Verdict.CORRECT for _, verdict in votes)
    slow = Counter(answer for answer, verdict in votes if verdict is Verdict.ANSWER_TIMEOUT)
    spellings = Counter(answer for answer, verdict in votes if verdict is not Verdict.CORRECT and answer not in slow)
    groups: dict[str, int] = {}
    for answer, count in spellings.most_common():
        groups[await _group_of(answer, groups, grader)] += count
    wrong = (*groups.values(), *slow.values())
    return Tally(correct=correct, wrong=tuple(sorted(wrong, reverse=True)), silent=len(samples) - len(votes))


def maj_at_n(tallies: Sequence[Tally]) -> float:
    """The mean of `Tally.majority` over problems. Raises ValueError if there is no problem.

    >>> maj_at_n([Tally(correct=2, wrong=(1,)), Tally(correct=1, wrong=(1,)), Tally(correct=0, wrong=(), silent=3)])
    0.5
    """
    if not tallies:
        raise ValueError("no problem to take a majority of")
    return sum(item.majority for item in tallies) / len(tallies)


async def _group_of(answer: str, groups: dict[str, int], grader: Grades) -> str:
    for other in groups:
        if await grader.grade(answer, other) is Verdict.CORRECT:
            return other
    groups[answer] = 0
    return answer
