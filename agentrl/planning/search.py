"""The cheapest setting that fits: every combination, cheapest first, until one fits rank and server."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from agentrl.models.attention import sharing_obstacle
from agentrl.planning.estimate import (
    CONTEXT,
    TOKEN_STEP,
    largest_micro_batch,
    rank_memory,
    server_memory,
    static_bytes,
    usable,
)
from agentrl.planning.memory import GB, OFFLOADS, ModelShape, Offload, RankMemory, ServerMemory, TrainingSetup

Placement = Literal["colocated", "dedicated"]

LORA_RANK = 32
"""Of the adapters that a plan proposes: the published practice for reinforcement learning is 1 to 32."""
_SHARED = (1, 2, 4, 8)
"""Ranks that share a row (training.sequence_parallel)."""
_CHECKPOINTS = ((False, False), (True, False), (True, True))
"""Whether layers are recomputed, and whether what that takes waits in host memory."""
_LARGEST_SHARE = 0.85
_SHARE_STEP = 0.05


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The GPUs of a run."""

    gpus: int
    memory: int  # bytes of each

    def __str__(self) -> str:
        return f"{self.gpus} {'GPU' if self.gpus == 1 else 'GPUs'} of {self.memory / GB:g} GB"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a plan may not change, and what it may use."""

    context: int  # tokens of the longest trajectory, prompt and response
    longest_request: int  # tokens that a server must hold, evaluations included
    bfloat16: bool = True
    reference: bool = False
    critic: bool = False
    tensor_parallel: int | None = None  # None: the smallest that fits
    may_offload: bool = False
    may_adapt: bool = False  # train adapters where nothing else fits
    only_adapt: bool = False
    lora_rank: int = LORA_RANK  # of the adapters


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A setting that fits."""

    setup: TrainingSetup
    placement: Placement
    replicas: int
    tensor_parallel: int
    share: float
    rank: RankMemory
    server: ServerMemory


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    stage: int
    checkpointing: bool
    checkpoint_offload: bool
    offload: Offload
    sequence_parallel: int
    placement: Placement
    lora_rank: int

    @property
    def cost(self) -> tuple[bool, float]:
        """For the order alone: adapters last, for they train something else; then the step's time, relative.

        Recomputing a forward adds one of three parts. Its inputs in host memory cross the bus twice: for 7B 0.4 MB a
        token, 16 us at 25 GB/s, beside 150 us of computing. Stage 3 sends half as much again (arXiv 1910.02054,
        section 7).
        Offloaded states cross the bus in each step, offloaded weights in each micro-batch (arXiv 2104.07857). Two ranks
        that share rows send up to 4 D numbers of two bytes a token and layer, forward and backward, half of them to the
        other: for 7B 0.8 MB a token, 40 us at 20 GB/s (no NVLink), beside 110 us of computing at 400 TFLOP/s. Dedicated
        servers halve the GPUs that train, and wait while those do.
        """
        factors = (
            4 / 3 if self.checkpointing else 1.0,
            1.1 if self.checkpoint_offload else 1.0,
            1.15 if self.stage == 3 else 1.0,
            {"none": 1.0, "optimizer": 1.3, "all": 3.0}[self.offload],
            1.0 if self.sequence_parallel == 1 else 1.35 + 0.01 * self.sequence_parallel,  # as few as will do
            2.0 if self.placement == "dedicated" else 1.0,
        )
        return self.lora_rank > 0, math.prod(factors)


def find_plan(shape: ModelShape, machine: Hardware, wish: Wish) -> Plan | None:
    """The cheapest setting that fits; None if none does."""
    for candidate in sorted(_candidates(shape, machine, wish), key=lambda item: item.cost):
        found = _fitted(shape, machine, wish, candidate)
        if found is not None:
            return found
    return None


def smallest_need(shape: ModelShape, machine: Hardware, wish: Wish) -> int:
    """Bytes of a rank under the most thrifty candidate."""
    return min(
        _rank(shape, _setup(machine, wish, item), item.placement).total for item in _candidates(shape, machine, wish)
    )


def _candidates(shape: ModelShape, machine: Hardware, wish: Wish) -> Iterator[_Candidate]:
    """DeepSpeed frees the GPU for a colocated server at stages 1 and 2 alone, and offloads weights at stage 3 alone."""
    adapters = (wish.lora_rank,) if wish.only_adapt else (0, wish.lora_rank) if wish.may_adapt else (0,)
    placements: tuple[Placement, ...] = ("colocated", "dedicated") if machine.gpus > 1 else ("colocated",)
    for stage, (checkpointing, moved), offload, shared, placement, lora in itertools.product(
        (2, 3), _CHECKPOINTS, OFFLOADS if wish.may_offload else OFFLOADS[:1], _SHARED, placements, adapters
    ):
        ranks = _training_gpus(machine, placement)
        if (placement == "colocated" and stage == 3) or (offload == "all" and stage < 3) or (ranks == 1 and stage == 3):
            continue
        if ranks % shared or sharing_obstacle(shape.config, shared) is not None:
            continue
        yield _Candidate(
            stage=stage,
            checkpointing=checkpointing,
            checkpoint_offload=moved,
            offload=offload,
            sequence_parallel=shared,
            placement=placement,
            lora_rank=lora,
        )


