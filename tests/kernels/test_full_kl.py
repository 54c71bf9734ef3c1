"""full_kl: the exact divergence over the vocabulary, its gradients, and that no block size changes them."""

import math
from itertools import chain
from typing import Any

import pytest
import torch
from kernels.cases import seeded
from torch import Tensor

from agentrl.kernels import KernelInputError, Support, divergence, full_kl, token_statistics, top_divergence

pytestmark = pytest.mark.on_device


def problem(n: int = 5, d: int = 3, v: int = 11, *, dtype: torch.dtype = torch.float64, close: float = 1.0):
    """(hidden, weight, bias) of the policy and (hidden, weight, bias) of the reference."""
    generator = seeded(n)
    shapes = [(n, d), (v, d), (v,)]
    first = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    second = [x + close * torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in first]
    return [x.to(dtype) for x in first], [x.to(dtype) for x in second]


def call(policy: list[Tensor], reference: list[Tensor], temperature: float = 1.0, beta: float = 1.0) -> Tensor:
    more = {"bias": policy[2], "reference_bias": reference[2], "beta": beta}
    return full_kl(*policy[:2], *reference[:2], temperature=temperature, **more)


def slow(policy: list[Tensor], reference: list[Tensor], temperature: float, beta: float = 1.0) -> Tensor:
    """With all logits, through plain autograd."""
    p, q = (((h @ w.t() + b) / temperature).softmax(-1) for h, w, b in (policy, reference))
    if beta == 1:
        return (p * (p / q).log()).sum(-1)
    if beta == 0:
        return (q * (q / p).log()).sum(-1)
    m = beta * q + (1 - beta) * p
    return (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(-1)


def test_by_hand():
    """p = (3/4, 1/4) and p_ref = (1/2, 1/2)."""
    one = torch.ones(1, 1, dtype=torch.float64)
    weight = torch.tensor([[3.0], [1.0]], dtype=torch.float64).log()
    value = full_kl(one, weight, one, torch.zeros_like(weight))
    assert float(value) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-14)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("rows_per_block", [1, 2, 5])
