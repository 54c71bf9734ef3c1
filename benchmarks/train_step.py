"""Compare a training step of agentrl with TRL's GRPOTrainer on the CPU, in alternating steps.

Both sides have the same random Qwen2 of 0.8M parameters, tokenizer, problems, reward and loss: 16 prompts x 8 samples x
64 new tokens. EOS is outside the model's vocabulary, so that every completion has its full length.

    python benchmarks/train_step.py [--repeats 25] [--micro-batches 1] [--set KEY=VALUE ...]

agentrl's side is a complete run of ``agentrl train`` (driver, engine, filters, plan, trainer, DeepSpeed, files). TRL's
side is a GRPOTrainer without gradient checkpointing and reference model, in a virtual environment that is created on
first use. Both wait for this program between steps, so that other programs affect both equally. CPU time is the time of
all threads of a side, and depends less on other programs than wall-clock time. ``--micro-batches`` applies to both
sides. The target: at least 1.5 times TRL's tokens per second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from train_step_task import Task

from agentrl.cli import SHORT_SPIN_VARIABLES
from agentrl.models.loading import EOS, tiny_config, train_tokenizer
from agentrl.models.settings import TinyModelSettings
from agentrl.problems.arithmetic import ArithmeticSource

HERE = Path(__file__).resolve().parent
TRL_HOME = Path("~/.cache/agentrl/bench-trl").expanduser()
TRL_PACKAGES = ("trl", f"torch=={torch.__version__.partition('+')[0]}")
SHAPE = TinyModelSettings(vocabulary_size=512, hidden_size=128, layers=4, heads=4, intermediate_size=320)
WARM_UP = 3


class Side:
    """One of the two programs, run step by step."""

    def __init__(self, name: str, python: Path, task: Task, log: Path, environment: dict[str, str]) -> None:
        self.name = name
        self._log = log
        self._process = subprocess.Popen(
            [str(python), str(HERE / f"train_step_{name}.py"), task.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            env=environment,
            text=True,
        )
        self.steps: list[dict[str, Any]] = []

    def receive(self) -> dict[str, Any]:
        """Return the next message. Raises SystemExit with the end of the log if the program ended."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            tail = "\n".join(self._log.read_text().splitlines()[-20:])
            raise SystemExit(f"{self.name} exited with code {self._process.wait()}:\n{tail}")
        message: dict[str, Any] = json.loads(text)
        return message

    def step(self) -> None:
        """Run one step."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.steps.append(self.receive())

    def close(self) -> None:
        """Close the program's input, and wait until the program exits. It is killed after 60 seconds."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def median(self, key: str) -> float:
        """Return the median over the steps after the warm-up."""
        return statistics.median(step[key] for step in self.steps[WARM_UP:])

    def part(self, name: str) -> float:
        return statistics.median(step["parts"].get(name, 0.0) for step in self.steps[WARM_UP:])


def prepare(folder: Path) -> int:
    """Write model, tokenizer and problems to ``folder``, and return the number of parameters."""
    from transformers import Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = ArithmeticSource(split="train", seed=0)
    problems = [source.problem(index) for index in range(2048)]
    corpus = (shown.text for shown in source.demonstrations(2048))
    tokenizer = train_tokenizer(corpus, vocabulary_size=SHAPE.vocabulary_size)
    # EOS is a token past the model's last row, so it is never sampled.
    tokenizer.add_special_tokens({"eos_token": "<|end|>", "pad_token": EOS})
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(tiny_config(SHAPE, vocabulary_size=tokenizer.eos_token_id, eos_id=tokenizer.pad_token_id))
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = ({"id": item.id, "problem": item.statement, "answer": item.answer} for item in problems)
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sum(parameter.numel() for parameter in model.parameters())


def trl_python(home: Path) -> Path:
    """Return TRL's interpreter. Creates its environment if it does not exist."""
    python = home / "bin" / "python"
    probe = [str(python), "-c", "import trl"]
    if not python.exists() or subprocess.run(probe, capture_output=True, check=False).returncode:
        print(f"creating TRL's environment in {home}", file=sys.stderr)
        venv.create(home, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *TRL_PACKAGES], check=True)
    return python


def environment(threads: int) -> dict[str, str]:
    """Return the environment of both sides: threads wait as in `agentrl train`, and the network is not used."""
    own = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **SHORT_SPIN_VARIABLES}
    return {**os.environ, **own, "PYTHONPATH": str(HERE)}


