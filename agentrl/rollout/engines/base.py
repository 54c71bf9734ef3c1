"""What an engine is: token ids in; sampled token ids, their log-probabilities and policy versions out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


class EngineError(RuntimeError):
    """The engine could not answer; the trajectory is retried, then ends as an infrastructure failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to sample one turn: from the tempered distribution, cut to its likeliest tokens of probability ``top_p``.

    Temperature 0 is greedy.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What was sampled: EOS and whatever stands past a stop string's end included.

    ``log_probs`` are those of the distribution sampled from; ``version_spans`` (policy version, number of tokens).
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Literal["eos", "stop", "length"]
    version_spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUse:
    """An engine's KV cache: ``tokens`` that it holds at most and the share that is in use where it is fullest (0 to 1).

    ``preemptions``: how often in its life a trajectory lost keys and values for want of room.
    """

    tokens: int
    used: float
    preemptions: int


class Engine(Protocol):
    """Thousands of calls may be in flight; cancelling one aborts its request.

    A call lasts as long as tokens come: time bounds no turn, since that would drop long ones on a busy engine.
    """

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        trajectory_id: str,
        request_id: str,
        seed: int,
    ) -> Completion: ...

    def release(self, trajectory_id: str) -> None:
        """Nothing more will be asked for this trajectory: what is cached for it may go."""

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probabilities at temperature 1 of tokens 1.. given those before: for probes."""

    async def cache_use(self) -> CacheUse | None:
        """How full the KV cache is; None if nobody can tell at present."""

    def fingerprint(self) -> str: ...

    async def health(self) -> str:
        """One line about the engine; raises :class:`EngineError` if it cannot serve."""

    async def close(self) -> None: ...
