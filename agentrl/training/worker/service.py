"""The calls that training ranks make to the rollout worker. Each is defined here once, with a description of the wait.

:class:`.local.LocalService` carries them out; :class:`.remote.RemoteService` sends them by name to another process.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from agentrl.errors import WorldError
from agentrl.evaluation.during_training import EvaluationReport
from agentrl.rollout.work_queue import QueueState
from agentrl.training.step.batching import RankPlan
from agentrl.weights.sources import TransferTarget
from agentrl.weights.verify import Probe, Verified

if TYPE_CHECKING:
    from agentrl.config import Settings


_Method = TypeVar("_Method", bound=Callable[..., object])


class InterruptedRunError(Exception):
    """The run was asked to stop (SIGTERM, Ctrl-C). Only interruptible calls raise it, on all ranks alike."""


@dataclass(frozen=True, kw_only=True)
class WorkerCall:
    """A method that can be called in the worker's process."""

    signature: inspect.Signature
    waiting_for: str  # a format string over the arguments
    interruptible: bool  # a request to stop cancels the call

    def arguments(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """The arguments of a call by name, including defaults."""
        bound = self.signature.bind(None, *args, **kwargs)  # None: self
        bound.apply_defaults()
        return {name: value for name, value in bound.arguments.items() if name != "self"}


CALLS: dict[str, WorkerCall] = {}
"""The calls that can be sent to the worker's process, by method."""


def _call(waiting_for: str, *, interruptible: bool = False) -> Callable[[_Method], _Method]:
    def register(method: _Method) -> _Method:
        CALLS[method.__name__] = WorkerCall(
            signature=inspect.signature(method), waiting_for=waiting_for, interruptible=interruptible
        )
        return method

    return register


class RolloutService(Protocol):
    """The rollout worker. All calls block, for at most ``training.worker_timeout`` seconds.

    Every rank makes every call, in the same order. A call is carried out once all ranks have made it, with rank 0's
    arguments, and returns or raises the same on all: no rank waits for slow work inside a collective, and all learn of
    a request to stop in the same interruptible call. A step whose plan was handed out is always finished.
    """

    @_call("the worker's description")
    def describe(self) -> list[str]:
        """The environment, the engine and the problems, for the console."""

    @_call("the plan of step {step} (training.worker_timeout)", interruptible=True)
    def plan(self, step: int, budget: int) -> RankPlan:
        """Roll out a step and return this rank's part of it, in micro-batches of ``budget`` tokens.

        A step that was planned but not confirmed is planned again, with the same trajectories.
        """

    @_call("the current batch (training.worker_timeout)", interruptible=True)
    def settle(self) -> None:
        """Return when the weights may change: after a batch of one policy version; at once after a request to stop."""

    @_call("the other ranks at {place} (training.worker_timeout)")
    def barrier(self, place: str) -> None:
        """Return when every rank is at ``place``."""

    @_call("the worker to confirm step {step}")
    def confirm(self, step: int) -> None:
        """Note that the step is trained: begin to write its trajectories and remove its groups from the work queue.

        Return when those of the step before are written.
        """

    @_call("the evaluation at step {step} (training.worker_timeout)", interruptible=True)
    def evaluate(self, step: int, *, falsified: bool = False) -> EvaluationReport | None:
        """Play the held-out problems; None if there are none. The report contains no groups.

        With ``falsified`` observations, only problems that reveal a value by execution are played.
        """

    @_call("the worker's state")
    def state_dict(self) -> QueueState:
        """The position in the problems and the work queue, once the trajectories of all confirmed steps are written."""

    @_call("the worker to restore its state")
    def load_state_dict(self, state: QueueState) -> None:
        """Continue from a saved position."""

    @_call("the target of weight transfers")
    def transfer_target(self) -> TransferTarget | None:
        """The destination of weights; None if the engine shares them with the trainer."""

    @_call("the prompts of the first problems")
    def probe_tokens(self) -> tuple[int, ...]:
        """The tokens that both trainer and engine score: the prompts of the first problems."""

    @_call("the verification of transfers")
    def verification(self) -> list[Verified]:
        """How transfers to each engine are verified, and the noise measured for this."""

    @_call("the engine to score the first probe")
    def verify(self, version: int, probe: Probe) -> str | None:
        """Check that the engine holds the policy it was started with. Returns the problem, or None."""

    @_call("the engine to pause")
    def pause(self) -> None:
        """Pause all requests until :meth:`install`."""

    @_call("the engine to load version {version}")
    def install(self, directory: str | None, version: int, probe: Probe | None) -> str | None:
        """Load ``version``, drop caches and resume requests. Returns the problem, or None if the probe agrees."""

    def interrupt(self) -> None:
        """Cancel interruptible calls, now and in future. Callable from any thread."""

    def close(self) -> None:
        """Release the worker's rollouts, engine and environment."""


FOLLOWED = 3
"""Exit code of a rank that ended because the rollout worker or another rank is gone or stuck."""
STUCK = 6
"""Exit code of a rank whose main thread was stuck."""

STOP_TIMEOUT = 60.0
"""Seconds for the worker to cancel its rollouts; it waits only for running programs and requests."""

# Seconds between checks of whether to end a wait.
_LOOK = 0.5


@dataclass(frozen=True, kw_only=True)
class Startup:
    """Rank 0's first message, with everything the worker needs. ``key`` authenticates the other ranks."""

    settings: Settings
    policy_path: str
    ranks: int
    key: bytes


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The first message on the connection of another rank.

    ``control``: the connection carries the rank's beats and interrupts to the worker, and :class:`StuckRanks` back.
    """

    rank: int
    control: bool


@dataclass(frozen=True, kw_only=True)
class WorkerRequest:
    """A call of the service's method ``name``. All ranks send it and wait together; ``arguments`` are rank 0's."""

    name: str
    waiting_for: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a call failed. ``interrupted``: the run was asked to stop; otherwise it ends with ``exit_code``.

    ``lost``: because another rank is gone.
    """

    message: str
    exit_code: int = 1
    interrupted: bool = False
    lost: bool = False


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The method's return value, or the reason why it failed."""

    value: object = None
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class StuckRanks:
    """The worker's last message on every rank's control connection, if ``ranks`` are stuck."""

    ranks: list[int]
    message: str


class WorkerLostError(WorldError):
    """The other end of a connection is gone or did not answer in time."""


def receive(
    connection: Connection,
    *,
    seconds: float,
    waiting_for: str,
    stops: threading.Event | None = None,
    stop_timeout: float = STOP_TIMEOUT,
    waits: Callable[[], None] = lambda: None,
) -> Any:
    """Return the next message. Raises WorkerLostError if the other end is gone or ``seconds`` have passed.

    Once ``stops`` is set, the other end must answer within ``stop_timeout`` seconds. ``waits`` is called twice a
    second.
    """
    began = time.monotonic()
    deadline = began + seconds
    stopping = False
    try:
        while not connection.poll(min(_LOOK, max(0.0, deadline - time.monotonic()))):
            waits()
            if stops is not None and stops.is_set() and not stopping:
                stopping, deadline = True, min(deadline, time.monotonic() + stop_timeout)
            if time.monotonic() >= deadline:
                told = f" ({stop_timeout:g} s of them after a request to stop)" if stopping else ""
                raise WorkerLostError(
                    f"no response after {time.monotonic() - began:.0f} s of waiting for {waiting_for}{told}"
                )
        return connection.recv()
    except (EOFError, OSError) as error:
        raise WorkerLostError(f"the connection closed while waiting for {waiting_for}") from error
