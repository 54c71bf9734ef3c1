"""The lifecycle of engines: opened by the settings, paused, given new weights, verified, resumed and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, Protocol

import torch

from agentrl.cluster.opening import open_cluster
from agentrl.cluster.settings import ClusterSettings
from agentrl.errors import SettingsError
from agentrl.models.settings import LoRASettings, ModelSettings
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import Engine
from agentrl.rollout.engines.table import engine_facts
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.engines.vllm.replica import Replica
from agentrl.rollout.engines.vllm.server import adapters_in_use
from agentrl.rollout.engines.vllm.servers import adapter_rank, server_engine, server_gpus
from agentrl.rollout.settings import RolloutSettings, VLLMSettings
from agentrl.weights.checksums import checksums, with_head
from agentrl.weights.exports import read_export, write_untied_copy
from agentrl.weights.native import TransferTarget, default_backend
from agentrl.weights.verify import Probe, Verifier


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """The engine to open and its policy.

    ``longest``: tokens of the longest sequence that will be requested. ``folder``: the place for servers' logs and
    their initial weights. ``model``: the loaded policy, for an engine in this process. ``shared``: ``model`` is the
    trained module itself, so weights need no transfer. ``trained``: the weights will change. ``cluster``: starts the
    servers on its nodes; None: they start on this machine.
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


def managed_engine(request: EngineRequest) -> ManagedEngine:
    """The engine named by ``rollout.engine``, not yet open. Raises SettingsError if it cannot be placed."""
    made: ManagedEngine = resolve_name(engine_facts(request.rollout).opener)(request)
    return made


async def open_managed_engine(request: EngineRequest) -> ManagedEngine:
    """The engine named by ``rollout.engine``, open. Raises SettingsError or WorldError."""
    managed = await asyncio.to_thread(managed_engine, request)
    await managed.open()
    return managed


class ManagedTransformers:
    def __init__(self, request: EngineRequest) -> None:
        self.engine = TransformersEngine(
            request.model, request.codec, request.rollout, deterministic=request.deterministic
        )
        self._model: Any = request.model
        self._shared = request.shared
        self._policy = request.policy
        self.verifier = Verifier(request.policy.dtype)

    async def open(self) -> None:
        """Return at once: the model is already loaded."""

    def begin_rollouts(self) -> None:
        self._model.eval()

    async def end_rollouts(self) -> None:
        if self._shared:
            await self.engine.rest()

    def target(self) -> TransferTarget | None:
        return None if self._shared else TransferTarget(backend="file")

    async def verify(self, version: int, probe: Probe) -> str | None:
        return await self._compare(probe)

    async def pause(self, *, zero_weights: bool) -> None:
        """Pause requests; ``zero_weights`` has no effect, because a file contains every parameter."""
        self.engine.pause()

    async def install(self, directory: str | None, version: int, probe: Probe | None) -> str | None:
        await self.engine.update_weights(() if directory is None else read_export(Path(directory)), version)
        problem = None if probe is None else await self._compare(probe)
        if problem is None:
            self.engine.resume()
        return problem

    def record(self) -> Mapping[str, str]:
        return {"name": "transformers", "dtype": self._policy.dtype}

    async def close(self) -> None:
        await self.engine.close()

    async def _compare(self, probe: Probe) -> str | None:
        self._model.eval()
        own = with_head(await asyncio.to_thread(checksums, self._model.named_parameters())) if probe.checksums else {}
        return self.verifier.judge("the engine", probe, told=own, scores=await self.engine.score(probe.token_ids))


