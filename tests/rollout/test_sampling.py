"""Sampling by inverting the cumulative distribution, with numbers keyed by request and position."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.engines.sampling import (
    keyed_uniform_numbers,
    restrict_to_likely_tokens,
    sample_tokens,
    sampling_key,
)

BELOW_ONE = 1 - 2**-53


def uniforms(count: int, key: int = 7) -> torch.Tensor:
    places = np.arange(count, dtype=np.uint64)
    return torch.from_numpy(keyed_uniform_numbers(np.full(count, key, dtype=np.uint64), places))


def test_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.7]])).expand(5, 3)
    points = torch.tensor([0.0, 0.0999, 0.1001, 0.3001, BELOW_ONE], dtype=torch.float64)
    tokens, log_probs, _ = sample_tokens(logits, torch.ones(5), points)
    assert tokens.tolist() == [0, 0, 1, 2, 2]
    torch.testing.assert_close(log_probs.exp(), torch.tensor([0.1, 0.1, 0.2, 0.7, 0.7]))


@given(seed=st.integers(0, 2**31), temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]))
def test_log_probs_are_those_of_the_tempered_distribution(seed: int, temperature: float) -> None:
    logits = 5 * torch.randn(16, 50, generator=torch.Generator().manual_seed(seed))
    tokens, log_probs, _ = sample_tokens(logits, torch.full((16,), temperature), uniforms(16))
    exact = torch.log_softmax(logits.double() / temperature, dim=-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs.double(), exact, rtol=1e-6, atol=2e-6)


def test_half_precision_logits_are_normalised_in_float32() -> None:
    logits = torch.randn(8, 300, dtype=torch.bfloat16)
    tokens, log_probs, _ = sample_tokens(logits, torch.ones(8), uniforms(8))
    exact = torch.log_softmax(logits.double(), dim=-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs.double(), exact, rtol=1e-6, atol=2e-6)


def test_frequencies_pass_a_chi_square_bound() -> None:
    probabilities = torch.tensor([0.02, 0.05, 0.08, 0.25, 0.6])
    count = 20_000
    tokens, _, _ = sample_tokens(probabilities.log().expand(count, 5), torch.ones(count), uniforms(count))
    seen = torch.bincount(tokens, minlength=5).double()
    expected = count * probabilities.double()
    # 4 degrees of freedom: above 23.5 with probability 1e-4; the key is fixed, so this cannot flicker.
    assert float(((seen - expected) ** 2 / expected).sum()) < 23.5


@given(point=st.one_of(st.sampled_from([0.0, 0.5, BELOW_ONE]), st.floats(0, BELOW_ONE)), seed=st.integers(0, 999))
def test_an_impossible_token_is_never_drawn(point: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, 40, generator=generator)
    logits[:, torch.rand(40, generator=generator) < 0.6] = -torch.inf
    logits[:, 20] = 0.0
    tokens, log_probs, _ = sample_tokens(logits, torch.ones(1), torch.tensor([point], dtype=torch.float64))
    assert torch.isfinite(log_probs).all()
    assert logits[0, tokens[0]] > -torch.inf


def test_a_number_depends_on_its_key_and_place_alone() -> None:
    keys = np.array([3, 2**64 - 1, 3, 0], dtype=np.uint64)
    places = np.array([0, 5, 1, 0], dtype=np.uint64)
    together = keyed_uniform_numbers(keys, places)
    alone = [keyed_uniform_numbers(keys[i : i + 1], places[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4
    assert keyed_uniform_numbers(keys[::-1], places[::-1]).tolist() == alone[::-1]


def test_numbers_are_uniform_within_and_across_keys() -> None:
    along = keyed_uniform_numbers(np.full(20_000, 11, dtype=np.uint64), np.arange(20_000, dtype=np.uint64))
    across = keyed_uniform_numbers(np.arange(20_000, dtype=np.uint64), np.zeros(20_000, dtype=np.uint64))
    for numbers in (along, across):
        # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded with probability 1e-3; the keys are fixed.
        distance = np.abs(np.sort(numbers) - (np.arange(20_000) + 0.5) / 20_000).max()
        assert distance < 1.95 / np.sqrt(20_000)


def test_keys_differ_where_requests_do() -> None:
    keys = {sampling_key(0, step, problem, sample, turn) for step in range(3) for problem in range(5)
            for sample in range(4) for turn in range(3)}  # fmt: skip
    assert len(keys) == 180
    assert all(0 <= key < 2**64 for key in keys)
    assert sampling_key(1, 23) != sampling_key(12, 3)
    assert sampling_key(0, 1, 2) == sampling_key(0, 1, 2)


def test_temperature_zero_takes_the_likeliest_token_with_certainty() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [0.0, 3.0, 2.0], [1.0, 1.0, -torch.inf]])
    points = torch.tensor([0.0, 0.0, BELOW_ONE], dtype=torch.float64)
    tokens, log_probs, _ = sample_tokens(logits, torch.tensor([0.0, 1.0, 0.0]), points)
    assert tokens.tolist() == [1, 0, 0]
    assert log_probs[[0, 2]].tolist() == [0.0, 0.0]
    assert float(log_probs[1]) < -3


def test_the_nucleus_is_the_smallest_set_that_reaches_top_p() -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.2, 0.3])
    logits = probabilities.log().expand(6, 4)
    top_ps = torch.tensor([0.3, 0.4, 0.69, 0.71, 1.0, 1e-9])
    kept = [[1], [1], [1, 3], [1, 2, 3], [0, 1, 2, 3], [1]]
    nucleus = partial(restrict_to_likely_tokens, **no_limits(6) | {"top_ps": top_ps})
    for point in (0.0, 0.3, 0.6, BELOW_ONE):
        tokens, log_probs, _ = sample_tokens(
            logits, torch.ones(6), torch.full((6,), point, dtype=torch.float64), nucleus
        )
        for token, log_prob, allowed in zip(tokens.tolist(), log_probs.tolist(), kept, strict=True):
            assert token in allowed
            share = probabilities[token] / probabilities[allowed].sum()
            torch.testing.assert_close(torch.tensor(log_prob).exp(), share)


def test_equal_probabilities_at_the_edge_of_a_set_are_cut_by_their_place() -> None:
    even = torch.full((2, 4), 0.25).log()
    limits = {"top_ps": torch.tensor([0.5, 1.0]), "top_ks": torch.tensor([0, 3])}
    assert kept(even, **limits) == [[0, 1], [0, 1, 2]]


def test_every_limit_applies_to_the_renormalized_result_of_those_before() -> None:
    """0.4, 0.3, 0.2 and 0.1: min_p before top_k before top_p."""
    rows = torch.tensor([0.2, 0.4, 0.1, 0.3]).log().expand(6, 4)
    limits = {
        "min_ps": torch.tensor([0.6, 0.0, 0.5, 0.0, 0.0, 0.0]),
        "top_ks": torch.tensor([0, 3, 0, 2, 9, 0]),
        "top_ps": torch.tensor([1.0, 1.0, 0.75, 0.5, 1.0, 1.0]),  # of 4/9, 3/9, 2/9 and of 4/7, 3/7
    }
    assert kept(rows, **limits) == [[1, 3], [0, 1, 3], [1, 3], [1], [0, 1, 2, 3], [0, 1, 2, 3]]
    restricted = restrict_to_likely_tokens(rows, **no_limits(6) | limits).exp()
    torch.testing.assert_close(restricted[1], torch.tensor([2 / 9, 4 / 9, 0.0, 3 / 9]))
    assert torch.equal(restricted[5:], rows[5:].exp())


def no_limits(rows: int) -> dict[str, torch.Tensor]:
    return {"min_ps": torch.zeros(rows), "top_ks": torch.zeros(rows, dtype=torch.int64), "top_ps": torch.ones(rows)}


def kept(log_probs: torch.Tensor, **limits: torch.Tensor) -> list[list[int]]:
    rows = restrict_to_likely_tokens(log_probs, **no_limits(len(log_probs)) | limits)
    return [(row > -torch.inf).nonzero()[:, 0].tolist() for row in rows]
