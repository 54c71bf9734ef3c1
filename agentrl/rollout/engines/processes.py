"""Server processes that a run starts, on this machine or on a node of a cluster."""

from __future__ import annotations

import re
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.cluster.local import THIS_MACHINE, LocalProcess, log_file
from agentrl.cluster.processes import Bundle, Cluster, NodeLostError, ProcessHandle, ProcessSpec, Reservation

# Variables that torch.distributed and launchers set for this process. A server must not inherit them.
LAUNCHER_VARIABLES = frozenset(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK", "ROLE_RANK"),
        *("MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE"),
    )
)
# Seconds between polls of a server on a node.
_POLL = 1.0
# Seconds to wait for a server to exit after SIGTERM.
_END = 30.0
_TAIL_LINES = 12
_ERROR_LINE = re.compile(r"\b\w*(?:Error|Exception)\b|out of memory|Killed", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class ServerPlan(ABC):
    """Plan of a server to start. ``gpus``: GPU numbers, empty for the CPU.

    A cluster replaces the host, port and GPUs with the values of the node that it chooses.
    """

    host: str
    port: int
    gpus: tuple[str, ...] = ()
    on_node: bool = False  # started on a node of a cluster

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    @abstractmethod
    def arguments(self) -> list[str]:
        """Return the arguments of the Python interpreter, such as ``["-m", "package.server", "--port", "8000"]``."""

    def environment_variable_changes(self) -> dict[str, str | None]:
        """Return the changes to the environment that the server inherits. None unsets a variable."""
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        return {**dict.fromkeys(LAUNCHER_VARIABLES), **gpus}


class ServerProcess:
    """A server process and its log. The server is killed when the process that started it exits."""

    def __init__(self, plan: ServerPlan, folder: Path, number: int = 0) -> None:
        """Configure the process without starting it. ``folder``: the directory of the run or evaluation."""
        self.plan = plan
        self.number = number
        self._folder = folder
        self.launch_count = 0
        self.on_exit: Callable[[], object] = lambda: None
        """Called in a thread after a server on another machine has exited."""
        self._process: LocalProcess | None = None

    def launch(self) -> None:
        """Start or restart the server. The server may take minutes to respond."""
        self._process = LocalProcess(self.process_spec(), THIS_MACHINE)
        self.launch_count += 1

    def process_spec(self) -> ProcessSpec:
        """Return the specification of the process."""
        return ProcessSpec(
            role="server",
            number=self.number,
            arguments=tuple(self.plan.arguments()),
            environment=self.plan.environment_variable_changes(),
            log=self.log,
            show_output=False,
            supervised=True,
        )

    @property
    def node(self) -> str:
        """The name of the server's machine."""
        return THIS_MACHINE.node

    @property
    def log(self) -> Path:
        return log_file(self._folder, self.node, "server", self.number)

    @property
    def has_exited(self) -> bool:
        return self._process is None or self._process.wait(0.0) is not None

    def log_excerpt(self) -> str:
        """Return the last lines of the log that contain an error, or the last lines if there is no error."""
        if not self.log.exists():
            return "(the log is empty)"
        with self.log.open(errors="replace") as file:
            lines = deque((line.rstrip() for line in file if line.strip()), maxlen=400)
        errors = [line for line in lines if _ERROR_LINE.search(line)] or list(lines)
        return "\n".join(line[:300] for line in errors[-_TAIL_LINES:]) or "(the log is empty)"

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        self._process.wait_or_kill(_END)


class NodeServer(ServerProcess):
    """A server on a node that the cluster chooses. Its address may change with each start."""

    def __init__(self, plan: ServerPlan, folder: Path, number: int, *, cluster: Cluster, bundle: Bundle) -> None:
        """Configure the server without starting it. The first start replaces the host, port and GPUs in ``plan``."""
        super().__init__(plan, folder, number)
        self._cluster = cluster
        self._bundle = bundle
        self._node: Reservation | None = None
        self._handle: ProcessHandle | None = None
        self._gone = threading.Event()
        self._gone.set()

    def launch(self) -> None:
        """Start the server on its node or, if that node is lost, on another. Raises WorldError if no node has room."""
        if self._node is None or not self._cluster.is_reachable(self._node):
            self._node = self._cluster.reserve_on_node(self._bundle)
        node = self._node
        self.plan = replace(
            self.plan,
            host=node.address,
            port=self._cluster.free_port(node),
            gpus=node.gpus[: self._bundle.gpus],
            on_node=True,
        )
        self._handle = self._cluster.start(self.process_spec(), node)
        self._gone = threading.Event()
        self.launch_count += 1
        watched = (self._handle, self._gone)
        threading.Thread(
            target=self._poll_until_exit, args=watched, daemon=True, name=f"watch-server-{self.number}"
        ).start()

    @property
    def node(self) -> str:
        return super().node if self._node is None else self._node.node

    @property
    def has_exited(self) -> bool:
        return self._gone.is_set()

    def stop(self) -> None:
        if self._handle is not None and not self.has_exited:
            self._handle.send_signal(signal.SIGTERM)
            self._gone.wait(_END)

    def _poll_until_exit(self, handle: ProcessHandle, gone: threading.Event) -> None:
        """Poll until the server exits. A node kills its processes when polling stops."""
        try:
            while handle.wait(0.0) is None:
                if gone.wait(_POLL):
                    return
        except NodeLostError:
            pass  # the server was lost with its node
        gone.set()
        self.on_exit()
