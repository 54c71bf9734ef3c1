"""The engine of a run as the rollout worker holds it: opened as the settings say, its weights received and checked."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agentrl.errors import SettingsError
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.engines.vllm.replica import Replica
from agentrl.rollout.engines.vllm.servers import server_engine, server_gpus
from agentrl.weights.checksums import checksums, with_head
from agentrl.weights.exports import read_export, write_untied_copy
from agentrl.weights.native import default_backend
from agentrl.weights.transports import TransferTarget
from agentrl.weights.verify import Probe, Verifier

if TYPE_CHECKING:
    from agentrl.config import Settings


class ManagedTransformers:
    """A model in this process. ``shared``: it is the very module that is trained, and nothing travels."""

    def __init__(self, settings: Settings, model: Any, codec: TextCodec, *, shared: bool) -> None:
        self.engine = TransformersEngine(model, codec, settings.rollout, deterministic=settings.training.deterministic)
        self._model = model
        self._shared = shared
        self.verifier = Verifier(settings.model.dtype)

    def begin_rollouts(self) -> None:
        self._model.eval()

    async def end_rollouts(self) -> None:
        """Weights that are trained now are read by nobody else."""
        if self._shared:
            await self.engine.rest()

    def target(self) -> TransferTarget | None:
        return None if self._shared else TransferTarget(backend="file")

    async def verify(self, version: int, probe: Probe) -> str | None:
        return await self._compare(probe)

    async def pause(self, *, zero_weights: bool) -> None:
        """Requests under way wait until the new weights are there and right; every parameter comes with a file."""
        self.engine.pause()

    async def install(self, directory: str | None, version: int, probe: Probe | None) -> str | None:
        await self.engine.update_weights(() if directory is None else read_export(Path(directory)), version)
        problem = None if probe is None else await self._compare(probe)
        if problem is None:
            self.engine.resume()
        return problem

    async def _compare(self, probe: Probe) -> str | None:
        self._model.eval()
        told = with_head(await asyncio.to_thread(checksums, self._model.named_parameters()))
        return self.verifier.judge("the engine", probe, told=told, scores=await self.engine.score(probe.token_ids))


class ManagedVLLM:
    """vLLM servers, started here or elsewhere."""

    def __init__(self, settings: Settings, codec: TextCodec, policy_path: str, folder: Path) -> None:
        """``folder``: the run's, for the servers' logs. Raises SettingsError where they cannot be placed."""
        vllm = settings.rollout.vllm
        self._external = vllm.placement == "external"
        self._colocated = vllm.placement == "colocated"
        self._backend = default_backend(vllm.placement) if vllm.transfer == "auto" else vllm.transfer
        self.verifier = Verifier(settings.model.dtype, bound=vllm.probe_bound)
        if self._backend != "file" and not torch.cuda.is_available():
            raise SettingsError(f"rollout.vllm.transfer={vllm.transfer} needs a GPU here; set it to file")
        start = folder / ".weights" / "start"
        self.engine = server_engine(
            settings,
            codec,
            policy_path,
            served=policy_path if self._external else changeable_policy(policy_path, start),
            folder=folder / "servers",
            training_gpus=settings.training.num_processes,
            backend=self._backend,
        )

    def begin_rollouts(self) -> None:
        """Servers that slept were woken for their weights."""

    async def end_rollouts(self) -> None:
        if self._colocated:
            await self.engine.sleep()

    def target(self) -> TransferTarget | None:
        targets = self.engine.targets()
        return TransferTarget(
            backend=self._backend,
            addresses=tuple(address for address, _ in targets),
            world_sizes=tuple(workers for _, workers in targets),
        )

    async def verify(self, version: int, probe: Probe) -> str | None:
        """None if servers that nobody has sent weights to hold the policy; Raises SettingsError for another one."""
        if not self.engine.untouched:
            return "its weights are of an earlier run"
        problem = await self._compare(probe)
        if problem is not None and self._external:
            raise SettingsError(
                f"{problem}: it serves another policy than model.path, or in another dtype. Start it with the policy "
                "that is trained (agentrl serve-policy)"
            )
        return problem

    async def pause(self, *, zero_weights: bool) -> None:
        """Requests under way wait. Servers that tell no checksums are zeroed first, on ``zero_weights`` all of them."""
        await self.engine.pause()
        await self.engine.zero_weights(all_of_them=zero_weights)

    async def install(self, directory: str | None, version: int, probe: Probe | None) -> str | None:
        if probe is None:
            raise ValueError("weights of servers are never taken without a probe")
        await self.engine.install(None if directory is None else Path(directory), version)
        return await self._compare(probe)

    async def _compare(self, probe: Probe) -> str | None:
        """Have every server tell its checksums and score the probe; requests go on if all are right."""

        def look(replica: Replica) -> Coroutine[Any, Any, str | None]:
            return self.verifier.look(replica, probe)

        problems = await self.engine.problems(look)
        if problems:
            return "; ".join(problems)
        self.engine.admit(look)
        return None


async def open_managed_engine(
    settings: Settings, codec: TextCodec, *, model: Any | None, policy_path: str, folder: Path, shared: bool
) -> ManagedTransformers | ManagedVLLM:
    """The engine that the settings name, ready. ``model``: of the transformers engine."""
    if settings.rollout.engine == "transformers":
        return ManagedTransformers(settings, model, codec, shared=shared)
    host = await asyncio.to_thread(ManagedVLLM, settings, codec, policy_path, folder)
    try:
        await host.engine.open()
    except BaseException:
        await host.engine.close()
        raise
    return host


def changeable_policy(policy_path: str, copy: Path) -> str:
    """What servers read whose weights will change: on a CPU a copy without tied embeddings, written to ``copy``."""
    return policy_path if server_gpus() else str(untied_policy(policy_path, copy))


def untied_policy(policy_path: str, target: Path) -> Path:
    """A copy of a policy (a directory or a Hugging Face id) whose head is a parameter of its own."""
    folder = Path(policy_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(policy_path))
    return write_untied_copy(folder, target.absolute())
