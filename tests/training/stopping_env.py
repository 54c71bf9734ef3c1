"""The counting environment that sends signals at chosen moments of a run, in whichever of its processes they come.

In the working directory ``order.json`` names a moment, what happens then, and to which processes. Who reaches the
moment first takes the order away, so that it is carried out once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from counting_env import CountingEnv
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from agentrl.models.policy import PolicyModel

ORDER = Path("order.json")
TAKEN = Path("taken.json")
UPDATED = Path("updated")
FIRST_BATCH = 3 * 4 * 2
"""Steps of a batch: problems, trajectories of each, turns."""
LONG = 5.0
"""Seconds that a step takes in which a signal was sent: rollouts are not over before the signal is heard."""

FIRST = 12.0
"""Seconds of the first forward of a run in which a rank will stall: its allowance is longer."""

_steps = itertools.count()
_forwards = itertools.count()


def reached(moment: str, *, lasting: float = 0.0) -> None:
    """Carry out the order if it is for this moment, which then lasts some seconds. Hooks of torch return nothing."""
    try:
        order = json.loads(ORDER.read_text())
        if moment != order["moment"] or os.environ.get("RANK", "0") not in order["at"]:
            return
        ORDER.rename(TAKEN)
    except FileNotFoundError:
        return
    if order["do"] == "fail":
        raise RuntimeError("this rank fails alone")
    if order["do"] == "stall":
        threading.Event().wait()
    if order["do"] == "halt":
        os.kill(os.getpid(), signal.SIGSTOP)
    for process in order["processes"]:
        os.kill(process, signal.SIGTERM)
    time.sleep(lasting)


def ordered(word: str) -> bool:
    """Whether the run's order contains ``word``, no matter which process takes the order away meanwhile."""
    for path in (ORDER, TAKEN):  # an order that is renamed after the first look is found at the second
        with contextlib.suppress(FileNotFoundError):
            if f'"{word}"' in path.read_text():
                return True
    return False


def wait_for(path: Path) -> None:
    """Return when a file is there."""
    while not path.exists():
        time.sleep(0.01)


class StoppingEnv(CountingEnv):
    """``plan`` and ``evaluation`` are steps of a training and of a held-out problem.

    ``settle``: a step of the batch after the first, which is not over before an update has been made.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        assert options is not None
        self._held_out = options["problem"].statement.startswith("held out")
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        reached("evaluation" if self._held_out else "plan", lasting=LONG)
        ahead = not self._held_out and next(_steps) >= FIRST_BATCH
        if ahead and ordered("settle"):
            wait_for(UPDATED)
            reached("settle")
        return super().step(action)


def _before_module(module: nn.Module, inputs: object) -> None:
    if isinstance(module, PolicyModel) and module.training and torch.is_grad_enabled():
        reached("forward")
        number = next(_forwards)
        if number == 0 and ordered("stall"):
            time.sleep(FIRST)
        reached(f"forward {number}")
        if os.environ.get("RANK") == "0" and ordered("fail"):
            threading.Event().wait()  # as in a collective that never ends, for the rank that fails


def _after_module(module: nn.Module, inputs: object, output: object) -> None:
    if type(module).__name__.endswith("RMSNorm") and isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(lambda gradient: reached("backward"))


def _at_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("open", "os.mkdir") or not isinstance(arguments[0], str | Path):
        return
    path = str(arguments[0])
    if "/.weights/" in path:  # what is sent before an update is what was resumed
        reached("transfer" if UPDATED.exists() else "restore")
    if "/.step-" in path:
        reached("checkpoint")


if not sys.argv[0].endswith("worker/process.py"):
    nn.modules.module.register_module_forward_pre_hook(_before_module)
    nn.modules.module.register_module_forward_hook(_after_module)
    register_optimizer_step_pre_hook(lambda *_: reached("update"))
    register_optimizer_step_post_hook(lambda *_: UPDATED.touch())
    sys.addaudithook(_at_event)
