"""maj@n: answers grouped by mathematical equality, split ties, abstentions."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from agentrl.evaluation.scores import ProblemVotes, count_votes, maj_at_n
from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.types import Verdict

RIGHT, WRONG = Verdict.CORRECT, Verdict.INCORRECT


@pytest.mark.parametrize(
    ("votes", "majority"),
    [
        (ProblemVotes(correct=3, wrong=(2, 2)), 1.0),
        (ProblemVotes(correct=2, wrong=(2, 1)), 1 / 2),
        (ProblemVotes(correct=2, wrong=(2, 2)), 1 / 3),
        (ProblemVotes(correct=1, wrong=(2,)), 0.0),
        (ProblemVotes(correct=0, wrong=(), abstentions=4), 0.0),
        (ProblemVotes(correct=1, wrong=(), abstentions=31), 1.0),
    ],
)
def test_majority(votes: ProblemVotes, majority: float) -> None:
    assert votes.majority_score == majority


def test_maj_at_n_is_the_mean_over_problems() -> None:
    assert maj_at_n([ProblemVotes(correct=2, wrong=(1,)), ProblemVotes(correct=1, wrong=(1, 1, 1))]) == 0.625
    with pytest.raises(ValueError, match="at least one problem"):
        maj_at_n([])


async def test_answers_are_grouped_by_what_they_mean() -> None:
    grader = Grader(GraderSettings(workers=1, deadline=60))
    samples = [
        (r"\frac{1}{3}", WRONG),
        ("1/3", WRONG),
        ("Fraction(1, 3)", WRONG),
        ("0.25", WRONG),
        (r"\frac14", WRONG),
        ("1/2", RIGHT),
        ("0.5", RIGHT),
        ("garbage {", Verdict.UNPARSABLE_ANSWER),
        (None, Verdict.NO_ANSWER),
        ("1/9", Verdict.GRADER_TIMEOUT),
        ("1/7", Verdict.ANSWER_TIMEOUT),
        (r"\frac17", Verdict.ANSWER_TIMEOUT),  # not compared again
        ("1/7", Verdict.ANSWER_TIMEOUT),
    ]
    assert await count_votes(samples, grader) == ProblemVotes(correct=2, wrong=(3, 2, 2, 1, 1), abstentions=2)
    await grader.close()


class SameText:
    """Grader that considers answers equal only if their text is equal."""

    async def grade(self, answer: str | None, gold: str) -> Verdict:
        return RIGHT if answer == gold else WRONG


async def test_a_scripted_sampler_gives_the_closed_form() -> None:
    """Success 0.6 and one wrong answer otherwise, n = 4: P(c >= 3) + P(c = 2) / 2."""
    rng = np.random.default_rng(0)
    tallies = [
        await count_votes([("5", RIGHT) if right else ("6", WRONG) for right in rng.random(4) < 0.6], SameText())
        for _ in range(6000)
    ]
    chance = [comb(4, c) * 0.6**c * 0.4 ** (4 - c) for c in range(5)]
    assert maj_at_n(tallies) == pytest.approx(chance[3] + chance[4] + chance[2] / 2, abs=0.02)


async def test_samples_may_come_in_any_order() -> None:
    samples = [("1", WRONG), ("2", WRONG), ("2", WRONG), ("3", RIGHT)]
    assert await count_votes(samples, SameText()) == await count_votes(samples[::-1], SameText())
