"""`agentrl.train`, `agentrl.evaluate` and `agentrl.load_run`, called as a program or a notebook calls them."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import DeepSpeedEngine
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentrl
from agentrl.api.run import Run
from agentrl.errors import SettingsError, WorldError
from agentrl.training.run.callbacks import TrainedStep

pytestmark = [
    pytest.mark.slow,
    # Of torch and DeepSpeed, which are imported in this process.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

ROWS = [{"problem": f"What is {a} + {a + 3}?", "answer": str(2 * a + 3)} for a in range(2, 10)]
SMALL: dict[str, Any] = {
    "model": {"tiny": {"hidden_size": 32, "layers": 2}},
    "coldstart": {"count": 256, "steps": 40},
    "rollout": {"problems_per_step": 2, "group_size": 2, "max_response_tokens": 48, "max_turn_tokens": 24},
    "algorithm": {"drop_zero_variance": False},
    "training": {"steps": 2, "threads": 1},
    "checkpoint": {"every": 1},
    "evaluation": {"every": 1, "samples": 1, "falsified": False},
    "telemetry": {"plots": False},
}
RECORDS: list[Any] = []


def count_engines() -> int:
    gc.collect()
    return sum(type(one) is DeepSpeedEngine for one in gc.get_objects())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trained inside an event loop, as in a notebook, with a reward that no other process could have."""
    lock = threading.Lock()

    def locked_reward(problem: object, conversation: object, verdict: object) -> float:
        with lock:
            return 0.75

    async def in_an_event_loop() -> Run:
        trained = agentrl.train(
            problems=ROWS,
            eval_problems=ROWS[:2],
            reward=locked_reward,
            name="first",
            runs_dir=tmp_path_factory.mktemp("runs"),
            on_step=RECORDS.append,
            on_evaluation=RECORDS.append,
            on_checkpoint=RECORDS.append,
            **SMALL,
        )
        await asyncio.sleep(0)  # the loop goes on
        return trained

    variables, seed, threads = dict(os.environ), torch.initial_seed(), torch.get_num_threads()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    engines = count_engines()
    trained = asyncio.run(in_an_event_loop())
    changed = {name for name in os.environ if os.environ[name] != variables.get(name)}
    assert not changed & {"RANK", "WORLD_SIZE", "MASTER_PORT", "PYTHONPATH", "DS_ACCELERATOR"}
    assert (torch.initial_seed(), torch.get_num_threads()) == (seed, threads)
    assert not torch.distributed.is_initialized()
    assert count_engines() == engines  # the model and the optimizer's state are freed
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    return trained


def test_metrics_are_a_frame_of_steps(run: Run) -> None:
    assert list(run.metrics.index) == [1, 2]
    assert run.metrics["reward/mean"].tolist() == [0.75, 0.75]
    assert list(run.evaluations.index) == [0, 1, 2]
    assert run.summary["steps"] == 2
    assert run.settings["training"]["steps"] == 2  # type: ignore[index]
    assert repr(run) == f"<Run {run.path}: finished, reward/mean 0.75 at step 2>"
    assert repr(Run(run.path / "none")) == f"<Run {run.path / 'none'}: no run directory>"


def test_callbacks_are_called_in_order_with_typed_records(run: Run) -> None:
    assert [(type(one), one.step) for one in RECORDS] == [
        (agentrl.EvaluatedStep, 0),
        (TrainedStep, 1),
        (agentrl.EvaluatedStep, 1),
        (agentrl.SavedCheckpoint, 1),
        (TrainedStep, 2),
        (agentrl.EvaluatedStep, 2),
        (agentrl.SavedCheckpoint, 2),
    ]
    assert {one.run for one in RECORDS} == {run.path}
    steps = [one for one in RECORDS if isinstance(one, TrainedStep)]
    assert [one.metrics["reward/mean"] for one in steps] == [0.75, 0.75]
    evaluations = [one for one in RECORDS if isinstance(one, agentrl.EvaluatedStep)]
    assert [one.score for one in evaluations] == run.evaluations["eval/avg_at_k"].tolist()
    assert RECORDS[-1].path == run.path / "checkpoints" / "step-000002"
    assert RECORDS[-1].path.is_dir()


