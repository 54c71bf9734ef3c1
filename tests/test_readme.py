"""Every command in README.md and docs/start is run, shortened by more settings; the rest is compared."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from shell import Shell

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/start/install.md", "docs/start/first-run.md", "docs/start/what-you-see.md")
}

NEEDS_DATA = ("word_problems", "math_tiny", "simpletir_7b", "AGENTRL_DATA_DIR")
COLD = "coldstart.steps=20 coldstart.count=256 coldstart.variants=1"
SHORT = (
    f"{COLD} training.steps=2 evaluation.problems=4 evaluation.samples=2 rollout.problems_per_step=4 "
    "rollout.group_size=4 algorithm.drop_zero_variance=false telemetry.plots=false"
)
SHORTENED = (  # (what a command looks like, what is added to it); the first that fits counts
    (r"make train", f"--no-print-directory VENV={sys.prefix} -o {sys.prefix}/.installed ARGS='{SHORT}'"),
    (r"make test", f"--no-print-directory VENV={sys.prefix} -o {sys.prefix}/.installed -n"),
    (r"agentrl train .*--dry-run", ""),
    (r"agentrl train --resume", "training.steps=3 telemetry.plots=true"),
    (r"agentrl train", SHORT),
    (r"agentrl eval", "--n 2 evaluation.problems=4"),
    (r"agentrl (compare|regrade|plan)", ""),
    (r"agentrl coldstart", COLD),
    (r"agentrl doctor", ""),
    (r"agentrl view", "--export seen.html"),
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", "".join(PAGES.values()), re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = "".join(blocks("console")).replace("\\\n", " ").splitlines()
    assert all(line.startswith("$ ") for line in lines)
    return [line.removeprefix("$ ") for line in lines]


def shortened(command: str) -> str:
    fitting = [added for pattern, added in SHORTENED if re.match(pattern, command)]
    assert fitting, f"no rule says how to shorten {command!r}"
    return f"{command} {fitting[0]}"


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_the_commands_run(shell: Shell) -> None:
    said = {
        command: shell.run(shortened(command))
        for command in commands()
        if not any(word in command for word in NEEDS_DATA)
    }
    assert all(tool in said["make test"] for tool in ("ruff check", "ruff format --check", "mypy", "lint-imports"))
    assert "pytest" in said["make test"]
    run = shell.folder / "runs" / "first"
    assert json.loads((run / "summary.json").read_text())["steps"] == 3  # two steps, and one after --resume
    (section,) = PAGES["docs/start/what-you-see.md"].split("## The run directory")[1:]
    table = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert {"config.yaml", "metrics.jsonl", "summary.json"} < set(table)
    for name in table:
        found = run / name.replace("00000012", "00000003")
        assert found.exists(), f"{name} is in docs/start/what-you-see.md and not in the run directory"
    assert json.loads((shell.folder / "runs" / "tiny-1" / "summary.json").read_text())["steps"] == 2
    assert (shell.folder / "policies" / "start" / "tokenizer.json").is_file()
    assert not any("Traceback" in text for text in said.values())


def test_the_commands_on_real_problems_run(shell: Shell, data_dir: Path) -> None:
    shell.environment["AGENTRL_DATA_DIR"] = str(data_dir)
    said = {
        command: shell.run(shortened(command)) for command in commands() if any(word in command for word in NEEDS_DATA)
    }
    evaluations = [text for command, text in said.items() if command.startswith("agentrl eval")]
    (compared,) = (text for command, text in said.items() if command.startswith("agentrl compare"))
    assert len(evaluations) == 2
    assert all(name in text for text in (*evaluations, compared) for name in ("aime24", "amc23"))
    assert (shell.folder / "scores" / "math_tiny" / "report.html").is_file()
    (published,) = (text for command, text in said.items() if "simpletir_7b" in command)
    assert "learning_rate: 1.0e-06" in published
    for name in ("word_problems-1", "math_tiny-1"):
        assert json.loads((shell.folder / "runs" / name / "summary.json").read_text())["steps"] == 2


def test_pip_and_uv_install_what_make_installs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (installed,) = re.findall(r"pip install (.*)", makefile)
    (extras,) = re.findall(r"^EXTRAS \?= (.*)$", makefile, re.MULTILINE)
    packages = shlex.split(installed.replace("$(EXTRAS)", extras))[-4:]
    assert packages == ["-e", "sandbox", "-e", ".[dev]"]
    pip, uv = blocks("bash")
    for block in (pip, uv):
        (line,) = (line for line in block.splitlines() if " install " in line)
        assert shlex.split(line)[-4:] == packages
        assert ".venv/bin/agentrl train --env simpletir" in block
    (train,) = re.findall(r"^train:.*\n\t@(.*)$", makefile, re.MULTILINE)
    assert train == "$(BIN)/agentrl train --env simpletir $(ARGS)"


def test_the_torch_index_is_the_same_everywhere() -> None:
    index = "https://download.pytorch.org/whl/cpu"
    assert PAGES["docs/start/install.md"].count(index) == 2
    assert f"TORCH_INDEX={index}" in (ROOT / "Makefile").read_text()
