"""Per-token and realized energies, and the examples in the docstrings."""

import doctest

import pytest
import torch

from agentrl.algorithms import (
    AdvantageInputs,
    EstimatorInputs,
    compute_advantages,
    logit_proxy_energy,
    records,
)
from agentrl.algorithms.estimators import baselines, branches
from agentrl.kernels.arithmetic import cumulative_sum


def test_logit_proxy_is_the_squared_norm_of_the_logit_gradient():
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(6, 5, generator=generator, dtype=torch.float64).softmax(-1)
    found = logit_proxy_energy(p[:, 2].log(), p.square().sum(-1))
    delta = torch.eye(5, dtype=torch.float64)[2] - p
    torch.testing.assert_close(found, delta.square().sum(-1))


def test_logit_proxy_is_never_negative():
    log_probs = torch.tensor([-1e-9, -1e-8, 0.0])
    assert bool((logit_proxy_energy(log_probs, torch.ones(3) - 1e-7) >= 0).all())


def test_realized_energy_by_hand():
    def realized(**given):
        inputs = AdvantageInputs(
            rewards=torch.zeros(1, 4),
            response_mask=torch.tensor([[1, 1, 0, 1]]).bool(),
            groups=torch.tensor([0]),
            token_energy=torch.tensor([[1.0, 2.0, torch.nan, 4.0]]),
            **given,
        )
        return cumulative_sum(
            baselines.importance_weighted_energy(EstimatorInputs.from_inputs(inputs), "logit_proxy")
        ).tolist()

    assert realized() == [[1.0, 3.0, 3.0, 7.0]]
    rho = torch.tensor([[2.0, 1.0, torch.inf, 0.5]])
    assert realized(importance_weights=rho) == [[4.0, 6.0, 6.0, 7.0]]
    loss_mask = torch.tensor([[1, 0, 0, 1]]).bool()
    assert realized(importance_weights=rho, loss_mask=loss_mask) == [[4.0, 4.0, 4.0, 5.0]]


def test_zeros_in_the_ratio_and_in_the_loss_mask_are_the_same_estimator():
    rejected = torch.tensor([[1, 0, 1], [1, 1, 0]]).bool()

    def baselines(**given):
        inputs = AdvantageInputs(
            rewards=torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.25]]),
            response_mask=torch.ones(2, 3, dtype=torch.bool),
            groups=torch.tensor([0, 0]),
            token_energy=torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]]),
            **given,
        )
        return compute_advantages("tir_otb", inputs).baselines

    zeroed = baselines(importance_weights=rejected.float())
    assert torch.equal(zeroed, baselines(importance_weights=torch.ones(2, 3), loss_mask=rejected))
    assert torch.equal(zeroed, baselines(loss_mask=rejected))
    assert not torch.equal(zeroed, baselines())


@pytest.mark.parametrize("module", [baselines, records, branches])
def test_examples_in_docstrings_run(module):
    names = {"torch": torch}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted > 0
    assert result.failed == 0
