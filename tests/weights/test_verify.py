"""What the probe alone finds: noise measured at the start, movements added up, scores that rest."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from agentrl.weights.checksums import Checksum
from agentrl.weights.verify import FLOORS, LIMITS, PROBE_TOKENS, Gauge, Probe, Verifier, probe_tokens

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

    def partly(self, share: float, before: tuple[float, ...]) -> tuple[float, ...]:
        """Scores of an engine that took ``share`` of all that moved since it scored ``before`` noiselessly."""
        moved = zip(before, self._truth, strict=True)
        return tuple(old + share * (new - old) + self._numbers.gauss(0.0, self._noise) for old, new in moved)

    def truth(self) -> tuple[float, ...]:
        return tuple(self._truth)

    def probe(self) -> Probe:
        sums = {"a": Checksum(values=1, total=self.steps)}
        return Probe(token_ids=TOKENS, log_probs=self.scores(), checksums=sums)


def started(policy: Policy) -> Gauge:
    gauge = Gauge("bfloat16")
    assert gauge.judge(policy.probe(), policy.scores()) is None
    return gauge


def test_the_probe_is_the_first_tokens_of_prompts() -> None:
    prompts = [tuple(range(300)), tuple(range(300, 600)), tuple(range(600, 900))]
    assert probe_tokens(prompts, longest=10_000) == tuple(range(PROBE_TOKENS))
    assert probe_tokens(prompts[:1], longest=10_000) == prompts[0]
    assert probe_tokens(prompts, longest=7) == (0, 1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize("scores", [(), (-1.0,), (-1.0, float("nan")), (-1.0, float("-inf"))])
def test_scores_that_are_none_never_agree(scores: tuple[float, ...]) -> None:
    probe = Probe(token_ids=(1, 2, 3), log_probs=(-1.0, -2.0))
    assert Gauge("bfloat16").judge(probe, scores) is not None
    later = Gauge("bfloat16")
    assert later.judge(probe, (-1.0, -2.0)) is None
    assert later.judge(probe, scores) is not None


def test_the_bound_is_measured_with_the_start_policy() -> None:
    gauge = started(Policy(drift=0.0, noise=0.02))
    assert gauge.measured == pytest.approx(0.0226, rel=0.1)  # the mean absolute value of a difference of two normals
    assert gauge.bound == 4 * gauge.measured
    assert started(Policy(drift=0.0, noise=1e-5)).bound == FLOORS["bfloat16"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_too_large_a_difference_at_the_start_is_another_policy(dtype: str) -> None:
    limit = LIMITS[dtype]
    probe = Probe(token_ids=(1, 2), log_probs=(-1.0,))
    said = Gauge(dtype).judge(probe, (-1.0 - 1.1 * limit,))
    assert said is not None
    assert said.endswith(f"nats on average (bound {limit:g})")
    near = Gauge(dtype)
    assert near.judge(probe, (-1.0 - 0.9 * limit,)) is None
    assert near.bound == limit  # no measurement widens it
    assert Gauge(dtype, bound=3.0).judge(probe, (-3.9,)) is None


@pytest.mark.parametrize("drift", [0.0, 1e-4, 1e-3, 0.02])
@pytest.mark.parametrize("noise", [0.0, 1e-3, NOISE])
def test_an_honest_engine_is_never_accused(drift: float, noise: float) -> None:
    policy = Policy(drift=drift, noise=noise)
    gauge = started(policy)
    for _ in range(300):
        policy.step()
        assert gauge.judge(policy.probe(), policy.scores()) is None


@pytest.mark.parametrize("drift", [2e-4, 1e-3, 5e-3])
def test_a_stale_engine_is_found_once_the_movement_exceeds_the_noise(drift: float) -> None:
    policy = Policy(drift=drift)
    gauge = started(policy)
    stuck = policy.truth()
    for _ in range(2000):
        policy.step()
        said = gauge.judge(policy.probe(), policy.partly(0.0, stuck))
        if said is not None:
            break
    assert said is not None
    # 0.8 sigma is the mean absolute value of a normal number; both sides' noise counts towards the movement.
    assert policy.steps <= gauge.bound / (0.8 * drift) + 1


def test_an_engine_that_followed_before_is_found_by_the_movement_since() -> None:
    policy = Policy(drift=2e-3)
    gauge = started(policy)
    for _ in range(100):
        policy.step()
        assert gauge.judge(policy.probe(), policy.scores()) is None
    stuck = policy.truth()
    for _ in range(60):
        policy.step()
        said = gauge.judge(policy.probe(), policy.partly(0.0, stuck))
        if said is not None:
            break
    assert said is not None
    assert "do not follow the trainer's" in said or "differ from the trainer's" in said


def test_scores_that_rest_to_the_last_bit_are_found_at_once() -> None:
    policy = Policy(drift=1e-6)
    gauge = Gauge("bfloat16")
    scores = policy.scores()
    assert gauge.judge(policy.probe(), scores) is None
    policy.step()
    said = gauge.judge(policy.probe(), scores)
    assert said is not None
    assert "did not change at all, the trainer changed 512 of 512 by" in said


def test_scores_may_rest_while_the_weights_do() -> None:
    policy = Policy(drift=0.0)
    gauge = Gauge("bfloat16")
    scores = policy.scores()
    assert gauge.judge(policy.probe(), scores) is None
    assert gauge.judge(policy.probe(), scores) is None  # a trainer's forward that is not deterministic


def test_a_part_that_stays_behind_is_found_when_it_exceeds_the_bound_and_no_sooner() -> None:
    policy = Policy(drift=1e-3)
    gauge = started(policy)
    first = policy.truth()
    found = []
    for _ in range(400):
        policy.step()
        found.append(gauge.judge(policy.probe(), policy.partly(0.7, first)) is not None)
    assert found == sorted(found)
    at = found.index(True) + 1
    assert 0.5 < 0.3 * 0.8e-3 * at / gauge.bound < 1.2


def test_a_verifier_says_what_it_compares_and_what_it_measured() -> None:
    policy = Policy(drift=0.0)
    verifier = Verifier("bfloat16")
    probe = policy.probe()
    assert verifier.judge("one", probe, told=dict(probe.checksums), scores=policy.scores()) is None
    assert verifier.judge("two", probe, told={}, scores=policy.scores()) is None
    first, second = map(str, verifier.verified())
    assert first.startswith("one: every transfer is verified by checksums of 1 of 1 parameters and by a probe; ")
    assert "differ by 0.011 nats on average, bound 0.04" in first
    assert second.startswith("two: every transfer is verified by checksums of 0 of 1 parameters and by a probe; ")
    assert verifier.judge("shared", replace(probe, checksums={}), told={}, scores=policy.scores()) is None
    assert str(verifier.verified()[2]).startswith("shared shares the trained weights; with the start policy the two ")


def test_checksums_decide_before_the_probe() -> None:
    policy = Policy(drift=0.0)
    verifier = Verifier("bfloat16")
    probe = policy.probe()
    wrong = {"a": Checksum(values=1, total=77)}
    said = verifier.judge("one", probe, told=wrong, scores=policy.scores())
    assert said == "one: by their checksums 1 of 1 parameters are not the trainer's: a"
    assert verifier.verified() == []
