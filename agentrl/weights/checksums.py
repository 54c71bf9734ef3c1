"""Checksums of parameters that do not depend on how an engine fuses, shards, pads and transposes them.

A checksum is a sum over a parameter's values, each mixed into 64 bits: sums of shards add up, and zeros contribute
nothing. One changed value always changes it, several leave it with probability 2^-64. It does not see their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

_MODULUS = 1 << 64
# Elements processed at a time: mixing needs 24 bytes of memory for each.
_CHUNK = 1 << 22
# The constants of splitmix64's finalizer, as signed 64-bit integers.
_FIRST = 0xBF58476D1CE4E5B9 - _MODULUS
_SECOND = 0x94D049BB133111EB - _MODULUS
_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Checksum:
    """``values``: the number of nonzero values; ``total``: the sum of the mixed values modulo 2^64."""

    values: int = 0
    total: int = 0

    def __add__(self, other: Checksum) -> Checksum:
        return Checksum(values=self.values + other.values, total=(self.total + other.total) % _MODULUS)

    def copies_in(self, other: Checksum) -> bool:
        """Whether ``other`` is one copy of this parameter, or as many as tensor parallelism makes.

        >>> one = Checksum(values=2, total=5)
        >>> one.copies_in(one), one.copies_in(one + one), one.copies_in(Checksum(values=4, total=11))
        (True, True, False)
        """
        if self.values == 0:
            return other.values == 0
        copies, rest = divmod(other.values, self.values)
        return copies > 0 and rest == 0 and other.total == copies * self.total % _MODULUS


def checksum(tensor: Tensor) -> Checksum:
    """The checksum of a tensor's values as float32, which represents bfloat16 and float16 exactly.

    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 0.0, 1.0], dtype=torch.bfloat16))
    True
    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([1.0, 2.0000002]))
    False
    """
    values = total = 0
    for chunk in tensor.detach().reshape(-1).split(_CHUNK):
        # Some processors treat denormal numbers as zeros, and a product with 1 loses the sign of -0.
        exact = chunk.float()
        bits = exact.view(torch.int32).to(torch.int64)
        bits = torch.where(exact.abs() < torch.finfo(torch.float32).tiny, 0, bits)
        values += int(bits.count_nonzero())
        total += int(_mixed(bits).sum())
    return Checksum(values=values, total=total % _MODULUS)


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Checksum]:
    """The checksum of each parameter; pieces with the same name are added up."""
    found: dict[str, Checksum] = defaultdict(Checksum)
    for name, tensor in tensors:
        found[name] += checksum(tensor)
    return dict(found)


def add_up(workers: Iterable[Mapping[str, tuple[int, int]]]) -> dict[str, Checksum]:
    """Checksums of whole parameters, from each worker's counts of values and totals."""
    found: dict[str, Checksum] = defaultdict(Checksum)
    for share in workers:
        for name, (values, total) in share.items():
            found[name] += Checksum(values=values, total=total)
    return dict(found)


def with_head(found: Mapping[str, Checksum]) -> dict[str, Checksum]:
    """The same checksums, with the embedding's as the head's if the two are tied."""
    tied = EMBEDDING in found and HEAD not in found
    return {**found, HEAD: found[EMBEDDING]} if tied else dict(found)


def say_differing(trainer: Mapping[str, Checksum], engine: Mapping[str, Checksum]) -> str | None:
    """Name the parameters that differ between engine and trainer, among those that both know; None if none differs.

    >>> two, three = Checksum(values=1, total=2), Checksum(values=1, total=3)
    >>> say_differing({"a": two, "b": two}, {"a": two, "b": three})
    "by their checksums 1 of 2 parameters are not the trainer's: b"
    """
    both = [name for name in trainer if name in engine]
    wrong = [name for name in both if not trainer[name].copies_in(engine[name])]
    if not wrong:
        return None
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    names = ", ".join(wrong[:_SHOWN])
    return f"by their checksums {len(wrong)} of {len(both)} parameters are not the trainer's: {names}{more}"


def _mixed(bits: Tensor) -> Tensor:
    """Mix each integer over 64 bits. The mapping is one to one, and 0 stays 0."""
    return _folded(_folded(bits * _FIRST, 30) * _SECOND, 31)


def _folded(bits: Tensor, shift: int) -> Tensor:
    return bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))
