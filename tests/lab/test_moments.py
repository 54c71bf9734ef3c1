"""The laboratory's moments against enumeration, loops and plain autograd."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import AdvantageInputs, compute_advantages
from agentrl.batch import Batch, MicroBatch
from agentrl.errors import SettingsError
from agentrl.lab.measure import (
    GradientMoments,
    GroupGradientProducts,
    TrajectoryGradients,
    TrueGradientProducts,
    compute_problem_advantages,
    covariance_inner_product,
    draw_disjoint_groups,
    measure_problems,
)
from agentrl.lab.sample import ProblemSample, advantage_inputs, build_sample, reason_unusable, row_slices_within_budget
from agentrl.lab.settings import LabSettings, parse_estimator_choices
from agentrl.models.policy import PolicyModel
from agentrl.trajectory import Group, Segment, Trajectory
from agentrl_envs.types import Ended, Problem

VOCABULARY = 3


def make_policy(*, vocabulary: int = VOCABULARY, uniform: bool = False) -> PolicyModel:
    """A random Llama; ``uniform``: its head is 0, so that every token has the same probability."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            initializer_range=0.5,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    if uniform:
        torch.nn.init.zeros_(model.lm_head.weight)
    return PolicyModel(model.eval())


def make_trajectory(sample: int, turns: tuple[tuple[int, ...], ...], reward: float, group: int = 0) -> Trajectory:
    """Turns of tokens with an observation of one token between."""
    segments: list[Segment] = []
    for place, tokens in enumerate(turns):
        last = place == len(turns) - 1
        spans = ((0, len(tokens)),)
        segments.append(
            Segment(origin="model", token_ids=tokens, text="", log_probs=(-1.0,) * len(tokens), version_spans=spans,
                    reward=reward if last else 0.0)
        )  # fmt: skip
        if not last:
            segments.append(Segment(origin="observation", token_ids=(0,), text=""))
    problem = Problem(id=f"p{group}", statement="?", answer="1", source="test")
    return Trajectory(problem=problem, step=0, group=group, sample=sample, prompt_ids=(1, 2), segments=tuple(segments),
                      ended=Ended.ANSWERED)  # fmt: skip


def make_group(trajectories: list[Trajectory]) -> Group:
    return Group(problem=trajectories[0].problem, index=trajectories[0].group, trajectories=tuple(trajectories))


def make_sample(policy: PolicyModel, *, group: int = 0, size: int = 8) -> ProblemSample:
    """Random trajectories of one or two turns and different lengths, rewards 0 and 1."""
    draw = torch.Generator().manual_seed(group + 1)

    def tokens() -> tuple[int, ...]:
        count = int(torch.randint(1, 5, (), generator=draw))
        return tuple(torch.randint(0, policy.head.out_features, (count,), generator=draw).tolist())

    rows = [
        make_trajectory(sample, tuple(tokens() for _ in range(1 + sample % 2)), float(sample % 3 == 0), group)
        for sample in range(size)
    ]
    return build_sample(policy, make_group(rows), temperature=0.8, budget=64, greedy_return=1.0)


def slow_gradient(policy: PolicyModel, sample: ProblemSample, rows: list[int], advantages: Tensor) -> Tensor:
    """(1/N) sum_i sum_t A_it grad ln p_it with the full logits, a token at a time."""
    total = torch.zeros(())
    for place, row in enumerate(rows):
        start = int(sample.batch.prompt_lengths[row])
        logits = policy.causal_lm.lm_head(
            policy.causal_lm.model(input_ids=sample.batch.input_ids[row : row + 1]).last_hidden_state
        )[0]
        log_p = torch.log_softmax(logits / 0.8, dim=-1)
        for t, counts in enumerate(sample.batch.response_mask[row].tolist()):
            if counts:
                total = total + advantages[place, t] * log_p[start + t - 1, sample.batch.response_ids[row, t]]
    gradients = torch.autograd.grad(total / len(rows), list(policy.parameters()))
    return torch.cat([item.flatten() for item in gradients])


