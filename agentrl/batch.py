"""Micro-batches as arrays. The rollout worker packs them, and the training rank pads them once.

The example has a prompt of two tokens and two responses. The first response consists of one model token. The second
response has an observation of one token between two model tokens:

>>> from agentrl_envs.types import Ended, Problem
>>> from agentrl.trajectory import Segment, Trajectory
>>> problem = Problem(id="toy-0", statement="2 + 3?", answer="5", source="toy")
>>> def segment(*ids: int, reward: float = 0.0) -> Segment:
...     spans = ((0, len(ids)),)
...     return Segment(origin="model", token_ids=ids, log_probs=(-0.5,) * len(ids), version_spans=spans, text="",
...                    reward=reward)
>>> seen = Segment(origin="observation", token_ids=(5,), text="")
>>> packed = MicroBatch.from_trajectories([
...     Trajectory(problem=problem, step=0, group=7, sample=0, prompt_ids=(1, 2), segments=(segment(3, reward=1.0),),
...                ended=Ended.ANSWERED),
...     Trajectory(problem=problem, step=0, group=7, sample=1, prompt_ids=(1, 2),
...                segments=(segment(4), seen, segment(6)), ended=Ended.ANSWERED),
... ])
>>> packed.row.token_ids.tolist(), packed.row.lengths.tolist(), packed.row.continued_segments.tolist()
([1, 2, 3, 4, 5, 6], [2, 1, 3], [0, 0, 0])
>>> batch = Batch.from_micro_batch(packed)
>>> batch.response_mask.int().tolist(), batch.rewards.tolist()
([[1, 0, 0], [1, 0, 1]], [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
>>> batch.row.response_token_ids(batch.rows, batch.columns).tolist()
[3, 4, 6]
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from agentrl.algorithms import Advantages, Correction
from agentrl.kernels import Support, TokenStatistics
from agentrl.kernels.attention import PackedRow, pack_row
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """``B`` trajectories, packed into one row, with flat arrays of their values. Uses about 9 bytes per token.

    A prefix that prompts share is stored once in the row (:class:`.PackedRow`). The responses consist of ``R`` runs,
    in the order of the trajectories. A run contains consecutive tokens of one origin. The model sampled ``N`` of the
    response tokens, in ``V`` version spans.
    """

    row: PackedRow  # on the host; with the engine's routes if they are replayed
    run_lengths: np.ndarray  # [R] int32
    run_sampled: np.ndarray  # [R] bool, True if the model sampled the run
    run_rewards: np.ndarray  # [R] float32, assigned to the last token of the run
    run_counts: np.ndarray  # [B] int32, number of runs in each trajectory
    log_probs: np.ndarray  # [N] float32, from the engine
    version_spans: np.ndarray  # [V, 2] int32: policy version, number of model tokens
    groups: np.ndarray  # [B] int64
    samples: np.ndarray  # [B] int64, index of the rollout in its group
    branches: np.ndarray  # [B] int64, index of the trajectory in its rollout
    parents: np.ndarray  # [B] int64, branch from which the trajectory forks, or -1
    forks: np.ndarray  # [B] int64, number of model tokens of the parent before the fork
    weights: np.ndarray  # [B] float32, the trajectory's fraction of its rollout's model tokens
    problem_weights: np.ndarray  # [B] float32, factor of the trajectory in the loss
    path_weights: np.ndarray  # [B] float32, weight of the trajectory in a forked rollout, else 1
    truncated: np.ndarray  # [B] bool, True if a limit ended the trajectory
    trained: np.ndarray  # [B] bool, False if filters removed the trajectory from the loss
    home_ranks: np.ndarray  # [B] int64, rank that receives all trajectories of the group in a statistics pass
    greedy_returns: np.ndarray | None = None  # [B] float32, reward of the group's greedy rollout
    support_ids: np.ndarray | None = None  # int32, tokens from which model tokens were sampled (:class:`.Support`)
    support_sizes: np.ndarray | None = None  # [N] int64, size of each model token's support; 0: whole vocabulary
    counted: bool = True  # False: the micro-batch takes part in collectives, but not in the loss or the metrics
    sources: tuple[str, ...] = ()  # [B] source of each trajectory's problem
    budgeted_tokens: int = 0  # computed tokens, as `RowCosts` counts them
    teacher_row: PackedRow | None = None  # the same responses after the prompts that a teacher reads

    @classmethod
    def from_trajectories(
        cls,
        items: Sequence[Trajectory],
        *,
        no_loss: Collection[tuple[int, int, int]] = (),
        home_ranks: Mapping[int, int] | None = None,
        greedy_returns: Mapping[int, float] | None = None,
        counted: bool = True,
        teacher_prompt: Callable[[Trajectory], tuple[int, ...]] | None = None,
        share_prefixes: bool = True,
    ) -> MicroBatch:
        """Pack trajectories. ``no_loss`` contains the (group, sample, branch) of each trajectory left out of the loss.

        ``home_ranks`` maps each group to the rank that receives its trajectories in a statistics pass. If
        ``home_ranks`` is None, rank 0 receives all trajectories. ``greedy_returns`` maps each group to the reward of
        its greedy rollout. ``teacher_prompt`` returns the prompt that a teacher reads instead of the policy's.
        ``share_prefixes``: see :class:`.RowCosts`.
        """
        segments = [segment for item in items for segment in item.segments]
        groups = np.array([item.group for item in items])
        greedy = None
        if greedy_returns:
            greedy = np.array([greedy_returns[item.group] for item in items], dtype=np.float32)
        documents = [
            (flat_array([item.prompt_ids], "i"), flat_array([segment.token_ids for segment in item.segments], "i"))
            for item in items
        ]
        sampled = [segment for segment in segments if segment.origin == "model"]
        restricted = any(segment.support_sizes for segment in sampled)
        sizes = [segment.support_sizes or (0,) * len(segment.token_ids) for segment in sampled]
        row = pack_row([(torch.from_numpy(prompt), torch.from_numpy(response)) for prompt, response in documents])
        teacher_row = None
        if teacher_prompt is not None:
            prompts = [torch.from_numpy(flat_array([teacher_prompt(item)], "i")) for item in items]
            responses = [torch.from_numpy(response) for _, response in documents]
            teacher_row = pack_row([*zip(prompts, responses, strict=True)])
        return cls(
            row=replace(row, routes=_pack_routes(items, row)),
            run_lengths=np.array([len(segment.token_ids) for segment in segments], dtype=np.int32),
            run_sampled=np.array([segment.origin == "model" for segment in segments]),
            run_rewards=np.array([segment.reward for segment in segments], dtype=np.float32),
            run_counts=np.array([len(item.segments) for item in items], dtype=np.int32),
            log_probs=flat_array([segment.log_probs for segment in segments], "d").astype(np.float32),
            version_spans=np.array(
                [span for segment in segments for span in segment.version_spans], dtype=np.int32
            ).reshape(-1, 2),
            groups=groups,
            samples=np.array([item.sample for item in items]),
            branches=np.array([item.branch for item in items]),
            parents=np.array([item.parent for item in items]),
            forks=np.array([item.fork for item in items]),
            weights=np.array([item.weight for item in items], dtype=np.float32),
            problem_weights=np.array([item.problem_weight for item in items], dtype=np.float32),
            path_weights=np.array([item.rollout_fraction for item in items], dtype=np.float32),
            truncated=np.array([item.ended.is_truncation for item in items]),
            trained=np.array([(item.group, item.sample, item.branch) not in no_loss for item in items]),
            home_ranks=np.array([0 if home_ranks is None else home_ranks[item.group] for item in items]),
            greedy_returns=greedy,
            support_ids=flat_array([segment.support_ids for segment in sampled], "i") if restricted else None,
            support_sizes=flat_array(sizes, "i").astype(np.int64) if restricted else None,
            counted=counted,
            sources=tuple(item.problem.source for item in items),
            budgeted_tokens=len(row.token_ids) if share_prefixes else sum(item.length for item in items),
            teacher_row=teacher_row,
        )

    @property
    def tokens(self) -> int:
        """Number of tokens in the row."""
        return len(self.row.token_ids)

    @property
    def trajectories(self) -> int:
        return len(self.run_counts)


def _pack_routes(items: Sequence[Trajectory], row: PackedRow) -> Tensor | None:
    """Return the routes [L, R] of the tokens of ``row``, -1 for tokens without a route; None if there are no routes.

    If several trajectories share a token, its route comes from the first of them, which sampled the token.
    """
    row_routes = None
    for number, item in reversed([*enumerate(items)]):
        sampled = [segment for segment in item.segments if segment.origin == "model"]
        count = item.length - 1
        for segment in reversed(item.segments):
            if segment is sampled[-1]:
                break
            count -= len(segment.token_ids)
        item_routes = np.concatenate([np.frombuffer(segment.routes, dtype=np.int16) for segment in sampled])
        if not len(item_routes):
            continue
        item_routes = item_routes.reshape(count, -1)
        if row_routes is None:
            row_routes = torch.full((len(row.token_ids), item_routes.shape[1]), -1, dtype=torch.int16, device="cpu")
        row_routes[row.document_token_indices(number, count - len(item.prompt_ids))] = torch.from_numpy(item_routes)
    return row_routes


def flat_array(runs: Sequence[Sequence[float]], code: Literal["i", "d"]) -> np.ndarray:
    """Concatenate sequences of numbers into an array of C int or double."""
    # struct converts Python numbers faster than NumPy.
    packed: np.ndarray = np.empty(sum(map(len, runs)), dtype=code)
    offset = 0
    for run in runs:
        struct.pack_into(f"{len(run)}{code}", packed.data, offset, *run)
        offset += len(run) * packed.itemsize
    return packed


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A micro-batch on the device: the packed row for the models, and per-token tensors padded to [B, T].

    ``T`` is the length of the longest response. Responses are left-aligned. The model sampled ``N`` of the tokens.

    The forward passes of policy, reference, teacher and critic add their results, all detached. Once all trajectories
    of the groups are scored, ``correction`` and ``estimate`` are added, and ``rewards`` include the penalties.
    """

    row: PackedRow
    rows: Tensor  # [N] int64, trajectory of each model token, in row-major order
    columns: Tensor  # [N] int64, index of each model token in its response
    response_mask: Tensor  # [B, T] bool, True for model tokens
    loss_mask: Tensor  # [B, T] bool, response mask without the trajectories that filters removed from the loss
    rewards: Tensor  # [B, T] float32; in the completed batch, with penalties for length and KL
    rollout_log_probs: Tensor  # [B, T] float32, 0 for tokens that the model did not sample
    versions: Tensor  # [B, T] int32, policy version that sampled the token, -1 if the model did not sample it
    response_lengths: Tensor  # [B] int64, including observations
    groups: Tensor  # [B] int64
    samples: Tensor  # [B] int64
    branches: Tensor  # [B] int64
    parents: Tensor  # [B] int64
    forks: Tensor  # [B] int64
    weights: Tensor  # [B] float32
    problem_weights: Tensor  # [B] float32
    path_weights: Tensor  # [B] float32
    truncated: Tensor  # [B] bool
    home_ranks: Tensor  # [B] int64
    greedy_returns: Tensor | None  # [B] float32
    support: Support | None  # of the model tokens
    counted: bool  # as in `MicroBatch`
    sources: tuple[str, ...] = ()  # as in `MicroBatch`
    budgeted_tokens: int = 0  # as in `MicroBatch`
    teacher_row: PackedRow | None = None  # as in `MicroBatch`
    statistics: TokenStatistics | None = None  # each [B, T], computed before the updates, 0 except at model tokens
    reference_log_probs: Tensor | None = None  # [B, T]
    teacher_log_probs: Tensor | None = None  # [B, T]
    values: Tensor | None = None  # [B, T] critic's value before each token
    final_values: Tensor | None = None  # [B] critic's value after the last token
    trajectory_energy: Tensor | None = None  # [B] exact
    correction: Correction | None = None  # None if no correction is set
    estimate: Advantages | None = None  # each [B, T]
    selected: Tensor | None = None  # [B, T] bool, for losses that select tokens over the whole step

    @classmethod
    def from_micro_batch(cls, micro: MicroBatch, *, device: torch.device | str = "cpu", multiple: int = 1) -> Batch:
        """Copy a micro-batch to ``device`` and pad it there.

        The packed rows are padded to a multiple of ``multiple`` tokens (:meth:`.PackedRow.pad_to_multiple`).
        """
        ends = np.cumsum(micro.run_counts)
        lengths = np.diff(np.cumsum(micro.run_lengths)[ends - 1], prepend=0)
        mask = np.zeros((micro.trajectories, lengths.max()), dtype=bool)
        rewards = np.zeros(mask.shape, dtype=np.float32)
        for number, (first, last) in enumerate(zip(ends - micro.run_counts, ends, strict=True)):
            run_lengths = micro.run_lengths[first:last]
            mask[number, : lengths[number]] = np.repeat(micro.run_sampled[first:last], run_lengths)
            rewards[number, np.cumsum(run_lengths) - 1] = micro.run_rewards[first:last]

        def to_device(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device)

        response_mask, trained = to_device(mask), to_device(micro.trained)
        versions = to_device(np.repeat(micro.version_spans[:, 0], micro.version_spans[:, 1]))
        # Pass the number of model tokens from the host to nonzero_static, to avoid a device synchronization.
        indices = torch.nonzero_static(response_mask, size=len(micro.log_probs))
        return cls(
            row=micro.row.pad_to_multiple(multiple).to(device),
            rows=indices[:, 0],
            columns=indices[:, 1],
            response_mask=response_mask,
            loss_mask=response_mask & trained[:, None],
            rewards=to_device(rewards),
            rollout_log_probs=scatter_tokens(to_device(micro.log_probs), response_mask),
            versions=torch.full_like(response_mask, -1, dtype=torch.int32).masked_scatter(response_mask, versions),
            response_lengths=to_device(lengths),
            groups=to_device(micro.groups),
            samples=to_device(micro.samples),
            branches=to_device(micro.branches),
            parents=to_device(micro.parents),
            forks=to_device(micro.forks),
            weights=to_device(micro.weights),
            problem_weights=to_device(micro.problem_weights),
            path_weights=to_device(micro.path_weights),
            truncated=to_device(micro.truncated),
            home_ranks=to_device(micro.home_ranks),
            greedy_returns=None if micro.greedy_returns is None else to_device(micro.greedy_returns),
            support=None
            if micro.support_ids is None or micro.support_sizes is None
            else Support(ids=to_device(micro.support_ids), sizes=torch.from_numpy(micro.support_sizes)),
            counted=micro.counted,
            sources=micro.sources,
            budgeted_tokens=micro.budgeted_tokens,
            teacher_row=None if micro.teacher_row is None else micro.teacher_row.pad_to_multiple(multiple).to(device),
        )

    @property
    def trajectories(self) -> int:
        return len(self.groups)

    @property
    def computed_statistics(self) -> TokenStatistics:
        """Statistics of the policy's forward pass, which must have run."""
        assert self.statistics is not None
        return self.statistics

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities [B, T] under the weights before the step's updates."""
        return self.computed_statistics.log_probs

    @property
    def bootstrap_values(self) -> Tensor | None:
        """Critic's value after the last token of truncated trajectories, 0 for others [B]; None without a critic."""
        return None if self.final_values is None else torch.where(self.truncated, self.final_values, 0.0)

    @property
    def advantages(self) -> Tensor:
        """Advantages [B, T]."""
        return self.computed_estimate.advantages

    @property
    def computed_estimate(self) -> Advantages:
        """The advantage estimate, which must have been computed."""
        assert self.estimate is not None
        return self.estimate

    @cached_property
    def counted_mask(self) -> Tensor:
        """Mask [B, T] of the model tokens in counted trajectories."""
        return self.response_mask & self.counted

    @cached_property
    def trained_mask(self) -> Tensor:
        """Mask [B, T]: :attr:`counted_mask` without the tokens that filters or the correction reject."""
        return (self.loss_mask if self.correction is None else self.correction.loss_mask) & self.counted

    @property
    def correction_weights(self) -> Tensor | None:
        """Weights [B, T] of the rollout correction; None if every weight is 1."""
        return None if self.correction is None else self.correction.weights

    @property
    def trajectory_ids(self) -> Tensor:
        """Unique number [B] of each trajectory in the step. The branches of a rollout have different numbers."""
        return (self.branches << 48) + (self.groups << 24) + self.samples

    @property
    def prompt_lengths(self) -> Tensor:
        """Number of prompt tokens of each trajectory, [B] int64."""
        return self.row.position_ids[0, self.row.prompt_ends] + 1

    @cached_property
    def input_ids(self) -> Tensor:
        """Prompts and responses, [B, S] int64, left-aligned and padded with 0, for code that needs unpacked tokens."""
        documents = [self.row.document_token_indices(*item) for item in enumerate(self.response_lengths.tolist())]
        lengths = torch.tensor([len(document) for document in documents])
        indices = pad_sequence(documents, batch_first=True)
        ids = torch.where(torch.arange(indices.shape[1]) < lengths[:, None], self.row.token_ids.cpu()[indices], 0)
        return ids.long().to(self.row.token_ids.device)

    @cached_property
    def response_ids(self) -> Tensor:
        """Token ids of the responses, [B, T] int64. 0 for tokens that the model did not sample."""
        return scatter_tokens(self.row.response_token_ids(self.rows, self.columns), self.response_mask)


def scatter_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """Scatter per-token values [N], in row-major order, to [B, T]. The result is 0 where ``mask`` is False.

    Differentiable with respect to ``values``.
    """
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
