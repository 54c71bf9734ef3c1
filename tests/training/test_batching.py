from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.worker import RolloutBatch
from agentrl.training.settings import AlgorithmSettings, CorrectionSettings
from agentrl.training.step.batching import (
    MicroBatch,
    pack,
    packed_tokens,
    pieces,
    plan_passes,
    plan_step,
    split_updates,
)
from agentrl.training.step.objective_settings import ObjectiveSettings
from agentrl.trajectory import Group, Segment, Trajectory
from agentrl_envs.types import Ended, Problem

PROBLEM = Problem(id="p", statement="?", answer="1", source="made")


def objective(**algorithm: Any) -> ObjectiveSettings:
    return ObjectiveSettings(algorithm=AlgorithmSettings(**algorithm), response_tokens=20)


def row(length: int, *, group: int = 0, sample: int = 0) -> Trajectory:
    """One prompt token and ``length - 1`` sampled ones."""
    tokens = tuple(range(length - 1))
    segment = Segment(
        origin="model", token_ids=tokens, text="", log_probs=(-1.0,) * len(tokens), version_spans=((0, len(tokens)),)
    )
    return Trajectory(
        problem=PROBLEM,
        step=1,
        group=group,
        sample=sample,
        prompt_ids=(9,),
        segments=(segment,),
        ended=Ended.STOPPED,
    )


def group(index: int, *lengths: int) -> Group:
    rows = tuple(row(length, group=index, sample=sample) for sample, length in enumerate(lengths))
    return Group(problem=PROBLEM, index=index, trajectories=rows)


def rollout_batch(*groups: Group, no_loss: frozenset[tuple[int, int]] = frozenset()) -> RolloutBatch:
    return RolloutBatch(step=4, version=0, played=groups, groups=groups, no_loss=no_loss, metrics={"reward/mean": 0.5})


def shape(plan: list[list[MicroBatch]]) -> list[list[tuple[list[int], bool]]]:
    """Lengths of the rows and whether they are dummies, by rank and micro-batch."""
    return [[([item.length for item in micro.rows], micro.dummy) for micro in rank] for rank in plan]


def test_the_fewest_micro_batches_within_the_budget_cost_nearly_the_same() -> None:
    units = [[row(length)] for length in (3, 10, 4, 9, 5)]
    assert shape(pack(units, 18, ranks=1)) == [[([10, 4, 3], False), ([9, 5], False)]]


def test_equal_prompts_count_once() -> None:
    rows = [row(5), row(4), row(3)]  # one prompt token each, the same
    assert packed_tokens(rows) == 1 + 4 + 3 + 2
    assert [[item.length for item in piece] for piece in pieces(rows, 8)] == [[5, 4], [3]]
    assert [[item.length for item in piece] for piece in pieces(rows, 1)] == [[5], [4], [3]]


def test_attention_makes_one_long_trajectory_as_costly_as_many_short_ones() -> None:
    units = [[row(length)] for length in (12, 8, 4, 4)]
    assert shape(pack(units, 32, ranks=2)) == [[([12, 4], False)], [([8, 4], False)]]
    # 12 + 12 * 12 / 4 = 48 against 24, 8 and 8.
    by_cost = shape(pack(units, 32, ranks=2, attention_length=4))
    assert by_cost == [[([12], False)], [([8, 4, 4], False)]]


def test_a_unit_larger_than_the_budget_gets_a_micro_batch_of_its_own() -> None:
    assert shape(pack([[row(6), row(6)], [row(2)]], 8, ranks=1)) == [[([6, 6], False), ([2], False)]]


def test_costly_micro_batches_meet_on_all_ranks_and_dummies_make_the_numbers_equal() -> None:
    units = [[row(length)] for length in (9, 8, 4)]
    # The shortest row of all is rank 0's dummy.
    assert shape(pack(units, 9, ranks=2)) == [
        [([9], False), ([4], True)],
        [([8], False), ([4], False)],
    ]


def test_a_single_unit_on_two_ranks_leaves_the_other_a_dummy() -> None:
    assert shape(pack([[row(5), row(3)]], 100, ranks=2)) == [[([5, 3], False)], [([3], True)]]


def test_few_units_are_spread_over_the_ranks() -> None:
    units = [[row(4)] for _ in range(6)]
    plan = shape(pack(units, 1000, ranks=3))
    assert [[lengths for lengths, _ in rank] for rank in plan] == [[[4, 4]]] * 3
    assert not any(dummy for rank in plan for _, dummy in rank)


@given(
    st.lists(st.lists(st.integers(2, 12), min_size=1, max_size=4), min_size=1, max_size=12),
    st.integers(4, 80),
    st.integers(1, 4),
)
def test_every_row_is_once_in_the_plan_whole_within_the_budget(
    lengths: list[list[int]], budget: int, ranks: int
) -> None:
    units = [group(index, *one).trajectories for index, one in enumerate(lengths)]
    plan = pack(units, budget, ranks=ranks)
    assert len({len(rank) for rank in plan}) == 1
    real = [micro for rank in plan for micro in rank if not micro.dummy]
    rows = [item for micro in real for item in micro.rows]
    assert sorted((item.group, item.sample) for item in rows) == sorted(
        (item.group, item.sample) for unit in units for item in unit
    )
    for micro in real:
        inside = {item.group for item in micro.rows}
        assert len(micro.rows) == sum(len(units[index]) for index in inside)
        # Every row has the same prompt of one token, which counts once for each unit.
        size = len(inside) + sum(item.length - 1 for item in micro.rows)
        assert size <= budget or len(inside) == 1
    if len(units) >= ranks:
        assert all(any(not micro.dummy for micro in rank) for rank in plan)


