"""Python objects as what the command line takes: problems as a file, functions and classes as ``module:attribute``.

A run uses several processes, and `--resume` starts new ones, so everything that a run needs must be found on disk.
"""

from __future__ import annotations

import hashlib
import json
import keyword
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from agentrl.errors import SettingsError
from agentrl.telemetry.files import atomic_write
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    import pandas as pd

Problems: TypeAlias = "Iterable[Mapping[str, object] | Problem] | pd.DataFrame"
_PICKLED = '''"""An object that was passed to agentrl from a notebook or a script's main module."""

import pickle
from pathlib import Path

{name} = pickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())
'''


def problem_file(problems: Problems, folder: Path) -> Path:
    """Write the problems to ``folder/DIGEST/problems.jsonl``, with a digest of their content, and return the full path.

    Raises SettingsError if there are no problems, if a row is not a mapping, or if a value cannot be stored as JSON.
    """
    pandas = sys.modules.get("pandas")  # a caller that passes a frame has imported it
    if pandas is not None and isinstance(problems, pandas.DataFrame):
        problems = problems.to_dict("records")
    if not isinstance(problems, Iterable):
        raise SettingsError(f"problems={problems!r:.100}: valid is {_VALID_PROBLEMS}")
    lines = [_line(place, row) for place, row in enumerate(problems)]
    if not lines:
        raise SettingsError("problems is empty: nothing to train on")
    return _write(folder, "{digest}/problems.jsonl", "".join(lines).encode())


@dataclass
class Names:
    """``module:attribute`` of functions and classes. ``plugins`` are the modules that a run must load to find them."""

    folder: Path
    plugins: list[str] = field(default_factory=list)

    def of(self, item: object) -> str:
        """The name of ``item``. One that no other process can import is pickled to ``folder``.

        A text is a name already. Raises SettingsError for what cannot be pickled.
        """
        if isinstance(item, str):
            return item
        module, attribute = getattr(item, "__module__", "__main__"), getattr(item, "__qualname__", "")
        if module != "__main__" and _resolves(module, attribute, item):
            return f"{module}:{attribute}"
        return self._pickled(item)

    def _pickled(self, item: object) -> str:
        import cloudpickle

        try:
            data = cloudpickle.dumps(item)
        except Exception as error:
            raise SettingsError(
                f"{item!r} cannot be passed to the processes of a run ({error}); define it in a module of its own"
            ) from error
        module = _write(self.folder, "notebook_{digest}.pickle", data).with_suffix(".py")
        own = getattr(item, "__name__", "")
        name = own if own.isidentifier() and not keyword.iskeyword(own) else "item"
        atomic_write(module, lambda out: out.writelines([_PICKLED.format(name=name).encode()]))
        self.plugins.append(str(module))
        return f"{module.stem}:{name}"


def _resolves(module: str, attribute: str, item: object) -> bool:
    found: object = sys.modules.get(module)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return found is item


_VALID_PROBLEMS = "a file, or rows such as {'problem': 'What is 2 + 3?', 'answer': '5'}"


def _line(place: int, row: object) -> str:
    if not isinstance(row, Mapping | Problem):
        raise SettingsError(f"problems[{place}] is {row!r:.100}: valid is {_VALID_PROBLEMS}")
    values = asdict(row) if isinstance(row, Problem) else dict(row)
    for key, value in values.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"problems[{place}][{key!r}] is not a JSON value: {error}") from error
    return json.dumps(values, ensure_ascii=False) + "\n"


def _write(folder: Path, name: str, data: bytes) -> Path:
    path = folder.absolute() / name.format(digest=hashlib.sha256(data).hexdigest()[:16])
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        atomic_write(path, lambda out: out.writelines([data]))
    return path
