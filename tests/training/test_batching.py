from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch import Batch, MicroBatch
from agentrl.training.settings import AlgorithmSettings, CorrectionSettings, KLSettings
from agentrl.training.step import batching
from agentrl.training.step.batching import (
    RankPlan,
    RowCosts,
    Unit,
    describe_passes,
    distribute_alternately,
    pack_into_micro_batches,
    split_group,
    split_into_updates,
    statistics_pass_reasons,
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


def plan_step(groups: Sequence[Group], settings: ObjectiveSettings, **sizes: Any) -> list[RankPlan]:
    return batching.plan_step(groups, settings, step=4, version=0, metrics={"reward/mean": 0.5}, **sizes)


def shape(shares: list[list[Unit]]) -> list[list[list[int]]]:
    """Lengths of the trajectories, by rank and micro-batch."""
    return [[[item.length for item in items] for unit in share for items in unit] for share in shares]


def test_the_fewest_micro_batches_within_the_budget_cost_nearly_the_same() -> None:
    units = [[row(length)] for length in (3, 10, 4, 9, 5)]
    assert shape(distribute_alternately(pack_into_micro_batches(units, 18, ranks=1), ranks=1)) == [[[10, 4, 3], [9, 5]]]


def test_equal_prompts_count_once() -> None:
    rows = [row(5), row(4), row(3)]  # one prompt token each, the same
    assert RowCosts().count_tokens(rows) == 1 + 4 + 3 + 2
    assert [[item.length for item in piece] for piece in split_group(rows, 8)] == [[5, 4], [3]]
    assert [[item.length for item in piece] for piece in split_group(rows, 1)] == [[5], [4], [3]]


def branch(number: int, parent: Trajectory, *ids: int) -> Trajectory:
    """A branch that continues after all tokens of ``parent`` and an observation of two tokens."""
    prompt = (*parent.prompt_ids, *parent.response_ids, 50, 51)
    last = replace(parent.segments[0], token_ids=ids, log_probs=(-1.0,) * len(ids), version_spans=((0, len(ids)),))
    return replace(
        parent, prompt_ids=prompt, segments=(last,), branch=number, parent=parent.branch, fork=parent.model_tokens
    )


def test_the_tokens_before_a_fork_count_once() -> None:
    root = replace(row(5), branches=3)
    rows = [root, branch(1, root, 7, 7, 7), branch(2, root, 8)]
    for order in (rows, rows[::-1]):  # the root's 5 tokens, the observation's 2, then 3 and 1
        micro = MicroBatch.from_trajectories(order)
        assert RowCosts().count_tokens(order) == micro.tokens == micro.budgeted_tokens == 5 + 2 + 3 + 1
    other = replace(row(9, sample=1))
    # The longest rollout comes first: 7 + 3 tokens of a path are more than 9. The budget has room for two of its edges.
    pieces = [[(item.sample, item.branch) for item in piece] for piece in split_group([other, *rows], 10)]
    assert pieces == [[(0, 0), (0, 1)], [(0, 2)], [(1, 0)]]


@pytest.mark.parametrize("how", ["padded", "padded teacher", "eob"])
def test_prefixes_that_every_trajectory_computes_count_for_each(how: str) -> None:
    root = replace(row(20), branches=5, path_weight=1.0, ended=Ended.FORKED)
    leaves = [replace(branch(number, root, 7, 7), path_weight=0.25) for number in range(1, 5)]  # 24 tokens each
    made = Group(problem=PROBLEM, index=0, trajectories=(root, *leaves))
    settings = objective(estimator="eob" if how == "eob" else "tir_otb")
    padded = {"padded_rows": how == "padded", "other_padded_rows": how == "padded teacher"}
    (plan,) = plan_step([made], settings, budget=48, ranks=1, **padded)
    for update in plan.updates:
        for micro in (micro for unit in update for micro in unit):
            batch = Batch.from_micro_batch(micro)
            documents = (batch.row.document_token_indices(*item) for item in enumerate(batch.response_lengths.tolist()))
            # With the packed tokens, one failure would divide the micro-batches by the size of a group.
            assert sum(map(len, documents)) == batch.budgeted_tokens <= 48
    assert ("policy/prefix_sharing" in plan.metrics) == (how != "padded")


def test_attention_makes_one_long_trajectory_as_costly_as_many_short_ones() -> None:
    units = [[row(length)] for length in (12, 8, 4, 4)]
    assert shape(distribute_alternately(pack_into_micro_batches(units, 32, ranks=2), ranks=2)) == [[[12, 4]], [[8, 4]]]
    # 12 + 12 * 12 / 4 = 48 against 24, 8 and 8.
    by_cost = shape(
        distribute_alternately(pack_into_micro_batches(units, 32, ranks=2, costs=RowCosts(attention_length=4)), ranks=2)
    )
    assert by_cost == [[[12]], [[8, 4, 4]]]


def test_a_unit_larger_than_the_budget_gets_a_micro_batch_of_its_own() -> None:
    assert shape(
        distribute_alternately(pack_into_micro_batches([[row(6), row(6)], [row(2)]], 8, ranks=1), ranks=1)
    ) == [[[6, 6], [2]]]


def test_costly_micro_batches_meet_on_all_ranks() -> None:
    units = [[row(length)] for length in (9, 8, 4)]
    assert shape(distribute_alternately(pack_into_micro_batches(units, 9, ranks=2), ranks=2)) == [[[9]], [[8], [4]]]


def counted(plan: RankPlan) -> list[tuple[int, bool]]:
    """Tokens of each micro-batch, and whether it is counted."""
    return [(micro.tokens, micro.counted) for update in plan.updates for unit in update for micro in unit]


def test_a_rank_with_fewer_micro_batches_repeats_the_shortest_trajectory_without_weight() -> None:
    made = [group(0, 9), group(1, 8), group(2, 4)]
    plans = plan_step(made, objective(), budget=9, ranks=2)
    assert [counted(plan) for plan in plans] == [[(9, True), (4, False)], [(8, True), (4, True)]]
    alone = plan_step([group(0, 5, 3)], objective(), budget=100, ranks=2)
    assert [counted(plan) for plan in alone] == [[(7, True)], [(3, False)]]


def test_few_units_are_spread_over_the_ranks() -> None:
    units = [[row(4)] for _ in range(6)]
    assert shape(distribute_alternately(pack_into_micro_batches(units, 1000, ranks=3), ranks=3)) == [[[4, 4]]] * 3


@given(
    st.lists(st.lists(st.integers(2, 12), min_size=1, max_size=4), min_size=1, max_size=12),
    st.integers(4, 80),
    st.integers(1, 4),
)
def test_every_row_is_once_in_the_plan_whole_within_the_budget(
    lengths: list[list[int]], budget: int, ranks: int
) -> None:
    units = [group(index, *one).trajectories for index, one in enumerate(lengths)]
    shares = distribute_alternately(pack_into_micro_batches(units, budget, ranks=ranks), ranks=ranks)
    bins = [items for share in shares for unit in share for items in unit]
    rows = [item for items in bins for item in items]
    assert sorted((item.group, item.sample) for item in rows) == sorted(
        (item.group, item.sample) for unit in units for item in unit
    )
    for items in bins:
        inside = {item.group for item in items}
        assert len(items) == sum(len(units[index]) for index in inside)
        # Every row has the same prompt of one token, which counts once for each unit.
        size = len(inside) + sum(item.length - 1 for item in items)
        assert size <= budget or len(inside) == 1
    if len(units) >= ranks:
        assert all(shares)


def test_tokens_and_sequences_are_those_of_all_ranks_and_of_the_loss() -> None:
    made = [group(0, 5, 4), replace(group(1, 3, 7), masked=frozenset({(1, 0)}))]
    plans = plan_step(made, objective(), budget=100, ranks=2)
    # Model tokens 4 + 3 + 2; the row of 6 model tokens is out of the loss.
    assert [(plan.tokens, plan.sequences) for plan in plans] == [(9, 3), (9, 3)]
    # 5 + 4 + 3 + 7 tokens with prompts; each rank computes one prompt token for its group of two.
    assert [plan.metrics for plan in plans] == [{"reward/mean": 0.5, "policy/prefix_sharing": 19 / 17}, {}]
    assert not any(plan.statistics_pass for plan in plans)


def test_a_group_over_the_budget_stays_on_one_rank_without_the_head_exact_diagnostic() -> None:
    settings = objective(estimator="grpo", head_exact_every=1)
    fits, split = (plan_step([group(0, 5, 5)], settings, budget=size, ranks=1)[0] for size in (9, 8))
    assert (fits.statistics_pass, fits.head_exact, counted(fits)) == (False, True, [(9, True)])
    assert (split.statistics_pass, split.head_exact, counted(split)) == (False, False, [(5, True), (5, True)])


def units_of(plan: RankPlan) -> tuple[list[list[int]], list[int]]:
    """Tokens of the micro-batches of each unit, and of those that are scored first."""
    (update,) = plan.updates
    return [[micro.tokens for micro in unit] for unit in update], [micro.tokens for micro in plan.scored_first]


def test_a_group_over_the_budget_is_scored_first_but_for_its_last_micro_batch() -> None:
    made = [group(0, 9, 7, 6), group(1, 8), group(2, 4), group(3, 8)]
    energies, rewards = (plan_step(made, objective(estimator=name), budget=9, ranks=2) for name in ("ogb", "grpo"))
    # The shortest trajectory, which weighs nothing, makes the numbers of passes equal.
    assert not any(plan.statistics_pass for plan in energies)
    first, second = map(units_of, energies)
    assert first == ([[9, 7, 6]], [9, 7])
    assert second == ([[8], [8], [4]], [4, 4])
    assert [units_of(plan)[1] for plan in rewards] == [[], []]
    assert [units_of(plan)[0] for plan in rewards] == [first[0], second[0]]


def test_a_statistics_pass_where_the_other_ranks_would_wait_for_that_of_a_large_group() -> None:
    plans = plan_step([group(0, 9, 7, 6), group(1, 4)], objective(estimator="ogb"), budget=9, ranks=2)
    assert all(plan.statistics_pass for plan in plans)
    assert all(len(unit) == 1 for plan in plans for unit in plan.updates[0])


def homes_of(plan: RankPlan) -> list[tuple[int, int]]:
    """(group, home) of each trajectory that is counted."""
    micro_batches = [micro for unit in plan.updates[0] for micro in unit if micro.counted]
    return [
        pair for micro in micro_batches for pair in zip(micro.groups.tolist(), micro.home_ranks.tolist(), strict=True)
    ]


def test_a_group_is_at_home_where_most_of_it_is_trained() -> None:
    whole = plan_step([group(0, 5, 5), group(1, 5, 5)], objective(normalize="whiten"), budget=5, ranks=2)
    homes = {number: home for plan in whole for number, home in homes_of(plan)}
    assert sorted(homes.values()) == [0, 1]  # equal shares of both: one group each
    settings = objective(normalize="whiten", head_exact_every=1)
    for rank, plan in enumerate(plan_step([group(0, 5, 5), group(1, 5, 5)], settings, budget=10, ranks=2)):
        assert {home for _, home in homes_of(plan)} == {rank}  # whole groups stay where they are


def test_no_groups_make_no_updates() -> None:
    plans = plan_step([], objective(head_exact_every=1), budget=10, ranks=2)
    assert [plan.updates for plan in plans] == [(), ()]


@pytest.mark.parametrize(
    ("groups", "updates", "sizes"), [(7, 2, [4, 3]), (2, 4, [1, 1]), (0, 3, []), (6, 3, [2, 2, 2])]
)
def test_updates_share_the_groups(groups: int, updates: int, sizes: list[int]) -> None:
    made = [group(index, 3) for index in range(groups)]
    parts = split_into_updates(made, updates)
    assert [len(part) for part in parts] == sizes
    assert [item for part in parts for item in part] == made


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        *({"loss": loss} for loss in ("ppo", "gspo", "cispo", "sapo", "gmpo", "dppo_tv", "dppo_kl")),
        *({"estimator": name} for name in ("grpo", "rloo", "opo", "ogb", "remax", "otb_total", "dr_grpo")),
        *({"estimator": name} for name in ("gpg", "reinforce_pp", "reinforce_pp_baseline")),
        *({"estimator": name, "normalize": "whiten"} for name in ("grpo", "rloo", "opo", "remax")),
    ],
)
def test_one_forward_where_a_group_or_the_rewards_of_the_step_suffice(algorithm: dict[str, str]) -> None:
    assert statistics_pass_reasons(objective(**algorithm)) == ()


