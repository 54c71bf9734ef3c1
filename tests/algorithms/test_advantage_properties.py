"""Properties of all estimators on random batches, and agreement with the slow ones of `slow_advantages`."""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from algorithms.slow_advantages import BY_INDEX, SCALAR, Slow, slow_advantages
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algorithms import ESTIMATORS, AdvantageInputs, Advantages, compute_advantages, estimator_needs

ALL = (*SCALAR, *BY_INDEX, "ogb_pooled", "reinforce_pp", "gae")
WEIGHTED = ("opo", "ogb", "eob", *BY_INDEX)  # weighted means, which keep sum (W + eps) A = 0
GROUP_BASED = tuple(name for name in ALL if ESTIMATORS[name].group_based)
CHOICES: dict[str, list[object]] = {
    "siblings": ["none"],  # forked rollouts are tested in test_forked_rollouts
    "sibling_pool": [1.0],
    "normalize": [None, "group_std", "whiten"],
    "tail": ["zero", "carry", "self"],
    "leave_one_out": [False, True],
    "energy": ["logit_proxy", "length", "head_exact"],
    "gamma": [1.0, 0.9, 0.0],
    "lam": [1.0, 0.8],
    "epsilon": [1e-8, 1e-3],
    "pool": [4.0, 0.5],
    "loss_aggregation": ["token_mean", "seq_mean_token_mean"],
}
PER_ROW = ("groups", "trajectory_energy", "bootstrap_values", "greedy_returns")


@dataclass
class Case:
    estimator: str
    inputs: AdvantageInputs
    options: dict[str, object]

    def results(self, inputs: AdvantageInputs | None = None) -> Advantages:
        return compute_advantages(self.estimator, inputs or self.inputs, **self.options)

    def run(self, inputs: AdvantageInputs | None = None) -> Tensor:
        return self.results(inputs).advantages


@st.composite
def masks(draw: st.DrawFn, contiguous: bool = False) -> Tensor:
    rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    if contiguous:
        lengths = draw(st.lists(st.integers(1, width), min_size=rows, max_size=rows))
        return torch.tensor([[t < length for t in range(width)] for length in lengths])
    positions = st.sets(st.integers(0, width - 1), min_size=1)
    chosen = draw(st.lists(positions, min_size=rows, max_size=rows))
    return torch.tensor([[t in row for t in range(width)] for row in chosen])


