"""Verification of weight transfers: checksums of every parameter, and a probe that trainer and engine both score.

Checksums find a parameter that did not arrive, arrived in part or is stale. They do not depend on the order of a
parameter's values, and cover only parameters that have a name in a checkpoint; the probe covers both. The start policy
measures the two sides' difference on the probe at equal weights, which bounds the difference from then on.

Not guaranteed: an engine that provides no checksums may miss an update that moves the probe by less than that bound.
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
_TIMES = 4.0  # ratio of the bound to the measured difference


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
    def title(self) -> str: ...
    @property
    def has_checksums(self) -> bool: ...
    async def checksums(self) -> list[dict[str, tuple[int, int]]]: ...
    async def score(self, token_ids: tuple[int, ...], *, salt: str) -> tuple[float, ...]: ...


class Verifier:
    """Checks that the engines of a run hold the trainer's weights."""

    def __init__(self, dtype: str, *, bound: float | None = None) -> None:
        """``bound`` replaces the measured bound."""
        self._limit = LIMITS[dtype] if bound is None else bound
        self._floor = FLOORS[dtype] if bound is None else bound
        self._verified: dict[str, Verified] = {}

    async def check(self, server: ScoringServer, probe: Probe) -> str | None:
        """Get a server's checksums, if it provides them, and its scores of the probe; return the problem, or None."""
        told = add_up(await server.checksums()) if server.has_checksums else {}
        scores = await server.score(probe.token_ids, salt=f"probe-{secrets.token_hex(8)}")
        return self.judge(f"the {server.title} server {server.address}", probe, told=told, scores=scores)

    def judge(self, engine: str, probe: Probe, *, told: Mapping[str, Checksum], scores: Sequence[float]) -> str | None:
        """The problem with an engine that returns these checksums and scores, or None.

        ``told`` is empty if the engine provides no checksums. The first scores of an engine measure its bound, because
        the weights are equal by construction then.

        >>> verifier = Verifier("bfloat16")
        >>> verifier.judge("E", Probe(token_ids=(1, 2, 3), log_probs=(-1.0, -2.0)), told={}, scores=(-1.01, -2.01))
        >>> verifier.judge("E", Probe(token_ids=(1, 2, 3), log_probs=(-1.1, -2.0)), told={}, scores=(-1.01, -2.03))
        "E: its log-probabilities of the probe differ from the trainer's by 0.06 nats on average (bound 0.04)"
        """
        problem = say_differing(probe.checksums, told)
        if problem is not None:
            return f"{engine}: {problem}"
        if len(scores) != len(probe.log_probs):
            return f"{engine}: it gave {len(scores)} scores for {len(probe.log_probs)} tokens"
        difference = math.fsum(abs(a - b) for a, b in zip(probe.log_probs, scores, strict=True)) / len(scores)
        known = self._verified.get(engine)
        bound = self._limit if known is None else known.bound
        if not difference <= bound:  # NaN included
            return (
                f"{engine}: its log-probabilities of the probe differ from the trainer's by {difference:.3g} nats on "
                f"average (bound {bound:.3g})"
            )
        self._verified[engine] = Verified(
            engine=engine,
            noise=difference if known is None else known.noise,
            bound=noise_bound(difference, floor=self._floor, limit=self._limit) if known is None else bound,
            compared=len(probe.checksums.keys() & told.keys()),
            parameters=len(probe.checksums),
        )
        return None

    def verified(self) -> list[Verified]:
        """Every engine that has been verified: the parameters compared, and the noise measured at the start."""
        return list(self._verified.values())