def measure(task: Task, home: Path, only: str | None) -> list[Side]:
    """Run both sides in alternating steps. The side that goes first alternates, too."""
    pythons = {"agentrl": Path(sys.executable)}
    if only != "agentrl":
        pythons["trl"] = trl_python(home)
    sides = [
        Side(name, python, task, Path(task.folder) / f"{name}.log", environment(task.threads))
        for name, python in pythons.items()
        if only in (None, name)
    ]
    try:
        for side in sides:
            facts = side.receive()
            versions = " ".join(f"{name} {version}" for name, version in facts["versions"].items())
            print(f"{side.name}: {versions}, {facts['threads']} threads")
        for index in range(task.steps):
            for side in sides if index % 2 == 0 else sides[::-1]:
                side.step()
    finally:
        for side in sides:
            side.close()
    return sides


def report(task: Task, sides: Sequence[Side]) -> None:
    """Print the table and the ratio."""
    print(f"\n{'':12}{'s/step':>9}{'min':>8}{'max':>8}{'CPU s/step':>12}{'tokens/s':>10}{'tokens/CPU s':>14}")
    for side in sides:
        taken = [step["seconds"] for step in side.steps[WARM_UP:]]
        seconds, cpu = side.median("seconds"), side.median("cpu_seconds")
        print(
            f"{side.name:12}{seconds:9.3f}{min(taken):8.3f}{max(taken):8.3f}{cpu:12.3f}"
            f"{task.tokens / seconds:10.0f}{task.tokens / cpu:14.0f}"
        )
    named = {side.name: side for side in sides}
    if len(named) == 2:
        ours, theirs = named["agentrl"], named["trl"]
        for label, key in (("wall", "seconds"), ("CPU", "cpu_seconds")):
            pairs = [b[key] / a[key] for a, b in zip(ours.steps[WARM_UP:], theirs.steps[WARM_UP:], strict=True)]
            quartiles = statistics.quantiles(pairs, n=4)
            print(
                f"tokens per {label} second, agentrl relative to TRL: ratio of medians "
                f"{theirs.median(key) / ours.median(key):.2f}; median ratio of pairs {quartiles[1]:.2f} "
                f"(quartiles {quartiles[0]:.2f}, {quartiles[2]:.2f})"
            )
    if "agentrl" in named:
        _breakdown(named["agentrl"])


def _breakdown(side: Side) -> None:
    """Print each part's median time over the steps. The sum of the medians may differ slightly from the step's time."""
    wall = _parts(side, "seconds", "")
    cpu = _parts(side, "cpu_seconds", ", CPU")
    print(f"\n{'agentrl, part of a step':36}{'ms':>8}{'CPU ms':>8}")
    for name, seconds in wall.items():
        print(f"{name:36}{seconds * 1e3:8.0f}{cpu[name] * 1e3:8.0f}")


def _parts(side: Side, total: str, suffix: str) -> dict[str, float]:
    names = ("rollout", "generation", "training", "forward", "backward", "optimizer")
    rollout, generation, training, forward, backward, optimizer = (side.part(name + suffix) for name in names)
    return {
        "generation: forwards and sampling": generation,
        "rollout, rest: driver, text, plan": rollout - generation,
        "forward and token statistics": forward,
        "backward": backward,
        "optimizer": optimizer,
        "training, rest: advantages, loss": training - forward - backward - optimizer,
        "files and the rest": side.median(total) - rollout - training,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25, help="number of measured steps per side")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=1, help="number of micro-batches per step, for both sides")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of agentrl")
    parser.add_argument("--only", choices=("agentrl", "trl"))
    parser.add_argument("--trl-home", type=Path, default=TRL_HOME, help="TRL's virtual environment; created if missing")
    parser.add_argument("--json", type=Path, help="file for the figures of every step")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark, and print the results."""
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="train-step-") as folder:
        parameters = prepare(Path(folder))
        task = Task(
            folder=folder,
            prompts=options.prompts,
            samples=options.samples,
            new_tokens=options.new_tokens,
            threads=options.threads,
            steps=WARM_UP + options.repeats,
            micro_batches=options.micro_batches,
            overrides=tuple(options.set),
        )
        print(
            f"{parameters / 1e6:.2f}M parameters, float32, {task.prompts} prompts x {task.samples} samples x "
            f"{task.new_tokens} tokens, load {os.getloadavg()[0]:.1f} at the start"
        )
        sides = measure(task, options.trl_home, options.only)
        print(f"load {os.getloadavg()[0]:.1f} at the end; ", end="")
        print(f"{options.repeats} steps per side after {WARM_UP} warm-up steps")
        report(task, sides)
        if options.json:
            options.json.write_text(json.dumps({side.name: side.steps for side in sides}, indent=1))


if __name__ == "__main__":
    main()
