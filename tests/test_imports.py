"""What a command may import: the light ones stay light, whatever they are run next to."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl

HEAVY = ("torch", "transformers", "deepspeed", "numpy", "matplotlib", "pyarrow", "datasets", "gymnasium", "sympy")
PACKAGE = Path(agentrl.__file__).parent


def imported(code: str) -> set[str]:
    """The heavy modules in a fresh interpreter after ``code``."""
    probe = f"import sys\n{code}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def run(*arguments: str) -> str:
    return f"import agentrl.cli\ntry:\n    agentrl.cli.app({list(arguments)!r})\nexcept SystemExit:\n    pass"


@pytest.mark.parametrize("command", [[], ["train"], ["eval"], ["coldstart"], ["variance"], ["serve-policy"]])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    assert imported(run(*command, "--help")) == set()


def test_settings_import_nothing_heavy() -> None:
    assert imported("from agentrl.config import load_settings\nload_settings()") == set()


def test_the_probe_sees_what_is_imported() -> None:
    assert imported("import numpy") == {"numpy"}


@pytest.mark.parametrize("module", ["agentrl_envs.simpletir", "agentrl_envs.gym_env", "agentrl_sandbox.client"])
def test_environments_and_sandbox_work_without_torch(module: str) -> None:
    assert not {"torch", "transformers", "deepspeed"} & imported(f"import {module}")


@pytest.mark.parametrize("package", ["kernels", "algorithms"])
def test_kernels_and_algorithms_are_torch_and_the_standard_library(package: str) -> None:
    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    files = sorted((PACKAGE / package).rglob("*.py"))
    assert files
    for file in files:
        for name in _imports(file):
            assert name.split(".")[0] in allowed or name.startswith(f"agentrl.{package}"), f"{file.name}: {name}"


def _imports(file: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


def test_the_command_line_sets_the_waiting_of_threads_before_torch_is_imported() -> None:
    code = (
        "import os\nfrom agentrl.cli import SHORT_SPINNING, shorten_spinning\n"
        "def chosen(**given):\n"
        "    for name in SHORT_SPINNING:\n        os.environ.pop(name, None)\n"
        "    os.environ.update(given)\n    shorten_spinning()\n"
        "    return {name: os.environ[name] for name in SHORT_SPINNING if name in os.environ}\n"
        "assert chosen() == SHORT_SPINNING\n"
        "assert chosen(GOMP_SPINCOUNT='5') == {**SHORT_SPINNING, 'GOMP_SPINCOUNT': '5'}\n"
        "assert chosen(OMP_WAIT_POLICY='passive') == {'OMP_WAIT_POLICY': 'passive'}"
    )
    assert imported(code) == set()
