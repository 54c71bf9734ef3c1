"""What a user can get wrong: one clear message, exit code 2, no traceback, nothing lost.

Through the real command line. In this process where the mistake is found before a policy is made, in a process of its
own where it is found later.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from models.architectures import write_tiny
from rollout.fakes import byte_tokenizer
from warm import run_warm

from agentrl.cli import main

Refused = Callable[..., str]

SHORT = [
    "coldstart.steps=2",
    "coldstart.count=64",
    "training.steps=1",
    "evaluation.problems=2",
    "evaluation.samples=1",
    "evaluation.falsified=false",
    "rollout.problems_per_step=2",
    "rollout.group_size=2",
    "telemetry.plots=false",
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own; what the command line does to its process is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command line adds the working directory
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs the command line, which must refuse, and returns the message."""

    def run(*arguments: str, started: bool = False) -> str:
        """``started``: there is a run already."""
        monkeypatch.setattr(sys, "argv", ["agentrl", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        shown = capsys.readouterr()
        assert stop.value.code == 2
        assert shown.out == ""
        assert shown.err.startswith("error: ")
        assert shown.err.count("error: ") == 1
        assert "Traceback" not in shown.err
        if arguments[0] == "train" and not started and "--resume" not in arguments:
            assert not Path("runs").exists() or _untouched()
        return shown.err.removeprefix("error: ").rstrip("\n").partition("\nhelp: ")[0]

    return run


def _untouched() -> bool:
    """No run directory but those that a test made itself."""
    return not any((run / "lock").exists() for run in Path("runs").iterdir())


def rows(name: str, *lines: object) -> str:
    Path(name).write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return name


GOOD = {"problem": "What is 1 + 1?", "answer": "2"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rollout.grup_size=8"], "unknown key rollout.grup_size (value 8) (command line); nearest valid key: rollout"),
        (["rollout.group_size=many"], 'rollout.group_size="many" (command line): expected a whole number at least 1'),
        (["training.steps=-1"], "training.steps=-1 (command line): expected a whole number at least 1"),
        (["rollout.max_turn_tokens=999"], "rollout.max_turn_tokens=999 exceeds rollout.max_response_tokens="),
        (["algorithm.estimator=tir_obt"], "algorithm.estimator=tir_obt: unknown estimator 'tir_obt'; did you mean"),
        (["algorithm.loss=pppo"], "algorithm.loss=pppo: unknown loss 'pppo'; did you mean 'ppo'?"),
        (["--config", "nowhere.yaml"], "no config file 'nowhere.yaml'"),
        (["--env", "simpletr"], "env=\"simpletr\": unknown environment 'simpletr'; did you mean 'simpletir'?"),
        (["--env", "nowhere:Nothing"], "environment 'nowhere:Nothing': there is no module 'nowhere'"),
        (["--env", "json:Nothing"], f"module 'json' ({json.__file__}) has no 'Nothing'"),
        (
            ["--env", "json:JSONDecoder"],
            "JSONDecoder is neither a gymnasium.Env, nor a class with a reset method, nor a subclass of agentrl_envs",
        ),
        (["--reward", "nowhere:reward"], "reward 'nowhere:reward': there is no module 'nowhere'"),
        (["--reward", "json:lods"], f"module 'json' ({json.__file__}) has no 'lods'; did you mean 'loads'?"),
        (["--reward", "reward"], "unknown reward 'reward' (valid: module:attribute)"),
        (
            ["environment.protocol=torrl"],
            "environment.protocol (command line): unknown protocol 'torrl'; did you mean 'torl'",
        ),
        (["environment.protocol=hermes"], "environment.protocol=hermes requires a model that supports tool calls"),
        (
            ["environment.chat=always"],
            "environment.chat=always requires a model with a chat template: set model.path to",
        ),
        (["environment.chat=maybe"], "environment.chat"),
        (
            ["environment.history=template"],
            "environment.history='template' applies only to tool calls in the chat template",
        ),
        (
            ["environment.mcp_sessions=shared"],
            "environment.mcp_sessions='shared' applies only to environment.protocol=hermes, not to simpletir",
        ),
        (
            ["environment.template_options.enable_thinking=false"],
            "environment.template_options={'enable_thinking': False} applies only to conversations in the chat temp",
        ),
        (
            ["environment.max_calls=2"],
            "environment.max_calls=2 applies only to environment.protocol=hermes, not to simple",
        ),
        (["--env", "reasoning", "environment.max_turns=2"], "unknown key environment.max_turns"),
        (["data.train.0.path=builtin:arithmetik"], "builtin:arithmetik: no such built-in problems; valid: builtin:ari"),
        (["data.train.0.families=[boxes]"], "builtin:horizon: unknown family 'boxes'; valid: "),
        (["data.train.0.split=test"], "builtin:horizon: unknown split 'test'; valid: train, heldout"),
        (["coldstart.demonstrations=gone.jsonl"], "gone.jsonl: no such file"),
        (["coldstart.demonstrations=null"], "neither model.path nor coldstart.demonstrations is set"),
        (["--resume"], "--resume: no run in runs"),
        (
            ["training.sequence_parallel=3", "training.num_processes=3"],
            "training.sequence_parallel=3 does not divide the model's 4 query heads; valid: 1, 2, 4",
        ),
        (
            ["training.sequence_parallel=2", "--num-processes", "3"],
            "training.sequence_parallel=2 does not divide the 3 training ranks; valid: 1, 3, or training.num_proc",
        ),
        (
            ["model.path=./gone", "data.train=[{path: builtin:arithmetic}]"],
            "model.path='./gone' does not exist",
        ),
    ],
)
def test_settings(refused: Refused, arguments: list[str], expected: str) -> None:
    message = refused("train", *arguments)
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([GOOD, '{"problem": "What'], "p.jsonl:2: not valid JSON"),
        ([GOOD, [1]], "p.jsonl:2: each line must be a JSON object; got list"),
        (
            [GOOD, {"problem": "What is 2 + 2?", "answer": ""}],
            "p.jsonl:2: the problem has no answer; set skip",
        ),
        ([GOOD, {"problem": "What is 2 + 2?"}], "p.jsonl:2: no field for the answer (expected answer, "),
        ([GOOD, {"text": "?", "answer": "4"}], "p.jsonl:2: no field for the problem (expected problem, question"),
        ([], "p.jsonl: the file contains no problems"),
    ],
)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_problem_files(refused: Refused, lines: list[object], expected: str, split: str) -> None:
    rows("p.jsonl", *lines)
    message = refused("train", f"data.{split}=[{{path: p.jsonl}}]")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize("file", ["p.jsonl", "shown.jsonl"])
