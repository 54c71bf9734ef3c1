"""The gradient-variance diagnostics against gradients from autograd, and their statistical identity."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import (
    HeadVarianceAccumulator,
    InvalidInputError,
    diagnostics,
    diagonal_proxy,
)
from agentrl.models.policy import FusedHead
from agentrl.training.engine.collectives import MetricAccumulator
from agentrl.training.step.diagnostics import HeadExactMonitor, record_forward_metrics, variance_proxies

TEMPERATURE = 0.8


def random_batch(seed: int = 0, *, tokens: int = 23, rows: int = 7, d: int = 4, v: int = 9) -> dict[str, Tensor]:
    """A ragged batch: rows 0-6 in groups 5, 5, 2, 2, 2, 8, 8; row 6 has no token here."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(tokens, d, generator=generator, dtype=torch.float64),
        "weight": torch.randn(v, d, generator=generator, dtype=torch.float64),
        "targets": torch.randint(0, v, (tokens,), generator=generator),
        "advantages": torch.randn(tokens, generator=generator, dtype=torch.float64),
        "rows": torch.randint(0, rows - 1, (tokens,), generator=generator),
        "groups": torch.tensor([5, 5, 2, 2, 2, 8, 8]),
    }


def group_gradients(batch: dict[str, Tensor]) -> list[Tensor]:
    """The mean head gradient of every group's trajectories, by autograd."""
    result = []
    for group in batch["groups"].unique():
        weight = batch["weight"].clone().requires_grad_()
        log_p = (batch["hidden"] @ weight.t() / TEMPERATURE).log_softmax(-1)
        chosen = batch["groups"][batch["rows"]] == group
        picked = log_p.gather(-1, batch["targets"].unsqueeze(-1)).squeeze(-1)
        size = int((batch["groups"] == group).sum())
        total = (picked * batch["advantages"] * chosen).sum() / size
        result.append(torch.autograd.grad(total, weight)[0])
    return result


def add(accumulator: HeadVarianceAccumulator, batch: dict[str, Tensor], rows: Tensor) -> None:
    """Add the trajectories `rows` of the batch as a micro-batch."""
    position = torch.full((batch["groups"].numel(),), -1).scatter(0, rows, torch.arange(rows.numel()))
    tokens = (position[batch["rows"]] >= 0).nonzero().squeeze(-1)
    accumulator.update(
        hidden=batch["hidden"][tokens],
        targets=batch["targets"][tokens],
        advantages=batch["advantages"][tokens],
        rows=position[batch["rows"][tokens]],
        groups=batch["groups"][rows],
    )


@pytest.mark.parametrize("block", [1, 50, 1 << 23])
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4, 5, 6]], [[4, 2, 3], [1, 0], [5, 6]]])
def test_head_variance_is_that_of_the_groups_gradients(monkeypatch, block, parts):
    monkeypatch.setattr(diagnostics, "_BLOCK_ELEMENTS", block)
    batch = random_batch()
    accumulator = HeadVarianceAccumulator(batch["weight"], temperature=TEMPERATURE)
    for part in parts:
        add(accumulator, batch, torch.tensor(part))
    gradients = group_gradients(batch)
    power = sum(float(g.square().sum()) for g in gradients) / 3
    signal = float((sum(gradients) / 3).square().sum())
    result = accumulator.result()
    assert result.groups == 3
    assert result.power == pytest.approx(power, rel=1e-10)
    assert result.signal == pytest.approx(signal, rel=1e-10)
    assert result.variance == pytest.approx((power - signal) / 2, rel=1e-10)
    assert result.power >= result.signal


def test_a_bias_of_the_head_shifts_the_logits():
    batch = random_batch(tokens=5, rows=2)
    batch["groups"] = torch.tensor([0, 1])
    batch["rows"] = torch.tensor([0, 0, 0, 1, 1])
    bias = torch.linspace(-1, 1, 9, dtype=torch.float64)
    # a bias is the weight of one more hidden unit that is always 1, whose own gradient does not count
    accumulator = HeadVarianceAccumulator(batch["weight"], temperature=TEMPERATURE, bias=bias)
    add(accumulator, batch, torch.tensor([0, 1]))
    log_p = ((batch["hidden"] @ batch["weight"].t() + bias) / TEMPERATURE).softmax(-1)
    delta = torch.nn.functional.one_hot(batch["targets"], 9) - log_p
    per_token = torch.einsum("t,tv,td->tvd", batch["advantages"] / TEMPERATURE, delta, batch["hidden"])
    gradients = [per_token[:3].sum(0), per_token[3:].sum(0)]
    power = sum(float(g.square().sum()) for g in gradients) / 2
    assert accumulator.result().power == pytest.approx(power, rel=1e-10)


