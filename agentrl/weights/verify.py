"""Whether a transfer arrived: a fixed probe, scored by the trainer and by the engine, and what checksums can tell."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BOUNDS = {"float32": 1e-4, "bfloat16": 3e-2}
"""Mean absolute difference of log-probabilities (nats) that two computations of one policy may have, by dtype."""

_LENGTH = 64
_SEED = 20_251
_EMPTY = hashlib.sha256(b"").hexdigest()
_SHOWN = 8


def probe_tokens(vocabulary: int, *, longest: int = _LENGTH) -> tuple[int, ...]:
    """The fixed probe for a vocabulary of so many tokens: the same on every rank, in every run.

    >>> probe_tokens(300) == probe_tokens(300), len(probe_tokens(300)), max(probe_tokens(300)) < 300
    (True, 64, True)
    """
    numbers = random.Random(_SEED)
    return tuple(numbers.randrange(vocabulary) for _ in range(min(_LENGTH, longest)))


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What the trainer says of the probe: ``log_probs`` of ``token_ids[1:]`` at temperature 1."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Mean absolute difference between trainer and engine; ``problem`` is None if they are the same policy."""

    difference: float
    problem: str | None = None


def compare(
    probe: Probe,
    scored: Sequence[float],
    *,
    bound: float,
    before: tuple[Probe, Sequence[float]] | None = None,
) -> Verdict:
    """Compare an engine's scores with the trainer's.

    ``before`` is the last probe that agreed and the engine's scores of it: an engine whose scores are the same to the
    last bit although the trainer's moved further than rounding has old weights, also where the difference hides under
    the bound of a coarse dtype.

    >>> probe = Probe(token_ids=(1, 2, 3), log_probs=(-1.0, -2.0))
    >>> compare(probe, (-1.0, -2.5), bound=0.3).problem is None, compare(probe, (-1.0, -2.5), bound=0.2).difference
    (True, 0.25)
    >>> last = Probe(token_ids=(1, 2, 3), log_probs=(-1.0, -2.3))
    >>> compare(probe, (-1.0, -2.2), bound=0.3, before=(last, (-1.0, -2.2))).problem
    'its log-probabilities of the probe did not change at all, the trainer changed them by 0.15 nats on average'
    """
    if len(scored) != len(probe.log_probs):
        return Verdict(difference=math.inf, problem=f"it gave {len(scored)} scores for {len(probe.log_probs)} tokens")
    difference = _mean_difference(probe.log_probs, scored)
    if not difference <= bound:  # NaN included
        said = f"its log-probabilities of the probe differ from the trainer's by {difference:.3g} nats on average"
        return Verdict(difference=difference, problem=f"{said} (bound {bound:g})")
    if before is not None and before[0].token_ids == probe.token_ids and tuple(before[1]) == tuple(scored):
        moved = _mean_difference(probe.log_probs, before[0].log_probs)
        if moved > 0 and moved > 2 * _mean_difference(before[0].log_probs, before[1]):
            return Verdict(
                difference=difference,
                problem="its log-probabilities of the probe did not change at all, the trainer changed them by "
                f"{moved:.3g} nats on average",
            )
    return Verdict(difference=difference)


def _mean_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def say_missing(blank: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Which parameters of an engine a transfer did not write, by checksums from before it (all zero) and after it.

    Checksums of empty tensors (an engine that packs its weights elsewhere, as vLLM on CPU) tell nothing.

    >>> say_missing({"a": "1", "b": "2"}, {"a": "1", "b": "3"})
    'by its checksums the transfer did not write 1 of 2 parameters: a'
    >>> say_missing({}, {})
    'it gives no checksums that could tell which parameters'
    """
    known = blank.keys() & after.keys()
    telling = sorted(name for name in known if _EMPTY not in (blank[name], after[name]))
    if not telling:
        return "it gives no checksums that could tell which parameters"
    hidden = len(known) - len(telling)
    silent = f"; {hidden} others are packed out of sight of checksums" if hidden else ""
    same = [name for name in telling if blank[name] == after[name]]
    if not same:
        return f"by its checksums the transfer wrote all {len(telling)} parameters{silent}"
    more = f" and {len(same) - _SHOWN} more" if len(same) > _SHOWN else ""
    names = ", ".join(same[:_SHOWN])
    return (
        f"by its checksums the transfer did not write {len(same)} of {len(telling)} parameters: {names}{more}{silent}"
    )