@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_columns_that_reset_asks_for(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, dry: list[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    Path("boxes.py").write_text("class Keeper:\n    def reset(self, boxes, **columns): ...\n")
    monkeypatch.delitem(sys.modules, "boxes", raising=False)
    shown = {"id": "a", "turns": [{"model": "2"}], **GOOD}
    for name in ("p.jsonl", "shown.jsonl"):
        rows(name, shown | {"boxs" if name == file else "boxes": [1]})
    given = ["data.train=[{path: p.jsonl}]", "coldstart.demonstrations=shown.jsonl"]
    message = refused("train", *dry, "--env", "boxes:Keeper", *given)
    place = "shown.jsonl:1: " if file == "shown.jsonl" else ""
    asked = "reset() of environment 'boxes:Keeper' requires the column 'boxes'; columns of problem a: "
    assert message.startswith(f"{place}{asked}")
    assert "boxs" in message


SHOP = """
class Shop:
    def reset(self, **columns):
        return None

    def query(self, sql{type}):
        {docstring}
        return "x"
"""
DOCSTRING = "'''Runs it.\\n\\n        Args:\\n            sql: a statement\\n        '''"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (SHOP.format(type="", docstring=DOCSTRING), "Shop.query cannot be a tool: its parameter 'sql' has no type."),
        (SHOP.format(type=": str", docstring="pass"), "Shop.query cannot be a tool: it has no docstring."),
        (SHOP.format(type=": 'Gone'", docstring=DOCSTRING), "its annotations cannot be evaluated (name 'Gone' is not"),
        ("import nowhere_to_be_found", "raised ModuleNotFoundError: No module named 'nowhere_to_be_found' ("),
        ("1 / 0", "importing module 'bad_shop' raised ZeroDivisionError: division by zero ("),
    ],
)
def test_an_environment_of_ones_own(
    refused: Refused, program: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("bad_shop.py").write_text(program)
    monkeypatch.delitem(sys.modules, "bad_shop", raising=False)
    rows("d.jsonl", {"problem": "?", "answer": "1", "turns": [{"model": "1"}]})
    message = refused("train", "--env", "bad_shop:Shop", "coldstart.demonstrations=d.jsonl")
    assert message.startswith("environment 'bad_shop:Shop': ")
    assert expected in message
    assert "\n" not in message


def test_a_column_that_is_not_json(refused: Refused) -> None:
    Path("p.jsonl").write_text('{"problem": "?", "answer": "1", "level": NaN}\n')
    message = refused("train", "data.train=[{path: p.jsonl}]")
    assert "p.jsonl:1: column level is nan, which is not JSON" in message
    assert message.endswith("or drop the column with fields.level=null")
    said = refused("eval", "--model", "a/model", "--benchmarks", "p.jsonl")
    assert said.endswith("null: use data.eval.0.path=p.jsonl data.eval.0.fields.level=null instead of --benchmarks")


def test_a_missing_problem_file_is_answered_with_those_in_its_folder(refused: Refused) -> None:
    rows("problems.jsonl", GOOD)
    assert "problem.jsonl: no such file; files in this folder: problems.jsonl" in refused(
        "train", "data.train=[{path: problem.jsonl}]"
    )


def test_a_split_that_leaves_nothing(refused: Refused) -> None:
    rows("p.jsonl", GOOD)
    message = refused("train", "data.train=[{path: p.jsonl, exclude: [p.jsonl]}]")
    assert "no problems remain in p: 0 of 1 problems, 1 excluded by their masked statement" in message


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ('{"problem"', "d.jsonl:1: not valid JSON"),
        (GOOD, "d.jsonl:1: a demonstration needs a non-empty list 'turns'"),
        ({**GOOD, "turns": [{"model": ""}]}, "d.jsonl:1: turn 1 needs a non-empty string 'model'"),
    ],
)
def test_demonstrations(refused: Refused, row: object, expected: str) -> None:
    rows("d.jsonl", row)
    assert expected in refused("coldstart", "--demonstrations", "d.jsonl", "--output", "out")
    assert expected in refused("train", "coldstart.demonstrations=d.jsonl")