def test_one_group_has_no_variance_and_none_is_an_error():
    batch = random_batch()
    accumulator = HeadVarianceAccumulator(batch["weight"], temperature=TEMPERATURE)
    with pytest.raises(InvalidInputError, match="no group was added"):
        accumulator.result()
    add(accumulator, batch, torch.tensor([0, 1]))
    result = accumulator.result()
    assert result.variance is None
    assert result.power == pytest.approx(result.signal, rel=1e-12)


def test_the_parts_of_several_ranks_add_up():
    batch = random_batch()
    whole = HeadVarianceAccumulator(batch["weight"], temperature=TEMPERATURE)
    add(whole, batch, torch.arange(7))
    first, second = (HeadVarianceAccumulator(batch["weight"], temperature=TEMPERATURE) for _ in range(2))
    add(first, batch, torch.tensor([0, 1]))
    add(second, batch, torch.tensor([2, 3, 4, 5, 6]))
    first.gradient_sum += second.gradient_sum
    first.power_sum += second.power_sum
    first.groups += second.groups
    assert first.result().signal == pytest.approx(whole.result().signal, rel=1e-12)
    assert first.result().variance == pytest.approx(whole.result().variance, rel=1e-12)


def test_the_variance_estimates_the_variance_of_the_mean_gradient():
    # Groups of one token with a one-dimensional head of two rows: g = A delta h, its variance known from many draws.
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(2, 1, dtype=torch.float64)
    draws = []
    for _ in range(400):
        targets = torch.randint(0, 2, (8,), generator=generator)
        advantages = torch.randn(8, generator=generator, dtype=torch.float64) + 1.0
        accumulator = HeadVarianceAccumulator(weight, temperature=1.0)
        rows = torch.arange(8)
        hidden = torch.ones(8, 1, dtype=torch.float64)
        accumulator.update(hidden=hidden, targets=targets, advantages=advantages, rows=rows, groups=rows)
        draws.append(accumulator.result().variance)
    # delta = +-(1/2, -1/2) with equal chance: E||g||^2 = E A^2 / 2 = 1, mean 0, so Var of the mean of 8 is 1/8
    assert sum(draws) / len(draws) == pytest.approx(1 / 8, rel=0.1)


def test_diagonal_proxy_is_the_norm_with_respect_to_the_logits():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 5, (2, 3), generator=generator)
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]]).bool()
    advantages = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    log_p = logits.log_softmax(-1)
    picked = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    (gradient,) = torch.autograd.grad((picked * advantages * mask).sum(), logits, retain_graph=True)
    delta = torch.nn.functional.one_hot(targets, 5) - log_p.exp()
    energy = torch.where(mask, delta.square().sum(-1), torch.nan)
    found = diagonal_proxy(energy, advantages, mask)
    torch.testing.assert_close(found, gradient.square().sum((1, 2)))
    assert not found.requires_grad


def test_shapes_must_agree():
    with pytest.raises(InvalidInputError):
        diagonal_proxy(torch.zeros(2, 3), torch.zeros(2, 2), torch.ones(2, 3))
    accumulator = HeadVarianceAccumulator(torch.zeros(5, 2), temperature=1.0)
    three = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(InvalidInputError, match=r"advantages and rows must be \[N\]"):
        accumulator.update(hidden=torch.zeros(4, 2), targets=three, advantages=three, rows=three, groups=three)
    with pytest.raises(InvalidInputError, match="temperature positive"):
        HeadVarianceAccumulator(torch.zeros(5, 2), temperature=0.0)


