"""Verification of weight transfers: checksums of every parameter, and a probe that trainer and engine both score.

A checksum is a sum over a parameter's values, each mixed into 64 bits. It does not depend on how an engine fuses,
shards, pads or transposes parameters: sums of shards add up, and zeros contribute nothing. A single change always
changes it. Several changes collide with probability 2^-64. A permutation is not detected.

Checksums detect a parameter that did not arrive, arrived partially or is stale, if it has a name in a checkpoint. The
probe covers all parameters and their order. At the start, the difference on the probe is measured at equal weights.
This measurement determines the bound for all later differences.

Not guaranteed: an engine that provides no checksums may miss an update that moves the probe by less than that bound.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

NOISE_FLOORS = {"float32": 1e-4, "bfloat16": 5e-3}
"""The smallest bound by dtype (nats, mean absolute difference on the probe) for any measured difference."""

NOISE_LIMITS = {"float32": 1e-2, "bfloat16": 0.15}
"""The largest difference, by dtype, that counts as noise between two computations of one policy."""

PROBE_TOKENS = 512
_BOUND_FACTOR = 4.0  # ratio of the bound to the measured difference

HEAD_NAME = "lm_head.weight"
EMBEDDING_NAME = "model.embed_tokens.weight"

_MODULUS = 1 << 64
# Elements processed at a time. Mixing needs 24 bytes of memory per element.
_CHUNK = 1 << 22
# The constants of splitmix64's finalizer, as signed 64-bit integers.
_FIRST = 0xBF58476D1CE4E5B9 - _MODULUS
_SECOND = 0x94D049BB133111EB - _MODULUS
_MAX_NAMES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Checksum:
    """Checksum of a parameter: number of nonzero ``values``, and ``total``, the sum of mixed values modulo 2^64."""

    values: int = 0
    total: int = 0

    def __add__(self, other: Checksum) -> Checksum:
        return Checksum(values=self.values + other.values, total=(self.total + other.total) % _MODULUS)

    def matches_copies(self, other: Checksum) -> bool:
        """Return True if ``other`` is one copy of this parameter or a sum of copies, as under tensor parallelism.

        >>> one = Checksum(values=2, total=5)
        >>> one.matches_copies(one), one.matches_copies(one + one), one.matches_copies(Checksum(values=4, total=11))
        (True, True, False)
        """
        if self.values == 0:
            return other.values == 0
        copies, rest = divmod(other.values, self.values)
        return copies > 0 and rest == 0 and other.total == copies * self.total % _MODULUS


def checksum(tensor: Tensor) -> Checksum:
    """Compute the checksum of a tensor's values as float32, which represents bfloat16 and float16 exactly.

    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 0.0, 1.0], dtype=torch.bfloat16))
    True
    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([1.0, 2.0000002]))
    False
    """
    values = total = 0
    for chunk in tensor.detach().reshape(-1).split(_CHUNK):
        # Count denormal numbers and -0 as 0: some processors flush denormals to zero, and sums of products with 1 and 0
        # lose the sign of -0.
        exact = chunk.float()
        bits = exact.view(torch.int32).to(torch.int64)
        bits = torch.where(exact.abs() < torch.finfo(torch.float32).tiny, 0, bits)
        values += int(bits.count_nonzero())
        total += int(_mix_bits(bits).sum())
    return Checksum(values=values, total=total % _MODULUS)


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Checksum]:
    """Compute the checksum of each parameter. Pieces with the same name are summed."""
    found: dict[str, Checksum] = defaultdict(Checksum)
    for name, tensor in tensors:
        found[name] += checksum(tensor)
    return dict(found)


def sum_checksums(workers: Iterable[Mapping[str, tuple[int, int]]]) -> dict[str, Checksum]:
    """Sum the workers' counts and totals into checksums of complete parameters."""
    found: dict[str, Checksum] = defaultdict(Checksum)
    for share in workers:
        for name, (values, total) in share.items():
            found[name] += Checksum(values=values, total=total)
    return dict(found)


def add_tied_head(found: Mapping[str, Checksum]) -> dict[str, Checksum]:
    """Return the checksums. If the head is missing because it is tied, the embedding's checksum is added for it."""
    tied = EMBEDDING_NAME in found and HEAD_NAME not in found
    return {**found, HEAD_NAME: found[EMBEDDING_NAME]} if tied else dict(found)


def describe_differing(trainer: Mapping[str, Checksum], engine: Mapping[str, Checksum]) -> str | None:
    """Describe the parameters whose engine and trainer checksums differ, or return None if all common parameters match.

    >>> two, three = Checksum(values=1, total=2), Checksum(values=1, total=3)
    >>> describe_differing({"a": two, "b": two}, {"a": two, "b": three})
    "the checksums of 1 of 2 parameters differ from the trainer's: b"
    """
    both = [name for name in trainer if name in engine]
    wrong = [name for name in both if not trainer[name].matches_copies(engine[name])]
    if not wrong:
        return None
    more = f" and {len(wrong) - _MAX_NAMES} more" if len(wrong) > _MAX_NAMES else ""
    names = ", ".join(wrong[:_MAX_NAMES])
    return f"the checksums of {len(wrong)} of {len(both)} parameters differ from the trainer's: {names}{more}"


