"""Every loss against a loop over trajectories and tokens written from the formulas, values and gradients."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algorithms import LOSSES, aggregate, loss_normalizer, policy_loss

BUILT_IN = [
    "cispo", "clip_cov", "dppo_kl", "dppo_tv", "dual_clip", "gmpo", "gspo", "kl_cov", "ppo", "reinforce", "sapo",
]  # fmt: skip
OPTIONS = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.28},
    "dual_clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5},
    "gspo": {"clip_low": 0.05, "clip_high": 0.08},
    "cispo": {"clip_low": 0.3, "clip_high": 0.4},
    "gmpo": {"clip_low": 0.25, "clip_high": 0.35},
    "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.05},
    "dppo_tv": {"clip_low": 0.02, "clip_high": 0.03},
    "dppo_kl": {"clip_low": 0.002, "clip_high": 0.003},
    "clip_cov": {"covariance_fraction": 0.3, "covariance_low": 0.05, "covariance_high": 0.6},
    "kl_cov": {"covariance_fraction": 0.3, "kl_coefficient": 0.7},
}
Row = list[Tensor]


def clip(x: Tensor, low: float, high: float) -> Tensor:
    return torch.stack(
        [torch.stack([x, torch.tensor(low, dtype=x.dtype)]).max(), torch.tensor(high, dtype=x.dtype)]
    ).min()


def ratio_of(p: Tensor, old: float) -> Tensor:
    return (p - old).clamp(-20, 20).exp()


def clipped(ratio: Tensor, a: float, o: dict[str, float]) -> Tensor:
    first, second = -a * ratio, -a * clip(ratio, 1 - o["clip_low"], 1 + o["clip_high"])
    return first if first.item() >= second.item() else second


def per_token(rule: Callable[..., Tensor]) -> Callable[..., Row]:
    def row(p: Row, old: list[float], a: list[float], o: dict[str, float], chosen: list[bool]) -> Row:
        return [rule(*token, o) for token in zip(p, old, a, chosen, strict=True)]

    return row


def reinforce(p, old, a, chosen, o):
    return -a * p


def ppo(p, old, a, chosen, o):
    return clipped(ratio_of(p, old), a, o)


def dual_clip(p, old, a, chosen, o):
    loss = clipped(ratio_of(p, old), a, o)
    bound = torch.tensor(-a * o["dual_clip"], dtype=loss.dtype)
    return bound + 0 * p if a < 0 and bound.item() < loss.item() else loss


def cispo(p, old, a, chosen, o):
    weight = min(max(math.exp(p.item() - old), 1 - o["clip_low"]), 1 + o["clip_high"])
    return -weight * a * p


def sapo(p, old, a, chosen, o):
    t = o["temperature_positive"] if a > 0 else o["temperature_negative"]
    return -a * (4 / t) / (1 + torch.exp(-t * (ratio_of(p, old) - 1)))


def dppo_tv(p, old, a, chosen, o):
    moved = math.exp(p.item()) - math.exp(old)
    keep = moved <= o["clip_high"] if a > 0 else moved >= -o["clip_low"]
    return -a * min(math.exp(p.item() - old), 20.0) * p * keep


def dppo_kl(p, old, a, chosen, o):
    new, was = math.exp(p.item()), math.exp(old)
    kl = was * math.log(was / new) + (1 - was) * math.log((1 - was) / (1 - new))
    keep = (kl <= o["clip_high"] or new <= was) if a > 0 else (kl <= o["clip_low"] or new >= was)
    return -a * min(new / was, 20.0) * p * keep


def clip_cov(p, old, a, chosen, o):
    return 0 * p if chosen else clipped(ratio_of(p, old), a, {"clip_low": 0.2, "clip_high": 0.2})


def kl_cov(p, old, a, chosen, o):
    return -a * ratio_of(p, old) + (o["kl_coefficient"] * (p - old).abs() if chosen else 0.0)


def gspo(p: Row, old: list[float], a: list[float], o: dict[str, float], chosen: list[bool]) -> Row:
    u = math.exp(min(sum(x.item() - y for x, y in zip(p, old, strict=True)) / len(p), 10.0))
    return [clipped(u * x.exp() / x.detach().exp(), b, o) for x, b in zip(p, a, strict=True)]


def gmpo(p: Row, old: list[float], a: list[float], o: dict[str, float], chosen: list[bool]) -> Row:
    terms = []
    for x, y, b in zip(p, old, a, strict=True):
        s = (b > 0) - (b < 0)
        first, second = s * (x - y), s * clip(x - y, -o["clip_low"], o["clip_high"])
        terms.append(s * (first if first.item() <= second.item() else second))
    value = -sum(a) / len(a) * (sum(terms) / len(terms)).exp()
    return [value] * len(p)


REFERENCES: dict[str, Callable[..., Row]] = {
    **{f.__name__: per_token(f) for f in (reinforce, ppo, dual_clip, cispo, sapo, dppo_tv, dppo_kl, clip_cov, kl_cov)},
    "gspo": gspo,
    "gmpo": gmpo,
}


def problem(seed: int, rows: int = 5, width: int = 7, spread: float = 0.4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 3 - 0.05
    log_probs = (old + spread * torch.randn(rows, width, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    advantages = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[:, 0] = True
    mask[-1] = False
    return {"log_probs": log_probs, "old_log_probs": old, "advantages": advantages, "loss_mask": mask}


def selection(name: str, tensors: dict[str, Tensor]) -> Tensor | None:
    """Some tokens: which ones are chosen is the business of another file."""
    if not LOSSES.traits(name).step_wide:
        return None
    return tensors["loss_mask"] & (torch.arange(tensors["loss_mask"].numel()).view(tensors["loss_mask"].shape) % 3 == 0)


def reference(name: str, tensors: dict[str, Tensor], weights: Tensor) -> tuple[Tensor, Tensor]:
    """(per-token losses, gradient of their weighted sum), token by token."""
    leaf = tensors["log_probs"].clone().requires_grad_()
    chosen = selection(name, tensors)
    result = torch.zeros_like(leaf)
    for i in range(leaf.shape[0]):
        where = [t for t in range(leaf.shape[1]) if tensors["loss_mask"][i, t]]
        if not where:
            continue
        losses = REFERENCES[name](
            [leaf[i, t] for t in where],
            [float(tensors["old_log_probs"][i, t]) for t in where],
            [float(tensors["advantages"][i, t]) for t in where],
            OPTIONS.get(name, {}),
            [chosen is not None and bool(chosen[i, t]) for t in where],
        )
        for t, loss in zip(where, losses, strict=True):
            result[i, t] = loss
    (gradient,) = torch.autograd.grad((result * weights).sum(), leaf)
    return result.detach(), gradient


def run(name: str, tensors: dict[str, Tensor], **more: object) -> Tensor:
    return policy_loss(name, **tensors, selected=selection(name, tensors), **OPTIONS.get(name, {}), **more)[0]


def test_every_loss_has_a_reference():
    assert list(LOSSES.names()) == BUILT_IN == sorted(REFERENCES)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spread", [0.05, 0.4, 1.5])
def test_values_and_gradients_are_those_of_the_loop(name, seed, spread):
    tensors = problem(seed, spread=spread)
    weights = torch.rand(tensors["advantages"].shape, generator=torch.Generator().manual_seed(seed)).double()
    expected, expected_gradient = reference(name, tensors, weights)
    leaf = tensors["log_probs"].clone().requires_grad_()
    result = run(name, {**tensors, "log_probs": leaf})
    torch.testing.assert_close(result.detach(), expected, rtol=0, atol=1e-10)
    (gradient,) = torch.autograd.grad((result * weights).sum(), leaf)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["ppo", "dual_clip", "gmpo", "kl_cov", "reinforce", "sapo"])
def test_gradcheck_of_the_losses_without_stop_gradient(name):
    tensors = problem(3, rows=3, width=4)

    def loss(log_probs: Tensor) -> Tensor:
        return run(name, {**tensors, "log_probs": log_probs})

    assert torch.autograd.gradcheck(loss, (tensors["log_probs"].requires_grad_(),), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("name", BUILT_IN)
def test_on_policy_the_gradient_is_that_of_reinforce(name):
    """gmpo spreads the mean advantage: the same where a trajectory's tokens share one."""
    tensors = problem(1)
    tensors["old_log_probs"] = tensors["log_probs"]
    if name == "gmpo":
        tensors["advantages"] = tensors["advantages"][:, :1].expand(-1, 7)
    gradients = []
    for which in (name, "reinforce"):
        leaf = tensors["log_probs"].clone().requires_grad_()
        none = {"selected": torch.zeros_like(tensors["loss_mask"])} if LOSSES.traits(which).step_wide else {}
        loss, _ = policy_loss(which, **{**tensors, "log_probs": leaf}, **none)
        total = aggregate(loss, tensors["loss_mask"], "seq_mean_token_mean")
        gradients.append(torch.autograd.grad(total, leaf)[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("gap", [1000.0, -1000.0, 25.0, -25.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_extreme_ratios_stay_finite(name, gap, advantage):
    low = torch.full((1, 3), -1000.0)
    high = low + abs(gap)
    log_probs = (high if gap > 0 else low).clone().requires_grad_()
    loss, _ = policy_loss(
        name,
        log_probs=log_probs,
        old_log_probs=low if gap > 0 else high,
        advantages=torch.full((1, 3), advantage),
        loss_mask=torch.ones(1, 3),
    )
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    assert bool(torch.isfinite(loss).all())
    assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("name", ["dppo_kl", "dppo_tv"])
def test_certain_tokens_are_no_special_case(name):
    """p = 1 now, before, or both: a binary divergence of 0 or of infinity, never NaN."""
    log_probs = torch.tensor([[0.0, 0.0, -1.0, 1e-9]], requires_grad=True)
    loss, metrics = policy_loss(
        name,
        log_probs=log_probs,
        old_log_probs=torch.tensor([[0.0, -1.0, 0.0, 0.0]]),
        advantages=torch.ones(1, 4),
        loss_mask=torch.ones(1, 4),
        clip_high=0.3,
    )
    # kept: nothing moved; p rose by 0.63: not kept; p fell: kept, whatever the divergence
    assert float(metrics["clip_fraction"]) == 0.25
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor([[-1.0, 0.0, -math.exp(-1), -1.0]]))


@hypothesis_settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(BUILT_IN), seed=st.integers(0, 10_000), pad=st.integers(0, 3), cut=st.integers(1, 4))
def test_padding_order_and_split_do_not_matter(name, seed, pad, cut):
    tensors = problem(seed)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    chosen = selection(name, tensors)

    def gradient(parts: list[Tensor], pad: int) -> tuple[Tensor, Tensor]:
        """The loss of the whole step and its gradient, from the rows of each part, padded with NaN."""
        leaf = tensors["log_probs"].clone().requires_grad_()
        mode = LOSSES.traits(name).aggregation
        normalizer = sum(loss_normalizer(tensors["loss_mask"][rows], mode) for rows in parts)
        total = torch.zeros((), dtype=torch.float64)
        for rows in parts:
            given_tensors = {**tensors, "log_probs": leaf}
            padded = {
                key: torch.nn.functional.pad(value[rows], (0, pad), value=math.nan if value.is_floating_point() else 0)
                for key, value in given_tensors.items()
            }
            mine = None if chosen is None else torch.nn.functional.pad(chosen[rows], (0, pad))
            loss, _ = policy_loss(name, **padded, selected=mine, **OPTIONS.get(name, {}))
            total = total + aggregate(loss, padded["loss_mask"], mode, normalizer=normalizer)
        return total.detach(), torch.autograd.grad(total, leaf)[0]

    whole = gradient([torch.arange(5)], 0)
    other = gradient([order[:cut], order[cut:]], pad)
    torch.testing.assert_close(other, whole, rtol=1e-12, atol=1e-14)
