"""Tasks in Harbor's format.

A task is a directory with ``task.toml``, ``instruction.md``, ``environment/`` (a Dockerfile, or an image named in
``task.toml``) and ``tests/test.sh``, which writes the reward to ``/logs/verifier/reward.txt`` or ``reward.json``.
Harbor's package needs Python 3.12, so this module reads the parts of the format that are used here.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, AliasChoices, BaseModel, Field, ValidationError, field_validator

from agentrl_envs.registry import PluginError
from agentrl_envs.types import Problem

_UNSUPPORTED = (
    ("steps",),
    ("verifier", "environment"),
    ("verifier", "collect"),
    *(("environment", name) for name in ("allowed_hosts", "mcp_servers", "gpus", "tpu", "skills_dir")),
    ("agent", "allowed_hosts"),
)
_SIZE = re.compile(r"\s*([\d.]+)\s*([KMG])(?:i?B)?\s*", re.IGNORECASE)
_MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1024}
_REFERENCE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
# Leading lines of an instruction that mark benchmark data. As in Harbor, agents do not see them.
_CANARY = re.compile(r"\A(?:[ \t]*(?:<!--.*canary.*-->|#.*canary.*)\s*(?:\n|\Z))+", re.IGNORECASE)


def _resolve_variable(value: str) -> str:
    """Replace ``${NAME}`` or ``${NAME:-DEFAULT}`` with the value of the environment variable, as Harbor does."""
    reference = _REFERENCE.fullmatch(value)
    found = value if reference is None else os.environ.get(reference[1], reference[2])
    if found is None:
        raise ValueError(f"this environment variable is not set: {reference[1]}")
    return found


class _Verifier(BaseModel):
    timeout_sec: float = Field(600.0, gt=0)
    env: dict[str, Annotated[str, AfterValidator(_resolve_variable)]] = {}
    user: str | int | None = None


class _Agent(BaseModel):
    timeout_sec: float | None = Field(None, gt=0)
    user: str | int | None = None


class Healthcheck(BaseModel):
    """A command that must succeed before the agent starts."""

    command: str
    interval_sec: float = Field(5.0, ge=0)
    timeout_sec: float = Field(30.0, gt=0)
    start_period_sec: float = Field(0.0, ge=0)
    start_interval_sec: float = Field(5.0, ge=0)
    retries: int = Field(3, ge=1)


class _Environment(BaseModel):
    build_timeout_sec: float = Field(600.0, gt=0)
    docker_image: str | None = None
    cpus: float | None = Field(None, gt=0)
    memory_mb: int | None = Field(None, gt=0, validation_alias=AliasChoices("memory", "memory_mb"))
    workdir: str | None = None
    env: dict[str, Annotated[str, AfterValidator(_resolve_variable)]] = {}
    healthcheck: Healthcheck | None = None

    @field_validator("memory_mb", mode="before")
    @classmethod
    def _parse_megabytes(cls, size: object) -> object:
        """Convert ``memory = "2G"`` of schema version 1.0 to megabytes. A number, even as a string, is in megabytes."""
        if not isinstance(size, str) or size.strip().isdecimal():
            return size
        match = _SIZE.fullmatch(size)
        if match is None:
            raise ValueError("write a size such as '2G' or '512M'")
        return int(float(match[1]) * _MEGABYTES[match[2].upper()])


class _TaskConfig(BaseModel):
    """The parts of ``task.toml`` that are used."""

    verifier: _Verifier = _Verifier()
    agent: _Agent = _Agent()
    environment: _Environment = _Environment()


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """One task: its directory, the text of ``instruction.md`` and its settings."""

    directory: Path
    instruction: str
    config: _TaskConfig

    @property
    def name(self) -> str:
        """Name of the directory."""
        return self.directory.name


def read_task(directory: Path) -> HarborTask:
    """Read a task. Raises PluginError if a file is missing or invalid, or if the task needs an unsupported feature."""
    file = directory / "task.toml"
    try:
        values: dict[str, Any] = tomllib.loads(_read(file))
        config = _TaskConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise PluginError(f"{file}: {'.'.join(map(str, first['loc']))}={first['input']!r}: {first['msg']}") from error
    except ValueError as error:
        raise PluginError(f"{file} is not valid TOML: {error}") from error
    tables = {"": values, **{name: values.get(name) or {} for name in ("agent", "verifier", "environment")}}
    used = [".".join(path) for path in _UNSUPPORTED if tables["".join(path[:-1])].get(path[-1])]
    used += ["environment.os"] if str(values.get("environment", {}).get("os", "linux")).lower() != "linux" else []
    used += ["verifier.environment_mode"] if tables["verifier"].get("environment_mode") == "separate" else []
    used += ["trajectory.json"] if (directory / "trajectory.json").exists() else []
    used += ["docker-compose.yaml"] if (directory / "environment" / "docker-compose.yaml").exists() else []
    if used:
        raise PluginError(
            f"{file} uses features that are not supported: {', '.join(used)}; remove this task from the directory"
        )
    if not (directory / "tests" / "test.sh").is_file():
        raise PluginError(f"{directory / 'tests' / 'test.sh'} does not exist, so the task has no verifier")
    if config.environment.docker_image is None and not (directory / "environment" / "Dockerfile").is_file():
        raise PluginError(f"{directory} has neither environment/Dockerfile nor environment.docker_image in task.toml")
    instruction = _CANARY.sub("", _read(directory / "instruction.md")).strip()
    return HarborTask(directory=directory, instruction=instruction, config=config)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise PluginError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PluginError(f"{file} is not encoded in UTF-8: {error}") from error


def read_task_rows(directory: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the file and the data row of each task in a directory. Raises PluginError if there are no tasks."""
    root = Path(directory).expanduser().absolute()
    files = [root / "task.toml"] if (root / "task.toml").is_file() else sorted(root.glob("*/task.toml"))
    if not files:
        raise PluginError(f"{root} contains no tasks: neither task.toml nor */task.toml exists")
    for file in files:
        task = read_task(file.parent)
        yield str(file), {"id": task.name, "problem": task.instruction, "task": str(task.directory)}


def check_agent_files(files: str | None, directory: str) -> None:
    """Raise PluginError if ``environment.agent_files`` is not a directory, or if it exposes tasks of ``directory``.

    The directory must not contain a task, and must not be part of the tests or the solution of a task.
    """
    if files is None:
        return
    mounted = Path(files).absolute().resolve()
    if not mounted.is_dir():  # Docker would create it
        raise PluginError(f"environment.agent_files={files} is not a directory")
    tasks = Path(directory).expanduser().absolute().resolve()
    contains_task = mounted.is_relative_to(tasks) and next(mounted.rglob("task.toml"), None) is not None
    is_part_of_task = any(
        path.name in ("tests", "solution") and (path.parent / "task.toml").is_file()
        for path in (mounted, *mounted.parents)
    )
    if tasks.is_relative_to(mounted) or contains_task or is_part_of_task:
        raise PluginError(
            f"environment.agent_files={files} contains tasks of {directory} or parts of them, so agents could read "
            "their tests and solutions: name a directory with only the agent's files"
        )


def task_of_problem(problem: Problem) -> HarborTask:
    """Return the task of a problem. Raises PluginError if the problem does not refer to a task."""
    directory = problem.info.get("task")
    if not isinstance(directory, str):
        raise PluginError(f"problem {problem.id} has no column task: use data.train.0.path=harbor:DIRECTORY")
    return read_task(Path(directory))
