"""The interface of engines: token ids in; sampled token ids, their log-probabilities and policy versions out.

An :class:`Engine` samples. A :class:`ManagedEngine` is its lifecycle: opened, paused, given new weights, closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from agentrl.cluster.settings import ClusterSettings
    from agentrl.models.settings import ModelSettings
    from agentrl.models.tokenizer import TextCodec
    from agentrl.rollout.settings import RolloutSettings
    from agentrl.weights.sources import TransferTarget
    from agentrl.weights.verify import Probe, Verifier


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


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """The engine to open and its policy.

    ``policy_path``: a directory or a Hugging Face id. ``longest``: tokens of the longest sequence that will be
    requested. ``folder``: the directory for servers' logs and their initial weights. ``model``: the loaded policy, for
    an engine in this process. ``shared``: ``model`` is the trained module itself, so weights need no transfer.
    ``trained``: the weights will change. ``cluster``: starts the servers on its nodes; None: they start here.
    """

    rollout: RolloutSettings
    policy: ModelSettings
    policy_path: str
    codec: TextCodec
    longest: int
    folder: Path
    model: Any | None = None
    shared: bool = False
    trained: bool = True
    training_gpus: int = 0
    deterministic: bool = False
    cluster: ClusterSettings | None = None


class ManagedEngine(Protocol):
    """The lifecycle of every engine.

    ``open`` comes first, then sampling through ``engine``. An update of the weights calls ``pause`` and ``install``,
    which verifies and resumes. ``close`` comes last. ``verify`` and ``install`` return the problem with the engine's
    weights, or None.
    """

    verifier: Verifier

    @property
    def engine(self) -> Engine: ...

    async def open(self) -> None:
        """Make the engine ready to sample. Raises SettingsError or WorldError; then nothing is left running."""

    def begin_rollouts(self) -> None:
        """Prepare for sampling after a training step."""

    async def end_rollouts(self) -> None:
        """Prepare for a training step: hand over the shared weights or GPUs."""

    def target(self) -> TransferTarget | None:
        """The destination of new weights; None for an engine that shares the trained module."""

    async def verify(self, version: int, probe: Probe) -> str | None:
        """Verify the weights that the engine was opened with; requests resume if they are right."""

    async def pause(self, *, zero_weights: bool) -> None:
        """Pause all requests until :meth:`install`.

        ``zero_weights``: set all parameters to zero, so that an incomplete transfer is detected.
        """

    async def install(self, directory: str | None, version: int, probe: Probe | None) -> str | None:
        """Take the weights of ``version``, from ``directory`` or as transferred; verify them; resume requests."""

    def record(self) -> Mapping[str, str]:
        """The fields that identify the engine in results."""

    async def close(self) -> None: ...
