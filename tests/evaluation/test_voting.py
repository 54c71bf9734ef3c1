"""maj@n: votes by mathematical equality, ties split, silence does not vote."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from agentrl.evaluation.scores import Tally, maj_at_n, tally
from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.types import Verdict

RIGHT, WRONG = Verdict.CORRECT, Verdict.INCORRECT


@pytest.mark.parametrize(
    ("votes", "majority"),
    [
        (Tally(correct=3, wrong=(2, 2)), 1.0),
        (Tally(correct=2, wrong=(2, 1)), 1 / 2),
        (Tally(correct=2, wrong=(2, 2)), 1 / 3),
        (Tally(correct=1, wrong=(2,)), 0.0),
        (Tally(correct=0, wrong=(), silent=4), 0.0),
        (Tally(correct=1, wrong=(), silent=31), 1.0),
    ],
)
def test_majority(votes: Tally, majority: float) -> None:
    assert votes.majority == majority


def test_maj_at_n_is_the_mean_over_problems() -> None:
    assert maj_at_n([Tally(correct=2, wrong=(1,)), Tally(correct=1, wrong=(1, 1, 1))]) == 0.625
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
    assert await tally(samples, grader) == Tally(correct=2, wrong=(3, 2, 2, 1, 1), silent=2)
    await grader.close()


class SameText:
    """A grader for which answers are equal when they are spelled alike."""

    async def grade(self, answer: str | None, gold: str) -> Verdict:
        return RIGHT if answer == gold else WRONG


async def test_a_scripted_sampler_gives_the_closed_form() -> None:
    """Success 0.6 and one wrong answer otherwise, n = 4: P(c >= 3) + P(c = 2) / 2."""
    rng = np.random.default_rng(0)
    tallies = [
        await tally([("5", RIGHT) if right else ("6", WRONG) for right in rng.random(4) < 0.6], SameText())
        for _ in range(6000)
    ]
    chance = [comb(4, c) * 0.6**c * 0.4 ** (4 - c) for c in range(5)]
    assert maj_at_n(tallies) == pytest.approx(chance[3] + chance[4] + chance[2] / 2, abs=0.02)


async def test_samples_may_come_in_any_order() -> None:
    samples = [("1", WRONG), ("2", WRONG), ("2", WRONG), ("3", RIGHT)]
    assert await tally(samples, SameText()) == await tally(samples[::-1], SameText())
