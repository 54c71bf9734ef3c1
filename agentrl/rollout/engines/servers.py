"""The base class of server engines, for vLLM and for plug-ins.

Servers are started by the run, or external. `ManagedServers` manages their lifecycle and weights, and
:mod:`.server_pool` handles the requests. See docs/how-to/engines.md for a complete example.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.cluster.backends import open_cluster
from agentrl.errors import SettingsError
from agentrl.rollout.engines.base import EngineSpecification, ServerSettings, engine_facts, server_bundles
from agentrl.rollout.engines.processes import NodeServer, ServerPlan, ServerProcess
from agentrl.rollout.engines.replica import ServerClient, ServerRequirements
from agentrl.rollout.engines.served_weights import ServedWeights
from agentrl.rollout.engines.server_pool import ServerEngine
from agentrl.weights.sources import TransferTarget
from agentrl.weights.verify import Probe, Verifier, sum_checksums


class ManagedServers(ABC):
    """A :class:`~agentrl.rollout.engines.base.ManagedEngine` over servers.

    A plug-in implements :meth:`connect` and, if it starts servers, :meth:`server_plans`. All other methods have
    defaults.
    """

    def __init__(self, request: EngineSpecification, settings: ServerSettings) -> None:
        """Plan the servers without starting them. Raises SettingsError if they cannot be placed."""
        self.request = request
        self.settings = settings
        self.facts = engine_facts(request.rollout)
        self.verifier = Verifier(request.policy.dtype, bound=settings.probe_bound)
        self._cluster = None if request.cluster is None else open_cluster(request.cluster, None)
        self.engine = ServerEngine(
            self._servers(),
            self.connect,
            ServerRequirements.from_policy(request.policy_path, request.codec, max_tokens=request.longest),
            settings,
            weights=self.weights(),
        )

    # -- implemented by plug-ins ----------------------------------------------------------------------------------

    @abstractmethod
    def connect(self, address: str) -> ServerClient:
        """Return the client of the server at ``address``."""

    def server_plans(self, gpus: Sequence[str] | None) -> Sequence[ServerPlan]:
        """Return the plans of the ``settings.replicas`` servers to start. The default raises SettingsError.

        ``gpus``: the GPUs to use; None: the GPUs of this machine. Training uses the first ``request.training_gpus``
        GPUs of this machine.
        """
        raise SettingsError(
            f"rollout.engine={self.request.rollout.engine} does not start servers: set {self.settings.prefix}.addresses"
        )

    def weights(self) -> ServedWeights:
        """Return the initial weights. By default, new weights replace them in place."""
        return ServedWeights(0, recompute=self.request.rollout.kv_on_update == "recomputed")

    def transfer_method(self) -> TransferTarget:
        """Return the transfer target without server addresses; :meth:`transfer_target` adds them.

        By default, weights are transferred as files.
        """
        return TransferTarget(deadline=self.settings.stall_deadline)

    # -- lifecycle ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        try:
            await self.engine.open()
        except BaseException:
            await self.close()
            raise

    def prepare_for_rollouts(self) -> None:
        """Do nothing, because sleeping servers were woken to receive their weights."""

    async def prepare_for_training(self) -> None:
        if self.facts.shares_gpus:
            await self.engine.sleep()

    def transfer_target(self) -> TransferTarget | None:
        servers = self.engine.responding_servers
        return replace(
            self.transfer_method(),
            addresses=tuple(server.address for server in servers),
            world_sizes=tuple(1 if server.identity is None else server.identity.workers for server in servers),
            server_starts=tuple(0 if server.process is None else server.process.launch_count for server in servers),
        )

    async def verify(self, version: int, probe: Probe) -> str | None:
        """Verify the servers' weights. Their version labels are checked only if the weights will change.

        Raises SettingsError if external servers serve a different model.
        """
        if self.request.trained and not self.engine.has_initial_weights:
            return "its weights come from an earlier run"
        problem = await self._resume_if_verified(probe)
        if problem is not None and self.settings.addresses:
            raise SettingsError(
                f"{problem}: the server serves a different model or dtype than model.path. "
                "Start the server with the model in model.path (agentrl serve-policy)"
            )
        return problem

    async def pause(self) -> None:
        await self.engine.pause()

    async def install(self, directory: str | None, version: int, probe: Probe | None) -> str | None:
        if probe is None:
            raise ValueError("a probe is required to install weights on servers")
        await self.engine.install(None if directory is None else Path(directory), version)
        return await self._resume_if_verified(probe)

    def identity_fields(self) -> Mapping[str, str]:
        releases = ", ".join(self.engine.software_releases())
        return {"name": self.request.rollout.engine, "version": releases, "dtype": self.request.policy.dtype}

    async def close(self) -> None:
        await self.engine.close()
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.close)

    def _servers(self) -> Sequence[ServerProcess | str]:
        if self.settings.addresses:
            return self.settings.addresses
        folder = self.request.folder
        if self._cluster is None or self.request.cluster is None:
            return [ServerProcess(plan, folder, number) for number, plan in enumerate(self.server_plans(None))]
        bundles = server_bundles(self.facts, self._cluster.nodes(), self.request.cluster.server_cpus)
        # The GPU numbers are placeholders, because the cluster chooses each server's node and GPUs.
        plans = self.server_plans([str(number) for number in range(sum(one.gpus for one in bundles))])
        return [
            NodeServer(plan, folder, number, cluster=self._cluster, bundle=bundle)
            for number, (plan, bundle) in enumerate(zip(plans, bundles, strict=True))
        ]

    async def _resume_if_verified(self, probe: Probe) -> str | None:
        """Resume requests if every server's checksums and scores match the probe. Returns the mismatches, or None."""

        async def check(replica: ServerClient) -> str | None:
            reported = sum_checksums(await replica.checksums()) if replica.has_checksums else {}
            scores = await replica.score(probe.token_ids, salt=f"probe-{secrets.token_hex(8)}")
            name = f"the {replica.title} server {replica.address}"
            return self.verifier.find_problem(name, probe, reported=reported, scores=scores)

        problems = await self.engine.find_problems(check)
        if problems:
            return "; ".join(problems)
        if not self.request.trained:
            await self.engine.label_weights_as_initial()
        self.engine.resume(check)
        return None
