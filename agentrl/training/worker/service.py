"""The calls from training ranks to the rollout worker, each with a description of what the ranks wait for.

:class:`.local.LocalRolloutService` executes the calls. :class:`.remote.RemoteRolloutService` sends them by name to
another process.
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
from agentrl.weights.verify import EngineVerification, Probe

if TYPE_CHECKING:
    from agentrl.config import Settings


_Method = TypeVar("_Method", bound=Callable[..., object])


class InterruptedRunError(Exception):
    """A stop was requested (SIGTERM, Ctrl-C). Only interruptible calls raise this error, and always on all ranks."""


@dataclass(frozen=True, kw_only=True)
class WorkerCall:
    """A method that can be called in the worker's process."""

    signature: inspect.Signature
    waiting_for: str  # format string, filled with the call's arguments
    interruptible: bool  # whether a request to stop cancels the call

    def bind_arguments(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """Return the arguments of a call by name, including defaults."""
        bound = self.signature.bind(None, *args, **kwargs)  # None: self
        bound.apply_defaults()
        return {name: value for name, value in bound.arguments.items() if name != "self"}


WORKER_CALLS: dict[str, WorkerCall] = {}
"""The calls that can be sent to the worker's process, by method."""


def _call(waiting_for: str, *, interruptible: bool = False) -> Callable[[_Method], _Method]:
    def register(method: _Method) -> _Method:
        signature = inspect.signature(method)
        waiting_for.format(**dict.fromkeys(signature.parameters, 0))  # an unknown name fails here, not in a run
        WORKER_CALLS[method.__name__] = WorkerCall(
            signature=signature, waiting_for=waiting_for, interruptible=interruptible
        )
        return method

    return register


class RolloutService(Protocol):
    """The rollout worker. All calls block, for at most ``training.worker_timeout`` seconds.

    Every rank makes every call, in the same order. A call is executed once all ranks have made it, with rank 0's
    arguments, and returns or raises on all ranks. Therefore no rank waits for slow work inside a collective, and all
    ranks stop in the same interruptible call. A step whose plan was returned is always completed.
    """

    @_call("the worker's description")
    def describe_setup(self) -> list[str]:
        """Return lines about the environment, the engine and the problems, for the console."""

    @_call("the plan of step {step} (training.worker_timeout)", interruptible=True)
    def roll_out_and_plan_rank(self, step: int, budget: int) -> RankPlan:
        """Roll out a step and return this rank's part of it, in micro-batches of ``budget`` tokens.

        A step that was planned but not finished is planned again, with the same trajectories.
        """

    @_call("the current batch (training.worker_timeout)", interruptible=True)
    def wait_until_weights_may_change(self) -> None:
        """Wait until the weights may change: after overlapped rollouts of the current batch, or on a stop request."""

    @_call("the other ranks at {point} (training.worker_timeout)")
    def wait_for_all_ranks(self, point: str) -> None:
        """Wait until every rank has reached ``point``."""

    @_call("the worker to finish step {step}")
    def accept_step(self, step: int) -> None:
        """Accept the last planned step: start writing its trajectories and remove its groups from the work queue.

        Returns when the trajectories of the previous step are written.
        """

    @_call("the evaluation at step {step} (training.worker_timeout)", interruptible=True)
    def evaluate(self, step: int, *, falsified: bool = False) -> EvaluationReport | None:
        """Evaluate on the held-out problems, and return a report, or None if there are no problems.

        With ``falsified`` observations, only problems that reveal a value by execution are used.
        """

    @_call("the worker's state")
    def state_dict(self) -> QueueState:
        """Return the state of the sampler and the work queue.

        Returns when the trajectories of all finished steps are written.
        """

    @_call("the worker to restore its state")
    def load_state_dict(self, state: QueueState) -> None:
        """Restore a :meth:`state_dict`."""

    @_call("the target of weight transfers")
    def transfer_target(self) -> TransferTarget | None:
        """Return the destination of weights, or None if the engine shares them with the trainer."""

    @_call("the prompts of the first problems")
    def probe_tokens(self) -> tuple[int, ...]:
        """Return the tokens that trainer and engine both score: texts of the first problems."""

    @_call("the verification of transfers")
    def verification_methods(self) -> list[EngineVerification]:
        """Return the verification method of transfers to each engine, with the noise measured at the start."""

    @_call("the engine to score the first probe")
    def verify_starting_policy(self, version: int, probe: Probe) -> str | None:
        """Check that the engine has its initial policy. Returns a description of the mismatch, or None."""

    @_call("the engine to pause")
    def pause_requests(self) -> None:
        """Pause all requests until :meth:`install_weights`."""

    @_call("the engine to load version {version}")
    def install_weights(self, directory: str | None, version: int, probe: Probe | None) -> str | None:
        """Load ``version``, drop caches and resume requests. Returns the mismatch, or None if the probe agrees."""

    def cancel_interruptible_calls(self) -> None:
        """Cancel current and future interruptible calls. Callable from any thread."""

    def close(self) -> None:
        """Release the worker's rollouts, engine and environment."""


STOP_TIMEOUT = 60.0
"""Seconds for the worker to cancel its rollouts; it waits only for running programs and requests."""

# Seconds between two checks of the conditions that end a wait.
_POLL_INTERVAL = 0.5


@dataclass(frozen=True, kw_only=True)
class WorkerStartup:
    """Rank 0's first message, with everything the worker needs. ``key`` authenticates the other ranks."""

    settings: Settings
    policy_path: str
    ranks: int
    key: bytes


@dataclass(frozen=True, kw_only=True)
class RankConnectionMessage:
    """The first message on a connection of a rank other than rank 0.

    ``control``: the connection is for the rank's heartbeats and interrupts, and for :class:`StuckRanks` in return.
    """

    rank: int
    control: bool


@dataclass(frozen=True, kw_only=True)
class WorkerRequest:
    """A call to the service's method ``name``. All ranks send it and wait; only rank 0 sends ``arguments``."""

    name: str
    waiting_for: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CallReply:
    """Reply to a call: the method's return value, or the error that every rank raises."""

    value: object = None
    error: Exception | None = None


@dataclass(frozen=True, kw_only=True)
class StuckRanks:
    """The worker's last message on every rank's control connection, if ``ranks`` are stuck."""

    ranks: list[int]
    message: str


class WorkerLostError(WorldError):
    """The other end of a connection exited or did not respond in time."""


def receive_message(
    connection: Connection,
    *,
    seconds: float,
    waiting_for: str,
    stop_requested: threading.Event | None = None,
    stop_timeout: float = STOP_TIMEOUT,
    while_waiting: Callable[[], None] = lambda: None,
) -> Any:
    """Wait for the next message and return it.

    Raises WorkerLostError if the other end exits, or if no message arrives within ``seconds``. Once ``stop_requested``
    is set, the other end must respond within ``stop_timeout`` seconds. ``while_waiting`` is called twice a second.
    """
    began = time.monotonic()
    deadline = began + seconds
    stopping = False
    try:
        while not connection.poll(min(_POLL_INTERVAL, max(0.0, deadline - time.monotonic()))):
            while_waiting()
            if stop_requested is not None and stop_requested.is_set() and not stopping:
                stopping, deadline = True, min(deadline, time.monotonic() + stop_timeout)
            if time.monotonic() >= deadline:
                after_stop = f" ({stop_timeout:g} s of them after a request to stop)" if stopping else ""
                raise WorkerLostError(
                    f"no response after {time.monotonic() - began:.0f} s of waiting for {waiting_for}{after_stop}"
                )
        return connection.recv()
    except (EOFError, OSError) as error:
        raise WorkerLostError(f"the connection closed while waiting for {waiting_for}") from error