def test_micro_batches_count_no_padding() -> None:
    """Rows of 3, 3, 31, 3 and 3 tokens, padded to 31."""
    rows = [make_trajectory(place, ((0,) * (count - 1),), 0.0) for place, count in enumerate((2, 2, 30, 2, 2))]
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories(make_group(rows).trajectories))
    assert (batch.prompt_lengths + batch.response_lengths).tolist() == [3, 3, 31, 3, 3]
    for budget, blocks in ((43, [(0, 5)]), (37, [(0, 3), (3, 5)]), (8, [(0, 2), (2, 3), (3, 5)]), (1, 5)):
        found = [(block.start, block.stop) for block in row_slices_within_budget(batch, budget)]
        assert found == (blocks if isinstance(blocks, list) else [(row, row + 1) for row in range(blocks)])


@pytest.mark.parametrize("estimator", ["rloo", "tir_otb"])
def test_a_bandits_variance_is_that_of_enumeration(estimator: str) -> None:
    """One token, three arms of equal probability, reward 1 for the first: all 9 groups of two, each as likely.

    The head is 0, so only its gradient (onehot - p) h is not: everything is known in closed form.
    """
    policy = make_policy(uniform=True)
    arms = [arm for pair in itertools.product(range(3), repeat=2) for arm in pair]
    rows = [make_trajectory(place, ((arm,),), float(arm == 0)) for place, arm in enumerate(arms)]
    sample = build_sample(policy, make_group(rows), temperature=1.0, budget=64, greedy_return=0.0)
    groups = torch.arange(18).reshape(9, 2)
    (choice,) = parse_estimator_choices([estimator])
    (advantages,) = compute_problem_advantages([sample], [groups], choice)
    gradients = TrajectoryGradients(policy, sample, temperature=1.0)
    (found,) = gradients.products_between_groups(groups, [advantages])

    expected = []
    for first, second in itertools.product(range(3), repeat=2):
        rewards = [float(first == 0), float(second == 0)]
        # Two rows: leave-one-out takes the other's reward; equal energies make the optimal baseline the mean.
        own = [rewards[0] - rewards[1], rewards[1] - rewards[0]]
        factor = 1.0 if estimator == "rloo" else 0.5
        score = [[float(arm == v) - 1 / 3 for v in range(3)] for arm in (first, second)]
        expected.append([sum(factor * own[i] * score[i][v] for i in range(2)) / 2 for v in range(3)])
    mean = [sum(item[v] for item in expected) / 9 for v in range(3)]
    state = policy.causal_lm.model(input_ids=torch.tensor([[1, 2]])).last_hidden_state[0, -1].detach()
    scale = float(state.square().sum())
    variance = scale * sum((item[v] - mean[v]) ** 2 for item in expected for v in range(3)) / 9
    assert found.variance * 8 / 9 == pytest.approx(variance, rel=1e-5)  # 9 groups are all there are
    power = scale * sum(x * x for item in expected for x in item) / 9
    assert float(found.squared.mean()) == pytest.approx(power, rel=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_products_are_those_of_gradients_of_single_tokens(weighted: bool) -> None:
    """Two groups of three: advantages by token and by row, some of them equal, in double precision."""
    policy = make_policy(vocabulary=7).double()
    sample = make_sample(policy)
    draw = torch.Generator().manual_seed(3)
    rows = torch.tensor([[5, 0, 3], [1, 2, 7]])
    shape = (2, 3, sample.batch.response_mask.shape[1])
    ratios = torch.rand(8, shape[-1], generator=draw) + 0.5 if weighted else None
    sample = replace(sample, importance_weights=ratios, distinct_response_index=torch.arange(8))
    by_token = torch.randn(shape, generator=draw)
    by_row = torch.randn(2, 3, 1, generator=draw).expand(shape).clone()
    mixed = torch.stack([by_token[0], by_row[1]])
    gradients = TrajectoryGradients(policy, sample, temperature=0.8)
    factors = torch.ones(8, shape[-1]) if ratios is None else ratios
    scores = torch.stack([slow_gradient(policy, sample, [row], factors[[row]]) for row in range(8)])
    torch.testing.assert_close(gradients.gram, scores @ scores.T, rtol=1e-9, atol=1e-12)
    given = [by_token, by_row, mixed, torch.zeros(shape), by_token.clone()]
    for values, found in zip(given, gradients.products_between_groups(rows, given), strict=True):
        vectors = torch.stack([slow_gradient(policy, sample, chosen.tolist(), one * factors[chosen])
                               for chosen, one in zip(rows, values, strict=True)])  # fmt: skip
        torch.testing.assert_close(found.score_products, vectors @ scores.T, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.squared, vectors.square().sum(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.sum_squared, vectors.sum(0).square().sum(), rtol=1e-5, atol=1e-5)


def test_adapters_are_measured_alone_and_importance_weights_stand_inside_of_energies() -> None:
    """Exact energies are the squared norms of the scores."""
    from agentrl.models.lora import add_adapters
    from agentrl.models.settings import LoRASettings

    whole = make_policy(vocabulary=7)
    adapted = PolicyModel(add_adapters(make_policy(vocabulary=7).causal_lm, LoRASettings(rank=2)))
    for name, item in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(item)
    group = make_group([make_trajectory(row, ((1, 2), (3,)), float(row)) for row in range(4)])
    for policy, correction in ((whole, None), (whole, {"weights": "token"}), (adapted, {"weights": "token"})):
        sample = build_sample(policy, group, temperature=0.8, budget=64, greedy_return=0.0, correction=correction)
        gradients = TrajectoryGradients(policy, sample, temperature=0.8)
        assert gradients.size == sum(item.numel() for item in policy.parameters() if item.requires_grad)
        torch.testing.assert_close(gradients.gram.diagonal().float(), sample.trajectory_energy, rtol=1e-4, atol=1e-6)
        assert (sample.importance_weights is None) is (correction is None)
    ratios = sample.importance_weights
    assert ratios is not None
    mask = sample.batch.response_mask
    wanted = (sample.log_probs - sample.batch.rollout_log_probs).exp().clamp(max=2.0)
    torch.testing.assert_close(ratios[mask], wanted[mask])
    given = advantage_inputs([sample], [torch.tensor([[0, 2]])]).importance_weights
    assert given is not None
    assert torch.equal(given, ratios[[0, 2]])


@pytest.mark.parametrize("weighted", [False, True])
def test_trajectories_that_are_alike_are_computed_once(weighted: bool) -> None:
    """Of eight, four have the tokens of an earlier one. Where the sampler's probabilities count, one of these differs
    in them; one more differs in what the model wrote of its tokens."""
    policy = make_policy(vocabulary=7).double()
    one, two, three, both = ((1, 2), (3,)), ((4,),), ((5, 6),), ((1, 2, 0, 3),)
    written: list[tuple[tuple[int, ...], ...]] = [one, two, one, two, both, three, two, three]
    rows = [make_trajectory(row, turns, float(row % 3 == 0)) for row, turns in enumerate(written)]
    rows[7] = replace(rows[7], segments=(replace(rows[7].segments[0], log_probs=(-1.0, -2.0)),))
    look = partial(build_sample, policy, temperature=0.8, budget=64, greedy_return=0.0,
                   correction={"weights": "token"} if weighted else None)  # fmt: skip
    sample = look(make_group(rows))
    assert sample.distinct_response_index.tolist() == [0, 1, 0, 1, 4, 5, 1, 7 if weighted else 5]
    everyone = replace(sample, distinct_response_index=torch.arange(8))
    groups = torch.tensor([[0, 2, 4, 5], [1, 3, 6, 7]])
    given = [torch.randn(2, 4, sample.batch.response_mask.shape[1], generator=torch.Generator().manual_seed(1))]
    found, wanted = (TrajectoryGradients(policy, item, temperature=0.8) for item in (sample, everyone))
    torch.testing.assert_close(found.gram, wanted.gram, rtol=1e-5, atol=1e-5)
    for own, whole in zip(
        found.products_between_groups(groups, given), wanted.products_between_groups(groups, given), strict=True
    ):
        torch.testing.assert_close(vars(own), vars(whole), rtol=1e-5, atol=1e-5)
    for row, trajectory in enumerate(rows):
        alone = look(make_group([trajectory]))
        width = alone.log_probs.shape[1]
        torch.testing.assert_close(sample.trajectory_energy[row], alone.trajectory_energy[0])
        for name in ("log_probs", "token_energy", "cross_energy", "hidden_norm_squared", "sum_pi_squared"):
            torch.testing.assert_close(getattr(sample, name)[row, :width], getattr(alone, name)[0])
    passes: list[int] = []
    policy.register_forward_pre_hook(lambda _, given: passes.append(len(given[0].response_starts)))
    TrajectoryGradients(policy, sample, temperature=0.8).products_between_groups(groups, given)
    assert passes == [1] * (5 if weighted else 4) + [3, 2]


def test_gradients_that_need_more_memory_than_is_allowed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.lab.measure.SCORE_BYTES", 100)
    policy = make_policy(vocabulary=7)
    with pytest.raises(SettingsError, match=r"the gradients of 8 trajectories with .* lower --samples"):
        TrajectoryGradients(policy, make_sample(policy), temperature=0.8)


def test_products_of_covariances_are_means_over_all_different_trajectories() -> None:
    draw = torch.Generator().manual_seed(1)
    returns = torch.tensor([1.0, 0.0, 0.5, 1.0, -2.0])
    products = torch.randn(2, 5, 5, generator=draw).double()
    for one, found in zip(products, covariance_inner_product(returns, products), strict=True):
        terms = [(returns[i] - returns[j]) * (returns[k] - returns[m]) * one[i, k]
                 for i, j, k, m in itertools.permutations(range(5), 4)]  # fmt: skip
        assert float(found) == pytest.approx(float(sum(terms)) / len(terms))
    with pytest.raises(ValueError, match="needs at least 4"):
        covariance_inner_product(returns[:3], products[:, :3, :3])


def test_products_with_the_true_gradient_use_no_trajectory_twice() -> None:
    """Against loops over groups, and over all choices of four trajectories outside of them."""
    draw = torch.Generator().manual_seed(2)
    scores = torch.randn(8, 3, generator=draw).double()
    returns = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]).double()
    rows = torch.tensor([[0, 1], [2, 7]])
    vectors = torch.randn(1, 2, 3, generator=draw).double()
    truth = TrueGradientProducts(returns, scores @ scores.T)
    along, paired = truth.mean_projections_and_leave_one_out(rows, vectors @ scores.T)
    wanted, same = [], []
    for group, vector in zip(rows.tolist(), vectors[0], strict=True):
        reference = loo_of(scores, returns, [row for row in range(8) if row not in group])
        wanted.append(float(vector @ reference))
        same.append(float(loo_of(scores, returns, group) @ reference))
    assert along.tolist() == pytest.approx([sum(wanted) / 2])
    assert paired == pytest.approx(sum(same) / 2)
    moments = truth.projection_variance_and_squared_mean(rows, vectors @ scores.T)
    assert moments is not None

    def product(first: Tensor, second: Tensor, outside: list[int]) -> float:
        terms = [(returns[i] - returns[j]) * (returns[k] - returns[m]) * (first @ scores[i]) * (second @ scores[k])
                 for i, j, k, m in itertools.permutations(outside, 4)]  # fmt: skip
        return float(sum(terms)) / len(terms)

    squares = [
        product(vector, vector, [row for row in range(8) if row not in group])
        for group, vector in zip(rows.tolist(), vectors[0], strict=True)
    ]
    apart = product(vectors[0, 0], vectors[0, 1], [3, 4, 5, 6])
    assert moments[0].tolist() == pytest.approx([sum(squares) / 2 - apart])
    assert moments[1].tolist() == pytest.approx([apart])
    assert (
        truth.projection_variance_and_squared_mean(torch.arange(8).reshape(2, 4), vectors @ scores.T) is None
    )  # nobody is outside


