"""Properties of the estimators on random batches, and agreement with a reference made of loops."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algorithms import AdvantageInputs, compute_advantages

ESTIMATORS = ("tir_otb", "otb", "grpo", "rloo")
EPSILON = 1e-8


@dataclass
class Case:
    estimator: str
    inputs: AdvantageInputs
    options: dict[str, object]

    def run(self, inputs: AdvantageInputs | None = None) -> Tensor:
        return compute_advantages(self.estimator, inputs or self.inputs, **self.options).advantages


@st.composite
def cases(draw: st.DrawFn, contiguous: bool = False, estimators: tuple[str, ...] = ESTIMATORS) -> Case:
    """A random batch with gaps, several rewards a row, some groups of one, and garbage off the mask."""
    rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    if contiguous:
        lengths = draw(st.lists(st.integers(1, width), min_size=rows, max_size=rows))
        mask = torch.tensor([[t < length for t in range(width)] for length in lengths])
    else:
        positions = st.sets(st.integers(0, width - 1), min_size=1)
        chosen = draw(st.lists(positions, min_size=rows, max_size=rows))
        mask = torch.tensor([[t in row for t in range(width)] for row in chosen])
    groups = torch.tensor(draw(st.lists(st.sampled_from([-3, 0, 12, 2**40]), min_size=rows, max_size=rows)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def noise(fill: float) -> Tensor:
        return torch.where(mask, torch.rand(rows, width, generator=generator, dtype=torch.float64), fill)

    rewards = torch.where(mask, torch.randint(-1, 3, (rows, width), generator=generator).double(), torch.nan)
    energy = noise(torch.nan) * draw(st.sampled_from([1.0, 1e-6, 1e3]))
    estimator = draw(st.sampled_from(estimators))
    options: dict[str, object] = {"normalize": draw(st.sampled_from([None, "group_std"]))}
    if estimator.endswith("otb"):
        options |= {
            "tail": draw(st.sampled_from(["zero", "carry", "self"])),
            "leave_one_out": draw(st.booleans()),
            "energy": draw(st.sampled_from(["logit_proxy", "length", "head_exact"])),
            "gamma": draw(st.sampled_from([1.0, 0.9])),
        }
    inputs = AdvantageInputs(
        rewards=rewards,
        response_mask=mask,
        groups=groups,
        token_energy=energy,
        hidden_norm_squared=noise(-torch.inf) + 0.5,
        importance_weights=torch.where(mask, noise(0.0).mul(2).round(), torch.inf) if draw(st.booleans()) else None,
    )
    return Case(estimator, inputs, options)


def take(inputs: AdvantageInputs, rows: Tensor) -> AdvantageInputs:
    return AdvantageInputs(**{name: None if t is None else t[rows] for name, t in vars(inputs).items()})


def same(left: Tensor, right: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=60)
@given(case=cases(), seed=st.integers(0, 100))
def test_row_order_does_not_matter(case, seed):
    rows = torch.randperm(case.inputs.groups.numel(), generator=torch.Generator().manual_seed(seed))
    same(case.run(take(case.inputs, rows)), case.run()[rows])


@settings(deadline=None, max_examples=40)
@given(case=cases(), shift=st.integers(-(10**6), 10**6))
def test_names_of_groups_do_not_matter(case, shift):
    relabelled = AdvantageInputs(**{**vars(case.inputs), "groups": shift - case.inputs.groups})
    same(case.run(relabelled), case.run())


@settings(deadline=None, max_examples=60)
@given(case=cases(), left=st.integers(0, 3), right=st.integers(0, 3), garbage=st.sampled_from([0.0, torch.nan]))
def test_padding_on_either_side_does_not_matter(case, left, right, garbage):
    padded = {}
    for name, tensor in vars(case.inputs).items():
        if tensor is None or name == "groups":
            padded[name] = tensor
            continue
        fill = False if name == "response_mask" else garbage
        padded[name] = torch.nn.functional.pad(tensor, (left, right), value=fill)
    width = case.inputs.rewards.shape[1]
    found = case.run(AdvantageInputs(**padded))
    same(found[:, left : left + width], case.run())
    assert float(found[:, :left].abs().sum() + found[:, left + width :].abs().sum()) == 0.0


@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_a_split_into_whole_groups_gives_the_same(case):
    whole = case.run()
    for group in case.inputs.groups.unique():
        rows = (case.inputs.groups == group).nonzero().squeeze(-1)
        same(case.run(take(case.inputs, rows)), whole[rows], 1e-12)


@settings(deadline=None, max_examples=60)
@given(case=cases(contiguous=True, estimators=("tir_otb",)))
def test_tir_otb_is_otb_on_contiguous_masks(case):
    raw = compute_advantages("otb", case.inputs, **case.options).advantages
    same(case.run(), raw, 1e-12)


@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_what_stands_off_the_mask_reaches_nothing(case):
    mask = case.inputs.response_mask
    clean = {
        name: t if t is None or name in ("response_mask", "groups") else torch.where(mask, t, 0.0)
        for name, t in vars(case.inputs).items()
    }
    result = case.run()
    assert bool(torch.isfinite(result).all())
    assert bool((result[~mask] == 0).all())
    assert torch.equal(result, case.run(AdvantageInputs(**clean)))


# ---- a reference made of loops -------------------------------------------------------------------------------------


def slow_weights(inputs: AdvantageInputs, energy: str) -> list[list[float]]:
    """W_k + eps of every trajectory's model tokens."""
    result = []
    for i, row in enumerate(inputs.response_mask):
        total, weights = 0.0, []
        for t in row.nonzero().squeeze(-1).tolist():
            w = 1.0 if energy == "length" else float(inputs.token_energy[i, t])
            if energy == "head_exact":
                w *= float(inputs.hidden_norm_squared[i, t])
            rho = 1.0 if inputs.importance_weights is None else float(inputs.importance_weights[i, t])
            total += rho * rho * w
            weights.append(total + EPSILON * slow_scale(inputs, i, energy))
        result.append(weights)
    return result


