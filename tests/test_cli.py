from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli import main
from agentrl.config import Settings
from agentrl.errors import SettingsError, WorldError
from agentrl.problems.rows import ProblemFileError
from agentrl_envs.episode import UnavailableError
from agentrl_sandbox.client import SandboxError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command line adds the working directory


class Recorder:
    """Stands where the packages that do the work stand; keeps what it was called with, answers or raises."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answer: int | BaseException = 0

    def __call__(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for package, name, function in (
        ("agentrl.training.run", "start", "train"),
        ("agentrl.training.run", "preflight", "dry_run"),
        ("agentrl.training.coldstart", "policy", "coldstart_command"),
        ("agentrl.evaluation", "run", "evaluate_command"),
    ):
        full = f"{package}.{name}"
        if not isinstance(sys.modules.get(full), _Scripted):
            scripted = _Scripted(full)
            monkeypatch.setitem(sys.modules, full, scripted)
            monkeypatch.setattr(f"{package}.{name}", scripted, raising=False)
        setattr(sys.modules[full], function, lambda *arguments, _name=function, **_options: recorder(_name, *arguments))
    return recorder


class _Scripted(types.ModuleType):
    pass


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["agentrl", *arguments])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_train_hands_over_settings_and_the_exit_code(monkeypatch: pytest.MonkeyPatch, work: Recorder) -> None:
    work.answer = 7
    arguments = ["train", "rollout.group_size=4", "--env", "simpletir", "seed=3", "--num-processes", "2", "name=x"]
    assert run(monkeypatch, *arguments, "--reward", "mine:reward") == 7
    ((name, settings, resume),) = work.calls
    assert (name, resume) == ("train", False)
    assert isinstance(settings, Settings)
    assert (settings.rollout.group_size, settings.seed, settings.training.num_processes) == (4, 3, 2)
    assert settings.reward.functions == {"mine:reward": 1.0}


def test_dry_run_runs_nothing(monkeypatch: pytest.MonkeyPatch, work: Recorder) -> None:
    assert run(monkeypatch, "train", "--dry-run") == 0
    assert [call[0] for call in work.calls] == ["dry_run"]


def test_coldstart(monkeypatch: pytest.MonkeyPatch, work: Recorder) -> None:
    assert run(monkeypatch, "coldstart", "--demonstrations", "it's: d.jsonl", "--output", "out", "seed=4") == 0
    ((name, settings, output),) = work.calls
    assert (name, output) == ("coldstart_command", Path("out"))
    assert (settings.coldstart.demonstrations, settings.seed, settings.model.path) == ("it's: d.jsonl", 4, None)


def test_coldstart_takes_an_environment(monkeypatch: pytest.MonkeyPatch, work: Recorder) -> None:
    assert run(monkeypatch, "coldstart", "--env", "reasoning", "--demonstrations", "d.jsonl", "--output", "out") == 0
    ((_, settings, _),) = work.calls
    assert settings.env == "reasoning"


def test_eval(monkeypatch: pytest.MonkeyPatch, work: Recorder, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    arguments = [
        "eval",
        "--model",
        str(model),
        "--benchmarks",
        "aime24, amc23",
        "--n",
        "4",
        "--falsified",
        "--k",
        "4,1",
    ]
    assert run(monkeypatch, *arguments, "--data-dir", "d", "--output", "o", "--preset", "simpletir", "seed=3") == 0
    ((name, settings, request),) = work.calls
    assert name == "evaluate_command"
    assert (request.benchmarks, request.data_dir, request.output, request.ks) == (
        ("aime24", "amc23"),
        Path("d"),
        Path("o"),
        (1, 4),
    )
    evaluation = settings.evaluation
    assert (evaluation.samples, evaluation.falsified, evaluation.top_p, settings.seed) == (4, True, 1.0, 3)
    assert (evaluation.max_turns, evaluation.max_response_tokens) == (10, 36000)


def test_eval_of_an_endpoint_needs_no_model(monkeypatch: pytest.MonkeyPatch, work: Recorder) -> None:
    url = "http://localhost:8000/v1"
    assert run(monkeypatch, "eval", "--base-url", url, "--model", "served", "--env", "simpletir") == 0
    ((_, settings, _),) = work.calls
    assert (settings.evaluation.endpoint.url, settings.evaluation.endpoint.model) == (url, "served")
    assert settings.model.path is None
    published = settings.evaluation
    assert (published.samples, published.temperature, published.top_p) == (32, 1.0, 0.95)
    assert settings.environment.max_turns == 10


def test_a_warning_is_said_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, work: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "train", "rollout.group_size=1") == 0
    assert capsys.readouterr().err.startswith("warning: rollout.group_size=1 with the group estimator")
    assert len(work.calls) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("settings are wrong"), 2),
        (ProblemFileError("p.jsonl, line 3: no JSON"), 2),
        (SandboxError("cannot isolate: no_network"), 2),
        (WorldError("disk full"), 1),
        (UnavailableError("the judge is overloaded"), 1),
    ],
)
def test_errors_are_one_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    work: Recorder,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
) -> None:
    work.answer = error
    assert run(monkeypatch, "train") == code
    shown = capsys.readouterr()
    assert shown.err == f"error: {error}\n"
    assert shown.out == ""


def test_a_bug_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch, work: Recorder) -> None:
    work.answer = AssertionError("broken invariant")
    with pytest.raises(AssertionError, match="broken invariant"):
        run(monkeypatch, "train")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "rollout.grup_size=8"], "error: unknown key rollout.grup_size (value 8) (command line); nearest"),
        (["train", "--config", "nowhere.yaml"], "error: no config file 'nowhere.yaml'"),
        (["train", "--num-processes", "0"], "error: training.num_processes=0 (command line): expected a whole number"),
        (
            ["train", "--env", "simpletr"],
            "error: env=\"simpletr\": unknown environment 'simpletr'; did you mean 'simpletir'?",
        ),
        (["train", "--resume"], "error: --resume: no run in runs"),
        (["coldstart", "--model", "/nope", "--output", "o"], "error: coldstart.demonstrations is not set"),
        (["eval", "--model", "/nope"], "error: model.path='/nope' does not exist"),
        (["eval"], "error: no model to evaluate: set --model DIRECTORY or OWNER/NAME, or --base-url URL"),
        (["eval", "--base-url", "localhost:8000"], "error: evaluation.endpoint.url="),
        (["eval", "--model", "a/b", "--preset", "simpletri"], "did you mean 'simpletir'?"),
        (["eval", "--model", "a/b", "--n", "4", "--k", "8"], "error: --k=8 exceeds --n=4"),
        (
            ["eval", "--model", "a/b", "--k", "one"],
            "error: --k must be positive whole numbers separated by commas; got 'one'",
        ),
        (["eval", "--model", "a/b", "--benchmarks", "aime42"], "error: unknown benchmark 'aime42'; valid: aime24"),
        (
            ["eval", "--model", "a/b", "--benchmarks", "aime24", "--data-dir", "gone"],
            "gone/aime24.jsonl: no such file; there is no folder gone",
        ),
        (
            ["eval", "--model", "a/b", "evaluation.top_p=0"],
            "error: evaluation.top_p=0 (command line): expected a number above 0",
        ),
        (["compare", "a", "b"], "error: a is not an evaluation"),
        (["regrade", "a"], "error: a is not an evaluation"),
        (["train", "--stepz", "3"], "No such option: --stepz"),
        (["tarin"], "No such command 'tarin'"),
    ],
)
def test_bad_input_in_a_real_process(arguments: list[str], expected: str) -> None:
    done = subprocess.run([sys.executable, "-m", "agentrl.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "status", "says"), [(["--port", "x"], 2, "port='x'"), (["--help"], 0, "--no-token")]
)
def test_sandbox_serve_hands_its_arguments_over(arguments: list[str], status: int, says: str) -> None:
    command = [sys.executable, "-m", "agentrl.cli", "sandbox", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, says in done.stdout + done.stderr) == (status, True)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, agentrl.cli\n"
        "try:\n    agentrl.cli.app(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'transformers', 'agentrl.config') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(command in done.stdout for command in ("train", "coldstart", "eval", "variance", "doctor"))


@pytest.mark.slow
def test_doctor_says_what_is_here() -> None:
    done = subprocess.run([sys.executable, "-m", "agentrl.cli", "doctor"], capture_output=True, text=True, check=True)
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "machine",
        "system",
        "libraries",
        "compiler",
        "sandbox",
    ]
    assert "torch 2." in done.stdout
    assert "local://" in done.stdout
