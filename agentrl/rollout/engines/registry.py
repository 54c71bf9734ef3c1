"""Engines by the names that ``rollout.engine`` can have, and the facts about one that a run needs before opening it.

An engine is a class derived from :class:`EnginePlugin`: one of ours, registered by :func:`register_engine`, an entry
point of the group ``agentrl.engines``, or ``module:Class``. This module imports nothing heavy, and plug-ins should
import their libraries in :meth:`EnginePlugin.managed`: settings are checked without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ValidationError

from agentrl.cluster.processes import Bundle, ClusterNode
from agentrl.errors import SettingsError
from agentrl.rollout.engines.settings import NoOptions
from agentrl_envs.registry import Registry, UnknownNameError

if TYPE_CHECKING:
    from agentrl.rollout.engines.base import EngineRequest, ManagedEngine
    from agentrl.rollout.settings import EngineSections, RolloutSettings

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
    """An engine that ``rollout.engine`` can name. docs/engines.md has a complete example."""

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
    own={
        "transformers": "agentrl.rollout.engines.registry:TransformersPlugin",
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
    [Bundle(holds='server 0', cpus=1.0, gpus=2)]
    """
    gpus = facts.gpus_per_server if any(node.gpus for node in nodes) else 0
    return [Bundle(holds=f"server {number}", cpus=cpus, gpus=gpus) for number in range(facts.servers)]