def slow_scale(inputs: AdvantageInputs, row: int, energy: str) -> float:
    if energy != "head_exact":
        return 1.0
    rows = (inputs.groups == inputs.groups[row]).unsqueeze(-1)
    return float(inputs.hidden_norm_squared[rows & inputs.response_mask].mean())


def slow_returns(inputs: AdvantageInputs, gamma: float) -> list[list[float]]:
    result = []
    for i, row in enumerate(inputs.response_mask):
        rewards = [float(inputs.rewards[i, t]) for t in row.nonzero().squeeze(-1).tolist()]
        returns, running = [], 0.0
        for reward in reversed(rewards):
            running = reward + gamma * running
            returns.append(running)
        result.append(returns[::-1])
    return result


def slow_token_baselines(case: Case) -> Tensor:
    """G - b [B, T] of otb and tir_otb, one entry at a time."""
    inputs, options = case.inputs, case.options
    mask, raw = inputs.response_mask, case.estimator == "otb"
    weights, returns = slow_weights(inputs, options["energy"]), slow_returns(inputs, options["gamma"])
    places = [row.nonzero().squeeze(-1).tolist() for row in mask]  # model positions of every row
    # columns[i] maps the shared index (position or compact index) to the compact index
    columns = [{t: k for k, t in enumerate(p)} if raw else {k: k for k in range(len(p))} for p in places]
    result = torch.zeros(mask.shape, dtype=torch.float64)

    def mean(rows: list[int], column: int) -> float:
        total = sum(weights[j][columns[j][column]] for j in rows)
        return sum(weights[j][columns[j][column]] * returns[j][columns[j][column]] for j in rows) / total

    def shared(i: int, column: int) -> float | None:
        members = [j for j in range(len(places)) if inputs.groups[j] == inputs.groups[i] and column in columns[j]]
        if len(members) < 2:
            return None
        return mean([j for j in members if j != i] if options["leave_one_out"] else members, column)

    for i in range(len(places)):
        alone = int((inputs.groups == inputs.groups[i]).sum()) == 1
        for column, k in columns[i].items():
            baseline = shared(i, column)
            if baseline is None:
                earlier = [b for c in range(column) if (b := shared(i, c)) is not None]
                own = {"zero": 0.0, "self": returns[i][k], "carry": earlier[-1] if earlier else 0.0}
                baseline = own[options["tail"]]
            result[i, places[i][k]] = returns[i][k] - (0.0 if alone else baseline)
    return result


@settings(deadline=None, max_examples=150)
@given(case=cases(estimators=("tir_otb", "otb")))
def test_token_baselines_agree_with_loops(case):
    case.options["normalize"] = None
    same(case.run(), slow_token_baselines(case), 1e-10)


@settings(deadline=None, max_examples=60)
@given(case=cases(estimators=("grpo", "rloo")))
def test_scalar_estimators_agree_with_loops(case):
    case.options["normalize"] = None
    mask = case.inputs.response_mask
    totals = [sum(row) for row in slow_rewards(case.inputs)]
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for i, group in enumerate(case.inputs.groups.tolist()):
        members = torch.tensor(
            [r for r, g in zip(totals, case.inputs.groups.tolist(), strict=True) if g == group], dtype=torch.float64
        )
        value = totals[i]
        if len(members) > 1 and case.estimator == "grpo":
            value = (totals[i] - float(members.mean())) / (float(members.std()) + 1e-6)
        elif len(members) > 1:
            value = totals[i] - (float(members.sum()) - totals[i]) / (len(members) - 1)
        expected[i, mask[i]] = value
    same(case.run(), expected, 1e-10)


def slow_rewards(inputs: AdvantageInputs) -> list[list[float]]:
    return [
        [float(inputs.rewards[i, t]) for t in row.nonzero().squeeze(-1).tolist()]
        for i, row in enumerate(inputs.response_mask)
    ]


@settings(deadline=None, max_examples=60)
@given(case=cases(estimators=("tir_otb",)))
def test_weighted_advantages_sum_to_zero_at_every_shared_index(case):
    case.options |= {"normalize": None, "leave_one_out": False}
    advantages, weights = case.run(), slow_weights(case.inputs, case.options["energy"])
    rows = [row[mask].tolist() for row, mask in zip(advantages, case.inputs.response_mask, strict=True)]
    for group in case.inputs.groups.unique().tolist():
        members = [i for i, g in enumerate(case.inputs.groups.tolist()) if g == group]
        for k in range(case.inputs.rewards.shape[1]):
            here = [i for i in members if len(rows[i]) > k]
            if len(here) >= 2:
                total = sum(weights[i][k] for i in here)
                assert sum(weights[i][k] * rows[i][k] for i in here) == pytest.approx(0.0, abs=1e-12 * total)
