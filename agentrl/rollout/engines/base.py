"""Engines: token ids in; sampled token ids, their log-probabilities and policy versions out.

An :class:`Engine` samples. A :class:`ManagedEngine` is its lifecycle: opened, paused, given new weights, closed. An
:class:`EnginePlugin` is the engine that ``rollout.engine`` names: a built-in one, one registered by
:func:`register_engine`, an entry point of the group ``agentrl.engines``, or ``module:Class``.

This module imports nothing heavy, and plug-ins should import their libraries in :meth:`EnginePlugin.managed`: settings
are checked without torch. An engine of servers derives from :class:`.ManagedServers` and :class:`.Replica`;
docs/engines.md has a complete example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.cluster.processes import Bundle, ClusterNode
from agentrl.errors import SettingsError
from agentrl_envs.registry import Registry, UnknownNameError

if TYPE_CHECKING:
    from agentrl.cluster.settings import ClusterSettings
    from agentrl.models.settings import ModelSettings
    from agentrl.models.tokenizer import TextCodec
    from agentrl.rollout.settings import EngineSections, RolloutSettings
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

    async def pause(self) -> None:
        """Pause all requests until :meth:`install`."""

    async def install(self, directory: str | None, version: int, probe: Probe | None) -> str | None:
        """Take the weights of ``version``, from ``directory`` or as transferred; verify them; resume requests."""

    def record(self) -> Mapping[str, str]:
        """The fields that identify the engine in results."""

    async def close(self) -> None: ...


class NoOptions(BaseModel):
    """The options of an engine that has none: every key in ``rollout.options`` is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSettings(BaseModel):
    """Addresses, number and deadlines of an engine's servers.

    >>> ServerSettings(replicas=2).stall_deadline
    300.0
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefix: ClassVar[str] = "rollout.options"
    """The key of these settings, for error messages."""

    addresses: list[str] = Field([], description="addresses of external servers, as http://HOST:PORT")
    replicas: int = Field(1, ge=1, description="number of servers to start")
    probe_bound: float | None = Field(
        None,
        gt=0,
        description="maximum mean |log-prob difference| on the probe after a transfer; null: measured at the start",
    )
    start_deadline: float = Field(900.0, gt=0, description="seconds that a server may take to start")
    stall_deadline: float = Field(
        300.0,
        gt=0,
        description="seconds without a computed token after which the requests of a server are sent to another server; "
        "the duration of a request is not limited. Also the seconds within which nccl and ipc must send the next "
        "parameter",
    )
    outage_deadline: float = Field(
        600.0, gt=0, description="seconds without a working server after which the run ends with an error"
    )
    request_retries: int = Field(8, ge=0, description="number of times that a failed request is sent again")
    restarts: int = Field(3, ge=0, description="number of times that each server started by the run is restarted")


_Plugin = TypeVar("_Plugin", bound="type[EnginePlugin]")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """An engine as the settings configure it.

    >>> EngineFacts(about="two servers of example", servers=2).in_process
    False
    """

    about: str
    """One line for the console."""
    in_process: bool = False
    """It computes in the rollout worker, with a model loaded there."""
    reproducible: bool = False
    """Equal requests give equal bits, regardless of when they arrive."""
    kv_slots: int | None = None
    """Tokens of its KV cache, if a setting fixes the number."""
    prompt_limit: int | None = None
    """Tokens of the longest prompt that it accepts."""
    servers: int = 0
    """Number of servers that it starts."""
    gpus_per_server: int = 1
    gpu_share: float | None = None
    """Share of a GPU's memory that a server takes; None: chosen when the server starts."""
    shares_gpus: str = ""
    """The setting by which it shares GPUs with the training ranks, so that one side is idle while the other computes,
    as ``key=value``; empty if it does not."""
    remote: bool = False
    """Servers may run on other machines, without being started by the run."""
    start_seconds: float = 0.0
    """How long opening it may take beyond loading a model."""


