"""Conversion of Python objects to settings: files for problems and models, ``module:attribute`` for functions.

A run's settings are text, so that ``--resume`` and the other processes of a run can read them. An object that is
defined in a module is passed by name. Any other object is used directly in this process and pickled for other
processes.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import keyword
import shutil
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from agentrl.config import Settings
from agentrl.config.layers import COMMAND_LINE
from agentrl.config.messages import nearest_key
from agentrl.config.settings import SIMPLETIR
from agentrl.errors import SettingsError
from agentrl.problems.rows import require_file
from agentrl.problems.settings import FILE_KINDS
from agentrl.problems.sources import expand_path
from agentrl.telemetry.files import atomic_write
from agentrl_envs.registry import did_you_mean
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Problems: TypeAlias = "Iterable[Mapping[str, object] | Problem] | pd.DataFrame"
INPUTS = ".inputs"
"""Folder beside the runs for problems, models and functions that were passed as Python objects."""
_PICKLED = '''"""An object that was passed to agentrl from a notebook or a script's main module."""

import pickle
from pathlib import Path

{name} = pickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())
'''
_VALID_PROBLEMS = "a file, or rows such as {'problem': 'What is 2 + 3?', 'answer': '5'}"


@dataclass
class Inputs:
    """Python objects passed to one call. Files created from the objects are written to ``folder``."""

    folder: Path
    plugins: list[str] = field(default_factory=list)
    """Modules that each process of the run must load."""
    unpickled: dict[str, str] = field(default_factory=dict)
    """Objects that exist in this process only, with the reason why they cannot be pickled."""

    def importable_name(self, item: object) -> str:
        """Return the name of a function or class. A string is returned unchanged.

        An object that other processes cannot import becomes the attribute of a new module in this process. Its pickle
        is a plug-in that defines the same module in other processes.
        """
        if isinstance(item, str):
            return item
        module, attribute = getattr(item, "__module__", "__main__"), getattr(item, "__qualname__", "")
        if module != "__main__" and _is_importable(module, attribute, item):
            return f"{module}:{attribute}"
        import cloudpickle

        name = getattr(item, "__name__", "")
        name = name if name.isidentifier() and not keyword.iskeyword(name) else "item"
        try:
            pickled = _write(self.folder, "notebook_{digest}.pickle", cloudpickle.dumps(item))
        except Exception as error:  # noqa: BLE001 - pickling runs code of any class
            stem, file = f"notebook_{name}", None
            self.unpickled[f"{stem}:{name}"] = str(error)
        else:
            path = pickled.with_suffix(".py")
            atomic_write(path, lambda out: out.writelines([_PICKLED.format(name=name).encode()]))
            self.plugins.append(str(path))
            stem, file = path.stem, str(path)
        here = types.ModuleType(stem)
        here.__file__ = file
        setattr(here, name, item)
        sys.modules[stem] = here
        return f"{stem}:{name}"

    def require_picklable(self) -> None:
        """Raise SettingsError if an object cannot be passed to the other processes of a run."""
        for name, reason in self.unpickled.items():
            raise SettingsError(
                f"{name.partition(':')[2]} cannot be passed to the other processes of this run ({reason}). Define it "
                "in a module, or set training.num_processes=1, rollout.schedule=synchronous, cluster.kind=local and "
                "cluster.restarts=0 to train in one process"
            )

    def problems_path(self, problems: str | Path | Problems) -> str:
        """Return the path of the problem file. Rows are written to a new file with :func:`write_problem_file`.

        Raises ProblemFileError if the file is missing, and the errors of :func:`write_problem_file`.
        """
        path = str(problems if isinstance(problems, str | Path) else write_problem_file(problems, self.folder))
        check_file(path)
        return path

    def reward_override(self, reward: object) -> str:
        """Format ``reward.functions=...`` for a function, a list of functions, or a mapping from functions to weights.

        Functions may be given by name.
        """
        if not isinstance(reward, Mapping):
            reward = dict.fromkeys(reward if isinstance(reward, list | tuple) else [reward], 1.0)
        return f"reward.functions={json.dumps({self.importable_name(one): weight for one, weight in reward.items()})}"

    def model_settings(self, model: object, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, object]:
        """Return settings for a model directory or id, a mapping of ``model`` settings, or a loaded model.

        A loaded model is saved to ``folder``, where every process of a run can read it.
        Raises SettingsError for a loaded model without ``tokenizer``, and for an object of another type.
        """
        if isinstance(model, Mapping):
            return {"model": model}
        if isinstance(model, str | Path):
            return {"model.path": str(model)}
        if not hasattr(model, "save_pretrained"):
            raise SettingsError(
                f"model must be a directory, a Hugging Face id or a transformers model; got {model!r:.100}"
            )
        if tokenizer is None:
            raise SettingsError("a loaded model needs its tokenizer: pass tokenizer=...")
        return {"model.path": str(save_model(cast("PreTrainedModel", model), tokenizer, self.folder))}

    def add_plugins(self, settings: Mapping[str, object]) -> Mapping[str, object]:
        """Return a copy of the settings that includes the plug-ins required by these objects."""
        plugins = settings.get("plugins") or ()
        if not isinstance(plugins, list | tuple):
            raise SettingsError(f"plugins must be a list of modules or files; got {plugins!r}")
        return {**settings, "plugins": [*plugins, *self.plugins]} if self.plugins else settings


def write_problem_file(problems: Problems, folder: Path) -> Path:
    """Write the problems to ``folder/DIGEST/problems.jsonl`` and return the full path. DIGEST is a hash of the content.

    Raises SettingsError if there are no problems, if a row is not a mapping, or if a value cannot be stored as JSON.
    """
    pandas = sys.modules.get("pandas")  # a caller that passes a frame has imported it
    if pandas is not None and isinstance(problems, pandas.DataFrame):
        problems = problems.to_dict("records")
    if not isinstance(problems, Iterable):
        raise SettingsError(f"problems={problems!r:.100} must be {_VALID_PROBLEMS}")
    lines = [_problem_line(number, row) for number, row in enumerate(problems)]
    if not lines:
        raise SettingsError("problems is empty: pass at least one problem")
    return _write(folder, "{digest}/problems.jsonl", "".join(lines).encode())


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """Save a model and its tokenizer to ``folder/model_DIGEST``, and return the full path.

    DIGEST is a hash of the files.
    """
    partial = folder.absolute() / ".model.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    digest = hashlib.sha256()
    for file in sorted(partial.iterdir()):
        digest.update(file.name.encode())
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    saved = partial.with_name(f"model_{digest.hexdigest()[:16]}")
    if saved.exists():
        shutil.rmtree(partial)
    else:
        partial.rename(saved)
    return saved


def check_file(path: str) -> None:
    """Raise ProblemFileError if the file does not exist."""
    if path.lower().endswith(FILE_KINDS):
        require_file(Path(expand_path(path)))


def to_overrides(settings: Mapping[str, object], prefix: str = "") -> list[str]:
    """Convert settings to ``key=value`` strings with dotted keys and JSON values. JSON is valid YAML.

    A mapping whose keys are not names of settings, such as reward functions with weights, becomes one value.

    >>> to_overrides({"training": {"steps": 5}, "rollout.group_size": 8, "name": "first"})
    ['training.steps=5', 'rollout.group_size=8', 'name="first"']
    """
    found = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and all(name.isidentifier() for name in value):
            found += to_overrides(value, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}={_json_value(f'{prefix}{key}', value)}")
    return found


def check_keywords(function: Callable[..., object], settings: Mapping[str, object]) -> None:
    """Raise SettingsError for a keyword that is neither an argument of ``function`` nor a setting."""
    arguments = [
        name for name, one in inspect.signature(function).parameters.items() if one.kind is not one.VAR_KEYWORD
    ]
    for name in settings:
        if name.partition(".")[0] not in Settings.model_fields:
            hint = did_you_mean(name, arguments) or f"; the nearest setting is {nearest_key(name, SIMPLETIR)}"
            raise SettingsError(f"agentrl.{function.__name__} has no argument or setting {name!r}{hint}")


@contextmanager
def without_command_line_origin() -> Iterator[None]:
    """Remove "(command line)" from error messages, because the settings were passed in a Python call."""
    try:
        yield
    except SettingsError as error:
        error.args = (str(error).replace(f" ({COMMAND_LINE})", ""),)
        raise


def _json_value(key: str, value: object) -> str:
    try:
        return json.dumps(str(value) if isinstance(value, Path) else value)
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"{key}={value!r:.200} cannot be a setting: {error}; pass functions and classes as env or reward, or by "
            "name as module:attribute"
        ) from None


def _is_importable(module: str, attribute: str, item: object) -> bool:
    found: object = sys.modules.get(module)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return found is item


def _problem_line(number: int, row: object) -> str:
    if not isinstance(row, Mapping | Problem):
        raise SettingsError(f"problems[{number}] is {row!r:.100}, but problems must be {_VALID_PROBLEMS}")
    values = asdict(row) if isinstance(row, Problem) else dict(row)
    for key, value in values.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"problems[{number}][{key!r}] is not a JSON value: {error}") from error
    return json.dumps(values, ensure_ascii=False) + "\n"


def _write(folder: Path, name: str, data: bytes) -> Path:
    path = folder.absolute() / name.format(digest=hashlib.sha256(data).hexdigest()[:16])
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        atomic_write(path, lambda out: out.writelines([data]))
    return path
