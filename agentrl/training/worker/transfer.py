"""Transfer of trained weights to an engine with a separate copy. A transfer is repeated once if verification fails."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import torch

from agentrl.errors import AgentRLError
from agentrl.kernels.attention import pack_padded
from agentrl.models.lora import write_adapter
from agentrl.models.settings import LoRASettings
from agentrl.telemetry.console import Console
from agentrl.telemetry.files import os_errors_as_world_errors
from agentrl.training.engine.collectives import run_on_every_rank
from agentrl.training.engine.deepspeed_engine import TrainingEngine
from agentrl.training.worker.service import RolloutService
from agentrl.weights.exports import AdapterSource, MergedSource, copy_to_host, write_export, write_version
from agentrl.weights.sources import DirectTransfer, ParameterSource, TransferTarget
from agentrl.weights.verify import Probe

_ATTEMPTS = 2


class WeightMismatchError(AgentRLError):
    """An engine does not have the trained weights after two transfers."""


class WeightSender:
    """Sends a policy's weights. Every rank has a sender, and all ranks must make the same calls."""

    def __init__(
        self,
        service: RolloutService,
        engine: TrainingEngine,
        *,
        folder: Path,
        console: Console,
        lora: LoRASettings,
        base: str,
        host: str = "127.0.0.1",
    ) -> None:
        """``folder`` receives weight files. ``host`` is the address at which servers reach rank 0.

        ``lora`` describes the policy's adapters on the model ``base``.
        """
        self._service = service
        self._engine = engine
        self._source = ParameterSource(engine.module.causal_lm, with_checksums=engine.rank == 0)
        self._lora = lora
        self._base = base
        self._probe: tuple[int, ...] = ()
        self._folder = folder
        self._console = console
        self._host = host
        self._direct: tuple[TransferTarget, DirectTransfer] | None = None

    def verify_initial_policy_and_measure_noise(self) -> float:
        """Ensure that the engine has the initial policy, and return the noise between trainer and engine (nats).

        Call this when a run starts and when it resumes, while the trainer has the initial policy too. Raises
        WeightMismatchError if trainer and engine have different policies.
        """
        target = self._service.transfer_target()
        self._probe = self._service.probe_tokens()
        if target is not None:
            self._source = self._source_for(target)
            for _ in self._source:
                pass  # iterating computes the checksums
        probe = replace(score_probe(self._engine, self._probe), checksums=self._source.checksums)
        problem = self._service.verify_starting_policy(0, probe)
        if problem is not None and target is None:
            raise WeightMismatchError(
                f"trainer and engine compute different log-probabilities from equal weights: {problem}"
            )
        if problem is not None:
            self.send_weights(0)
        verified = self._service.verification_methods()
        for one in verified:
            self._console.note(str(one))
        return max((one.noise for one in verified), default=0.0)

    def send_weights(self, version: int) -> None:
        """Send ``version`` to the engine. Raises WeightMismatchError if two attempts fail."""
        target = self._service.transfer_target()
        if target is None:
            self._service.install_weights(None, version, None)
            return
        probe = score_probe(self._engine, self._probe)
        for attempt in range(_ATTEMPTS):
            problem = self._try_to_send(target, version, probe)
            if problem is None:
                return
            self._console.warning(f"transfer {attempt + 1} of {_ATTEMPTS} for version {version} failed: {problem}")
        raise WeightMismatchError(
            f"the weights of version {version} did not arrive in {_ATTEMPTS} transfers by {target.backend}: {problem}. "
            "The run stops, because the engine would sample from a different policy than the trained one."
        )

    def close(self) -> None:
        """Leave the servers' group and delete the files."""
        if self._direct is not None:
            self._direct[1].close()
        if self._engine.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _try_to_send(self, target: TransferTarget, version: int, probe: Probe) -> str | None:
        directory = None if target.opener else run_on_every_rank(partial(self._write_weights, target, version))[0]
        self._service.pause_requests()
        if target.opener:
            now = self._service.transfer_target()  # servers may have been lost or restarted before they paused
            self._open_direct_transfer(target if now is None else now).send()
            if torch.cuda.is_available():
                # Free the transfer's buffer and copy, because colocated servers allocate their caches next.
                torch.cuda.empty_cache()
        # Sending iterates over the source, which computes the checksums of the sent weights.
        return self._service.install_weights(directory, version, replace(probe, checksums=self._source.checksums))

    def _source_for(self, target: TransferTarget) -> ParameterSource:
        module, with_checksums = self._engine.module.causal_lm, self._engine.rank == 0
        if target.form == "merged":
            return MergedSource(module, self._lora, with_checksums=with_checksums)
        return AdapterSource(module, with_checksums=with_checksums) if target.form == "adapter" else self._source

    def _write_weights(self, target: TransferTarget, version: int) -> str:
        """Write the weights on rank 0. Every rank completes the gathering, even if writing fails."""
        tensors = iter(self._source)
        try:
            if self._engine.rank > 0:
                return ""
            with os_errors_as_world_errors(self._folder, "write weights to"):
                folder = self._folder.absolute()
                if target.form == "adapter":
                    factors = {name: copy_to_host(value) for name, value in tensors}
                    write = partial(write_adapter, factors=factors, settings=self._lora, base=self._base)
                    return str(write_version(folder, version, write, older_versions=target.older_versions))
                return str(write_export(folder, tensors, version))
        finally:
            for _ in tensors:
                pass

    def _open_direct_transfer(self, target: TransferTarget) -> DirectTransfer:
        """Return the open transfer, or a new transfer if the set of servers has changed."""
        if self._direct is not None and self._direct[0] != target:
            self._direct[1].close()
            self._direct = None
        if self._direct is None:
            opener = resolve_name(target.opener)
            self._direct = (target, opener(target, self._source, rank=self._engine.rank, host=self._host))
        return self._direct[1]


@torch.no_grad()
def score_probe(engine: TrainingEngine, token_ids: tuple[int, ...]) -> Probe:
    """Compute the trained policy's log-probabilities of ``token_ids[1:]`` at temperature 1. Collective under ZeRO-3."""
    ids = torch.tensor([token_ids], device=engine.device)
    prompt_lengths, mask = torch.ones_like(ids[:, 0]), torch.ones_like(ids[:, 1:], dtype=torch.bool)
    engine.module.eval()
    packed = pack_padded(ids, prompt_lengths, mask, multiple=engine.module.row_length_multiple)
    statistics, _ = engine(*packed, temperature=1.0)
    return Probe(token_ids=token_ids, log_probs=tuple(statistics.log_probs.float().tolist()))
