"""Interfaces of engines. An engine samples token ids with log-probabilities and policy versions.

An :class:`Engine` samples. A :class:`ManagedEngine` controls its lifecycle, including weight updates. An
:class:`EnginePlugin` is selected by ``rollout.engine``: a built-in engine, an engine registered with
:func:`register_engine`, an entry point of the group ``agentrl.engines``, or ``module:Class``.

This module imports no heavy libraries, because settings are checked without torch. Plug-ins should import their
libraries in :meth:`EnginePlugin.managed`. Engines over servers derive from :class:`.ManagedServers` and
:class:`.ServerClient`. See docs/how-to/engines.md for a complete example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.cluster.backends import has_many_nodes
from agentrl.cluster.processes import Bundle, ClusterNode
from agentrl.errors import SettingsError
from agentrl.trajectory import Segment
from agentrl_envs.registry import Registry, UnknownNameError

if TYPE_CHECKING:
    from agentrl.cluster.settings import ClusterSettings
    from agentrl.models.settings import ModelSettings
    from agentrl.models.tokenizer import TextCodec
    from agentrl.rollout.settings import EngineRelatedSettings, RolloutSettings
    from agentrl.weights.sources import TransferTarget
    from agentrl.weights.verify import Probe, Verifier


class EngineError(RuntimeError):
    """Raised if the engine fails. After the last retry, the trajectory ends as an infrastructure failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters of one turn: the tempered distribution, restricted by ``min_p``, ``top_k`` and ``top_p``.

    The limits apply in this order, each to the renormalized result of the previous limits. Temperature 0 means greedy
    sampling. ``returns_support``: return the tokens to which each distribution was restricted. ``routes_from``: return
    the routes of the context's tokens from this index on, and of the sampled tokens except the last; None: return no
    routes.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    returns_support: bool = False
    routes_from: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The sampled tokens, including EOS and any text past the end of a stop string.

    ``log_probs`` are under the sampling distribution. ``version_spans`` lists (policy version, number of tokens).
    ``support_ids``, ``support_sizes`` and ``routes``: see :class:`~agentrl.trajectory.Segment`; empty if not requested.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Literal["eos", "stop", "length"]
    version_spans: tuple[tuple[int, int], ...]
    support_ids: Sequence[int] = ()
    support_sizes: Sequence[int] = ()
    routes: bytes = b""

    def to_segment(self, text: str, *, reward: float) -> Segment:
        """Convert the completion to a segment of a trajectory."""
        return Segment(
            origin="model",
            token_ids=self.token_ids,
            text=text,
            log_probs=self.log_probs,
            version_spans=self.version_spans,
            reward=reward,
            support_ids=self.support_ids,
            support_sizes=self.support_sizes,
            routes=self.routes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUse:
    """Usage of an engine's KV cache: its capacity in ``tokens``, and the fraction ``used`` (0 to 1).

    An engine with several caches reports the fraction of the fullest cache.

    ``preemptions``: number of times since the start that a trajectory lost its keys and values for lack of room.
    """

    tokens: int
    used: float
    preemptions: int


class Engine(Protocol):
    """Interface of engines. Thousands of calls may run concurrently, and cancelling a call aborts its request.

    Turns have no time limit, because a limit would drop long turns on a busy engine.
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

    async def cache_use(self) -> CacheUse | None:
        """Return the usage of the KV cache, or None if it is currently unknown."""

    async def health(self) -> str:
        """Return a one-line status of the engine. Raises :class:`EngineError` if it cannot serve requests."""

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class EngineSpecification:
    """An engine to build, and the policy that it samples from.

    ``policy_path``: a directory or a Hugging Face id. ``longest``: tokens of the longest sequence that will be
    requested. ``folder``: the directory for servers' logs and their initial weights. ``model``: the loaded policy, for
    an engine in this process. ``shared``: ``model`` is the trained module itself, so weights need no transfer.
    ``trained``: the weights will change. ``routes``: requests for routes will follow. ``cluster``: the cluster for the
    servers; None: they start on this machine.
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
    routes: bool = False
    training_gpus: int = 0
    deterministic: bool = False
    cluster: ClusterSettings | None = None


class ManagedEngine(Protocol):
    """The lifecycle of an engine.

    ``open`` is called first, and ``engine`` samples after that. A weight update calls ``pause`` and then ``install``,
    which verifies the weights and resumes requests. ``close`` is called last. ``verify`` and ``install`` return the
    problem with the engine's weights, or None.
    """

    verifier: Verifier

    @property
    def engine(self) -> Engine: ...

    async def open(self) -> None:
        """Prepare the engine for sampling.

        If opening fails, stops everything that was started and raises SettingsError or WorldError.
        """

    def prepare_for_rollouts(self) -> None:
        """Prepare for sampling after a training step."""

    async def prepare_for_training(self) -> None:
        """Prepare for a training step: release shared weights or GPUs."""

    def transfer_target(self) -> TransferTarget | None:
        """Return the destination of new weights, or None for an engine that shares the trained module."""

    async def verify(self, version: int, probe: Probe) -> str | None:
        """Verify the initial weights. Requests resume if the weights are correct."""

    async def pause(self) -> None:
        """Pause all requests until :meth:`install`."""

    async def install(self, directory: str | None, version: int, probe: Probe | None) -> str | None:
        """Install the weights of ``version`` from ``directory`` or a transfer, verify them and resume requests."""

    def identity_fields(self) -> Mapping[str, str]:
        """Return the fields that identify the engine in results."""

    async def close(self) -> None: ...


class NoOptions(BaseModel):
    """The options of an engine without options: every key in ``rollout.options`` is an error."""

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
    request_retries: int = Field(8, ge=0, description="maximum number of times that a failed request is sent again")
    restarts: int = Field(3, ge=0, description="maximum number of restarts of each server that the run started")


_Plugin = TypeVar("_Plugin", bound="type[EnginePlugin]")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """Properties of an engine under the run's settings.

    >>> EngineFacts(about="two servers of example", servers=2).in_process
    False
    """

    about: str
    """One-line description of the engine for the console."""
    in_process: bool = False
    """Whether the engine runs in the rollout worker, with a model loaded there."""
    reproducible: bool = False
    """Whether equal requests return bitwise equal results, regardless of their time of arrival."""
    kv_slots: int | None = None
    """Capacity of the KV cache in tokens, if fixed by a setting."""
    largest_support: int | None = 0
    """Number of tokens of the largest support that the engine can return; None: unlimited, 0: no supports."""
    returns_routes: bool = False
    """Whether the engine can return the experts of each token in every layer."""
    approximation: str = ""
    """The setting, as ``key=value``, that makes the sampling policy differ from the trained policy; empty: none."""
    prompt_limit: int | None = None
    """Length in tokens of the longest accepted prompt."""
    servers: int = 0
    """Number of servers to start."""
    gpus_per_server: int = 1
    gpu_share: float | None = None
    """Fraction of a GPU's memory for each server; None: chosen when the server starts."""
    shares_gpus: str = ""
    """The setting, as ``key=value``, that makes the engine share GPUs with the training ranks; empty if it does not.
    With shared GPUs, one side is idle while the other computes."""
    remote: bool = False
    """Whether servers may run on other machines without being started by the run."""
    start_seconds: float = 0.0
    """Maximum number of seconds to open the engine, not counting the time to load a model."""


class EnginePlugin(ABC):
    """Base class of the engines that ``rollout.engine`` selects."""

    options_model: ClassVar[type[BaseModel]] = NoOptions
    """The pydantic model of ``rollout.options``."""

    def options(self, rollout: RolloutSettings) -> Any:
        """Parse ``rollout.options`` with ``options_model``. Raises a SettingsError that lists every invalid key."""
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
        """Return the engine's properties. Must be cheap, because it is called often, even before a model is loaded."""

    @abstractmethod
    def managed(self, request: EngineSpecification) -> ManagedEngine:
        """Build the engine without opening it. Raises SettingsError if this machine cannot run it."""

    def problems(self, settings: EngineRelatedSettings, *, cluster: str) -> Iterable[str]:
        """Yield one message for each contradiction in the settings. ``cluster``: ``cluster.kind``."""
        return ()

    def check_machine(self, settings: EngineRelatedSettings, *, longest: int, training_gpus: int) -> None:
        """Raise SettingsError if this machine cannot run the engine. ``longest``: tokens of the longest sequence."""


class TransformersPlugin(EnginePlugin):
    """The plug-in for the transformers engine in the rollout worker."""

    def facts(self, rollout: RolloutSettings) -> EngineFacts:
        return EngineFacts(
            about="the transformers engine in the rollout worker",
            in_process=True,
            reproducible=True,
            kv_slots=rollout.kv_cache_tokens,
            largest_support=None,
            returns_routes=True,
        )

    def managed(self, request: EngineSpecification) -> ManagedEngine:
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
    """Register the decorated plug-in class for ``rollout.engine=NAME``."""
    return ENGINES.decorator(name)


def engine_plugin(rollout: RolloutSettings) -> EnginePlugin:
    """Return the plug-in selected by ``rollout.engine``. Raises SettingsError if the name is unknown."""
    try:
        plugin = ENGINES[rollout.engine]
    except UnknownNameError as error:
        raise SettingsError(f"rollout.engine={rollout.engine}: {error}") from error
    return plugin()


def engine_facts(rollout: RolloutSettings) -> EngineFacts:
    """Return the properties of the engine selected by ``rollout.engine``."""
    return engine_plugin(rollout).facts(rollout)


def runs_servers_on_nodes(rollout: RolloutSettings, cluster: str) -> bool:
    """Return True if a cluster of this kind (``cluster.kind``) places the engine's servers on its nodes."""
    facts = engine_facts(rollout)
    return has_many_nodes(cluster) and facts.servers > 0 and not facts.shares_gpus


def server_bundles(facts: EngineFacts, nodes: Sequence[ClusterNode], cpus: float) -> list[Bundle]:
    """Return the resources that each server needs on its node. GPUs are requested only if the nodes have any.

    >>> node = ClusterNode(name="a", address="10.0.0.1", cpus=8, gpus=8)
    >>> server_bundles(EngineFacts(about="example", servers=1, gpus_per_server=2), [node], 1.0)
    [Bundle(purpose='server 0', cpus=1.0, gpus=2)]
    """
    gpus = facts.gpus_per_server if any(node.gpus for node in nodes) else 0
    return [Bundle(purpose=f"server {number}", cpus=cpus, gpus=gpus) for number in range(facts.servers)]
