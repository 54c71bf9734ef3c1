"""Finds the runs and evaluations below the paths that the user gave."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.errors import SettingsError
from agentrl.telemetry.run_directory import RunDirectory

Kind = Literal["run", "evaluation"]

_DEPTH = 3  # folders below a path that are searched
_MARKS: dict[str, Kind] = {"config.yaml": "run", "provenance.json": "evaluation"}
_INSIDE_A_RUN = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class ViewedFolder:
    """One run or evaluation. ``id`` names it in addresses and stays the same while it lies where it lies."""

    id: str
    kind: Kind
    name: str
    path: Path


class Library:
    """The runs and evaluations below ``paths``, found again at every look: new ones appear while the viewer runs."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises SettingsError where a path is missing or holds nothing to view."""
        self._paths = tuple(paths)
        self._known: dict[str, ViewedFolder] = {}
        for path in self._paths:
            if not path.exists():
                raise SettingsError(f"{path} does not exist; give the directory of a run, an evaluation, or a folder")
            if next(_below(path, _DEPTH), None) is None:
                raise SettingsError(
                    f"{path} holds no run (a folder with config.yaml and metrics.jsonl) and no evaluation (a folder "
                    f"with provenance.json), {_DEPTH} folders deep; a training run makes one in runs/NAME"
                )

    def places(self) -> list[ViewedFolder]:
        """Every run and evaluation, by name."""
        found: dict[str, ViewedFolder] = {}
        for root in self._paths:
            for kind, path in _below(root, _DEPTH):
                name = path.resolve().name if path == root else path.relative_to(root).as_posix()
                place = ViewedFolder(id=_id(path), kind=kind, name=name, path=path)
                found.setdefault(place.id, place)
        self._known = found
        return sorted(found.values(), key=lambda place: place.name)

    def run(self, place_id: str) -> RunDirectory:
        """The run with this id. Raises SettingsError if there is none."""
        return RunDirectory(self._path(place_id, "run"))

    def evaluation(self, place_id: str) -> Path:
        """The directory of the evaluation with this id. Raises SettingsError if there is none."""
        return self._path(place_id, "evaluation")

    def _path(self, place_id: str, kind: Kind) -> Path:
        if place_id not in self._known:
            self.places()
        place = self._known.get(place_id)
        if place is not None and place.kind == kind == _kind(place.path):
            return place.path
        raise SettingsError(f"there is no {kind} {place_id}: it was moved or deleted")


def _below(folder: Path, depth: int) -> Iterator[tuple[Kind, Path]]:
    kind = _kind(folder)
    if kind is not None:
        yield kind, folder
    elif depth > 0 and folder.is_dir():
        try:
            inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError:
            return  # a folder that this user may not read has nothing to show
        for path in inside:
            yield from _below(path, depth - 1)


def _kind(folder: Path) -> Kind | None:
    for mark, kind in _MARKS.items():
        if (folder / mark).is_file() and (kind != "run" or (folder / _INSIDE_A_RUN).is_file()):
            return kind
    return None


def _id(path: Path) -> str:
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:10]
