"""Verification of weight transfers: checksums of every parameter, and a probe that trainer and engine both score.

The start policy measures the two sides' difference at equal weights. After that, a larger one, or scores that do not
move while the trainer's do, mean that the weights did not arrive. Small movements add up until they exceed that noise.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.weights.checksums import Checksum, add_up, say_differing

FLOORS = {"float32": 1e-4, "bfloat16": 5e-3}
"""The smallest bound by dtype (nats, mean absolute difference on the probe), whatever the measurement says."""

LIMITS = {"float32": 1e-2, "bfloat16": 0.15}
"""The largest difference by dtype that counts as noise between two computations of one policy."""

PROBE_TOKENS = 512
# The ratio of the bound to the measured difference, and the share of the trainer's movement that the engine may lack.
_TIMES = 4.0
_MISSING = 0.75


def noise_bound(noise: float, *, floor: float, limit: float) -> float:
    """The largest difference that counts as equal weights, where equal weights were measured to differ by ``noise``.

    >>> noise_bound(0.011, floor=5e-3, limit=0.15), noise_bound(0.064, floor=5e-3, limit=0.15)
    (0.044, 0.15)
    """
    return min(limit, max(floor, _TIMES * noise))


def probe_tokens(prompts: Iterable[tuple[int, ...]], *, longest: int) -> tuple[int, ...]:
    """The first tokens of the concatenated prompts, at most ``PROBE_TOKENS`` and ``longest``.

    >>> probe_tokens([(1, 2, 3), (4, 5)], longest=4)
    (1, 2, 3, 4)
    """
    most = min(PROBE_TOKENS, longest)
    found: tuple[int, ...] = ()
    for prompt in prompts:
        found += prompt
        if len(found) >= most:
            break
    return found[:most]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The trainer's reference for its weights: ``log_probs`` of ``token_ids[1:]`` at temperature 1, and checksums."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    checksums: Mapping[str, Checksum] = field(default_factory=dict)


class Gauge:
    """Judges by the scores of the probe whether one engine follows the trainer."""

    def __init__(self, dtype: str, *, bound: float | None = None) -> None:
        """``bound`` replaces the measured bound."""
        self._limit = LIMITS[dtype] if bound is None else bound
        self._floor = FLOORS[dtype] if bound is None else bound
        self.measured: float | None = None
        self.bound = self._limit
        self._last: tuple[Probe, tuple[float, ...]] | None = None
        self._moved: tuple[Probe, tuple[float, ...]] | None = None

    def judge(self, probe: Probe, scores: Sequence[float]) -> str | None:
        """The problem with an engine that returns these scores, or None.

        The first scores measure the bound, because the weights are equal by construction then.

        >>> gauge = Gauge("bfloat16")
        >>> gauge.judge(Probe(token_ids=(1, 2, 3), log_probs=(-1.0, -2.0)), (-1.01, -2.01)), round(gauge.bound, 3)
        (None, 0.04)
        >>> gauge.judge(Probe(token_ids=(1, 2, 3), log_probs=(-1.1, -2.0)), (-1.01, -2.03))
        "its log-probabilities of the probe differ from the trainer's by 0.06 nats on average (bound 0.04)"
        """
        if len(scores) != len(probe.log_probs):
            return f"it gave {len(scores)} scores for {len(probe.log_probs)} tokens"
        difference = _mean_difference(probe.log_probs, scores)
        if not difference <= self.bound:  # NaN included
            said = f"its log-probabilities of the probe differ from the trainer's by {difference:.3g} nats on average"
            return f"{said} (bound {self.bound:.3g})"
        seen = (probe, tuple(scores))
        if self._last is None or self._moved is None:
            self.measured = difference
            self.bound = noise_bound(difference, floor=self._floor, limit=self._limit)
            self._last = self._moved = seen
            return None
        problem = self._rests(*self._last, *seen) or self._lags(*self._moved, *seen)
        if problem is None:
            self._last = seen
        return problem

    def _rests(self, before: Probe, said: tuple[float, ...], probe: Probe, scores: tuple[float, ...]) -> str | None:
        """Report scores that are bitwise identical while the trainer's weights and most of its scores changed."""
        changed = sum(a != b for a, b in zip(probe.log_probs, before.log_probs, strict=True))
        known = probe.checksums and probe.checksums == before.checksums
        if scores != said or known or 2 * changed <= len(scores):
            return None
        return (
            "its log-probabilities of the probe did not change at all, the trainer changed "
            f"{changed} of {len(scores)} by {_mean_difference(probe.log_probs, before.log_probs):.3g} nats on average"
        )

    def _lags(self, before: Probe, said: tuple[float, ...], probe: Probe, scores: tuple[float, ...]) -> str | None:
        """Report scores that do not move with the trainer's, once those have moved further than the noise."""
        moved = _mean_difference(probe.log_probs, before.log_probs)
        if moved <= self.bound:
            return None
        missing = math.fsum(
            abs((a - b) - (c - d)) for a, b, c, d in zip(probe.log_probs, before.log_probs, scores, said, strict=True)
        )
        if missing <= _MISSING * moved * len(scores):
            self._moved = (probe, scores)
            return None
        return (
            f"its log-probabilities of the probe do not follow the trainer's, which moved by {moved:.3g} nats on "
            f"average since they last did (bound {self.bound:.3g})"
        )


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The verification of one engine: the ``noise`` measured at the start and its ``bound``, in nats.

    ``compared``: of so many ``parameters`` of the trainer the engine provides checksums; 0 of 0 for shared weights.
    """

    engine: str
    noise: float
    bound: float
    compared: int
    parameters: int

    def __str__(self) -> str:
        difference = f"the two sides' log-probabilities differ by {self.noise:.2g} nats on average"
        if not self.parameters:
            return f"{self.engine} shares the trained weights; with the start policy {difference}"
        checksums = f"checksums of {self.compared} of {self.parameters} parameters"
        return (
            f"{self.engine}: every transfer is verified by {checksums} and by a probe; "
            f"with the start policy {difference}, bound {self.bound:.2g}"
        )


class ScoringServer(Protocol):
    """The calls that verification makes to an engine in another process."""

    @property
    def address(self) -> str: ...
    @property
    def tells_checksums(self) -> bool: ...
    async def checksums(self) -> list[dict[str, tuple[int, int]]]: ...
    async def score(self, token_ids: tuple[int, ...], *, salt: str) -> tuple[float, ...]: ...


class Verifier:
    """Checks that the engines of a run hold the trainer's weights."""

    def __init__(self, dtype: str, *, bound: float | None = None) -> None:
        self._dtype = dtype
        self._bound = bound
        self._gauges: dict[str, Gauge] = {}
        self._compared: dict[str, tuple[int, int]] = {}

    async def look(self, server: ScoringServer, probe: Probe) -> str | None:
        """Get a server's checksums, if it provides them, and its scores of the probe; return the problem, or None."""
        told = add_up(await server.checksums()) if server.tells_checksums else {}
        scores = await server.score(probe.token_ids, salt=f"probe-{secrets.token_hex(8)}")
        return self.judge(f"the vLLM server {server.address}", probe, told=told, scores=scores)

    def judge(self, engine: str, probe: Probe, *, told: Mapping[str, Checksum], scores: Sequence[float]) -> str | None:
        """The problem with an engine that returns these checksums and scores, or None.

        ``told`` is empty if the engine provides no checksums.
        """
        problem = say_differing(probe.checksums, told)
        if problem is None:
            gauge = self._gauges.setdefault(engine, Gauge(self._dtype, bound=self._bound))
            problem = gauge.judge(probe, scores)
        if problem is not None:
            return f"{engine}: {problem}"
        self._compared[engine] = (len(probe.checksums.keys() & told.keys()), len(probe.checksums))
        return None

    def verified(self) -> list[Verified]:
        """Every engine that has been verified: the parameters compared, and the noise measured at the start."""
        made = []
        for engine, (compared, parameters) in self._compared.items():
            gauge = self._gauges[engine]
            assert gauge.measured is not None  # its first scores were accepted
            made.append(
                Verified(
                    engine=engine, noise=gauge.measured, bound=gauge.bound, compared=compared, parameters=parameters
                )
            )
        return made


def _mean_difference(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
