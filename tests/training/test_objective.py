"""KL penalty and entropy bonus on tokens that another policy sampled: expected gradients by enumeration."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from training.rows import rows_of

from agentrl.algorithms import Advantages, Correction
from agentrl.rollout.settings import RewardSettings
from agentrl.training.engine.deepspeed_engine import TrainingEngine
from agentrl.training.settings import AlgorithmSettings, CorrectionSettings, KLSettings, TeacherSettings
from agentrl.training.step.objective import PolicyObjective
from agentrl.training.step.objective_settings import ObjectiveSettings

BEHAVIOUR = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
BEFORE = torch.tensor([0.35, 0.25, 0.4], dtype=torch.float64)  # the policy before the step's updates
REFERENCE = torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64)


def objective(*, entropy: float = 0.0, teacher: str | None = None, **kl: Any) -> PolicyObjective:
    return PolicyObjective(
        ObjectiveSettings(
            algorithm=AlgorithmSettings(aggregation="token_sum", entropy_coefficient=entropy),
            reward=RewardSettings(),
            kl=KLSettings(**kl),
            teacher=TeacherSettings() if teacher is None else TeacherSettings(path="teacher", objective=teacher),
            correction=CorrectionSettings(weights="token"),
            response_tokens=1,
        )
    )


def expected_gradient(
    made: PolicyObjective, logits: Tensor, *, weights: Tensor, fresh: bool, taught: bool = False
) -> Tensor:
    """E over tokens of the behaviour policy of the loss's gradient, advantages 0; row i samples token i."""
    log_p = logits.log_softmax(-1)
    column, everywhere = log_p[:, None], torch.ones(1, 1, dtype=torch.bool)
    before = column.detach() if fresh else BEFORE.log()[:, None]
    entropy = -(log_p.exp() * log_p).sum().expand(3, 1)
    full = (log_p.exp() * (log_p - REFERENCE.log())).sum().expand(3, 1)
    total = torch.zeros((), dtype=torch.float64)
    for row, probability in enumerate(BEHAVIOUR.tolist()):
        rows = slice(row, row + 1)
        nothing = torch.zeros(1, 1)
        correction = Correction(weights=weights[rows, None], loss_mask=everywhere, metrics={})
        others = REFERENCE[rows, None].log()
        scored = rows_of(before[rows], reference_log_probs=others, teacher_log_probs=others if taught else None)
        estimate = Advantages(advantages=nothing, returns=nothing, baselines=nothing)
        own = replace(scored, correction=correction, estimate=estimate)
        statistics = replace(own.statistics, log_probs=column[rows], entropy=entropy[rows], full_kl=full[rows])
        statistics = replace(statistics, teacher_divergence=full[rows])
        value, _ = made.loss(statistics, own, normalizer=None, beta=1.0, teacher_coefficient=0.5, ratio_is_one=fresh)
        total = total + probability * value
    return torch.autograd.grad(total, logits)[0]


def present(*, fresh: bool) -> tuple[Tensor, Tensor]:
    """Logits of the policy, and the untruncated weights of the policy before the updates over the behaviour."""
    start = BEFORE.log() if fresh else torch.tensor([0.2, -0.5, 1.1], dtype=torch.float64)
    return start.clone().requires_grad_(), BEFORE / BEHAVIOUR


@pytest.mark.parametrize("fresh", [True, False], ids=["one forward", "later update"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k1+", "k3", "k3+", "full", "full+", "abs"])
def test_the_kl_penalty_on_stale_tokens_has_the_gradient_of_its_divergence(estimator: str, fresh: bool) -> None:
    logits, weights = present(fresh=fresh)
    found = expected_gradient(objective(coefficient=1.0, estimator=estimator), logits, weights=weights, fresh=fresh)
    p, q = logits.softmax(-1), REFERENCE
    divergence = {"k1": 0.0 * p, "k3": q * (q / p).log(), "abs": (p - q).abs()}.get(estimator, p * (p / q).log())
    torch.testing.assert_close(found, torch.autograd.grad(divergence.sum(), logits)[0], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("fresh", [True, False], ids=["one forward", "later update"])
@pytest.mark.parametrize("form", ["sampled", "reverse_kl"])
def test_a_teacher_adds_its_divergence_to_the_penalty(form: str, fresh: bool) -> None:
    logits, weights = present(fresh=fresh)
    p = logits.softmax(-1)
    (divergence,) = torch.autograd.grad((p * (p / REFERENCE).log()).sum(), logits)
    alone = expected_gradient(objective(teacher=form), logits, weights=weights, fresh=fresh, taught=True)
    torch.testing.assert_close(alone, 0.5 * divergence, rtol=1e-6, atol=1e-12)
    both = objective(teacher=form, coefficient=1.0, estimator="full")
    found = expected_gradient(both, logits, weights=weights, fresh=fresh, taught=True)
    torch.testing.assert_close(found, 1.5 * divergence, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("fresh", [True, False], ids=["one forward", "later update"])
@pytest.mark.parametrize("term", ["entropy", "full"])
def test_what_no_sampled_token_enters_is_exact_whatever_the_weights(term: str, fresh: bool) -> None:
    logits, weights = present(fresh=fresh)
    made = objective(entropy=1.0) if term == "entropy" else objective(coefficient=1.0, estimator="full")
    found = expected_gradient(made, logits, weights=weights.clamp(max=0.8), fresh=fresh)
    p = logits.softmax(-1)
    exact = (p * p.log()).sum() if term == "entropy" else (p * (p / REFERENCE).log()).sum()
    torch.testing.assert_close(found, torch.autograd.grad(exact, logits)[0], rtol=1e-6, atol=1e-12)


def test_the_random_tokens_of_a_loss_depend_on_the_seed_of_the_run_and_the_step() -> None:
    batch = rows_of(torch.zeros(4, 64))
    advantages = torch.ones(4, 64)
    scored = replace(batch, estimate=Advantages(advantages=advantages, returns=advantages, baselines=advantages))
    engine = cast(TrainingEngine[nn.Module], SimpleNamespace(device="cpu", groups=SimpleNamespace(peers=None)))

    def selected(seed: int, step: int) -> Tensor:
        algorithm = AlgorithmSettings(loss="kl_cov", loss_options={"covariance_fraction": 0.2})
        made = PolicyObjective(ObjectiveSettings(algorithm=algorithm, response_tokens=64, seed=seed))
        (mask,) = made.select_tokens([scored.log_probs], [scored], engine, step=step)
        return mask

    masks = [selected(seed, step) for seed, step in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert torch.equal(masks[0], selected(0, 0))
    assert all(not torch.equal(one, other) for one, other in combinations(masks, 2))
