"""The sampler: fair epochs, weights, and a position that resumes exactly."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.problems.arithmetic import ArithmeticSource
from agentrl.problems.rows import EmptyProblemsError, ProblemLoadError, SamplerStateError
from agentrl.problems.sampler import FiniteSource, Mixture, ProblemSampler
from agentrl_envs.types import Problem


def toy(name: str, size: int) -> FiniteSource:
    return FiniteSource(
        name, [Problem(id=f"{name}-{i}", statement=f"{i}+0?", answer=str(i), source=name) for i in range(size)]
    )


def mixture() -> Mixture:
    return Mixture(sources=(toy("a", 3), ArithmeticSource(seed=4), toy("b", 7)), weights=(1.0, 2.0, 1.0))


def test_every_epoch_holds_every_problem_once_in_another_order():
    sampler = ProblemSampler(toy("a", 20), seed=0)
    epochs = [[problem.id for problem in sampler.next(20)] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(f"a-{i}" for i in range(20))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_another_seed_gives_another_order():
    assert ProblemSampler(toy("a", 20), seed=0).next(20) != ProblemSampler(toy("a", 20), seed=1).next(20)


@settings(max_examples=30, deadline=None)
@given(before=st.integers(0, 60), after=st.integers(0, 40), chunk=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_resumed_equals_uninterrupted(before: int, after: int, chunk: int, seed: int):
    whole = ProblemSampler(mixture(), seed=seed).next(before + after)
    first = ProblemSampler(mixture(), seed=seed)
    head = [problem for start in range(0, before, chunk) for problem in first.next(min(chunk, before - start))]
    resumed = ProblemSampler(mixture(), seed=seed)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + resumed.next(after) == whole


def test_mixture_draws_by_weight():
    drawn = Counter(problem.source for problem in ProblemSampler(mixture(), seed=3).next(8000))
    # Expected 2000, 4000, 2000; four standard deviations of a binomial count are at most 179.
    assert abs(drawn["a"] - 2000) < 179
    assert abs(drawn["arithmetic"] - 4000) < 179
    assert abs(drawn["b"] - 2000) < 179


def test_a_position_of_other_problems_is_refused():
    saved = ProblemSampler(toy("a", 3), seed=0).state_dict()
    with pytest.raises(SamplerStateError, match=r"differs in seed: saved 0, now 1"):
        ProblemSampler(toy("a", 3), seed=1).load_state_dict(saved)
    with pytest.raises(SamplerStateError, match=r"differs in sources: saved \['a:3:.*now \['a:4:"):
        ProblemSampler(toy("a", 4), seed=0).load_state_dict(saved)
    with pytest.raises(SamplerStateError, match="lacks left_out, positions, posteriors, weights"):
        ProblemSampler(toy("a", 3), seed=0).load_state_dict({"seed": 0, "drawn": 0, "sources": []})


def test_unusable_mixtures_are_refused():
    with pytest.raises(EmptyProblemsError, match="at least one source"):
        Mixture(sources=(), weights=())
    with pytest.raises(ProblemLoadError, match=r"two sources of a mixture are named 'a'.*different file names"):
        Mixture(sources=(toy("a", 1), toy("a", 2)), weights=(1.0, 1.0))
    with pytest.raises(EmptyProblemsError, match="toy: the source contains no problems"):
        FiniteSource("toy", [])
    twice = Problem(id="x", statement="s", answer="1", source="t")
    with pytest.raises(ProblemLoadError, match="two different problems have the id 'x'"):
        FiniteSource("toy", [twice, twice])


def trained(sampler: ProblemSampler, rewards: dict[str, float]) -> None:
    sampler.posteriors.add_training_step(
        (f"a/{number}", [rewards.get(f"a-{number}", 0.0)] * 20, []) for number in range(6)
    )


@pytest.mark.parametrize("curriculum", ["variance", "thompson"])
def test_a_curriculum_draws_problems_that_are_solved_half_of_the_time(curriculum):
    sampler = ProblemSampler(toy("a", 6), seed=0, curriculum=curriculum)
    trained(sampler, {"a-2": 0.5, "a-4": 0.5, "a-5": 1.0})
    steps = [[problem.id for problem in sampler.next(2)] for _ in range(200)]
    assert all(len(set(step)) == 2 for step in steps)
    drawn = Counter(problem for step in steps for problem in step)
    assert drawn["a-2"] + drawn["a-4"] > 250
    assert {"a-2", "a-4"} == {name for name, _ in drawn.most_common(2)}


def test_weights_are_those_of_the_posterior_variance():
    sampler = ProblemSampler(toy("a", 2), seed=0, curriculum="variance")
    sampler.posteriors.add_training_step(
        [("a/0", [1.0] * 8, []), ("a/1", [1.0, 0.0] * 4, [])]
    )  # p (1 - p): 0.09 and 0.25
    drawn = Counter(sampler.next(1)[0].id for _ in range(4000))
    assert drawn["a-0"] / 4000 == pytest.approx(0.09 / 0.34, abs=0.03)


@pytest.mark.parametrize("curriculum", ["variance", "thompson"])
def test_a_curriculum_resumes_exactly(curriculum):
    straight = ProblemSampler(toy("a", 6), seed=0, curriculum=curriculum, decay=0.9)
    straight.next(3)
    trained(straight, {"a-1": 0.5})
    straight.exclude_problem(straight.draw(1)[0].key)
    saved = json.loads(json.dumps(straight.state_dict()))
    resumed = ProblemSampler(toy("a", 6), seed=0, curriculum=curriculum, decay=0.9)
    resumed.load_state_dict(saved)
    assert resumed.next(9) == straight.next(9)
    assert resumed.state_dict() == straight.state_dict()


def test_a_problem_that_was_left_out_is_not_drawn_again():
    sampler = ProblemSampler(toy("a", 2), seed=0, curriculum="thompson")
    first = sampler.draw(1)[0]
    sampler.exclude_problem(first.key)
    assert first.problem not in sampler.next(20)


def test_a_curriculum_needs_finite_sources():
    with pytest.raises(ProblemLoadError, match="curriculum=thompson: the problems of arithmetic-train-4 never repeat"):
        ProblemSampler(mixture(), seed=0, curriculum="thompson")