def loo_of(scores: Tensor, returns: Tensor, rows: list[int]) -> Tensor:
    own = returns[rows]
    rest = (own.sum() - own) / (len(rows) - 1)
    mean: Tensor = ((own - rest)[:, None] * scores[rows]).mean(0)
    return mean


def test_noise_along_the_true_gradient_is_that_of_enumeration() -> None:
    """Scores of two arms, reward 1 for the first: over all samples of six, estimates average to the exact values."""
    arms = torch.tensor([[1.0, 0.5], [-1.0, 0.25]]).double()
    rows = torch.tensor([[0], [1]])
    total, count = torch.zeros(3).double(), 0
    for drawn in itertools.product((0, 1), repeat=6):
        chosen = torch.tensor(drawn)
        returns, scores = (chosen == 0).double(), arms[chosen]
        truth = TrueGradientProducts(returns, scores @ scores.T)
        vectors = (returns[:2, None] * scores[:2])[None]  # a group of one, without a baseline: R s
        moments = truth.projection_variance_and_squared_mean(rows, vectors @ scores.T)
        assert moments is not None
        total += torch.stack([moments[0][0], moments[1][0], torch.tensor(truth.squared)])
        count += 1
    true = 0.25 * (arms[0] - arms[1])  # Cov(R, s) for equal arms
    values = torch.stack([arms[0] @ true, torch.tensor(0.0)])
    assert float(total[0] / count) == pytest.approx(float(values.var(correction=0)))
    assert float(total[1] / count) == pytest.approx(float(values.mean().square()))
    assert float(total[2] / count) == pytest.approx(float(true @ true))


