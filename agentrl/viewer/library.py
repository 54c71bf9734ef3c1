"""Search for runs and evaluations below the paths of the command line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.errors import SettingsError
from agentrl.telemetry.run_directory import RunDirectory

Kind = Literal["run", "evaluation"]

_DEPTH = 3  # levels of directories to search below a path
_MARKS: dict[str, Kind] = {"config.yaml": "run", "provenance.json": "evaluation"}
_INSIDE_A_RUN = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class ViewedFolder:
    """One run or evaluation. ``id`` identifies it in addresses and depends only on its path."""

    id: str
    kind: Kind
    name: str
    path: Path


class Library:
    """Runs and evaluations below ``paths``. Every listing searches again, so that new ones appear."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises SettingsError if a path is missing or contains neither a run nor an evaluation."""
        self._paths = tuple(paths)
        self._known: dict[str, ViewedFolder] = {}
        for path in self._paths:
            if not path.exists():
                raise SettingsError(
                    f"{path} does not exist; use the directory of a run, an evaluation, or a parent of these"
                )
            if next(_below(path, _DEPTH), None) is None:
                raise SettingsError(
                    f"{path} contains no run (a directory with config.yaml and metrics.jsonl) and no evaluation (a "
                    f"directory with provenance.json) within {_DEPTH} levels; training writes runs to runs/NAME"
                )

    def places(self) -> list[ViewedFolder]:
        """Return all runs and evaluations, sorted by name."""
        folders: dict[str, ViewedFolder] = {}
        for root in self._paths:
            for kind, path in _below(root, _DEPTH):
                name = path.resolve().name if path == root else path.relative_to(root).as_posix()
                folder = ViewedFolder(id=_id(path), kind=kind, name=name, path=path)
                folders.setdefault(folder.id, folder)
        self._known = folders
        return sorted(folders.values(), key=lambda folder: folder.name)

    def run(self, folder_id: str) -> RunDirectory:
        """Return the run with this id. Raises SettingsError if there is none."""
        return RunDirectory(self._path(folder_id, "run"))

    def evaluation(self, folder_id: str) -> Path:
        """Return the directory of the evaluation with this id. Raises SettingsError if there is none."""
        return self._path(folder_id, "evaluation")

    def _path(self, folder_id: str, kind: Kind) -> Path:
        if folder_id not in self._known:
            self.places()
        folder = self._known.get(folder_id)
        if folder is not None and folder.kind == kind == _kind(folder.path):
            return folder.path
        raise SettingsError(f"there is no {kind} {folder_id}: it was moved or deleted")


def _below(folder: Path, depth: int) -> Iterator[tuple[Kind, Path]]:
    kind = _kind(folder)
    if kind is not None:
        yield kind, folder
    elif depth > 0 and folder.is_dir():
        try:
            inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError:
            return  # directories without read permission are skipped
        for path in inside:
            yield from _below(path, depth - 1)


def _kind(folder: Path) -> Kind | None:
    for mark, kind in _MARKS.items():
        if (folder / mark).is_file() and (kind != "run" or (folder / _INSIDE_A_RUN).is_file()):
            return kind
    return None


def _id(path: Path) -> str:
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:10]
