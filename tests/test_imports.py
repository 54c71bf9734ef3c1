"""What a command may import: the light ones stay light, whatever they are run next to."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


@pytest.mark.parametrize("module", ["agentrl_envs.simpletir", "agentrl_envs.gym", "agentrl_sandbox.client"])
def test_environments_and_sandbox_work_without_torch(module: str) -> None:
    assert not {"torch", "transformers", "deepspeed"} & imported(f"import {module}")


@pytest.mark.parametrize("package", ["kernels", "algorithms"])
def test_kernels_and_algorithms_are_torch_and_the_standard_library(package: str) -> None:
    allowed = {*sys.stdlib_module_names, "torch", "triton", "flash_attn", "flash_attn_interface"}
    files = sorted((PACKAGE / package).rglob("*.py"))
    assert files
    for file in files:
        for name in _imports(file):
            own = name.startswith((f"agentrl.{package}", "agentrl.kernels"))  # kernels lie below algorithms
            own = own or (package == "algorithms" and name == "agentrl_envs.registry")  # the standard library alone
            assert name.split(".")[0] in allowed or own, f"{file.name}: {name}"


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
        "import os\nfrom agentrl.cli import SHORT_SPIN_VARIABLES, shorten_spinning\n"
        "def chosen(**given):\n"
        "    for name in SHORT_SPIN_VARIABLES:\n        os.environ.pop(name, None)\n"
        "    os.environ.update(given)\n    shorten_spinning()\n"
        "    return {name: os.environ[name] for name in SHORT_SPIN_VARIABLES if name in os.environ}\n"
        "assert chosen() == SHORT_SPIN_VARIABLES\n"
        "assert chosen(GOMP_SPINCOUNT='5') == {**SHORT_SPIN_VARIABLES, 'GOMP_SPINCOUNT': '5'}\n"
        "assert chosen(OMP_WAIT_POLICY='passive') == {'OMP_WAIT_POLICY': 'passive'}"
    )
    assert imported(code) == set()


class _Refuses(BaseHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.send_error(404)


def test_an_endpoint_that_is_wrong_is_said_before_anything_heavy_is_imported() -> None:
    """Importing torch and what follows takes many times as long as asking."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        found = imported(
            "import agentrl.cli, agentrl.errors\n"
            f"arguments = ['eval', '--base-url', {url!r}, '--benchmarks', 'aime24']\n"
            "try:\n    agentrl.cli.app(arguments)\n"
            "except agentrl.errors.SettingsError as error:\n    assert '--model' in str(error), error\n"
            "else:\n    raise AssertionError('it was not refused')"
        )
        server.shutdown()
        thread.join()
    assert found <= {"numpy"}  # of the scores