@pytest.mark.parametrize("beta", [1.0, 0.0, 0.3])
def test_values_and_gradients_are_those_of_the_whole_logits(temperature, rows_per_block, beta, monkeypatch):
    monkeypatch.setattr(divergence, "_BLOCK_ELEMENTS", dict.fromkeys(("cpu", "cuda"), 11 * rows_per_block))
    monkeypatch.setattr(divergence, "_PIECE_ELEMENTS", dict.fromkeys(("cpu", "cuda"), 22))
    policy, reference = problem()
    upstream = torch.linspace(-1, 2, 5, dtype=torch.float64)
    results = []
    for function in (call, slow):
        leaves = [x.clone().requires_grad_() for x in policy]
        value = function(leaves, reference, temperature, beta)
        results.append((value.detach(), *torch.autograd.grad((value * upstream).sum(), leaves)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("beta", "limit"), [(1e-6, 0.0), (1 - 1e-6, 1.0)])
def test_the_jensen_shannon_divergence_tends_to_a_multiple_of_either_kl(beta, limit):
    policy, reference = problem()
    factor = beta if limit == 0 else 1 - beta
    torch.testing.assert_close(
        call(policy, reference, 1.0, beta) / factor, call(policy, reference, 1.0, limit), rtol=1e-4, atol=0
    )


def coarse(policy: list[Tensor], reference: list[Tensor], ids: Tensor, beta: float, cap: float | None) -> Tensor:
    """Compute the divergence over the chosen tokens and the rest with plain autograd."""
    x = policy[0] @ policy[1].t() + policy[2]
    p = ((x if cap is None else cap * torch.tanh(x / cap)) / 0.7).softmax(-1)
    q = (reference[0] @ reference[1].t() + reference[2]).softmax(-1)
    p, q = (torch.cat([r.gather(1, ids), 1 - r.gather(1, ids).sum(-1, keepdim=True)], -1) for r in (p, q))
    m = beta * q + (1 - beta) * p
    one, other = (p * (p / (q if beta == 1 else m)).log()).sum(-1), (q * (q / (p if beta == 0 else m)).log()).sum(-1)
    return {0.0: other, 1.0: one}.get(beta, beta * other + (1 - beta) * one)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("beta", [1.0, 0.0, 0.3])
def test_the_divergence_over_top_tokens_has_the_gradient_of_autograd_and_bounds_the_whole(beta, cap, monkeypatch):
    monkeypatch.setattr(divergence, "_PIECE_ELEMENTS", dict.fromkeys(("cpu", "cuda"), 26))  # two rows
    policy, reference = problem()
    log_q = (reference[0] @ reference[1].t() + reference[2]).log_softmax(-1)
    log_q, ids = log_q.topk(4)
    targets, upstream = torch.tensor([0, 3, 10, 5, 2]), torch.linspace(-1, 2, 5, dtype=torch.float64)
    results = []
    for exact in (True, False):
        leaves = [x.clone().requires_grad_() for x in policy]
        if exact:
            value = coarse(leaves, reference, ids, beta, cap)
        else:
            more: dict[str, Any] = {"temperature": 0.7, "bias": leaves[2], "cap": cap}
            log_probs = token_statistics(leaves[0], leaves[1], targets, **more).log_probs
            value = top_divergence(leaves[0], leaves[1], targets, log_probs, ids, log_q, beta=beta, **more)
        results.append((value.detach(), *torch.autograd.grad((value * upstream).sum(), leaves)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)
    more = {"temperature": 0.7, "bias": policy[2], "cap": cap, "reference_bias": reference[2]}
    whole = full_kl(*policy[:2], *reference[:2], reference_temperature=1.0, beta=beta, **more)
    assert bool((results[0][0] <= whole + 1e-12).all())


def test_top_divergence_allocates_no_gradient_of_a_frozen_head(monkeypatch):
    """A head below adapters: the gradient of the weight would be the largest tensor."""
    (hidden, weight, _), (others, _, _) = problem()
    hidden.requires_grad_()
    log_q, ids = (others @ others.t()).log_softmax(-1).topk(3)
    value = top_divergence(
        hidden, weight, torch.zeros(5, dtype=torch.int64), torch.full((5,), -1.0).double(), ids, log_q
    )
    monkeypatch.setattr(torch, "zeros_like", lambda *_, **__: pytest.fail("allocated"))
    value.sum().backward()
    assert bool(hidden.grad.isfinite().all())


def test_gradcheck():
    policy, reference = problem(3, 2, 4)
    for x in policy:
        x.requires_grad_()
    assert torch.autograd.gradcheck(lambda *p: call(list(p), reference, 0.8), policy)


def test_it_is_the_expectation_of_k1_over_the_vocabulary():
    policy, reference = problem(4, 3, 6)
    expectation = torch.zeros(4, dtype=torch.float64)
    for v in range(6):
        targets = torch.full((4,), v)
        log_p, log_q = (
            token_statistics(h, w, targets, bias=b, temperature=0.7).log_probs for h, w, b in (policy, reference)
        )
        expectation += log_p.exp() * (log_p - log_q)
    torch.testing.assert_close(call(policy, reference, 0.7), expectation, rtol=1e-12, atol=1e-14)


def test_equal_policies_are_at_distance_zero_and_close_ones_keep_their_digits_in_float32():
    policy, _ = problem(6, 8, 500, dtype=torch.float32)
    assert call(policy, policy).tolist() == [0.0] * 6
    policy, reference = problem(6, 8, 500, close=1e-3)
    exact = slow(policy, reference, 1.0)
    got = call([x.float() for x in policy], [x.float() for x in reference])
    assert float(exact.max()) < 1e-4
    torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=0)
    assert bool((got > 0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_accumulated_in_float32(dtype):
    policy, reference = problem(7, 16, 300, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in policy]
    value = call(leaves, reference)
    value.sum().backward()
    assert value.dtype == torch.float32
    wide = [x.double().requires_grad_() for x in policy]
    expected = slow(wide, [x.double() for x in reference], 1.0)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    expected.sum().backward()
    for got, exact in zip(leaves, wide, strict=True):
        assert got.grad is not None
        assert exact.grad is not None
        assert got.grad.dtype == dtype
        torch.testing.assert_close(got.grad.double(), exact.grad, rtol=1e-2, atol=1e-2 * float(exact.grad.abs().max()))


def test_impossible_tokens():
    """Biases of -inf: impossible in both, in the policy alone, in the reference alone."""
    hidden, weight = torch.ones(1, 1, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)
    inf = math.inf
    cases = [
        ([0.0, 0.0, -inf], [0.0, math.log(3), -inf], 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),
        ([0.0, -inf, -inf], [0.0, 0.0, 0.0], math.log(3)),
        ([0.0, 0.0, 0.0], [0.0, 0.0, -inf], inf),
    ]
    for own, other, expected in cases:
        bias = torch.tensor(own, dtype=torch.float64)
        value = full_kl(hidden, weight, hidden, weight, bias=bias, reference_bias=bias.new_tensor(other))
        assert float(value) == pytest.approx(expected, rel=1e-12)
        mirrored = full_kl(hidden, weight, hidden, weight, bias=bias.new_tensor(other), reference_bias=bias, beta=0.0)
        assert float(mirrored) == pytest.approx(expected, rel=1e-12)
        between = full_kl(hidden, weight, hidden, weight, bias=bias, reference_bias=bias.new_tensor(other), beta=0.5)
        assert 0 < float(between) <= math.log(2)


def test_extreme_logits_stay_finite():
    one = torch.ones(1, 1)
    up, down = torch.tensor([[1e4], [-1e4], [0.0]]), torch.tensor([[0.0], [1e4], [-1e4]])
    leaf = up.clone().requires_grad_()
    value = full_kl(one, leaf, one, down)
    assert float(value.detach()) == pytest.approx(1e4)
    value.backward()
    assert leaf.grad is not None
    assert bool(torch.isfinite(leaf.grad).all())


def test_the_reference_may_be_of_another_size_and_gets_no_gradient():
    (hidden, weight, _), _ = problem(4, 3, 6)
    (other_hidden, other_weight, _), _ = problem(4, 5, 6)
    for x in (weight, other_hidden, other_weight):
        x.requires_grad_()
    full_kl(hidden, weight, other_hidden, other_weight).sum().backward()
    assert weight.grad is not None
    assert other_hidden.grad is None
    assert other_weight.grad is None


def test_no_rows():
    (_, weight, _), _ = problem()
    empty = torch.zeros(0, 3, dtype=torch.float64, requires_grad=True)
    value = full_kl(empty, weight, empty.detach(), weight)
    value.sum().backward()
    assert value.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference_weight": torch.zeros(10, 3)}, "the vocabularies differ: head_weight has 11 rows, .* 10"),
        ({"reference_hidden": torch.zeros(4, 3)}, r"targets must be \[N\] = \[4\]"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"bias": torch.zeros(3)}, r"bias must be \[V\] = \[11\]"),
        ({"beta": 1.5}, "beta must be between 0 and 1; got 1.5"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    arguments = {
        "hidden": torch.zeros(5, 3),
        "head_weight": torch.zeros(11, 3),
        "reference_hidden": torch.zeros(5, 3),
        "reference_weight": torch.zeros(11, 3),
    }
    with pytest.raises(KernelInputError, match=message):
        full_kl(**{**arguments, **change})


def test_a_support_restricts_both_policies():
    """The divergence between the distributions that are renormalized over the set of each row."""
    (hidden, weight, bias), (other, head, shift) = problem(3, 2, 4)
    sets = [[0, 3], [], [1, 2, 3]]
    support = Support(ids=torch.tensor([*chain(*sets)]), sizes=torch.tensor(list(map(len, sets)), device="cpu"))
    hidden.requires_grad_()
    value = full_kl(hidden, weight, other, head, bias=bias, reference_bias=shift, support=support)
    expected = []
    for row, one in enumerate(sets):
        one = one or list(range(4))
        log_p, log_q = (
            (h[row] @ w.t() + b)[one].log_softmax(-1) for h, w, b in ((hidden, weight, bias), (other, head, shift))
        )
        expected.append((log_p.exp() * (log_p - log_q)).sum())
    torch.testing.assert_close(value, torch.stack(expected), rtol=1e-11, atol=1e-12)
    found, wanted = (torch.autograd.grad(total.sum(), hidden)[0] for total in (value, torch.stack(expected)))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