def test_total_power_signal_strength_and_pure_noise_are_the_published_ones():
    energy = torch.tensor([[0.5, 1.0, 0.5], [0.25, 0.75, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages = torch.tensor([[0.5] * 3, [-2.0] * 3])  # one a trajectory: W A^2, W = 2 and 1
    powers = diagonal_proxy(energy, advantages, mask)
    assert powers.tolist() == [2 * 0.25, 1 * 4.0]
    found = variance_proxies(total_power=float(powers.mean()), gradient_norm=0.5, trajectories=2)
    assert found == {"variance/signal_strength": 0.25, "variance/pure_noise": 2.25 - 0.25}
    assert variance_proxies(total_power=6.0, gradient_norm=2.0, trajectories=5)["variance/pure_noise"] == 0.5
    alone = variance_proxies(total_power=6.0, gradient_norm=1e200, trajectories=1)
    assert alone == {"variance/signal_strength": float("inf")}


def test_a_tree_counts_as_one_rollout_with_the_weights_of_its_branches() -> None:
    """Group 1: a root of 2 tokens with branches of 1 and 3 tokens, and a plain rollout. Group 2: a plain rollout."""
    lengths = (2, 1, 3, 2, 2)
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(4, 9, bias=False, dtype=torch.float64)
    hidden = torch.randn(sum(lengths), 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 9, (len(hidden),), generator=generator)
    advantages = torch.randn(len(lengths), max(lengths), generator=generator, dtype=torch.float64)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rows, columns = mask.nonzero(as_tuple=True)
    paths = torch.tensor([1.0, 0.5, 0.5, 1.0, 1.0], dtype=torch.float64)
    counts = torch.tensor(lengths, dtype=torch.float64) * paths
    batch: Any = SimpleNamespace(
        row=SimpleNamespace(response_token_ids=lambda *_: targets),
        rows=rows,
        columns=columns,
        groups=torch.tensor([1, 1, 1, 1, 2]),
        advantages=advantages,
        path_weights=paths,
        weights=torch.cat([counts[:3] / counts[:3].sum(), torch.ones(2, dtype=torch.float64)]),
        support=None,
        counted_mask=mask,
        computed_statistics=SimpleNamespace(
            **{
                name: torch.rand(mask.shape, generator=generator, dtype=torch.float64)
                for name in ("log_probs", "entropy", "sum_pi_squared", "energy")
            }
        ),
        rollout_log_probs=torch.zeros(mask.shape, dtype=torch.float64),
        versions=torch.where(mask, 0, -1),
    )
    policy: Any = SimpleNamespace(
        head=FusedHead.from_linear(linear), sequence=None, local_token_indices=lambda *_: None
    )
    monitor = HeadExactMonitor(policy, temperature=TEMPERATURE)
    monitor.add_groups(batch, hidden)
    by_rollout = HeadVarianceAccumulator(linear.weight, temperature=TEMPERATURE)
    rollouts = torch.tensor([0, 0, 0, 1, 2])
    by_rollout.update(
        hidden=hidden,
        targets=targets,
        advantages=(advantages * paths[:, None])[rows, columns],
        rows=rollouts[rows],
        groups=torch.tensor([1, 1, 2]),
    )
    found, expected = monitor.metrics_over_ranks(lambda values: values), by_rollout.result()
    assert found["variance/head_exact_total_power"] == pytest.approx(expected.power, rel=1e-12)
    assert found["variance/head_exact_signal_strength"] == pytest.approx(expected.signal, rel=1e-12)
    assert found["variance/head_exact_pure_noise"] == pytest.approx(expected.variance, rel=1e-12)

    meter = MetricAccumulator(torch.device("cpu"))
    record_forward_metrics(meter, batch, version=0)
    energy = batch.computed_statistics.energy
    by_edge = torch.stack([energy[row, :n] @ advantages[row, :n].square() for row, n in enumerate(lengths)])
    power = (by_edge[0] + by_edge[1] / 4 + by_edge[2] / 4 + by_edge[3] + by_edge[4]) / 3
    engine: Any = SimpleNamespace(sum_over_replicas=lambda values: values, all_reduce_max=lambda values: values)
    assert meter.weight_over_ranks("variance/total_power", engine) == pytest.approx(3)
    assert meter.reduce_over_ranks(engine)["variance/total_power"] == pytest.approx(float(power), rel=1e-6)
