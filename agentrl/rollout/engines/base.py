"""The interface of engines: token ids in; sampled token ids, their log-probabilities and policy versions out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


class EngineError(RuntimeError):
    """The engine could not answer; the trajectory is retried, then ends as an infrastructure failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How to sample one turn: from the tempered distribution, cut to its nucleus of probability ``top_p``.

    Temperature 0 means greedy sampling.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The sampled tokens, including EOS and any text past the end of a stop string.

    ``log_probs`` refer to the distribution sampled from; ``version_spans`` lists (policy version, number of tokens).
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Literal["eos", "stop", "length"]
    version_spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUse:
    """An engine's KV cache: its capacity in ``tokens``, and the share ``used`` (0 to 1) of its fullest part.

    ``preemptions``: how often since the start a trajectory lost its keys and values for lack of room.
    """

    tokens: int
    used: float
    preemptions: int


class Engine(Protocol):
    """An engine that serves thousands of concurrent calls; cancelling a call aborts its request.

    A call lasts as long as tokens arrive. No turn has a time limit, which would drop long turns on a busy engine.
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
        """Allow the engine to drop a trajectory's cache, because no further request will follow."""

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probabilities of ``token_ids[1:]`` at temperature 1, each given the tokens before it; used by probes."""

    async def cache_use(self) -> CacheUse | None:
        """The usage of the KV cache; None if it is currently unknown."""

    def fingerprint(self) -> str: ...

    async def health(self) -> str:
        """One line about the engine; raises :class:`EngineError` if it cannot serve."""

    async def close(self) -> None: ...