def test_cross_energies_and_exact_energies_are_those_of_loops() -> None:
    policy = make_policy(vocabulary=7)
    sample = make_sample(policy, size=4)
    for row in range(4):
        start = int(sample.batch.prompt_lengths[row])
        hidden = policy.causal_lm.model(input_ids=sample.batch.input_ids[row : row + 1]).last_hidden_state
        p = torch.softmax(policy.causal_lm.lm_head(hidden)[0] / 0.8, dim=-1).detach()
        places = sample.batch.response_mask[row].nonzero().squeeze(-1).tolist()
        deltas = [torch.eye(7)[sample.batch.response_ids[row, t]] - p[start + t - 1] for t in places]
        wanted = [sum(max(0.0, float(deltas[j] @ deltas[k])) for j in range(k + 1)) for k in range(len(places))]
        torch.testing.assert_close(sample.cross_energy[row, places], torch.tensor(wanted), rtol=1e-4, atol=1e-6)
        ones = torch.ones(1, sample.batch.response_mask.shape[1])
        exact = slow_gradient(policy, sample, [row], ones).square().sum().detach()
        torch.testing.assert_close(sample.trajectory_energy[row], exact, rtol=1e-4, atol=1e-6)


def test_groups_are_disjoint_and_depend_on_the_problem() -> None:
    def draw(**changed: int) -> Tensor:
        given: dict[str, int] = {"max_groups": 16, "seed": 0, "problem_index": 3, **changed}
        return draw_disjoint_groups(9, 2, **given)

    assert draw().shape == (4, 2)
    assert len(set(draw().flatten().tolist())) == 8
    assert torch.equal(draw(), draw())
    assert draw(max_groups=2).shape == (2, 2)
    for changed in ({"seed": 1}, {"problem_index": 4}):
        assert not torch.equal(draw(), draw(**changed))