@pytest.mark.parametrize(
    ("estimator", "reasons"),
    [("reinforce_pp", 0), ("reinforce_pp_baseline", 0), ("gpg", 0), ("ogb_pooled", 1)],
)
def test_a_weight_of_the_correction_needs_the_step_only_for_energies_of_the_step(estimator: str, reasons: int) -> None:
    settings = ObjectiveSettings(
        algorithm=AlgorithmSettings(estimator=estimator),
        correction=CorrectionSettings(weights="token"),
        response_tokens=20,
    )
    assert len(statistics_pass_reasons(settings)) == reasons


def test_rewards_of_the_step_that_depend_on_the_policy_take_a_statistics_pass() -> None:
    settings = ObjectiveSettings(
        algorithm=AlgorithmSettings(estimator="reinforce_pp"),
        kl=KLSettings(coefficient=0.1, placement="reward"),
        response_tokens=20,
    )
    assert statistics_pass_reasons(settings) == ("whitening needs the mean over the whole step",)


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({"updates_per_step": 2}, "2 updates on the same trajectories"),
        ({"normalize": "whiten"}, "whitening needs the mean over the whole step"),
        ({"estimator": "ogb_pooled"}, "the estimator needs the groups of the whole step"),
        ({"estimator": "eob"}, "exact energies need a separate forward and backward"),
        ({"loss": "clip_cov"}, "the loss clip_cov selects tokens over the whole step"),
        ({"loss": "kl_cov"}, "the loss kl_cov selects tokens over the whole step"),
        ({"estimator": "gae", "estimator_options": {"normalize": None}}, "the critic's values must be computed before"),
    ],
)
def test_a_statistics_pass_where_an_algorithm_needs_the_step(algorithm: dict[str, Any], reason: str) -> None:
    (said,) = statistics_pass_reasons(objective(**algorithm))
    assert said.startswith(reason)


