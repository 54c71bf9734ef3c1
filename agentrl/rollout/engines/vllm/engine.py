"""The vLLM engine: its servers, their weight transfer, and ``agentrl serve-policy``, which starts a single server."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from agentrl.errors import SettingsError, WorldError
from agentrl.models.settings import LoRASettings, ModelSettings
from agentrl.models.tokenizer import TextCodec, read_tokenizer
from agentrl.rollout.engines.base import EngineSpecification
from agentrl.rollout.engines.processes import ServerProcess
from agentrl.rollout.engines.replica import ServerClient, ServerRequirements
from agentrl.rollout.engines.served_weights import ServedAdapters, ServedWeights
from agentrl.rollout.engines.server_pool import ServerEngine
from agentrl.rollout.engines.servers import ManagedServers
from agentrl.rollout.engines.vllm.plan import (
    VLLMPlan,
    adapter_rank,
    max_adapters_in_use,
    plan_policy_servers,
    untie_policy_for_cpu_servers,
)
from agentrl.rollout.engines.vllm.plugin import VLLMSettings
from agentrl.rollout.engines.vllm.replica import VLLMClient
from agentrl.rollout.settings import RolloutSettings
from agentrl.weights.sources import TransferTarget


def build_vllm_engine(
    servers: Sequence[ServerProcess | str],
    needs: ServerRequirements,
    rollout: RolloutSettings,
    *,
    label: bool = True,
    adapter_rank: int = 0,
) -> ServerEngine:
    """Build an engine over vLLM servers, without a run's lifecycle.

    ``label``: set the version label of servers that report no label. ``adapter_rank``: the rank of LoRA adapters, or 0
    for full weights.
    """
    return ServerEngine(
        servers,
        partial(VLLMClient, rollout=rollout, adapter_rank=adapter_rank),
        needs,
        rollout.vllm,
        weights=_build_served_weights(rollout, adapter_rank),
        label=label,
    )


class ManagedVLLM(ManagedServers):
    """Lifecycle of vLLM servers. This process starts them unless they are external.

    Without training, colocated servers stay awake, and no weight transfer is prepared.
    """

    def __init__(self, request: EngineSpecification) -> None:
        """Plan the servers without starting them. Raises SettingsError if they cannot be placed."""
        if not request.trained:  # the servers do not share their GPUs with training, and there are no adapters
            vllm = request.rollout.vllm
            if vllm.placement == "colocated":
                awake = vllm.model_copy(update={"placement": "dedicated"})
                request = replace(request, rollout=request.rollout.model_copy(update={"vllm": awake}))
            request = replace(request, policy=request.policy.model_copy(update={"lora": LoRASettings()}))
        vllm = request.rollout.vllm
        self._adapter_rank = adapter_rank(request.rollout, request.policy)
        self._weight_form: Literal["full", "merged", "adapter"] = "full" if request.policy.lora.rank == 0 else vllm.lora
        self._backend = choose_transfer_backend(vllm) if request.trained and not self._adapter_rank else "file"
        if self._backend != "file" and not torch.cuda.is_available():
            raise SettingsError(
                f"rollout.vllm.transfer={vllm.transfer} needs a GPU on this machine: set rollout.vllm.transfer=file"
            )
        super().__init__(request, vllm)

    def connect(self, address: str) -> ServerClient:
        return VLLMClient(address, self.request.rollout, adapter_rank=self._adapter_rank)

    def weights(self) -> ServedWeights:
        return _build_served_weights(self.request.rollout, self._adapter_rank)

    def server_plans(self, gpus: Sequence[str] | None) -> list[VLLMPlan]:
        request = self.request
        start = request.folder / ".weights" / "start"
        # Weights that never change can stay tied, even on a CPU.
        copied = request.trained and not self._adapter_rank
        return plan_policy_servers(
            request.rollout,
            request.policy,
            request.policy_path,
            served=untie_policy_for_cpu_servers(request.policy_path, start) if copied else request.policy_path,
            longest=request.longest,
            training_gpus=request.training_gpus if gpus is None else 0,
            backend=self._backend,
            gpus=gpus,
            routes=request.routes,
        )

    def transfer_method(self) -> TransferTarget:
        return TransferTarget(
            opener="" if self._backend == "file" else "agentrl.weights.native:open_native_transfer",
            backend=self._backend,
            form=self._weight_form,
            older_versions=max(1, max_adapters_in_use(self.request.rollout) if self._adapter_rank else 0),
            deadline=self.settings.stall_deadline,
        )


def choose_transfer_backend(vllm: VLLMSettings) -> Literal["file", "nccl", "ipc"]:
    """Return ``rollout.vllm.transfer`` or, for auto, IPC on the same GPUs, NCCL to other GPUs, files without GPUs."""
    if vllm.transfer != "auto":
        return vllm.transfer
    if not torch.cuda.is_available():
        return "file"
    return "ipc" if vllm.placement == "colocated" else "nccl"


def _build_served_weights(rollout: RolloutSettings, adapter_rank: int) -> ServedWeights:
    return (ServedAdapters if adapter_rank else ServedWeights)(0, recompute=rollout.kv_on_update == "recomputed")


def serve_policy(
    rollout: RolloutSettings,
    policy: ModelSettings,
    *,
    longest: int,
    host: str,
    port: int | None,
    report: Callable[[str], None],
) -> None:
    """Serve the policy in ``policy.path`` until SIGTERM or Ctrl-C. A run that uses the server may change its weights.

    ``longest``: the length in tokens of the longest sequence. ``report`` prints a line.
    """
    model = str(policy.path)
    with tempfile.TemporaryDirectory(prefix="agentrl-policy-") as folder:
        (plan,) = plan_policy_servers(
            rollout,
            policy,
            model,
            served=untie_policy_for_cpu_servers(model, Path(folder)),
            longest=longest,
            training_gpus=0,
            backend=choose_transfer_backend(rollout.vllm),
            host=host,
            port=port,
        )
        report(f"starting vLLM for {model}; this can take minutes")
        asyncio.run(_run_server(rollout, plan, Path(folder), report))


async def _run_server(rollout: RolloutSettings, plan: VLLMPlan, folder: Path, report: Callable[[str], None]) -> None:
    """Start the server, check it as a run would, print its address, and serve until a stop signal."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = ServerProcess(plan, folder)
    engine = build_vllm_engine(
        [server],
        ServerRequirements.from_policy(
            plan.tokenizer, TextCodec(read_tokenizer(plan.tokenizer)), max_tokens=plan.max_tokens
        ),
        rollout,
        label=False,
    )
    opening = asyncio.create_task(engine.open())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()
            report(f"serving {plan.tokenizer} at {plan.address}")
            while not stopping.done():
                await asyncio.wait({stopping}, timeout=1.0)
                if server.has_exited and not stopping.done():
                    raise WorldError(f"the vLLM server has exited; end of its log:\n{server.log_excerpt()}")
    finally:
        for task in (opening, stopping):
            task.cancel()
        await asyncio.gather(opening, stopping, return_exceptions=True)
        await engine.close()