def _mix_bits(bits: Tensor) -> Tensor:
    """Mix each integer over 64 bits. The mapping is one-to-one and maps 0 to 0."""
    return _xor_shift(_xor_shift(bits * _FIRST, 30) * _SECOND, 31)


def _xor_shift(bits: Tensor, shift: int) -> Tensor:
    return bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))


def noise_bound(noise: float, *, floor: float, limit: float) -> float:
    """Return the largest difference at which weights count as equal. ``noise`` was measured between equal weights.

    >>> noise_bound(0.011, floor=5e-3, limit=0.15), noise_bound(0.064, floor=5e-3, limit=0.15)
    (0.044, 0.15)
    """
    return min(limit, max(floor, _BOUND_FACTOR * noise))


def probe_tokens(texts: Iterable[tuple[int, ...]], *, longest: int) -> tuple[int, ...]:
    """Return the first tokens of the concatenated texts, at most ``min(PROBE_TOKENS, longest)``.

    >>> probe_tokens([(1, 2, 3), (4, 5)], longest=4)
    (1, 2, 3, 4)
    """
    most = min(PROBE_TOKENS, longest)
    found: tuple[int, ...] = ()
    for text in texts:
        found += text
        if len(found) >= most:
            break
    return found[:most]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Reference values from the trainer: ``log_probs`` of ``token_ids[1:]`` at temperature 1, and checksums."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    checksums: Mapping[str, Checksum] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EngineVerification:
    """The verification of one engine: the ``noise`` measured at the start and its ``bound``, in nats.

    The engine provides checksums of ``compared`` of the trainer's ``parameters``; both are 0 for shared weights.
    """

    engine: str
    noise: float
    bound: float
    compared: int
    parameters: int

    def __str__(self) -> str:
        difference = f"{self.noise:.2g} nats on average"
        if not self.parameters:
            return (
                f"{self.engine} shares the trained weights; at the start, the log-probabilities of engine and trainer "
                f"differed by {difference}"
            )
        checksums = f"checksums of {self.compared} of {self.parameters} parameters"
        return (
            f"{self.engine}: every transfer is verified by {checksums} and by a probe; at the start, the "
            f"log-probabilities of engine and trainer differed by {difference} (bound {self.bound:.2g})"
        )


class Verifier:
    """Checks that the engines of a run have the trainer's weights."""

    def __init__(self, dtype: str, *, bound: float | None = None) -> None:
        """Create a verifier. ``bound`` replaces the bound that is otherwise measured."""
        self._limit = NOISE_LIMITS[dtype] if bound is None else bound
        self._floor = NOISE_FLOORS[dtype] if bound is None else bound
        self._verified: dict[str, EngineVerification] = {}

    def find_problem(
        self, engine: str, probe: Probe, *, reported: Mapping[str, Checksum], scores: Sequence[float]
    ) -> str | None:
        """Return the problem with an engine that returns these checksums and scores, or None.

        ``reported`` is empty if the engine provides no checksums. The first scores of an engine determine its bound,
        because at that time the weights are equal by construction.

        >>> verifier = Verifier("bfloat16")
        >>> probe = Probe(token_ids=(1, 2, 3), log_probs=(-1.0, -2.0))
        >>> verifier.find_problem("E", probe, reported={}, scores=(-1.01, -2.01))
        >>> probe = Probe(token_ids=(1, 2, 3), log_probs=(-1.1, -2.0))
        >>> verifier.find_problem("E", probe, reported={}, scores=(-1.01, -2.03))
        "E: its log-probabilities of the probe differ from the trainer's by 0.06 nats on average (bound 0.04)"
        """
        problem = describe_differing(probe.checksums, reported)
        if problem is not None:
            return f"{engine}: {problem}"
        if len(scores) != len(probe.log_probs):
            return f"{engine}: it returned {len(scores)} scores for {len(probe.log_probs)} tokens"
        difference = math.fsum(abs(a - b) for a, b in zip(probe.log_probs, scores, strict=True)) / len(scores)
        known = self._verified.get(engine)
        bound = self._limit if known is None else known.bound
        if not difference <= bound:  # NaN included
            return (
                f"{engine}: its log-probabilities of the probe differ from the trainer's by {difference:.3g} nats on "
                f"average (bound {bound:.3g})"
            )
        self._verified[engine] = EngineVerification(
            engine=engine,
            noise=difference if known is None else known.noise,
            bound=noise_bound(difference, floor=self._floor, limit=self._limit) if known is None else bound,
            compared=len(probe.checksums.keys() & reported.keys()),
            parameters=len(probe.checksums),
        )
        return None

    def verified(self) -> list[EngineVerification]:
        """Return every verified engine, with the parameters compared and the noise measured at the start."""
        return list(self._verified.values())