@pytest.mark.parametrize("label", ["tir_otb:leave_one_out=true", "reinforce_pp", "ogb_pooled"])
def test_advantages_are_those_of_single_steps(label: str) -> None:
    """A step holds one group of every problem, which matters to whitening and to baselines of other groups."""
    policy = make_policy(vocabulary=7)
    samples = [make_sample(policy, group=group) for group in range(2)]
    rows = [torch.tensor([[0, 3, 2, 1], [4, 5, 6, 7]]), torch.tensor([[7, 5, 0, 4], [1, 2, 3, 6]])]
    (choice,) = parse_estimator_choices([label])
    found = compute_problem_advantages(samples, rows, choice)
    for group in range(2):
        inputs = advantage_inputs(samples, [own[group : group + 1] for own in rows])
        wanted = compute_advantages(choice.name, inputs, **choice.options).advantages.unflatten(0, (2, 4))
        for index in range(2):
            torch.testing.assert_close(found[index][group], wanted[index][:, : found[index].shape[-1]])


def test_otb_cross_weights_each_token_with_its_cross_energy_as_it_is() -> None:
    policy = make_policy(vocabulary=7)
    sample = make_sample(policy, size=2)
    mask = sample.batch.response_mask
    sample = replace(sample, cross_energy=mask * torch.tensor([[1.0], [3.0]]), importance_weights=mask * 0.5)
    (choice,) = parse_estimator_choices(["otb_cross:tail=self"])
    (found,) = compute_problem_advantages([sample], [torch.tensor([[0, 1]])], choice)
    returns = sample.returns.double()
    baseline = (returns[0] + 3 * returns[1]) / 4
    shared = int(mask.sum(-1).min())
    for row in range(2):
        torch.testing.assert_close(found[0, row][mask[row]][:shared], (returns[row] - baseline).expand(shared))


