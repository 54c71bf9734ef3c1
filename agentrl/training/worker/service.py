"""What training ranks ask of the rollout worker: each call is written here once, with what a rank then waits for.

:class:`~agentrl.training.worker.local.LocalService` carries the calls out in the process it lives in. With several
ranks, or rollouts beside training, that is the worker's own process (:mod:`agentrl.training.worker.process`), and
:class:`~agentrl.training.worker.remote.RemoteService` sends every call there by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from agentrl.evaluation.play.during_training import EvaluationReport
from agentrl.rollout.work_queue import QueueState
from agentrl.training.step.batching import RankPlan
from agentrl.weights.transports import TransferTarget
from agentrl.weights.verify import Probe

_Method = TypeVar("_Method", bound=Callable[..., object])


class InterruptedRunError(Exception):
    """The run was asked to stop (SIGTERM, Ctrl-C). Raised by interruptible calls alone, on all ranks at once."""


@dataclass(frozen=True, kw_only=True)
class WorkerCall:
    """A method that can be called in the worker's process. ``waiting_for`` says what a rank waits for meanwhile, as a
    format of the arguments. ``interruptible``: a request to stop cancels the call."""

    signature: inspect.Signature
    waiting_for: str
    interruptible: bool

    def arguments(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """The arguments of a call by their names, defaults included."""
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


class WeightReceiver(Protocol):
    """The part of the service that :class:`agentrl.training.worker.transfer.WeightSender` calls."""

    @_call("where the engine's weights go")
    def transfer_target(self) -> TransferTarget | None:
        """Where to send weights; None if the engine shares them with the trainer."""

    @_call("the prompts of the first problems")
    def probe_tokens(self) -> tuple[int, ...]:
        """The tokens that trainer and engine both score: prompts of the first problems."""

    @_call("how transfers are verified")
    def verification(self) -> list[str]:
        """How transfers are verified, and the noise that was measured for it."""

    @_call("the engine to score the first probe")
    def verify(self, version: int, probe: Probe) -> str | None:
        """Whether the engine holds the policy it was started with: None, or what is wrong."""

    @_call("the engine to pause")
    def pause(self, *, zero_weights: bool) -> None:
        """Pause all requests until :meth:`install`. ``zero_weights``: zero all weights, so that gaps show."""

    @_call("the engine to load version {version}")
    def install(self, directory: str | None, version: int, probe: Probe | None) -> str | None:
        """Load ``version``, drop caches and resume requests. None if the probe agrees, or what is wrong."""


class RolloutService(WeightReceiver, Protocol):
    """The rollout worker. All calls block, for at most ``training.worker_timeout`` seconds.

    Every rank makes every call, in the same order. A call is carried out once all ranks have made it, with rank 0's
    arguments, and returns or raises the same on all of them. So nothing slow is waited for within a collective, and
    all ranks learn at one place that the run is to stop: in an interruptible call. A step whose plan was handed out is
    finished.
    """

    @_call("the worker's description")
    def describe(self) -> list[str]:
        """The environment, the engine and the problems, for the console."""

    @_call("the plan of step {step} (training.worker_timeout)", interruptible=True)
    def plan(self, step: int) -> RankPlan:
        """Roll out a step; this rank's part of it."""

    @_call("the batch under way (training.worker_timeout)", interruptible=True)
    def settle(self) -> None:
        """Return when the weights may change: after the batch under way if it must be of one policy version.

        Returns at once if the run is to stop.
        """

    @_call("the other ranks at {place} (training.worker_timeout)")
    def barrier(self, place: str) -> None:
        """Return when every rank is at ``place``."""

    @_call("the worker to note that step {step} is trained")
    def confirm(self, step: int) -> None:
        """The step is trained: write its trajectories and remove its groups from the work queue."""

    @_call("the evaluation at step {step} (training.worker_timeout)", interruptible=True)
    def evaluate(self, step: int, *, falsified: bool = False) -> EvaluationReport | None:
        """Play the held-out problems with the engine's present weights; None if there are none to play.

        With ``falsified`` observations, only problems that reveal a value by execution are played. The report has no
        groups.
        """

    @_call("the worker's state")
    def state_dict(self) -> QueueState:
        """The position in the problems and the work queue."""

    @_call("the worker to restore its state")
    def load_state_dict(self, state: QueueState) -> None:
        """Continue from a saved position."""

    def interrupt(self) -> None:
        """Cancel interruptible calls, now and from now on. From any thread."""

    def close(self) -> None:
        """Release the worker's rollouts, engine and environment."""
