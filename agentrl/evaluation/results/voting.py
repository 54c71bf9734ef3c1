"""maj@n: correctness of the most frequent answer. Answers are grouped by mathematical equality.

Samples without an answer and excluded samples do not vote. An answer whose comparison times out counts as a vote for
its own spelling. Ties are split evenly, so that a problem's score is a fraction and not a random draw. All correct
answers form one group; the grader decides which of the others are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl_envs.types import Verdict


class Grades(Protocol):
    """Grading of one answer, the only method of a grader that is needed here."""

    async def grade(self, answer: str | None, gold: str) -> Verdict: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """Votes on one problem: for the correct answer, for each distinct wrong one (most votes first), and for none.

    >>> Tally(correct=3, wrong=(3, 1), silent=1).majority
    0.5
    """

    correct: int
    wrong: tuple[int, ...]
    silent: int = 0

    @property
    def majority(self) -> float:
        """1 if the correct answer has the most votes, a fraction of 1 if it is tied for the most, otherwise 0."""
        most = max((self.correct, *self.wrong))
        if self.correct == 0 or self.correct < most:
            return 0.0
        return 1 / (1 + self.wrong.count(most))


async def tally(samples: Sequence[tuple[str | None, Verdict]], grader: Grades) -> Tally:
    """Count the votes on one problem from each sample's answer and verdict.

    A wrong answer joins the first group that the grader considers equal, in order of decreasing frequency of spellings.
    The outcome therefore depends on the order of samples only between equally frequent spellings.
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
    """Return the mean of `Tally.majority` over problems. Raises ValueError if there is no problem.

    >>> maj_at_n([Tally(correct=2, wrong=(1,)), Tally(correct=1, wrong=(1,)), Tally(correct=0, wrong=(), silent=3)])
    0.5
    """
    if not tallies:
        raise ValueError("maj@n needs at least one problem")
    return sum(item.majority for item in tallies) / len(tallies)


async def _group_of(answer: str, groups: dict[str, int], grader: Grades) -> str:
    for other in groups:
        if await grader.grade(answer, other) is Verdict.CORRECT:
            return other
    groups[answer] = 0
    return answer