@pytest.mark.parametrize("label", ["tir_otb", "reinforce_pp", "reinforce_pp_baseline", "ogb_pooled", "remax"])
def test_groups_of_equal_rewards_leave_the_step_as_in_training(label: str) -> None:
    """Before whitening; a pooled baseline keeps them, and a greedy rollout can make the difference."""
    policy = make_policy(vocabulary=7)
    samples = [make_sample(policy, group=group) for group in range(3)]  # rows 0, 3 and 6 are right
    rows = [torch.tensor([[0, 1, 2, 4], [3, 5, 6, 7]]), torch.tensor([[1, 2, 4, 5], [0, 3, 6, 7]]),
            torch.tensor([[5, 0, 2, 7], [1, 3, 4, 6]])]  # fmt: skip
    (choice,) = parse_estimator_choices([label])
    found = compute_problem_advantages(samples, rows, choice)
    kept = [0, 2] if label not in ("ogb_pooled", "remax") else [0, 1, 2]  # in the first step
    inputs = advantage_inputs([samples[index] for index in kept], [rows[index][:1] for index in kept])
    wanted = compute_advantages(choice.name, inputs, **choice.options).advantages.unflatten(0, (len(kept), 4))
    for place, index in enumerate(kept):
        torch.testing.assert_close(found[index][0], wanted[place][:, : found[index].shape[-1]])
    if 1 not in kept:
        assert not found[1][0].any()
        assert found[1][1].any()


