"""The rollout worker in a process of its own, as every training rank sees it.

Rank 0 starts the process and talks to it over an inherited pipe; the other ranks connect over TCP with a random key
that rank 0 hands them in a collective. The worker ends when a rank does.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING, Any

from agentrl.errors import SettingsError, WorldError
from agentrl.evaluation.evaluate import EvaluationReport
from agentrl.training.deepspeed_engine import from_rank_zero, gather_from_ranks
from agentrl.training.service import InterruptedRunError, StepPlan
from agentrl.training.wire import Failure, Reply, Request, Startup, WorkerLostError, receive
from agentrl.weights.transports import TransferTarget
from agentrl.weights.verify import Probe

if TYPE_CHECKING:
    from agentrl.config import Settings

# Seconds for the worker to start and for ranks to reach it; models may lie on slow disks.
_START = 600.0
# Seconds for the worker to release its engine and environment once told to.
_END = 30.0


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where the worker listens."""

    address: tuple[str, int]
    key: bytes


class RemoteService:
    """A :class:`~agentrl.training.service.RolloutService` of ``ranks`` ranks; made on every rank at once."""

    def __init__(self, settings: Settings, policy_path: str, *, rank: int, ranks: int) -> None:
        """``policy_path`` holds the weights to start from. Raises WorldError if the worker does not come up."""
        self._rank = rank
        self._seconds = settings.training.plan_deadline
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        hosts = gather_from_ranks(socket.gethostname())
        place = None
        if rank == 0:
            host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
            key = secrets.token_bytes(32)
            startup = Startup(settings=settings, policy_path=policy_path, ranks=ranks, host=host, key=key)
            self._connection = self._start(startup)
            address = receive(self._connection, seconds=_START, waiting_for="the rollout worker's start")
            place = _Place(address=address, key=key)
        place = from_rank_zero(place)
        if rank > 0:
            self._connection = _connect(place, rank)
        servers = settings.rollout.vllm.start_deadline if settings.rollout.engine == "vllm" else 0.0
        self._answer("the rollout worker's set-up", _START + servers)

    def describe(self) -> list[str]:
        """What the worker found; nothing on other ranks than 0."""
        if self._rank > 0:
            return []
        return [*self._ask("describe", waiting_for="the worker's description"), self._where()]

    def plan(self, step: int) -> StepPlan:
        """This rank's plan; the worker rolls out when every rank has asked."""
        plan: StepPlan = self._ask("plan", step, waiting_for=f"the plan of step {step} (training.plan_deadline)")
        return plan

    def meet(self, place: str) -> None:
        """Return when every rank has called this."""
        self._ask("meet", place, waiting_for=f"the other ranks at {place} (training.plan_deadline)")

    def confirm(self, step: int) -> None:
        """The step's update is done: its groups leave the ledger."""
        if self._rank == 0:
            self._ask("confirm", step, waiting_for=f"the worker to note that step {step} is trained")

    def transfer_target(self) -> TransferTarget | None:
        """Where the worker's engine takes weights from; None on other ranks."""
        if self._rank > 0:
            return None
        target: TransferTarget | None = self._ask("transfer_target", waiting_for="where the engine's weights go")
        return target

    def probe_tokens(self) -> tuple[int, ...]:
        """The tokens of the probe; none on other ranks."""
        if self._rank > 0:
            return ()
        tokens: tuple[int, ...] = self._ask("probe_tokens", waiting_for="the prompts of the first problems")
        return tokens

    def verification(self) -> list[str]:
        """How the worker verifies transfers; nothing on other ranks."""
        if self._rank > 0:
            return []
        lines: list[str] = self._ask("verification", waiting_for="how transfers are verified")
        return lines

    def accept(self, version: int, probe: Probe) -> str | None:
        """Whether the engine holds the policy it was started with; None on other ranks."""
        return self._of_weights("accept", version, probe, waiting_for="the engine to score the first probe")

    def hold(self, *, blank: bool) -> None:
        """Have the engine's requests wait for :meth:`install`."""
        self._of_weights("hold", blank, waiting_for="the engine to pause")

    def install(self, directory: str | None, version: int, probe: Probe | None) -> str | None:
        """Have the engine take ``version`` and compare the probe; None if it agrees, and on other ranks."""
        return self._of_weights(
            "install", directory, version, probe, waiting_for=f"the engine to load version {version}"
        )

    def evaluate(self, step: int, *, falsified: bool = False) -> EvaluationReport | None:
        """Play the held-out problems; the report on rank 0, None at once on others."""
        if self._rank > 0:
            return None
        report: EvaluationReport | None = self._ask(
            "evaluate", step, falsified, waiting_for=f"the evaluation at step {step} (training.plan_deadline)"
        )
        return report

    def state_dict(self) -> dict[str, Any]:
        """The worker's position and ledger on rank 0."""
        if self._rank > 0:
            return {}
        state: dict[str, Any] = self._ask("state_dict", waiting_for="the worker's state")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        if self._rank == 0:
            self._ask("load_state_dict", state, waiting_for="the worker to restore its state")

    def interrupt(self) -> None:
        """Have the worker cancel its rollouts; from a signal handler. Rank 0's word counts."""
        if self._control is not None:
            with contextlib.suppress(OSError):  # a worker that is gone has nothing to cancel
                self._control.send("interrupt")

    def close(self) -> None:
        """End the worker (rank 0) and this rank's connection to it."""
        self._connection.close()
        if self._process is None:
            return
        try:
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # -- talking --------------------------------------------------------------------------------------------------

    def _start(self, startup: Startup) -> Connection:
        own, theirs = Pipe()
        self._control, their_control = Pipe()
        handles = (theirs.fileno(), their_control.fileno())
        command = [sys.executable, "-m", "agentrl.training.worker_process", *map(str, handles)]
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self._process = subprocess.Popen(command, pass_fds=handles, env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        their_control.close()
        own.send(startup)
        return own

    def _of_weights(self, name: str, *arguments: Any, waiting_for: str) -> str | None:
        if self._rank > 0:
            return None
        problem: str | None = self._ask(name, *arguments, waiting_for=waiting_for)
        return problem

    def _ask(self, name: str, *arguments: Any, waiting_for: str) -> Any:
        with contextlib.suppress(ConnectionError):  # the worker is gone: its last word may still wait to be read
            if not self._connection.poll():
                self._connection.send(Request(name=name, arguments=arguments))
        return self._answer(waiting_for, self._seconds)

    def _answer(self, waiting_for: str, seconds: float) -> Any:
        try:
            reply: Reply = receive(self._connection, seconds=seconds, waiting_for=waiting_for)
        except WorkerLostError as error:
            raise WorkerLostError(f"rollout worker: {error}{self._how_it_ended()}") from error
        if reply.failure is not None:
            raise _error_of(reply.failure)
        return reply.value

    def _how_it_ended(self) -> str:
        if self._process is None:
            return ""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ""
        if code < 0:
            name = signal.Signals(-code).name
            return (
                f" (it was ended by {name}, as the system does where memory runs out; the run goes on from its last "
                "checkpoint with --resume)"
            )
        return f" (it ended with exit code {code})"

    def _where(self) -> str:
        pid = self._process.pid if self._process is not None else 0
        return f"rollout worker: process {pid}"


def _error_of(failure: Failure) -> Exception:
    if failure.interrupted:
        return InterruptedRunError()
    kind = SettingsError if failure.exit_code == SettingsError.exit_code else WorldError
    return kind(failure.message)


def _connect(place: _Place | None, rank: int) -> Connection:
    """Connect to where rank 0 said and say who we are.

    In a thread, because neither connecting nor the handshake knows a deadline.
    """
    if place is None:
        raise WorkerLostError("rank 0 did not say where the rollout worker listens")
    done: queue.Queue[Connection | Exception] = queue.Queue()

    def work() -> None:
        try:
            connection = Client(place.address, authkey=place.key)
            connection.send(rank)
            done.put(connection)
        except (OSError, EOFError) as error:
            done.put(error)

    threading.Thread(target=work, daemon=True, name="connect-to-worker").start()
    try:
        outcome = done.get(timeout=_START)
    except queue.Empty:
        raise WorkerLostError(f"waited {_START:g} s in vain to reach the rollout worker at {place.address}") from None
    if isinstance(outcome, Exception):
        raise WorkerLostError(f"cannot reach the rollout worker at {place.address}: {outcome}") from outcome
    return outcome