def test_tokens_and_sequences_are_those_of_all_ranks_and_of_the_loss() -> None:
    made = rollout_batch(group(0, 5, 4), group(1, 3, 7), no_loss=frozenset({(1, 1)}))
    plans = plan_step(made, objective(), budget=100, ranks=2)
    # Model tokens 4 + 3 + 2; the row of 6 model tokens is out of the loss.
    assert [(update.tokens, update.sequences) for plan in plans for update in plan.updates] == [(9, 3), (9, 3)]
    assert [plan.metrics for plan in plans] == [{"reward/mean": 0.5}, {}]
    assert all(plan.passes.one_forward for plan in plans)


def test_a_group_over_the_budget_needs_a_statistics_pass_and_no_head_exact_diagnostic() -> None:
    settings = objective(head_exact_every=1)
    fits, split = (plan_step(rollout_batch(group(0, 5, 5)), settings, budget=size, ranks=1)[0] for size in (9, 8))
    assert (fits.passes.one_forward, fits.head_exact, len(fits.updates[0].micro_batches)) == (True, True, 1)
    assert (split.passes.one_forward, split.head_exact, len(split.updates[0].micro_batches)) == (False, False, 2)


def test_a_group_is_at_home_where_most_of_it_is_trained() -> None:
    whole = plan_step(rollout_batch(group(0, 5, 5), group(1, 5, 5)), objective(normalize="whiten"), budget=5, ranks=2)
    assert [sorted(plan.homes) for plan in whole] == [[0, 1], [0, 1]]
    assert set(whole[0].homes.values()) == {0, 1}  # equal shares of both: one group each
    settings = objective(normalize="whiten", head_exact_every=1)
    for rank, plan in enumerate(plan_step(rollout_batch(group(0, 5, 5), group(1, 5, 5)), settings, budget=10, ranks=2)):
        trained = {item.group for micro in plan.updates[0].micro_batches for item in micro.rows}
        assert [plan.homes[index] for index in trained] == [rank]  # whole groups stay where they are


def test_no_groups_make_no_updates() -> None:
    plans = plan_step(rollout_batch(), objective(head_exact_every=1), budget=10, ranks=2)
    assert [plan.updates for plan in plans] == [(), ()]


@pytest.mark.parametrize(
    ("groups", "updates", "sizes"), [(7, 2, [4, 3]), (2, 4, [1, 1]), (0, 3, []), (6, 3, [2, 2, 2])]
)
def test_updates_share_the_groups(groups: int, updates: int, sizes: list[int]) -> None:
    made = [group(index, 3) for index in range(groups)]
    parts = split_updates(made, updates)
    assert [len(part) for part in parts] == sizes
    assert [item for part in parts for item in part] == made


def reasons(settings: ObjectiveSettings, budget: int = 100) -> tuple[str, ...]:
    plan = plan_passes(settings, group_tokens=50, budget=budget)
    assert plan.one_forward == (not plan.reasons)
    return plan.reasons


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        *({"loss": loss} for loss in ("ppo", "gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl")),
        *({"estimator": name} for name in ("grpo", "rloo", "opo", "ogb", "remax", "otb_total", "dr_grpo")),
    ],
)
def test_one_forward_where_everything_lies_in_a_group(algorithm: dict[str, str]) -> None:
    assert reasons(objective(**algorithm)) == ()


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({"updates_per_step": 2}, "2 updates on the same trajectories"),
        ({"normalize": "whiten"}, "whitening takes the mean over the whole step"),
        ({"estimator": "reinforce_pp"}, "whitening takes the mean over the whole step"),
        ({"estimator": "gpg"}, "its rule looks at the groups of the whole step"),
        ({"estimator": "eob"}, "exact energies take a forward and a backward"),
        ({"loss": "clip_cov"}, "the loss clip_cov selects tokens over the whole step"),
        ({"loss": "kl_cov"}, "the loss kl_cov selects tokens over the whole step"),
        ({"estimator": "gae", "estimator_options": {"normalize": None}}, "the critic's values are those before"),
    ],
)
def test_a_statistics_pass_where_an_algorithm_needs_the_step(algorithm: dict[str, Any], reason: str) -> None:
    (said,) = reasons(objective(**algorithm))
    assert said.startswith(reason)


@pytest.mark.parametrize(
    ("correction", "passes"),
    [
        ({"weights": "token"}, 1),
        ({"weights": "sequence", "weight_bound": "icepop"}, 1),
        ({"weights": "token", "self_normalize": True}, 2),
        ({"ratio_mask": "geometric"}, 2),
        ({"divergence_mask": "k3"}, 2),
    ],
)
def test_a_correction_needs_the_step_where_it_masks_or_normalises(correction: dict[str, Any], passes: int) -> None:
    settings = ObjectiveSettings(correction=CorrectionSettings(**correction), response_tokens=20)
    assert len(reasons(settings)) == passes - 1


def test_a_group_that_is_too_large_is_said_beside_other_reasons() -> None:
    first, second = reasons(objective(normalize="whiten"), budget=49)
    assert first.startswith("whitening")
    assert second == "a group of 50 tokens does not fit one micro-batch (training.micro_batch_tokens=49)"
    assert plan_passes(objective(), group_tokens=0, budget=1).describe().startswith("one forward")
