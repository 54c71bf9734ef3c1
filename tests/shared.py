"""What tests share: folders of the workers of pytest-xdist, and Pythons of other libraries."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from agentrl_envs.registry import install_command


def command_of(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder ``name`` as ``make`` left it: the first worker that asks makes it, the others wait for it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # each worker has a folder of its own below
    folder, done = root / name, root / f"{name}.made"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def python_with(package: str) -> str:
    """The Python that has ``package``, whose dependencies differ from ours; in CI there must be one."""
    variable = f"AGENTRL_{package.upper()}_PYTHON"
    python = os.environ.get(variable)
    if python:
        return python
    reason = f"{variable} names no Python with {package}"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def needed(package: str, extra: str) -> None:
    """Skip the test or the module where ``package`` is not installed; in CI it must be."""
    if os.environ.get("CI") == "true":
        importlib.import_module(package)
    else:
        pytest.importorskip(package, reason=f"{package} is not installed: {install_command(extra)}")
