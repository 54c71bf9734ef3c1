"""Budgets: the best sizes by brute force, an unbiased gradient by enumeration, and posteriors in checkpoints."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout.fakes import ScriptedEngine, ScriptedEnvironment, ScriptedEpisode, byte_codec, completion, ends
from torch import Tensor

from agentrl.algorithms import AGGREGATIONS, AdvantageInputs, aggregate, compute_advantages, token_factors
from agentrl.problems.posterior import Posteriors
from agentrl.problems.sampler import FiniteSource, ProblemSampler
from agentrl.rollout.budget import SCORES, allocate_group_sizes, expected_energy
from agentrl.rollout.driver import Driver
from agentrl.rollout.filters import FilterRules
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.worker import RolloutWorker
from agentrl.trajectory import Group, Segment, Trajectory
from agentrl_envs.types import Ended, Problem

CODEC = byte_codec()


@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]), min_size=1, max_size=4),
    st.integers(0, 10),
    st.integers(3, 8),
)
def test_sizes_are_optimal_by_brute_force(scores: list[float], extra: int, most: int) -> None:
    total = min(2 * len(scores) + extra, most * len(scores))

    def variance(sizes: tuple[int, ...]) -> float:
        return sum(score**2 / size for score, size in zip(scores, sizes, strict=True))

    every = itertools.product(range(2, most + 1), repeat=len(scores))
    best = min(variance(sizes) for sizes in every if sum(sizes) == total)
    sizes = allocate_group_sizes(scores, total, most=most)
    assert sum(sizes) == total
    assert all(2 <= size <= most for size in sizes)
    assert variance(tuple(sizes)) == pytest.approx(best, abs=1e-12)


def test_equal_scores_have_equal_sizes() -> None:
    assert allocate_group_sizes([0.3] * 5, 40, most=32) == [8] * 5
    assert allocate_group_sizes([0.0] * 5, 40, most=32) == [8] * 5


def test_scores_follow_the_formulas() -> None:
    posteriors = Posteriors(decay=1.0)
    posteriors.add_training_step([("a", [1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [8.0] * 6), ("b", [1.0] * 6, [2.0] * 6)])
    assert posteriors.beta_parameters("a") == (2, 6)
    assert SCORES["variance"](posteriors, "a") == pytest.approx(0.25 * 0.75)
    assert SCORES["neyman"](posteriors, "a") == pytest.approx(math.sqrt(8 * 0.25 * 0.75))
    assert SCORES["neyman"](posteriors, "new") == pytest.approx(math.sqrt(5 * 0.25))  # the mean energy of all rollouts


def test_a_problem_whose_rollouts_were_all_excluded_stays_unknown() -> None:
    posteriors = Posteriors(decay=0.5)
    posteriors.add_training_step([("a", [1.0], [5.0]), ("b", [], [])])
    assert not posteriors.is_known("b")
    assert posteriors.expected_energy("b") == 5.0  # the mean energy of all rollouts
    posteriors.add_training_step([("a", [], [])])
    assert (posteriors.is_known("a"), posteriors.beta_parameters("a"), posteriors.expected_energy("a")) == (
        True,
        (1.5, 1.0),
        5.0,
    )


def test_the_energy_of_sampled_tokens_is_right_on_average() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    problem = Problem(id="a", statement="?", answer=None, source="toy")

    def rollout(token: int) -> Trajectory:
        segment = Segment(
            origin="model", token_ids=(token,), log_probs=(math.log(probabilities[token]),), version_spans=((0, 1),),
            text="",
        )  # fmt: skip
        return Trajectory(
            problem=problem, step=0, group=0, sample=0, prompt_ids=(0,), segments=(segment,), ended=Ended.STOPPED
        )

    sampled = sum(float(probabilities[token]) * expected_energy([rollout(token)]) for token in range(3))
    exact = sum(probabilities[y] * (torch.eye(3)[y] - probabilities).square().sum() for y in range(3))
    assert sampled == pytest.approx(float(exact), abs=1e-12)


# -- an unbiased gradient ------------------------------------------------------------------------------------------


def _enumerated(sizes: Sequence[int], success: Tensor, gradients: Tensor, mode: str) -> float:
    """Return the expected gradient over all outcomes of ``sizes`` rollouts. ``gradients``: by problem and outcome."""
    groups = torch.tensor([problem for problem, size in enumerate(sizes) for _ in range(size)])
    mask = torch.ones(len(groups), 1, dtype=torch.bool)
    weights = torch.tensor([3.0 / size for size in sizes], dtype=torch.float64)[groups]
    length = 1.0 if mode == "seq_mean_token_sum_norm" else None
    expected = 0.0
    for outcome in itertools.product([0, 1], repeat=len(groups)):
        won = torch.tensor(outcome)
        chance = torch.where(won == 1, success[groups], 1 - success[groups]).prod()
        inputs = AdvantageInputs(rewards=won.double().unsqueeze(-1), response_mask=mask, groups=groups)
        terms = compute_advantages("rloo", inputs).advantages * gradients[groups, won].unsqueeze(-1)
        expected += float(chance * aggregate(terms, mask, mode, length=length, problem_weights=weights))
    return expected


@pytest.mark.parametrize("mode", ["seq_mean_token_mean", "token_mean", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize("sizes", [(3, 3), (2, 4), (5, 2)])
def test_the_expected_gradient_is_that_of_the_mean_over_problems(sizes: tuple[int, int], mode: str) -> None:
    # Two problems with success probabilities sigmoid(2 theta) and sigmoid(theta - 1), so grad ln p = (won - p) * slope.
    success = torch.sigmoid(torch.tensor([0.8, -0.6], dtype=torch.float64))
    slopes = torch.tensor([2.0, 1.0], dtype=torch.float64)
    gradients = torch.stack([-success * slopes, (1 - success) * slopes], dim=-1)
    exact = float((success * (1 - success) * slopes).mean())
    assert _enumerated(sizes, success, gradients, mode) == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_factors_and_parts_agree_with_the_sum(mode: str) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.rand(5, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 4, generator=generator) > 0.4
    options = {
        "weights": torch.tensor([1.0, 0.25, 0.75, 1.0, 1.0], dtype=torch.float64),
        "problem_weights": torch.tensor([0.5, 2.0, 2.0, 1.0, 1.0], dtype=torch.float64),
    }
    length = 7.0 if mode == "seq_mean_token_sum_norm" else None
    whole = aggregate(values, mask, mode, length=length, **options)
    factors = token_factors(mask, mode, length=length, **options).unsqueeze(-1)
    assert float((factors * values)[mask].sum()) == pytest.approx(float(whole), abs=1e-12)


# -- the worker ----------------------------------------------------------------------------------------------------

CHANCES = {"easy": 1.0, "hard": 0.0, "even": 0.5}


def worker(budget: str = "neyman", *, problems: int = 3, **changes: object) -> RolloutWorker:
    """A worker over three problems: solved always, never and by every second rollout."""
    settings = RolloutSettings.model_validate(
        {"problems_per_step": problems, "group_size": 8, "budget": budget, "schedule": "synchronous", **changes}
    )
    listed = [Problem(id=name, statement=name, answer="1", source="toy") for name in CHANCES]

    def episode(problem: Problem, made: int) -> ScriptedEpisode:
        reward = {"easy": 1.0, "hard": 0.0, "even": float(made % 2)}[problem.id]
        return ScriptedEpisode([ends(reward=reward)], prompt="P")

    driver = Driver(
        environment=ScriptedEnvironment(episode),
        engine=ScriptedEngine(lambda *_: completion(CODEC, "aEND")),
        codec=CODEC,
        settings=settings,
        seed=0,
    )
    return RolloutWorker(
        driver=driver,
        sampler=ProblemSampler(FiniteSource("toy", listed), seed=2, decay=0.9),
        settings=settings,
        rules=FilterRules(void_turns="exclude", truncated="train", accuracy_range=None, drop_zero_variance=False),
        updates_posteriors=True,
    )


def sizes(groups: Sequence[Group]) -> dict[str, int]:
    return {group.problem.id: len(group.rollouts) for group in groups}


async def test_a_step_distributes_its_rollouts_by_earlier_steps() -> None:
    one = worker()
    first = await one.next_batch(0)
    assert sizes(first) == {"easy": 8, "hard": 8, "even": 8}
    assert one.metrics["posterior/known_share"] == 0
    one.record_trained()
    second = await one.next_batch(1)
    assert sum(sizes(second).values()) == 24
    assert sizes(second)["even"] > 10  # p is estimated as 0.9 (0.1) after 8 (no) successes
    assert {sizes(second)["easy"], sizes(second)["hard"]} <= {6, 7}
    for group in second:
        assert math.fsum(item.problem_weight for item in group.rollouts) == pytest.approx(8)
    metrics = one.metrics
    means = [math.fsum(item.reward for item in group.rollouts) / len(group.rollouts) for group in second]
    assert metrics["reward/mean"] == pytest.approx(math.fsum(means) / 3)
    assert (metrics["budget/rollouts_min"], metrics["budget/rollouts_max"]) == (
        min(sizes(second).values()),
        max(sizes(second).values()),
    )
    assert metrics["budget/variance_ratio"] < 1
    assert metrics["posterior/known_share"] == 1


@pytest.mark.parametrize("budget", ["neyman", "variance"])
async def test_a_resumed_run_allocates_the_same_rollouts(budget: str) -> None:
    straight = worker(budget, problems=2)
    expected = []
    for step in range(5):
        await straight.next_batch(step)
        expected.append([(group.index, group.problem.id, len(group.rollouts)) for group in straight.sampled_groups])
        straight.record_trained()

    killed = worker(budget, problems=2)
    for step in range(3):
        await killed.next_batch(step)
        killed.record_trained()
    await killed.next_batch(3)  # played, but not trained
    state = json.loads(json.dumps(killed.state_dict()))
    resumed = worker(budget, problems=2)
    resumed.load_state_dict(state)
    for step in (3, 4):
        await resumed.next_batch(step)
        played = [(group.index, group.problem.id, len(group.rollouts)) for group in resumed.sampled_groups]
        assert played == expected[step]
        resumed.record_trained()
    assert resumed.state_dict() == straight.state_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1, "budget": "neyman"}, "budget=neyman needs at least 2 rollouts per problem"),
        ({"group_size": 8, "budget_max": 4}, "budget_max=4 must be at least group_size=8"),
    ],
)
def test_impossible_budgets_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutSettings.model_validate(changes)