def _training_gpus(machine: Hardware, placement: Placement) -> int:
    return machine.gpus if placement == "colocated" else machine.gpus - machine.gpus // 2


def _setup(machine: Hardware, wish: Wish, candidate: _Candidate) -> TrainingSetup:
    return TrainingSetup(
        ranks=_training_gpus(machine, candidate.placement),
        stage=candidate.stage,
        bfloat16=wish.bfloat16,
        tokens=wish.context,
        checkpointing=candidate.checkpointing,
        checkpoint_offload=candidate.checkpoint_offload,
        offload=candidate.offload,
        sequence_parallel=candidate.sequence_parallel,
        lora_rank=candidate.lora_rank,
        reference=wish.reference,
        critic=wish.critic,
    )


def _rank(shape: ModelShape, setup: TrainingSetup, placement: Placement) -> RankMemory:
    """A sleeping server keeps its own context on the GPU."""
    return rank_memory(shape, setup, context=contexts(placement))


def contexts(placement: str) -> int:
    """Bytes of the CUDA contexts on a training GPU."""
    return 2 * CONTEXT if placement == "colocated" else CONTEXT


def _fitted(shape: ModelShape, machine: Hardware, wish: Wish, candidate: _Candidate) -> Plan | None:
    setup, placement = _setup(machine, wish, candidate), candidate.placement
    if static_bytes(shape, setup) > usable(machine.memory):  # before its activations are counted
        return None
    rank = _rank(shape, setup, placement)
    if rank.total > usable(machine.memory):
        return None
    share = server_share(rank, machine.memory) if placement == "colocated" else _LARGEST_SHARE
    gpus = machine.gpus if placement == "colocated" else machine.gpus // 2
    parallel = _tensor_parallel(shape, machine, wish, share=share, gpus=gpus)
    if parallel is None:
        return None
    free = machine.memory - (contexts(placement) - CONTEXT)
    largest = largest_micro_batch(shape, setup, memory=free)
    setup = replace(setup, tokens=max(wish.context, largest))
    return Plan(
        setup=setup,
        placement=placement,
        replicas=gpus // parallel,
        tensor_parallel=parallel,
        share=share,
        rank=_rank(shape, setup, placement),
        server=server_memory(shape, memory=machine.memory, share=share, tensor_parallel=parallel),
    )


def server_share(rank: RankMemory, memory: int) -> float:
    """Of a GPU, for a server that wakes while the rank keeps its weights alone (those of reference and critic too)."""
    kept = sum(rank.static[name] for name in ("weights", "gathered weights", "reference")) + CONTEXT
    kept += rank.static["weights"] if rank.static["critic"] else 0
    share = min(_LARGEST_SHARE, (usable(memory) - kept) / memory)
    return max(0.0, round(math.floor(share / _SHARE_STEP + 1e-9) * _SHARE_STEP, 2))


def _tensor_parallel(shape: ModelShape, machine: Hardware, wish: Wish, *, share: float, gpus: int) -> int | None:
    """GPUs of a server: the smallest number that holds the weights and the longest request; None if none does."""
    options = (1, 2, 4, 8) if wish.tensor_parallel is None else (wish.tensor_parallel,)
    for parallel in options:
        if gpus % parallel or shape.heads % parallel:
            continue
        server = server_memory(shape, memory=machine.memory, share=share, tensor_parallel=parallel)
        if server.kv_tokens >= wish.longest_request:
            return parallel
    return None


def nearest_that_fits(shape: ModelShape, machine: Hardware, wish: Wish) -> list[str]:
    """What would work where nothing fits: more GPUs, larger ones, a shorter context, adapters."""
    found = []
    for gpus in (machine.gpus * 2**power for power in range(1, 8)):
        if find_plan(shape, replace(machine, gpus=gpus), wish):
            found.append(f"{gpus} GPUs of this memory")
            break
    for memory in (size * GB for size in (16, 24, 32, 40, 48, 80, 96, 141, 192, 288)):
        if memory > machine.memory and find_plan(shape, replace(machine, memory=memory), wish):
            found.append(f"{memory / GB:g} GB a GPU")
            break
    context = wish.context // 2
    while context >= TOKEN_STEP:
        shorter = replace(wish, context=context, longest_request=min(wish.longest_request, context))
        if find_plan(shape, machine, shorter):
            found.append(f"a context of {context} tokens")
            break
        context //= 2
    return found