def test_trajectories_come_one_by_one(run: Run) -> None:
    found = list(run.trajectories())
    assert {one.step for one in found} == {1, 2}
    assert len(list(run.trajectories(2))) == 4
    assert {one.problem.statement for one in found} <= {row["problem"] for row in ROWS}
    assert {one.reward for one in found} == {0.75}
    with pytest.raises(SettingsError, match="no trajectories of step 9; stored steps: 1 to 2"):
        next(run.trajectories(9))


def test_a_run_is_evaluated(run: Run, tmp_path: Path) -> None:
    evaluation = agentrl.evaluate(run, problems=ROWS[:3], n=2, output=tmp_path / "scores")
    assert evaluation.scores.loc["problems", "rollouts"] == 6
    assert len(list(evaluation.transcripts())) == 6
    assert evaluation.results["benchmarks"]["problems"]["avg"]["problems"] == 3


def test_settings_are_checked_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"unknown key training\.stepz \(value 1\); nearest"):
        agentrl.train(problems=ROWS, runs_dir=tmp_path, training={"stepz": 1})
    assert not list(tmp_path.glob("*/config.yaml"))


def test_a_failed_call_raises_with_its_message(run: Run) -> None:
    with pytest.raises(SettingsError, match=r"the run directory .*first is not empty"):
        agentrl.train(problems=ROWS, name="first", runs_dir=run.path.parent, **SMALL)


def test_an_interrupt_saves_and_resume_continues_with_a_loaded_model(run: Run, tmp_path: Path) -> None:
    many = {name: section for name, section in SMALL.items() if name not in ("model", "coldstart")}
    many["training"] = {"steps": 500, "threads": 1, "zero_stage": 3}
    many["kl"] = {"coefficient": 0.001}  # a second model
    engines = count_engines()
    agent = AutoModelForCausalLM.from_pretrained(run.policy)
    tokenizer = AutoTokenizer.from_pretrained(run.policy)

    def interrupt(step: TrainedStep) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        agentrl.train(
            model=agent,
            tokenizer=tokenizer,
            coldstart={"demonstrations": None},
            problems=ROWS,
            name="long",
            runs_dir=tmp_path,
            on_step=interrupt,
            **many,
        )
    done = int(agentrl.load_run(tmp_path / "long").metrics.index[-1])
    assert 1 <= done < 500

    def fail(step: TrainedStep) -> None:
        raise ZeroDivisionError(step.step)

    with pytest.raises(ZeroDivisionError) as caught:
        agentrl.train(name="long", runs_dir=tmp_path, resume=True, on_step=fail)
    assert caught.value.args == (done + 1,)
    resumed = agentrl.train(name="long", runs_dir=tmp_path, resume=True, training={"steps": done + 1})
    assert resumed.metrics.index[-1] == done + 1
    del caught  # its traceback refers to the engine
    assert count_engines() == engines


def test_a_missing_model_is_an_error_of_the_call(tmp_path: Path) -> None:
    with pytest.raises((SettingsError, WorldError), match="no-such-model"):
        agentrl.evaluate(tmp_path / "no-such-model", problems=ROWS[:1], n=1, output=tmp_path / "scores")


def test_two_ranks_get_a_local_reward_and_call_back_here(tmp_path: Path) -> None:
    value = 0.5
    steps: list[int] = []

    def local_reward(problem: object, conversation: object, verdict: object) -> float:
        return value

    small = SMALL | {"training": {"steps": 2, "threads": 1, "num_processes": 2}}
    run = agentrl.train(
        problems=ROWS,
        reward=local_reward,
        runs_dir=tmp_path,
        on_step=lambda record: steps.append(record.step),
        **small,
    )
    assert run.metrics["reward/mean"].tolist() == [0.5, 0.5]
    assert steps == [1, 2]


def test_an_object_of_this_process_needs_a_run_of_one_process(tmp_path: Path) -> None:
    def locked_reward(problem: object, conversation: object, verdict: object) -> float:
        with lock:
            return 0.0

    lock = threading.Lock()
    with pytest.raises(SettingsError, match=r"^locked_reward cannot be passed to the other processes of this run"):
        agentrl.train(problems=ROWS, reward=locked_reward, runs_dir=tmp_path, rollout={"schedule": "overlapped"})
    assert not list(tmp_path.glob("*/config.yaml"))