class ManagedVLLM:
    """vLLM servers, started by this process or external.

    Without training, servers that would share its GPUs stay awake, and no weight transfer is prepared.
    """

    def __init__(self, request: EngineRequest) -> None:
        """Raises SettingsError if the servers cannot be placed."""
        rollout = request.rollout if request.trained else _awake(request.rollout)
        vllm = rollout.vllm
        # What does not train has no adapters.
        policy = request.policy if request.trained else request.policy.model_copy(update={"lora": LoRASettings()})
        self._adapters = adapters_in_use(rollout) if adapter_rank(rollout, policy) else 0
        self._form: Literal["full", "merged", "adapter"] = "full" if policy.lora.rank == 0 else vllm.lora
        self._trained = request.trained
        self._external = vllm.placement == "external"
        self._colocated = vllm.placement == "colocated"
        self._backend = transfer_backend(vllm) if request.trained and not self._adapters else "file"
        self._dtype = request.policy.dtype
        self._deadline = vllm.stall_deadline
        self.verifier = Verifier(request.policy.dtype, bound=vllm.probe_bound)
        if self._backend != "file" and not torch.cuda.is_available():
            raise SettingsError(f"rollout.vllm.transfer={vllm.transfer} needs a GPU here; set it to file")
        # Weights that never change can stay tied, even on a CPU.
        copied = request.trained and not self._external and not self._adapters
        start = request.folder / ".weights" / "start"
        cluster = request.cluster
        self._cluster = None if cluster is None else open_cluster(cluster, None)
        self.engine = server_engine(
            rollout,
            request.codec,
            policy,
            request.policy_path,
            served=changeable_policy(request.policy_path, start) if copied else request.policy_path,
            longest=request.longest,
            folder=request.folder,
            training_gpus=request.training_gpus,
            backend=self._backend,
            cluster=self._cluster,
            cpus=1.0 if cluster is None else cluster.server_cpus,
        )

    async def open(self) -> None:
        try:
            await self.engine.open()
        except BaseException:
            await self.close()
            raise

    def begin_rollouts(self) -> None:
        """Do nothing: sleeping servers were woken to receive their weights."""

    async def end_rollouts(self) -> None:
        if self._colocated:
            await self.engine.sleep()

    def target(self) -> TransferTarget | None:
        targets = self.engine.targets()
        return TransferTarget(
            backend=self._backend,
            form=self._form,
            kept=max(1, self._adapters),
            addresses=tuple(address for address, _, _ in targets),
            world_sizes=tuple(workers for _, workers, _ in targets),
            starts=tuple(starts for _, _, starts in targets),
            deadline=self._deadline,
        )

    async def verify(self, version: int, probe: Probe) -> str | None:
        """Accept servers with the right weights; the version label matters only if the weights will change.

        Raises SettingsError for external servers that serve another model.
        """
        if self._trained and not self.engine.untouched:
            return "its weights come from an earlier run"
        problem = await self._compare(probe)
        if problem is not None and self._external:
            raise SettingsError(
                f"{problem}: it serves another model than model.path, or in another dtype. "
                "Start it with the model of model.path (agentrl serve-policy)"
            )
        return problem

    async def pause(self, *, zero_weights: bool) -> None:
        """Pause all requests. The weights of servers without checksums are always set to zero."""
        await self.engine.pause()
        await self.engine.zero_weights(all_of_them=zero_weights)

    async def install(self, directory: str | None, version: int, probe: Probe | None) -> str | None:
        if probe is None:
            raise ValueError("servers accept new weights only with a probe")
        await self.engine.install(None if directory is None else Path(directory), version)
        return await self._compare(probe)

    def record(self) -> Mapping[str, str]:
        return {"name": "vllm", "version": ", ".join(self.engine.releases()), "dtype": self._dtype}

    async def close(self) -> None:
        await self.engine.close()
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.close)

    async def _compare(self, probe: Probe) -> str | None:
        """Get every server's checksums and scores of the probe; resume requests if all are right."""

        def look(replica: Replica) -> Coroutine[object, object, str | None]:
            return self.verifier.look(replica, probe)

        problems = await self.engine.problems(look)
        if problems:
            return "; ".join(problems)
        if not self._trained:
            await self.engine.adopt()
        self.engine.resume(look)
        return None


def transfer_backend(vllm: VLLMSettings) -> Literal["file", "nccl", "ipc"]:
    """The transfer backend: ``rollout.vllm.transfer``, or the fastest one on this machine."""
    return default_backend(vllm.placement) if vllm.transfer == "auto" else vllm.transfer


def changeable_policy(policy_path: str, copy: Path) -> str:
    """The policy that servers load if their weights will change: on a CPU, a copy with untied embeddings in ``copy``.

    ``policy_path``: a directory or a Hugging Face id.
    """
    if server_gpus():
        return policy_path
    folder = Path(policy_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(policy_path))
    return str(write_untied_copy(folder, copy.absolute()))


def _awake(rollout: RolloutSettings) -> RolloutSettings:
    """The settings with dedicated instead of colocated servers, because nothing trains on their GPUs."""
    if rollout.vllm.placement != "colocated":
        return rollout
    return rollout.model_copy(update={"vllm": rollout.vllm.model_copy(update={"placement": "dedicated"})})
