"""Faults that the probe and the checksums detect, with a bound measured at the start."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from agentrl.weights.verify import NOISE_FLOORS, NOISE_LIMITS, PROBE_TOKENS, Checksum, Probe, Verifier, probe_tokens

TOKENS = tuple(range(513))
NOISE = 0.01


class Policy:
    """Log-probabilities of a probe that drift a little in each step, computed twice with noise, as bfloat16 does."""

    def __init__(self, *, drift: float, noise: float = NOISE) -> None:
        self._numbers = random.Random(1)
        self._noise = noise
        self._truth = [self._numbers.uniform(-8.0, -0.01) for _ in TOKENS[1:]]
        self._slopes = [self._numbers.gauss(0.0, drift) for _ in TOKENS[1:]]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        self._truth = [value + slope for value, slope in zip(self._truth, self._slopes, strict=True)]

    def scores(self) -> tuple[float, ...]:
        return tuple(value + self._numbers.gauss(0.0, self._noise) for value in self._truth)

    def probe(self) -> Probe:
        sums = {"a": Checksum(values=1, total=self.steps)}
        return Probe(token_ids=TOKENS, log_probs=self.scores(), checksums=sums)


def judged(verifier: Verifier, probe: Probe, scores: tuple[float, ...]) -> str | None:
    return verifier.find_problem("one", probe, reported={}, scores=scores)


def started(policy: Policy) -> Verifier:
    verifier = Verifier("bfloat16")
    assert judged(verifier, policy.probe(), policy.scores()) is None
    return verifier


def test_the_probe_is_the_first_tokens_of_prompts() -> None:
    prompts = [tuple(range(300)), tuple(range(300, 600)), tuple(range(600, 900))]
    assert probe_tokens(prompts, longest=10_000) == tuple(range(PROBE_TOKENS))
    assert probe_tokens(prompts[:1], longest=10_000) == prompts[0]
    assert probe_tokens(prompts, longest=7) == (0, 1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize("scores", [(), (-1.0,), (-1.0, float("nan")), (-1.0, float("-inf"))])
def test_scores_that_are_none_never_agree(scores: tuple[float, ...]) -> None:
    probe = Probe(token_ids=(1, 2, 3), log_probs=(-1.0, -2.0))
    assert judged(Verifier("bfloat16"), probe, scores) is not None
    later = Verifier("bfloat16")
    assert judged(later, probe, (-1.0, -2.0)) is None
    assert judged(later, probe, scores) is not None


def test_the_bound_is_measured_with_the_start_policy() -> None:
    (one,) = started(Policy(drift=0.0, noise=0.02)).verified()
    assert one.noise == pytest.approx(0.0226, rel=0.1)  # the mean absolute value of a difference of two normals
    assert one.bound == 4 * one.noise
    (exact,) = started(Policy(drift=0.0, noise=1e-5)).verified()
    assert exact.bound == NOISE_FLOORS["bfloat16"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_too_large_a_difference_at_the_start_is_another_policy(dtype: str) -> None:
    limit = NOISE_LIMITS[dtype]
    probe = Probe(token_ids=(1, 2), log_probs=(-1.0,))
    said = judged(Verifier(dtype), probe, (-1.0 - 1.1 * limit,))
    assert said is not None
    assert said.endswith(f"nats on average (bound {limit:g})")
    near = Verifier(dtype)
    assert judged(near, probe, (-1.0 - 0.9 * limit,)) is None
    assert near.verified()[0].bound == limit  # no measurement widens it
    assert judged(Verifier(dtype, bound=3.0), probe, (-3.9,)) is None


@pytest.mark.parametrize("drift", [0.0, 1e-4, 1e-3, 0.02])
@pytest.mark.parametrize("noise", [0.0, 1e-3, NOISE])
def test_an_honest_engine_is_never_accused(drift: float, noise: float) -> None:
    policy = Policy(drift=drift, noise=noise)
    verifier = started(policy)
    for _ in range(300):
        policy.step()
        assert judged(verifier, policy.probe(), policy.scores()) is None


def test_a_stale_engine_without_checksums_is_found_once_its_scores_differ_by_more_than_the_bound() -> None:
    policy = Policy(drift=0.02)
    verifier = started(policy)
    (one,) = verifier.verified()
    stuck = policy.scores()
    found = []
    for _ in range(10):
        policy.step()
        found.append(judged(verifier, policy.probe(), stuck) is not None)
    assert found == sorted(found)
    # 0.8 sigma is the mean absolute value of a normal number.
    assert found.index(True) + 1 <= one.bound / (0.8 * 0.02) + 1


def test_a_stale_engine_with_checksums_is_found_at_once() -> None:
    policy = Policy(drift=1e-6)
    verifier, before = Verifier("bfloat16"), policy.probe()
    assert verifier.find_problem("one", before, reported=before.checksums, scores=policy.scores()) is None
    policy.step()
    said = verifier.find_problem("one", policy.probe(), reported=before.checksums, scores=policy.scores())
    assert said == "one: the checksums of 1 of 1 parameters differ from the trainer's: a"


def test_a_verifier_says_what_it_compares_and_what_it_measured() -> None:
    policy = Policy(drift=0.0)
    verifier = Verifier("bfloat16")
    probe = policy.probe()
    assert verifier.find_problem("one", probe, reported=dict(probe.checksums), scores=policy.scores()) is None
    assert verifier.find_problem("two", probe, reported={}, scores=policy.scores()) is None
    first, second = map(str, verifier.verified())
    assert first.startswith("one: every transfer is verified by checksums of 1 of 1 parameters and by a probe; ")
    assert "differed by 0.011 nats on average (bound 0.046)" in first
    assert second.startswith("two: every transfer is verified by checksums of 0 of 1 parameters and by a probe; ")
    assert verifier.find_problem("shared", replace(probe, checksums={}), reported={}, scores=policy.scores()) is None
    assert str(verifier.verified()[2]).startswith("shared shares the trained weights; at the start, the log-")


def test_checksums_decide_before_the_probe() -> None:
    policy = Policy(drift=0.0)
    verifier = Verifier("bfloat16")
    probe = policy.probe()
    wrong = {"a": Checksum(values=1, total=77)}
    said = verifier.find_problem("one", probe, reported=wrong, scores=policy.scores())
    assert said == "one: the checksums of 1 of 1 parameters differ from the trainer's: a"
    assert verifier.verified() == []