class EnginePlugin(ABC):
    """An engine that ``rollout.engine`` can name."""

    options_model: ClassVar[type[BaseModel]] = NoOptions
    """The model of ``rollout.options``."""

    def options(self, rollout: RolloutSettings) -> Any:
        """Return ``rollout.options`` as an ``options_model``. Raises SettingsError that names every wrong key."""
        try:
            return self.options_model.model_validate(rollout.options)
        except ValidationError as error:
            valid = ", ".join(self.options_model.model_fields) or "none"
            raise SettingsError(
                "\n".join(
                    f"{'.'.join(map(str, ('rollout.options', *item['loc'])))}: {item['msg']} (valid options of "
                    f"rollout.engine={rollout.engine}: {valid})"
                    for item in error.errors()
                )
            ) from None

    @abstractmethod
    def facts(self, rollout: RolloutSettings) -> EngineFacts:
        """Return the facts about the engine. Called often, and before anything is loaded."""

    @abstractmethod
    def managed(self, request: EngineRequest) -> ManagedEngine:
        """Return the engine, not yet open. Raises SettingsError if it cannot run here."""

    def problems(self, settings: EngineSections, *, cluster: str) -> Iterable[str]:
        """Yield one message for each contradiction in the settings. ``cluster``: ``cluster.kind``."""
        return ()

    def check_machine(self, settings: EngineSections, *, longest: int, training_gpus: int) -> None:
        """Raise SettingsError if this machine cannot run the engine. ``longest``: tokens of the longest sequence."""


class TransformersPlugin(EnginePlugin):
    """The engine in the rollout worker."""

    def facts(self, rollout: RolloutSettings) -> EngineFacts:
        return EngineFacts(
            about="the transformers engine in the rollout worker",
            in_process=True,
            reproducible=True,
            kv_slots=rollout.kv_cache_tokens,
        )

    def managed(self, request: EngineRequest) -> ManagedEngine:
        from agentrl.rollout.engines.transformers import ManagedTransformers

        return ManagedTransformers(request)


ENGINES: Registry[type[EnginePlugin]] = Registry(
    "engine",
    builtin={
        "transformers": "agentrl.rollout.engines.base:TransformersPlugin",
        "vllm": "agentrl.rollout.engines.vllm.plugin:VLLMPlugin",
    },
    group="agentrl.engines",
    paths=True,
)


def register_engine(name: str) -> Callable[[_Plugin], _Plugin]:
    """Class decorator: ``rollout.engine=NAME`` selects this plug-in."""

    def add(plugin: _Plugin) -> _Plugin:
        ENGINES.add(name, plugin)
        return plugin

    return add


def engine_plugin(rollout: RolloutSettings) -> EnginePlugin:
    """Return the plug-in that ``rollout.engine`` names. Raises SettingsError if there is none."""
    try:
        plugin = ENGINES[rollout.engine]
    except UnknownNameError as error:
        raise SettingsError(f"rollout.engine={rollout.engine}: {error}") from error
    return plugin()


def engine_facts(rollout: RolloutSettings) -> EngineFacts:
    """Return the facts about the engine that ``rollout.engine`` names."""
    return engine_plugin(rollout).facts(rollout)


def servers_on_nodes(rollout: RolloutSettings, cluster: str) -> bool:
    """Return whether a cluster of this kind (``cluster.kind``) places the engine's servers on its nodes."""
    facts = engine_facts(rollout)
    return cluster == "ray" and facts.servers > 0 and not facts.shares_gpus


def server_bundles(facts: EngineFacts, nodes: Sequence[ClusterNode], cpus: float) -> list[Bundle]:
    """Return the resources of each server to be started, all on one node; GPUs only if the nodes have any.

    >>> node = ClusterNode(name="a", address="10.0.0.1", cpus=8, gpus=8)
    >>> server_bundles(EngineFacts(about="example", servers=1, gpus_per_server=2), [node], 1.0)
    [Bundle(purpose='server 0', cpus=1.0, gpus=2)]
    """
    gpus = facts.gpus_per_server if any(node.gpus for node in nodes) else 0
    return [Bundle(purpose=f"server {number}", cpus=cpus, gpus=gpus) for number in range(facts.servers)]
