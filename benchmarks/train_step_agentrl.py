"""agentrl's side of ``train_step.py``: a run of ``agentrl train`` that waits for the parent between steps."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import transformers
from train_step_task import BETAS, CLIP, GRADIENT_CLIP, LEARNING_RATE, ParentLine, Task, cpu_seconds, reward

from agentrl.config import Settings, dump_yaml, load_settings
from agentrl.rollout.engines.batcher import Batcher
from agentrl.telemetry.console import Console
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.training.engine.deepspeed_engine import TrainingEngine, start_distributed
from agentrl.training.engine.determinism import set_threads
from agentrl.training.run.session import TrainingSession
from agentrl.training.step.trainer import Trainer
from agentrl.training.worker.local import LocalRolloutService
from agentrl_envs.episode import Environment
from agentrl_envs.types import Ended, Problem, Step

LONGEST_PROMPT = 40  # tokens


class OneTurnEpisode:
    """An episode with the problem's statement as the prompt, one model turn, and the shared reward."""

    stop_strings: tuple[str, ...] = ()

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def turn_complete(self, text: str) -> bool:
        return True

    async def start(self) -> str:
        return self._problem.statement

    async def step(self, action: str) -> Step:
        return Step(observation="", reward=reward(action), ended=Ended.STOPPED)

    async def fork(self) -> OneTurnEpisode:
        return OneTurnEpisode(self._problem)

    async def close(self) -> None:
        """Do nothing, because no resource is held."""


class OneTurnEnvironment(Environment):
    """An environment without sandbox and grader."""

    def __init__(self, settings: object) -> None:
        """Ignore ``settings``, which configure gymnasium environments."""

    async def open(self) -> None:
        """Do nothing."""

    def episode(self, problem: Problem) -> OneTurnEpisode:
        return OneTurnEpisode(problem)

    async def close(self) -> None:
        """Do nothing."""

    def describe(self) -> list[str]:
        return ["environment: one turn, rewarded for distinct characters"]


class WaitingConsole(Console):
    """Console that reports progress to the parent."""

    def __init__(self, settings: Settings, line: ParentLine, task: Task, clocks: Clocks) -> None:
        super().__init__(settings.telemetry, file=sys.stderr)
        self._line = line
        self._task = task
        self._clocks = clocks

    @contextmanager
    def progress(self, total: int, done: int = 0, unit: str = "step") -> Iterator[Any]:  # type: ignore[override]
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self._line.ready(versions=versions, threads=torch.get_num_threads())
        yield self

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Report a complete step, whose files are written, and wait."""
        if metrics["rollout/model_tokens"] != self._task.tokens or metrics["policy/tokens"] != self._task.tokens:
            raise SystemExit(f"agentrl sampled {metrics['rollout/model_tokens']:.0f} tokens, not {self._task.tokens}")
        self._line.step_done(self._clocks.take(), last=step >= self._task.steps)


class Clocks:
    """Wall and CPU seconds (of all threads) spent in methods, by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def watch(self, owner: type, method: str, name: str) -> None:
        """Measure ``owner.method`` from now on."""
        original: Callable[..., Any] = getattr(owner, method)

        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began, cpu = time.perf_counter(), cpu_seconds()
            try:
                return original(*args, **kwargs)
            finally:
                self._seconds[name] += time.perf_counter() - began
                self._seconds[f"{name}, CPU"] += cpu_seconds() - cpu

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """Return the times measured since the last call."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken


def settings_of(task: Task, runs: str) -> Settings:
    """Return the settings: GRPO with one update per step on the task's model and problems, otherwise the defaults."""
    return load_settings(
        "train_step_agentrl:OneTurnEnvironment",
        None,
        [
            "name=step",
            f"runs_dir={runs}",
            f"model.path={task.model}",
            "model.dtype=float32",
            f"data.train.0.path={task.problems}",
            f"data.eval.0.path={task.problems}",
            "evaluation.problems=1",
            "evaluation.samples=1",
            f"rollout.problems_per_step={task.prompts}",
            f"rollout.group_size={task.samples}",
            f"rollout.max_turn_tokens={task.new_tokens}",
            f"rollout.max_response_tokens={task.new_tokens}",
            f"rollout.max_prompt_tokens={LONGEST_PROMPT}",
            "algorithm.estimator=grpo",
            "algorithm.loss=ppo",
            f"algorithm.clip_low={CLIP}",
            f"algorithm.clip_high={CLIP}",
            "algorithm.aggregation=token_mean",
            "algorithm.drop_zero_variance=false",
            f"optimizer.learning_rate={LEARNING_RATE}",
            f"optimizer.betas={list(BETAS)}",
            "optimizer.weight_decay=0",
            f"optimizer.gradient_clip={GRADIENT_CLIP}",
            f"training.steps={task.steps}",
            f"training.threads={task.threads}",
            f"checkpoint.every={task.steps + 1}",
            f"training.micro_batch_tokens={_micro_batch_tokens(task)}",
            "telemetry.plots=false",
            *task.overrides,
        ],
    )


def _micro_batch_tokens(task: Task) -> int:
    """Return the tokens of a micro-batch whose prompts all have the maximum length."""
    return task.prompts * task.samples // task.micro_batches * (LONGEST_PROMPT + task.new_tokens)


def main() -> None:
    """Run ``train_step_agentrl.py TASK_JSON``. Communicates with the parent over standard input and output."""
    task = Task.from_json(sys.argv[1])
    line = ParentLine()
    clocks = Clocks()
    clocks.watch(LocalRolloutService, "roll_out_and_plan_rank", "rollout")
    clocks.watch(Batcher, "run_forward_pass", "generation")
    clocks.watch(Trainer, "train", "training")
    clocks.watch(TrainingEngine, "__call__", "forward")
    clocks.watch(TrainingEngine, "backward", "backward")
    clocks.watch(TrainingEngine, "step", "optimizer")
    with tempfile.TemporaryDirectory(dir=task.folder) as runs:
        settings = settings_of(task, runs)
        run = RunDirectory.create(Path(runs) / "step", dump_yaml(settings))
        rank, world = start_distributed(deadline=settings.training.collective_deadline)
        set_threads(settings, processes=world)
        session = TrainingSession(settings, run, WaitingConsole(settings, line, task, clocks), rank=rank, world=world)
        try:
            session.print_setup_and_restore(resume=False)
            session.run_all_steps()
        finally:
            session.close()


if __name__ == "__main__":
    main()
