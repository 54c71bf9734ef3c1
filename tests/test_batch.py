"""Micro-batches and batches against trajectories read one token at a time."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout.fakes import played

from agentrl.algorithms import step_selection
from agentrl.batch import Batch, MicroBatch, scatter_tokens
from agentrl.trajectory import Segment, Trajectory


def model(*ids: int, reward: float = 0.0, version: int = 0) -> Segment:
    log_probs = tuple(-0.1 * token for token in ids)
    spans = ((version, len(ids)),)
    return Segment(origin="model", token_ids=ids, text="A", log_probs=log_probs, version_spans=spans, reward=reward)


def observed(*ids: int) -> Segment:
    return Segment(origin="observation", token_ids=ids, text="E")


def trajectory(*segments: Segment, **changes: Any) -> Trajectory:
    return played(segments=segments, **{"prompt_ids": (11, 12), **changes})


def test_a_batch_by_hand() -> None:
    short = trajectory(model(5, reward=1.0, version=2), prompt_ids=(21, 22, 23), group=7, sample=1)
    long = trajectory(model(1, 2), observed(8), model(3, version=1), prompt_ids=(11,), group=9, sample=0)
    micro = MicroBatch.from_trajectories(
        [short, long], no_loss={(9, 0, 0)}, home_ranks={7: 1, 9: 0}, greedy_returns={7: 0.5, 9: 0.25}
    )
    batch = Batch.from_micro_batch(micro, multiple=4)
    assert batch.row.input_ids.tolist() == [[21, 22, 23, 5, 11, 1, 2, 8, 3, 0, 0, 0]]
    assert batch.row.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]]
    assert (batch.rows.tolist(), batch.columns.tolist()) == ([0, 1, 1, 1], [0, 0, 1, 3])
    assert batch.row.response_token_ids(batch.rows, batch.columns).tolist() == [5, 1, 2, 3]
    assert batch.row.predicting_positions(batch.rows, batch.columns).tolist() == [2, 4, 5, 7]
    assert batch.input_ids.tolist() == [[21, 22, 23, 5, 0], [11, 1, 2, 8, 3]]
    assert batch.prompt_lengths.tolist() == [3, 1]
    assert batch.response_ids.tolist() == [[5, 0, 0, 0], [1, 2, 0, 3]]
    assert batch.response_mask.tolist() == [[True, False, False, False], [True, True, False, True]]
    assert batch.loss_mask.tolist() == [[True, False, False, False], [False] * 4]
    assert batch.rewards.tolist() == [[1.0, 0.0, 0.0, 0.0], [0.0] * 4]
    torch.testing.assert_close(batch.rollout_log_probs, torch.tensor([[-0.5, 0, 0, 0], [-0.1, -0.2, 0, -0.3]]))
    assert (batch.groups.tolist(), batch.versions.tolist()) == ([7, 9], [[2, -1, -1, -1], [0, 0, -1, 1]])
    assert (batch.home_ranks.tolist(), batch.greedy_returns.tolist(), batch.counted) == ([1, 0], [0.5, 0.25], True)


def test_a_micro_batch_takes_nine_bytes_a_token_and_survives_pickling() -> None:
    turns = [part for _ in range(10) for part in (model(*range(1, 401)), observed(*range(400, 500)))]
    whole = trajectory(*turns, prompt_ids=tuple(range(3, 103)))
    micro = MicroBatch.from_trajectories([whole])
    packed = pickle.dumps(micro)
    assert len(packed) < 9 * whole.length
    read = pickle.loads(packed)
    for before, after in ((micro.row, read.row), (micro, replace(read, row=micro.row))):
        for name, value in vars(after).items():
            assert np.array_equal(value, getattr(before, name)), name


def drawn(draw: random.Random, rows: int) -> list[Trajectory]:
    """Trajectories over three prompts, with observations between turns and behind the last one."""
    prompts = [tuple(draw.randrange(50) for _ in range(draw.randint(1, 6))) for _ in range(3)]

    def tokens() -> list[int]:
        return [draw.randrange(50) for _ in range(draw.randint(1, 5))]

    made = []
    for sample in range(rows):
        parts: list[Segment] = []
        for _ in range(draw.randint(1, 3)):
            parts += [model(*tokens(), reward=draw.random(), version=draw.randrange(3)), observed(*tokens())]
        kept = parts[: len(parts) - draw.randint(0, 1)]
        made.append(trajectory(*kept, prompt_ids=draw.choice(prompts), sample=sample))
    return made


@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 4))
def test_every_tensor_is_that_of_the_trajectories(seed: int, rows: int, multiple: int) -> None:
    items = drawn(random.Random(seed), rows)
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories(items), multiple=multiple)
    tokens = [(row, column) for row, one in enumerate(items) for column, on in enumerate(one.response_mask) if on]
    assert list(zip(batch.rows.tolist(), batch.columns.tolist(), strict=True)) == tokens
    assert batch.row.response_token_ids(batch.rows, batch.columns).tolist() == [
        items[r].response_ids[c] for r, c in tokens
    ]
    # The state before a token belongs to the previous token, at the previous position.
    before = batch.row.predicting_positions(batch.rows, batch.columns)
    whole = [one.prompt_ids + one.response_ids for one in items]
    places = [len(items[r].prompt_ids) + c - 1 for r, c in tokens]
    assert batch.row.input_ids[0, before].tolist() == [whole[r][at] for (r, _), at in zip(tokens, places, strict=True)]
    assert batch.row.position_ids[0, before].tolist() == places
    assert batch.row.input_ids.shape[1] % multiple == 0
    for row, one in enumerate(items):
        count = len(one.response_ids)
        assert batch.input_ids[row].tolist() == [*whole[row], *[0] * (batch.input_ids.shape[1] - len(whole[row]))]
        assert batch.rewards[row, :count].tolist() == pytest.approx(one.rewards)
        assert batch.rollout_log_probs[row, :count].tolist() == pytest.approx(one.log_probs)
        assert tuple(batch.versions[row, :count].tolist()) == one.versions
        assert not batch.response_mask[row, count:].any()
        assert int(batch.response_lengths[row]) == count


def test_branches_of_a_rollout_have_different_numbers() -> None:
    fork = {"path_weight": 0.5, "parent": 0, "fork": 2, "branches": 3, "group": 7, "sample": 1}
    root = trajectory(model(1, 2), **{**fork, "parent": -1, "fork": 0, "path_weight": 1.0})
    leaves = [trajectory(model(3 + branch), prompt_ids=(11, 12, 1, 2), branch=branch, **fork) for branch in (1, 2)]
    other = trajectory(model(4), group=8, sample=1)
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories([root, *leaves, other]))
    assert batch.trajectory_ids.unique().numel() == 4
    # Losses that select tokens over the step refuse rows with equal numbers.
    values = torch.where(batch.response_mask, batch.rollout_log_probs, 0.0)
    options = {"covariance_fraction": 1.0, "covariance_low": -1e9, "covariance_high": 1e9}
    selected = step_selection(
        "clip_cov",
        log_probs=values,
        old_log_probs=values,
        advantages=values,
        loss_mask=batch.loss_mask,
        trajectory_ids=batch.trajectory_ids,
        **options,
    )
    assert selected.shape == batch.response_mask.shape


def test_scattered_tokens_stand_in_row_major_order_and_carry_gradients() -> None:
    mask = torch.tensor([[True, False, True], [False, True, False]])
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    spread = scatter_tokens(values, mask)
    assert spread.tolist() == [[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]
    (spread * torch.tensor([10.0, 20.0, 30.0])).sum().backward()
    assert values.grad.tolist() == [10.0, 30.0, 20.0]
