"""aggregate: five modes by hand, micro-batches that add up, and masks that leave nothing."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import AGGREGATIONS, InvalidInputError, InvalidOptionError, aggregate, loss_normalizer

LOSS = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]
MASK = [[1, 1, 0], [1, 0, 0], [0, 0, 0]]  # sums 3 and 4, lengths 2 and 1; the third sequence is out


def options(mode: str) -> dict[str, float]:
    return {"length": 10.0} if mode == "seq_mean_token_sum_norm" else {}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 7 / 3),
        ("token_sum", 7.0),
        ("seq_mean_token_mean", (1.5 + 4.0) / 2),
        ("seq_mean_token_sum", 3.5),
        ("seq_mean_token_sum_norm", 0.35),
    ],
)
def test_by_hand(mode, expected):
    assert float(aggregate(torch.tensor(LOSS), torch.tensor(MASK), mode, **options(mode))) == pytest.approx(expected)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_nothing_left_is_a_zero_connected_to_the_graph(mode):
    loss = torch.full((2, 3), torch.nan, requires_grad=True)
    total = aggregate(loss, torch.zeros(2, 3), mode, **options(mode))
    total.backward()
    assert float(total.detach()) == 0.0
    assert loss.grad is not None
    assert loss.grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_masked_garbage_reaches_no_gradient(mode):
    loss = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]], requires_grad=True)
    total = aggregate(loss, torch.tensor([[1, 0], [0, 1]]), mode, **options(mode))
    total.backward()
    assert bool(torch.isfinite(total))
    assert loss.grad is not None
    assert bool(torch.isfinite(loss.grad).all())


@settings(deadline=None, max_examples=60)
@given(
    mode=st.sampled_from(AGGREGATIONS),
    rows=st.integers(1, 8),
    width=st.integers(1, 5),
    seed=st.integers(0, 1000),
    cuts=st.sets(st.integers(1, 7)),
)
def test_micro_batches_add_up_to_the_whole_step(mode, rows, width, seed, cuts):
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    whole = aggregate(loss, mask, mode, **options(mode))
    bounds = [0, *sorted(cut for cut in cuts if cut < rows), rows]
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    normalizer = sum(loss_normalizer(mask[part], mode) for part in parts)
    total = sum(aggregate(loss[part], mask[part], mode, normalizer=normalizer, **options(mode)) for part in parts)
    torch.testing.assert_close(total, whole)


@settings(deadline=None, max_examples=30)
@given(mode=st.sampled_from(AGGREGATIONS), pad=st.integers(0, 4), seed=st.integers(0, 100))
def test_padding_does_not_matter(mode, pad, seed):
    generator = torch.Generator().manual_seed(seed)
    loss = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 3, generator=generator) < 0.6
    wide = torch.nn.functional.pad(loss, (0, pad), value=torch.nan)
    wide_mask = torch.nn.functional.pad(mask, (0, pad))
    torch.testing.assert_close(
        aggregate(wide, wide_mask, mode, **options(mode)), aggregate(loss, mask, mode, **options(mode))
    )


@pytest.mark.parametrize(
    ("mode", "given_options", "message"),
    [
        ("token_means", {}, "aggregation='token_means' is not one of .* did you mean 'token_mean'"),
        ("seq_mean_token_sum_norm", {}, "needs a positive, finite length; got None"),
        ("seq_mean_token_sum_norm", {"length": 0.0}, "needs a positive, finite length; got 0.0"),
        ("token_mean", {"length": 5.0}, "length applies to seq_mean_token_sum_norm only, not to token_mean"),
    ],
)
def test_modes_and_lengths_that_do_not_fit(mode, given_options, message):
    with pytest.raises(InvalidOptionError, match=message):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), mode, **given_options)


def test_shapes_must_agree():
    with pytest.raises(
        InvalidInputError, match=r"loss_mask must be \[B, T\] like per_token; got \(2, 1\) and \(1, 2\)"
    ):
        aggregate(torch.zeros(1, 2), torch.ones(2, 1), "token_mean")