@pytest.mark.parametrize(
    ("correction", "aggregation", "passes"),
    [
        ({"weights": "token"}, "token_mean", 1),
        ({"weights": "sequence", "weight_bound": "icepop"}, "token_mean", 1),
        ({"weights": "token", "self_normalize": True}, "token_mean", 2),
        ({"ratio_mask": "geometric"}, "token_mean", 2),
        ({"divergence_mask": "k3"}, "seq_mean_token_mean", 2),
        ({"divergence_mask": "k3"}, "token_sum", 1),  # the sum has no divisor
    ],
)
def test_a_correction_needs_the_step_for_a_divisor(correction: dict[str, Any], aggregation: str, passes: int) -> None:
    settings = ObjectiveSettings(
        algorithm=AlgorithmSettings(aggregation=aggregation),
        correction=CorrectionSettings(**correction),
        response_tokens=20,
    )
    assert len(statistics_pass_reasons(settings)) == passes - 1


@pytest.mark.parametrize(
    ("algorithm", "tokens", "said"),
    [
        ({}, 49, "one forward for statistics, advantages and backward (micro-batches of whole groups)"),
        ({"estimator": "grpo"}, 50, "one forward .*, also for groups that do not fit into one .* need only rewards"),
        ({"estimator": "ogb"}, 50, "one forward .*; groups that do not fit into one .* need a second forward"),
        ({"normalize": "whiten"}, 50, "a statistics pass, then the training pass: whitening needs the mean"),
    ],
)
def test_the_passes_in_words(algorithm: dict[str, Any], tokens: int, said: str) -> None:
    text = describe_passes(objective(**algorithm), group_tokens=tokens, budget=49)
    assert text == said or re.match(said, text)