@st.composite
def inputs_for(draw: st.DrawFn, mask: Tensor) -> AdvantageInputs:
    """Several rewards a row, some groups of one, zero energies, rejected tokens, and garbage off the mask."""
    rows, width = mask.shape
    groups = torch.tensor(draw(st.lists(st.sampled_from([-3, 0, 12, 2**40]), min_size=rows, max_size=rows)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def noise(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def tokens(fill: float, values: Tensor) -> Tensor:
        return torch.where(mask, values, fill)

    rewards = torch.randint(-1, 3, (rows, width), generator=generator).double() / draw(st.sampled_from([1, 4]))
    energy_scale = draw(st.sampled_from([1.0, 1e-6, 1e3, 0.0]))
    weights = tokens(torch.inf, noise(rows, width).mul(3).round() / 2) if draw(st.booleans()) else None
    kept = (noise(rows, width) < 0.7) if draw(st.booleans()) else None
    return AdvantageInputs(
        rewards=tokens(torch.nan, rewards),
        response_mask=mask,
        groups=groups,
        token_energy=tokens(torch.nan, noise(rows, width) * energy_scale),
        hidden_norm_squared=tokens(-torch.inf, noise(rows, width) * 40),
        importance_weights=weights,
        loss_mask=kept,
        trajectory_energy=noise(rows) * energy_scale,
        values=tokens(torch.nan, noise(rows, width) - 0.5),
        bootstrap_values=(noise(rows) - 0.5).round(decimals=1) if draw(st.booleans()) else None,
        greedy_returns=noise(rows),
    )


@st.composite
def cases(draw: st.DrawFn, estimators: tuple[str, ...] = ALL, contiguous: bool = False, **fixed: object) -> Case:
    """A random batch and a random value of every option that the estimator has, or the one that is fixed."""
    estimator = draw(st.sampled_from(estimators))
    choices = CHOICES | ({"energy": ["exact"]} if estimator == "eob" else {})
    options = {
        name: fixed.get(name, draw(st.sampled_from(choices[name]))) for name in ESTIMATORS.option_names(estimator)
    }
    return Case(estimator, draw(inputs_for(draw(masks(contiguous)))), options)


def take(inputs: AdvantageInputs, rows: Tensor) -> AdvantageInputs:
    return AdvantageInputs(**{name: None if t is None else t[rows] for name, t in vars(inputs).items()})


def same(left: Tensor, right: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def test_every_built_in_estimator_is_covered_here():
    built_in = {
        name for name in ESTIMATORS.names() if ESTIMATORS[name].function.__module__.startswith("agentrl.algorithms")
    }
    assert built_in == {*ALL, "none"}


@pytest.mark.parametrize("estimator", ALL)
def test_agreement_with_loops_in_rational_numbers(estimator):
    @settings(deadline=None, max_examples=40)
    @given(case=cases(estimators=(estimator,)))
    def check(case: Case) -> None:
        found = case.results()
        advantages, returns, baselines = slow_advantages(case.estimator, case.inputs, case.options)
        same(found.returns, returns, 1e-10)
        same(found.baselines, baselines, 1e-10)
        same(found.advantages, advantages, 1e-10)

    check()


@settings(deadline=None, max_examples=150)
@given(case=cases(), seed=st.integers(0, 100))
def test_row_order_does_not_matter(case, seed):
    rows = torch.randperm(case.inputs.groups.numel(), generator=torch.Generator().manual_seed(seed))
    same(case.run(take(case.inputs, rows)), case.run()[rows])


@settings(deadline=None, max_examples=80)
@given(case=cases(), shift=st.integers(-(10**6), 10**6))
def test_names_and_order_of_groups_do_not_matter(case, shift):
    same(case.run(replace(case.inputs, groups=shift - case.inputs.groups)), case.run())


@settings(deadline=None, max_examples=150)
@given(case=cases(), left=st.integers(0, 3), right=st.integers(0, 3), garbage=st.sampled_from([0.0, torch.nan]))
def test_padding_on_either_side_does_not_matter(case, left, right, garbage):
    padded = {}
    for name, tensor in vars(case.inputs).items():
        if tensor is None or name in PER_ROW:
            padded[name] = tensor
            continue
        fill = False if tensor.dtype == torch.bool else garbage
        padded[name] = torch.nn.functional.pad(tensor, (left, right), value=fill)
    width = case.inputs.rewards.shape[1]
    found = case.run(AdvantageInputs(**padded))
    same(found[:, left : left + width], case.run())
    assert float(found[:, :left].abs().sum() + found[:, left + width :].abs().sum()) == 0.0


@settings(deadline=None, max_examples=150)
@given(case=cases())
def test_a_split_into_whole_groups_gives_the_same_unless_the_step_is_needed(case):
    if estimator_needs(case.estimator, **case.options).step_wide:
        case.options["normalize"] = None
        if case.estimator == "ogb_pooled":
            return  # it takes its baseline from the other groups, too
    whole = case.run()
    for group in case.inputs.groups.unique():
        rows = (case.inputs.groups == group).nonzero().squeeze(-1)
        part, own = case.run(take(case.inputs, rows)), whole[rows]
        if case.estimator == "gpg":  # c of one group: 1, of all: the share of groups that differ
            part, own = part / part.abs().sum().clamp(min=1e-9), own / own.abs().sum().clamp(min=1e-9)
        same(part, own, 1e-12)


@settings(deadline=None, max_examples=100)
@given(case=cases(contiguous=True, estimators=("otb",)))
def test_tir_otb_is_otb_on_contiguous_masks(case):
    by_index = compute_advantages("tir_otb", case.inputs, **case.options).advantages
    same(by_index, case.run(), 1e-12)


@settings(deadline=None, max_examples=150)
@given(case=cases())
def test_what_stands_off_the_mask_reaches_nothing(case):
    mask = case.inputs.response_mask
    clean = {
        name: t if t is None or name in PER_ROW or t.dtype == torch.bool else torch.where(mask, t, 0.0)
        for name, t in vars(case.inputs).items()
    }
    result = case.results()
    for field in fields(result):
        tensor = getattr(result, field.name)
        assert bool(torch.isfinite(tensor).all())
        assert bool((tensor[~mask] == 0).all())
    assert torch.equal(result.advantages, case.run(AdvantageInputs(**clean)))


@settings(deadline=None, max_examples=120)
@given(case=cases(estimators=GROUP_BASED, gamma=1.0, tail="self"), shift=st.sampled_from([-2.0, 0.5, 3.0]))
def test_a_shift_of_all_outcomes_changes_nothing_where_a_baseline_is_shared(case, shift):
    """The reward of every trajectory moves by a constant. Not so at tails that are 0, and in groups of one."""
    mask = case.inputs.response_mask
    last = mask.shape[1] - 1 - mask.flip(-1).int().argmax(-1)
    moved = case.inputs.rewards.clone()
    moved[torch.arange(len(last)), last] += shift
    sizes = torch.stack([(case.inputs.groups == group).sum() for group in case.inputs.groups])
    if case.options["normalize"] == "whiten":
        case.options["normalize"] = None  # the groups of one would move the mean of all
    shared = sizes > 1
    same(
        case.run(replace(case.inputs, rewards=moved))[shared],
        case.run()[shared],
        1e-7 if "grpo" in case.estimator else 1e-9,
    )


@settings(deadline=None, max_examples=150)
@given(case=cases(estimators=GROUP_BASED, tail="self", gamma=1.0), reward=st.sampled_from([1.0, 0.7, -0.1, 1e6]))
def test_a_group_of_equal_outcomes_has_exactly_no_advantage(case, reward):
    mask = case.inputs.response_mask
    last = mask.shape[1] - 1 - mask.flip(-1).int().argmax(-1)
    rewards = torch.zeros_like(mask, dtype=torch.float64)
    rewards[torch.arange(len(last)), last] = reward
    everyone = torch.zeros_like(case.inputs.groups)
    if len(last) > 1:
        result = case.run(replace(case.inputs, rewards=rewards, groups=everyone))
        assert float(result.abs().max()) == 0.0


@settings(deadline=None, max_examples=150)
@given(case=cases(estimators=WEIGHTED, normalize=None, leave_one_out=False))
def test_weighted_advantages_sum_to_zero_over_whatever_shares_a_baseline(case):
    slow = Slow(case.inputs, case.options)
    advantages = case.run()
    rows = [row[mask].tolist() for row, mask in zip(advantages, case.inputs.response_mask, strict=True)]
    token = case.estimator in BY_INDEX
    weights = slow.token_weights(case.estimator) if token else slow.trajectory_weights(case.estimator)
    for members in {tuple(group) for group in slow.group if len(group) > 1}:
        for column in range(case.inputs.rewards.shape[1] if token else 1):
            if not token:
                pairs = [(float(weights[i]), rows[i][0]) for i in members]
            elif case.estimator == "otb":
                here = [(i, slow.places[i].index(column)) for i in members if column in slow.places[i]]
                pairs = [(float(weights[i][k]), rows[i][k]) for i, k in here]
            else:
                pairs = [(float(weights[i][column]), rows[i][column]) for i in members if len(rows[i]) > column]
            if len(pairs) >= 2:
                total = sum(weight for weight, _ in pairs)
                assert sum(weight * value for weight, value in pairs) == pytest.approx(
                    0.0, abs=1e-12 * max(total, 1e-30)
                )


@settings(deadline=None, max_examples=80)
@given(case=cases(estimators=("ogb", "otb", "tir_otb", "otb_isolated", "otb_total")))
def test_a_zero_weight_and_a_loss_mask_reject_alike(case):
    mask = case.inputs.response_mask
    kept = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    zeroed = replace(case.inputs, importance_weights=kept.double(), loss_mask=None)
    masked = replace(case.inputs, importance_weights=None, loss_mask=kept)
    assert torch.equal(case.run(zeroed), case.run(masked))


@settings(deadline=None, max_examples=60)
@given(case=cases(estimators=("opo",)))
def test_opo_is_ogb_with_the_length_for_energy(case):
    free = replace(case.inputs, importance_weights=None, loss_mask=None)
    same(case.run(free), compute_advantages("ogb", free, energy="length", **case.options).advantages, 1e-12)


@settings(deadline=None, max_examples=60)
@given(case=cases(estimators=("gae",), lam=1.0, normalize=None))
def test_gae_with_lambda_one_is_the_return_minus_the_value(case):
    ended = replace(case.inputs, bootstrap_values=None)
    returns = compute_advantages("reinforce_pp", ended, gamma=case.options["gamma"], normalize=None).returns
    result = case.results(ended)
    same(result.returns, returns, 1e-12)
    same(result.advantages, returns - result.baselines, 1e-12)
