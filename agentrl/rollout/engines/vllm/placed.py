"""vLLM servers on the nodes of a cluster: placed by their resources, watched, started elsewhere if a node is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.cluster.processes import Bundle, Cluster, ClusterNode, NodeLostError, Place, ProcessHandle
from agentrl.rollout.engines.vllm.server import ServerPlan, ServerProcess
from agentrl.rollout.settings import VLLMSettings

# Seconds between two looks at a server, and for it to end cleanly.
_LOOK = 1.0
_END = 30.0


def server_bundles(vllm: VLLMSettings, nodes: Sequence[ClusterNode], cpus: float) -> list[Bundle]:
    """What each server that is to be started needs of one node; a GPU only if the nodes have any.

    >>> node = ClusterNode(name="a", address="10.0.0.1", cpus=8, gpus=8)
    >>> server_bundles(VLLMSettings(tensor_parallel_size=2), [node], 1.0)
    [Bundle(holds='server 0', cpus=1.0, gpus=2)]
    """
    gpus = vllm.tensor_parallel_size if any(node.gpus for node in nodes) else 0
    return [Bundle(holds=f"server {number}", cpus=cpus, gpus=gpus) for number in range(vllm.replicas)]


class PlacedServer(ServerProcess):
    """A server on a node that the cluster has chosen: each start may be at another address."""

    def __init__(self, plan: ServerPlan, folder: Path, number: int, *, cluster: Cluster, bundle: Bundle) -> None:
        """``plan``: with a host, a port and GPUs that the first start replaces."""
        super().__init__(plan, folder, number)
        self._cluster = cluster
        self._bundle = bundle
        self._place: Place | None = None
        self._handle: ProcessHandle | None = None
        self._gone = threading.Event()
        self._gone.set()

    def start(self) -> None:
        """Start the server, on its node or, if that is lost, on another one. Raises WorldError if no node has room."""
        if self._place is None or not self._cluster.answers(self._place):
            self._place = self._cluster.host(self._bundle)
        place = self._place
        self.plan = replace(
            self.plan, host=place.address, port=self._cluster.free_port(place), gpus=place.gpus[: self._bundle.gpus]
        )
        own = {"VLLM_HOST_IP": place.address}  # vLLM finds none by itself on a node without a route to elsewhere
        self._handle = self._cluster.start(self.spec(self.plan.changes() | own), place)
        self._gone = threading.Event()
        self.starts += 1
        watch = (self._handle, self._gone)
        threading.Thread(target=self._watch, args=watch, daemon=True, name=f"watch-server-{self.number}").start()

    @property
    def node(self) -> str:
        return super().node if self._place is None else self._place.node

    @property
    def ended(self) -> bool:
        return self._gone.is_set()

    def stop(self) -> None:
        if self._handle is not None and not self.ended:
            self._handle.send_signal(signal.SIGTERM)
            self._gone.wait(_END)

    def _watch(self, handle: ProcessHandle, gone: threading.Event) -> None:
        """Ask for the server until it has ended: a node that nobody asks ends what runs there."""
        try:
            while handle.wait(0.0) is None:
                if gone.wait(_LOOK):
                    return
        except NodeLostError:
            pass  # it has ended with its node
        gone.set()
        self.when_ended()