def test_a_model_without_a_tokenizer(refused: Refused) -> None:
    Path("model").mkdir()
    assert "model.path='model' has no config.json" in refused("eval", "--model", "model")
    Path("model/config.json").write_text("{}")
    for command in (["eval", "--model", "model"], ["train", "model.path=model", "data.train.0.path=p.jsonl"]):
        assert "model.path='model' has a model but no tokenizer" in refused(*command)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with a tokenizer: an ordinary one, and one for each reason not to train it."""
    folder = tmp_path_factory.mktemp("models")
    length = {"max_position_embeddings": 4096}
    write_tiny(folder / "llama", "llama", **length)
    write_tiny(folder / "six_heads", "llama", **length, num_attention_heads=6, hidden_size=48)
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    write_tiny(folder / "dynamic", "llama", max_position_embeddings=64, rope_parameters=dynamic)
    for name, config in {"linear": {"model_type": "qwen3_next"}, "unknown": {"model_type": "perceptron"}}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    for made in folder.iterdir():
        byte_tokenizer().save_pretrained(made)
    return folder


@pytest.mark.parametrize(
    ("model", "arguments", "expected"),
    [
        (
            "six_heads",
            ["training.sequence_parallel=4", "--num-processes", "4"],
            "training.sequence_parallel=4 does not divide the model's 6 query heads; valid: 1, 2, 3, 6",
        ),
        ("dynamic", [], "beyond 64 tokens, the model's rotary embeddings (dynamic) depend on the longest sequence"),
        (
            "linear",
            [],
            "the model (qwen3_next) has layers of type linear_attention, which would mix the documents",
        ),
        (
            "unknown",
            [],
            "the configuration cannot be read (The checkpoint you are trying to load has model type `perceptron` but",
        ),
        ("llama", ["model.attention=flash"], "model.attention=flash needs a GPU; otherwise set model.attention=auto"),
        ("llama", ["model.attention=flex"], "model.attention=flex needs a GPU; otherwise set model.attention=auto"),
        (
            "llama",
            ["model.lora.rank=8", "model.lora.targets=[qkv_proj]"],
            "no linear layer of LlamaForCausalLM has a name that ends in qkv_proj; valid: q_proj, k_proj, v_proj, o_",
        ),
        (
            "llama",
            ["model.lora.rank=8", "model.lora.targets=[lm_head]"],
            "model.lora.targets: lm_head is the model's head, which cannot have an adapter, because training",
        ),
        (
            "llama",
            ["model.lora.rank=0", "model.lora.targets=[q_proj]"],
            "has no effect with model.lora.rank=0, which trains all weights: set model.lora.rank from 1 to 512",
        ),
        ("llama", ["model.lora.rank=-1"], "model.lora.rank=-1 (command line): expected a whole number at least 0"),
    ],
)
def test_models_and_how_they_are_trained(
    refused: Refused, models: Path, model: str, arguments: list[str], expected: str
) -> None:
    assert not torch.cuda.is_available()
    rows("p.jsonl", GOOD)
    message = refused("train", f"model.path={models / model}", "data.train=[{path: p.jsonl}]", *arguments)
    assert expected in message
    assert "\n" not in message


def test_adapters_of_the_tiny_policy_are_checked_before_it_is_made(refused: Refused) -> None:
    message = refused("train", "--config", "lora", "model.lora.targets=[c_attn]", "optimizer.warmup_steps=0")
    assert "no linear layer of Qwen2ForCausalLM has a name that ends in c_attn; valid: q_proj" in message


def test_adapters_need_their_package(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "peft" else found(name, *more))
    message = refused("train", "--config", "lora")
    assert message == "model.lora.rank needs the package peft: pip install 'agentrl-trainer[lora]'"


def test_unknown_benchmarks(refused: Refused) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("model/tokenizer.json").write_text("{}")
    assert "unknown benchmark 'aime42'; valid: " in refused("eval", "--model", "model", "--benchmarks", "aime42")


def test_a_run_directory_that_is_not_empty(refused: Refused) -> None:
    thesis = Path("runs/mine/thesis.txt")
    thesis.parent.mkdir(parents=True)
    thesis.write_text("precious")
    message = refused("train", "name=mine")
    assert "runs/mine is not empty (it contains thesis.txt): continue that run with --resume" in message
    assert thesis.read_text() == "precious"
    assert [path.name for path in thesis.parent.iterdir()] == ["thesis.txt"]


def test_a_run_directory_that_cannot_be_written(refused: Refused) -> None:
    Path("file").write_text("precious")
    assert "cannot write to the run directory file/mine (Not a directory)" in refused(
        "train", "runs_dir=file", "name=mine"
    )
    assert Path("file").read_text() == "precious"


def test_a_cold_start_onto_something(refused: Refused) -> None:
    Path("out").mkdir()
    Path("out/thesis.txt").write_text("precious")
    command = ["coldstart", "--demonstrations", "builtin:arithmetic", "--output"]
    assert "--output out already exists: choose a new or empty directory" in refused(*command, "out")
    assert "cannot create --output out/thesis.txt/x: Not a directory" in refused(*command, "out/thesis.txt/x")
    assert Path("out/thesis.txt").read_text() == "precious"


def agentrl(*arguments: str, code: int = 2, **environment: str) -> str:
    """What a process of its own says on stderr; no traceback, the exit code as expected."""
    run = subprocess.run if environment else run_warm  # libraries may read changed variables as they load
    done = run(
        [sys.executable, "-m", "agentrl.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error: ") == (code != 0)
    return done.stderr + done.stdout if code == 0 else done.stderr


@pytest.mark.slow
def test_resume_with_other_settings_says_which_and_loses_nothing(refused: Refused) -> None:
    Path("bin").mkdir()  # no compiler on PATH: none is needed, also not for DeepSpeed's operators
    agentrl("train", *SHORT, "name=one", code=0, PATH=str(Path("bin").absolute()), CXX="/nowhere/c++")
    before = {path: path.read_bytes() for path in Path("runs/one").rglob("*") if path.is_file()}
    said = refused("train", "--resume", "name=one", "optimizer.learning_rate=0.5", "training.steps=2")
    assert "runs/one was started with different settings (saved -> requested):" in said
    assert "optimizer.learning_rate: 3e-05" in said
    assert "-> 0.5" in said
    assert "training.steps" not in said.split("omit these")[0]
    assert {path: path.read_bytes() for path in Path("runs/one").rglob("*") if path.is_file()} == before
    smaller = ("training.micro_batch_tokens=700", "rollout.concurrency=8", "training.worker_timeout=600")
    agentrl("train", "--resume", "name=one", "training.steps=2", *smaller, code=0)
    trained = [json.loads(line) for line in Path("runs/one/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in trained if "groups/trained" in row] == [1, 2]
    assert "the run directory runs/one is not empty" in refused(
        "train", *SHORT, "optimizer.warmup_steps=0", "name=one", started=True
    )


@pytest.mark.slow
def test_long_prompts_are_skipped_counted_and_said() -> None:
    long = {"problem": "What is " + " + ".join(["1"] * 400) + "?", "answer": "400"}
    rows("p.jsonl", GOOD, long, {"problem": "What is 2 + 2?", "answer": "4"})
    said = agentrl("train", *SHORT, "data.train=[{path: p.jsonl}]", "rollout.problems_per_step=4", "name=one", code=0)
    assert "is skipped: its prompt has" in said
    metrics = map(json.loads, Path("runs/one/metrics.jsonl").read_text().splitlines())
    (step,) = (row for row in metrics if "groups/trained" in row)
    assert step["groups/skipped_long_prompt"] >= 1
    rows("q.jsonl", long)
    said = agentrl("train", *SHORT, "data.train=[{path: q.jsonl}]", "name=two")
    assert "consecutive problems have prompts longer than rollout.max_prompt_tokens=256: raise the limit" in said


@pytest.mark.slow
def test_a_group_of_one_is_a_warning_that_says_what_happens() -> None:
    said = agentrl("train", *SHORT, "rollout.group_size=1", "algorithm.drop_zero_variance=false", "name=one", code=0)
    assert "warning: rollout.group_size=1 with the group estimator algorithm.estimator=tir_otb: every group is" in said
    assert json.loads(Path("runs/one/summary.json").read_text())["steps"] == 1


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be stripped of its capabilities to see what is refused")
def test_a_sandbox_that_cannot_isolate_is_refused_and_its_name_can_be_used_again() -> None:
    stripped = (
        "import errno, os, sys\nfrom agentrl_sandbox.runner import kernel, seccomp\n"
        "kernel.drop_capabilities()\nkernel.no_new_privileges()\n"
        "machine = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}[os.uname().machine]\n"
        "denied = {444: seccomp.fail_with(errno.ENOSYS)}\n"
        "no_landlock = seccomp.assemble_seccomp_filter(machine, denied, 444, seccomp.allow_call())\n"
        "seccomp.SeccompFilter(no_landlock).install()\n"
        "from agentrl.cli import main\nsys.argv = ['agentrl', *sys.argv[1:]]\nmain()"
    )
    command = [sys.executable, "-c", stripped, "train", *SHORT, "name=one"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "error: the sandbox cannot isolate programs on this machine: missing scratch_only_writes" in done.stderr
    assert "allow_unisolated=true" in done.stderr
    assert "Traceback" not in done.stderr
    done = subprocess.run([*command, "sandbox.allow_unisolated=true"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