def test_everything_the_measurement_says_is_that_of_loops() -> None:
    policy = make_policy(vocabulary=7).double()
    samples = [make_sample(policy, group=group, size=10) for group in range(2)]
    choices = parse_estimator_choices(["rloo", "tir_otb"])
    lab = LabSettings(samples=10, group_sizes=(2, 3), groups=3, choices=choices, head=True)
    both = list(measure_problems(policy, samples, [4, 9], lab, temperature=0.8, seed=5))
    assert list(measure_problems(policy, samples, [4, 9], lab, temperature=0.8, seed=5, skip={4})) == both[1:]
    for number, sample, (index, moments) in zip((4, 9), samples, both, strict=True):
        assert samples[index] is sample
        every = torch.stack([slow_gradient(policy, sample, [row], torch.ones(1, 99)) for row in range(10)])
        for size, choice in itertools.product((2, 3), choices):
            rows = draw_disjoint_groups(10, size, max_groups=3, seed=5, problem_index=number)
            (values,) = compute_problem_advantages([sample], [rows], choice)
            vectors = torch.stack([slow_gradient(policy, sample, chosen.tolist(), one)
                                   for chosen, one in zip(rows, values, strict=True)])  # fmt: skip
            head = vectors[:, -policy.head.weight.numel() :]  # untied: the last parameter
            truth = TrueGradientProducts(sample.returns, every @ every.T)
            products = (vectors @ every.T)[None]
            along, paired = truth.mean_projections_and_leave_one_out(rows, products)
            directional = truth.projection_variance_and_squared_mean(rows, products)
            assert directional is not None
            pairs = [float(a @ b) for a, b in itertools.permutations(vectors, 2)]
            energies = sample.token_energy[rows.flatten()].double() * values.flatten(0, 1).square()
            wanted = GradientMoments(
                variance=float(vectors.var(0).sum()),
                mean_squared=sum(pairs) / len(pairs),
                along=float(along),
                reference_squared=truth.squared,
                reference_along=paired,
                along_variance=float(directional[0]),
                along_squared=float(directional[1]),
                head_variance=float(head.var(0).sum()),
                diagonal=float(energies.sum()) / (3 * size**2),
            )
            found = moments[size][choice.label]
            assert vars(found) == pytest.approx(vars(wanted), rel=1e-5, abs=1e-7)
            if choice.name == "rloo":
                assert found.along == pytest.approx(found.reference_along)


def test_the_variance_of_groups_is_unbiased_over_all_divisions() -> None:
    """Four vectors in every way to make two pairs of group means: the mean variance is the population's for N = 2."""
    vectors = torch.tensor([[1.0, 0.0], [3.0, 1.0], [-2.0, 4.0], [0.0, 0.5]]).double()
    variances = []
    for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))):
        means = torch.stack([vectors[list(pair)].mean(0) for pair in pairs])
        products = GroupGradientProducts(
            score_products=means @ vectors.T, squared=means.square().sum(1), sum_squared=means.sum(0).square().sum()
        )
        assert products.unbiased_squared_norm_of_expected_gradient == pytest.approx(float(means[0] @ means[1]))
        variances.append(products.variance)
    assert sum(variances) / 3 == pytest.approx(float(vectors.var(0).sum()) / 2)


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1, 0, 0, 1, 1], None),
        ([1, 0], "too few usable trajectories"),
        ([1] * 4, "equal rewards"),
        ([0] * 4 + [1], "equal rewards"),  # they differ only in what is cut off
    ],
)
def test_problems_that_cannot_be_measured(rewards: list[float], reason: str | None) -> None:
    group = make_group([make_trajectory(place, ((1,),), reward) for place, reward in enumerate(rewards)])
    assert reason_unusable(group, size=4) == reason


def test_inputs_hold_everything_that_rollouts_have() -> None:
    policy = make_policy(vocabulary=7)
    sample = make_sample(policy)
    inputs: AdvantageInputs = advantage_inputs([sample], [torch.tensor([[1, 4]])])
    missing = {name for name, value in vars(inputs).items() if value is None}
    # On-policy, without a critic, and each rollout is one row.
    of_branches = {"samples", "branches", "parents", "forks", "path_weights"}
    assert missing == {"importance_weights", "loss_mask", "values", "bootstrap_values"} | of_branches
