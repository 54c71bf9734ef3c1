"""What an experiment tracker is: the protocol behind ``telemetry.trackers``, and the table of trackers by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from agentrl.errors import SettingsError
from agentrl_envs.registry import Registry, install_extra

Factory = TypeVar("Factory", bound="TrackerFactory")
Cell = str | float | None


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told at the start.

    ``settings``: by their dotted keys. ``folder`` is the tracker's own, in the run directory. ``continued``: the
    tracker's own id of the run that ``--resume`` continues. ``step``: steps done; later ones may be told again.
    ``patience``: seconds after which opening and closing should give up.
    """

    name: str
    project: str
    settings: Mapping[str, object]
    folder: Path
    continued: str | None
    step: int
    patience: float


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """A few trajectories of a step."""

    step: int
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]


class Tracker(Protocol):
    """One run at a tracker. All calls come from one thread of its own, where they may block and raise."""

    @property
    def id(self) -> str:
        """What continues this run, given as ``TrackedRun.continued``."""

    @property
    def place(self) -> str:
        """Where a user finds the run: an address or a folder."""

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        """A row of ``metrics.jsonl`` without its step: a training step, or an evaluation (``eval/...``) after it."""

    def trajectories(self, table: SampleTable) -> None:
        """A sample of a step's trajectories."""

    def plots(self, files: Sequence[Path]) -> None:
        """The run's plots (PNG), at its end."""

    def close(self) -> None:
        """The run is over or was stopped: send what is left."""


TrackerFactory = Callable[[TrackedRun], Tracker]

_MODULE = "agentrl.telemetry.trackers"
TRACKERS: Registry[TrackerFactory] = Registry(
    "tracker",
    own={
        "wandb": f"{_MODULE}.packages:WandbTracker",
        "trackio": f"{_MODULE}.packages:TrackioTracker",
        "tensorboard": f"{_MODULE}.packages:TensorboardTracker",
        "mlflow": f"{_MODULE}.packages:MlflowTracker",
    },
    group="agentrl.trackers",
    paths=True,
)
"""Classes and functions that open a `Tracker`; ours need the package of their name."""


def register_tracker(name: str) -> Callable[[Factory], Factory]:
    """Decorator: NAME in ``telemetry.trackers`` means this class or function, which makes a tracker of a run."""

    def add(factory: Factory) -> Factory:
        TRACKERS.add(name, factory)
        return factory

    return add


def check_trackers(names: Iterable[str]) -> None:
    """Raise SettingsError for a tracker whose package is missing, PluginError for one that cannot be imported."""
    for name in names:
        if name in TRACKERS.own and importlib.util.find_spec(name) is None:
            raise SettingsError(f"telemetry.trackers: {name} needs a package: {install_extra(name)}")
        TRACKERS[name]
