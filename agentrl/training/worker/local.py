"""The rollout worker in the current process: environment, engine, event loop and rollouts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from agentrl.cluster.launchers import count_local_ranks
from agentrl.errors import SettingsError
from agentrl.evaluation.benchmarks import load_held_out_problems
from agentrl.evaluation.during_training import EvaluationReport, evaluate_policy
from agentrl.evaluation.settings import evaluation_rollout_settings, with_evaluation_turn_limit
from agentrl.models.attention import document_length_where_attention_dominates
from agentrl.models.exactness import uses_padded_rows
from agentrl.models.loading import read_model, read_model_config_if_available
from agentrl.models.lora import add_adapters
from agentrl.models.tokenizer import TextCodec, read_tokenizer
from agentrl.problems.sampler import ProblemSampler
from agentrl.problems.sources import load_mixture
from agentrl.rollout.driver import Driver
from agentrl.rollout.engines.base import (
    EngineSpecification,
    ManagedEngine,
    engine_facts,
    engine_plugin,
    runs_servers_on_nodes,
)
from agentrl.rollout.environment import (
    build_environment_and_codec,
    build_rewards,
    check_episode_can_fork,
    rewards_compare_answers,
)
from agentrl.rollout.filters import FilterRules
from agentrl.rollout.gateway.settings import is_agent_program
from agentrl.rollout.settings import longest_request_tokens
from agentrl.rollout.work_queue import QueueState
from agentrl.rollout.worker import RolloutWorker
from agentrl.telemetry.files import BackgroundWriter
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.trace import start_trace, stop_trace, trace_service_call
from agentrl.training.step.batching import RankPlan, is_due, plan_step
from agentrl.training.step.objective_settings import ObjectiveSettings, estimator_requirements
from agentrl.training.worker.service import InterruptedRunError
from agentrl.trajectory import Group, Trajectory
from agentrl.weights.sources import TransferTarget
from agentrl.weights.verify import EngineVerification, Probe, probe_tokens
from agentrl_envs import execution
from agentrl_envs.episode import Environment
from agentrl_envs.threads import LoopThread, close_loop

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentrl.config import Settings


_Result = TypeVar("_Result")


class CallerLoop:
    """Runs coroutines in the calling thread, only during a call. Nothing runs while a rank trains."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def run(self, work: Coroutine[object, object, _Result]) -> _Result:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        close_loop(self._loop)


# The probe consists of this many problem statements and a fixed text, because statements may be empty. Prompts are not
# used, because building them would require starting an episode for each problem.
_PROBE_PROBLEMS = 64
_PROBE_TEXT = "The sum 12 + 345 = 357.\n```python\nprint(7 * 8)\n```\n"


class LocalRolloutService:
    """Executes the calls of a :class:`~agentrl.training.worker.service.RolloutService`.

    With ``rollout.schedule=synchronous`` the event loop is idle while the ranks train; otherwise it always runs.
    """

    def __init__(
        self, settings: Settings, policy_path: str, *, ranks: int = 1, trained: PreTrainedModel | None = None
    ) -> None:
        """Open the environment and the engine.

        An engine in this process samples from ``trained`` or, by default, from a separate copy of the policy.
        """
        self._settings = settings
        self._ranks = ranks
        self._folder = settings.run_path.absolute()
        self._interrupted = False
        self._running: asyncio.Task[object] | None = None  # task of the running interruptible call
        self._groups: tuple[Group, ...] | None = None  # groups of the planned step; None if no step is planned
        with contextlib.ExitStack() as opened:  # closes the opened parts if a later part fails to open
            self._open(opened, policy_path, trained)
            self._opened = opened.pop_all()

    def _open(self, opened: contextlib.ExitStack, policy_path: str, trained: PreTrainedModel | None) -> None:
        settings = self._settings
        if settings.telemetry.trace:
            start_trace(RunDirectory(self._folder).trace, "rollout worker")
            opened.callback(stop_trace)
            execution.trace_program = partial(trace_service_call, "sandbox", "program")
            opened.callback(setattr, execution, "trace_program", contextlib.nullcontext)
        environment, codec = build_environment_and_codec(settings, read_tokenizer(policy_path), policy_path)
        self._environment = environment
        self._loop = CallerLoop() if settings.rollout.schedule == "synchronous" else LoopThread()
        opened.callback(self._loop.close)
        self._rewards = build_rewards(settings)
        self._run_interruptible(environment.open())
        opened.callback(lambda: self._run_to_end(environment.close()))
        if self._rewards is not None:
            rewards = self._rewards
            self._run_interruptible(rewards.open())
            opened.callback(lambda: self._run_to_end(rewards.close()))
        self._managed = self._run_interruptible(self._open_engine(self._engine_request(policy_path, codec, trained)))
        opened.callback(lambda: self._run_to_end(self._managed.close()))
        self._engine = self._managed.engine
        self._make_driver = partial(
            Driver, codec=codec, seed=settings.seed, deterministic=settings.training.deterministic
        )
        self._driver = self._make_driver(
            environment=environment,
            engine=self._engine,
            settings=settings.rollout,
            trained=True,
            routed=settings.correction.route_replay == "rollout",
            rewards=self._rewards,
        )
        self._mixture, self._reports = load_mixture(
            settings.data.train, seed=settings.seed, answered=rewards_compare_answers(settings)
        )
        if settings.rollout.branching.width > 1:
            (problem,) = ProblemSampler(self._mixture, seed=settings.seed).next(1)
            self._run_interruptible(check_episode_can_fork(environment, problem, settings.rollout))
        self._held_out = load_held_out_problems(settings)
        self._objective = ObjectiveSettings.from_settings(settings)
        configs = [(model, read_model_config_if_available(model)) for model in settings.models_on_training_ranks]
        config = configs[0][1]
        self._attention_length = math.inf if config is None else document_length_where_attention_dominates(config)
        self._padded_rows, *others = (one is not None and uses_padded_rows(model, one) for model, one in configs)
        self._other_padded_rows = any(others)
        algorithm = settings.algorithm
        self._worker = RolloutWorker(
            driver=self._driver,
            sampler=ProblemSampler(
                self._mixture,
                seed=settings.seed,
                curriculum=settings.data.curriculum,
                decay=settings.data.posterior_decay,
            ),
            settings=settings.rollout,
            rules=FilterRules(
                void_turns=algorithm.void_turns,
                truncated=algorithm.truncated,
                accuracy_range=algorithm.accuracy_range,
                drop_zero_variance=self._objective.drops_zero_variance,
            ),
            greedy="greedy_returns" in estimator_requirements(self._objective).inputs,
            last_step=settings.training.steps,
            updates_posteriors=(settings.data.curriculum, settings.rollout.budget) != ("uniform", "uniform"),
        )
        opened.callback(lambda: self._run_to_end(self._worker.close()))
        self._writer = BackgroundWriter("trajectories")
        opened.callback(self._writer.close)

    def _engine_request(
        self, policy_path: str, codec: TextCodec, trained: PreTrainedModel | None
    ) -> EngineSpecification:
        settings = self._settings
        model = trained
        if model is None and engine_facts(settings.rollout).in_process:
            model = add_adapters(read_model(policy_path, settings.model), settings.model.lora)
            model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        return EngineSpecification(
            rollout=settings.rollout,
            policy=settings.model,
            policy_path=policy_path,
            codec=codec,
            longest=longest_request_tokens(settings.rollout, settings.evaluation.max_response_tokens),
            folder=self._folder,
            model=model,
            shared=trained is not None,
            routes=settings.correction.route_replay == "rollout",
            training_gpus=count_local_ranks(settings.training.num_processes),
            deterministic=settings.training.deterministic,
            cluster=settings.cluster if runs_servers_on_nodes(settings.rollout, settings.cluster.kind) else None,
        )

    @staticmethod
    async def _open_engine(request: EngineSpecification) -> ManagedEngine:
        managed = await asyncio.to_thread(engine_plugin(request.rollout).managed, request)
        await managed.open()
        return managed

    def describe_setup(self) -> list[str]:
        engine = self._run_to_end(self._engine.health())
        return [*self._environment.describe(), engine, *(report.describe() for report in self._reports)]

    def roll_out_and_plan_rank(self, step: int, budget: int) -> RankPlan:
        """Roll out one step and plan it for this process, the only rank."""
        return self.roll_out_and_plan(step, budget)[0]

    def wait_for_all_ranks(self, point: str) -> None:
        """Return immediately, because this process is the only rank."""

    def roll_out_and_plan(self, step: int, budget: int) -> list[RankPlan]:
        """Roll out one step if necessary, and plan it for every rank. Sequence-parallel ranks share a plan."""
        if self._groups is None or self._worker.step != step:
            self._managed.prepare_for_rollouts()
            self._groups = self._run_interruptible(self._worker.next_batch(step))
            self._run_to_end(self._managed.prepare_for_training())
        sharing = self._settings.training.sequence_parallel
        plans = plan_step(
            self._groups,
            self._objective,
            step=step,
            version=self._worker.version,
            metrics=self._worker.metrics,
            budget=budget,
            ranks=self._ranks // sharing,
            attention_length=self._attention_length,
            padded_rows=self._padded_rows,
            other_padded_rows=self._other_padded_rows,
            teacher_prompt=None if self._settings.teacher.hint is None else self._teacher_prompt,
        )
        return [plan for plan in plans for _ in range(sharing)]

    def _teacher_prompt(self, item: Trajectory) -> tuple[int, ...]:
        """Return the teacher's prompt: the tokenizer's prefix, the hint, and the policy's prompt."""
        codec, prompt, hint = self._driver.codec, item.prompt_ids, self._settings.teacher.hint or ""
        start = len(codec.prefix_ids) if prompt[: len(codec.prefix_ids)] == codec.prefix_ids else 0
        problem = item.problem
        values = {**problem.info, "statement": problem.statement, "answer": problem.answer}
        try:
            text = hint.format_map(values)
        except KeyError as error:
            raise SettingsError(
                f"teacher.hint={hint!r} uses {error}, which problem {problem.id!r} lacks; its columns: "
                f"{', '.join(sorted(values))}"
            ) from None
        return prompt[:start] + codec.encode(text) + prompt[start:]

    def wait_until_weights_may_change(self) -> None:
        with contextlib.suppress(InterruptedRunError):
            self._run_interruptible(self._worker.wait_until_weights_may_change())

    def accept_step(self, step: int) -> None:
        """Accept the last planned step, and start writing its trajectories.

        Raises WorldError if the previous write failed.
        """
        if self._groups is None or self._worker.step != step:
            raise RuntimeError(f"step {step} was finished, but it is not the last planned step")
        self._writer.wait()
        if is_due(step, self._settings.telemetry.trajectories_every):
            sampled = self._worker.sampled_groups
            rows = (item.to_record() for group in sampled for item in group.all_trajectories)
            self._writer.submit(partial(RunDirectory(self._folder).write_trajectories, step, rows))
        self._run_to_end(self._call_in_loop(self._worker.record_trained))
        self._groups = None

    def transfer_target(self) -> TransferTarget | None:
        return self._managed.transfer_target()

    def probe_tokens(self) -> tuple[int, ...]:
        texts = [
            problem.statement
            for problem in ProblemSampler(self._mixture, seed=self._settings.seed).next(_PROBE_PROBLEMS)
        ]
        texts.append(_PROBE_TEXT)
        longest = self._settings.rollout.max_prompt_tokens
        return probe_tokens(map(self._driver.codec.encode, texts), longest=longest)

    def verification_methods(self) -> list[EngineVerification]:
        return self._managed.verifier.verified()

    def verify_starting_policy(self, version: int, probe: Probe) -> str | None:
        return self._run_to_end(self._record_if_verified(self._managed.verify(version, probe), version))

    def pause_requests(self) -> None:
        self._run_to_end(self._managed.pause())

    def install_weights(self, directory: str | None, version: int, probe: Probe | None) -> str | None:
        return self._run_to_end(self._record_if_verified(self._managed.install(directory, version, probe), version))

    def evaluate(self, step: int, *, falsified: bool = False) -> EvaluationReport | None:
        if falsified and is_agent_program(self._settings.env):
            return None  # the observations of an agent's tools do not pass through the environment
        if not any(problem.setup or not falsified for problem in self._held_out):
            return None
        self._managed.prepare_for_rollouts()
        return self._run_interruptible(
            evaluate_policy(
                self._held_out,
                environment=with_evaluation_turn_limit(self._environment, self._settings),
                driver_for=self._evaluation_driver,
                step=step,
                samples=self._settings.evaluation.samples,
                temperature=self._settings.evaluation.temperature,
                seed=self._settings.seed,
                falsified=falsified,
            )
        )

    def state_dict(self) -> QueueState:
        self._writer.wait()  # a resumed run does not write these trajectories again
        return self._run_to_end(self._call_in_loop(self._worker.state_dict))

    def load_state_dict(self, state: QueueState) -> None:
        self._worker.load_state_dict(state)

    def cancel_interruptible_calls(self) -> None:
        if not self._interrupted:  # cancelled tasks are cleaning up and must not be cancelled again
            self._interrupted = True
            running = self._running
            if running is not None:
                running.get_loop().call_soon_threadsafe(running.cancel)

    def close(self) -> None:
        self._opened.close()

    async def _call_in_loop(self, work: Callable[[], _Result]) -> _Result:
        """Call ``work`` on the thread of the event loop, where rollouts use the same state."""
        return work()

    async def _record_if_verified(self, transfer: Coroutine[object, object, str | None], version: int) -> str | None:
        """Await a transfer. Return why its verification failed, or record ``version`` as installed and return None."""
        problem = await transfer
        if problem is None:
            self._worker.record_install(version)
        return problem

    def _evaluation_driver(self, environment: Environment) -> Driver:
        """Return a driver with the limits and sampling of evaluation and with the rewards of the environment."""
        return self._make_driver(
            environment=environment,
            engine=self._engine,
            settings=evaluation_rollout_settings(self._settings),
            label="evaluation-",
        )

    def _run_to_end(self, work: Coroutine[object, object, _Result]) -> _Result:
        """Run ``work`` without interruption, because weight changes are short and must be complete."""
        return self._loop.run(work)

    def _run_interruptible(self, work: Coroutine[object, object, _Result]) -> _Result:
        """Run ``work``. Raises InterruptedRunError after :meth:`cancel_interruptible_calls`."""
        if self._interrupted:
            work.close()
            raise InterruptedRunError
        try:
            return self._loop.run(self._run_as_current_task(work))
        except (asyncio.CancelledError, concurrent.futures.CancelledError):  # from CallerLoop, from LoopThread
            raise InterruptedRunError from None

    async def _run_as_current_task(self, work: Coroutine[object, object, _Result]) -> _Result:
        self._running = task = asyncio.current_task()
        if self._interrupted and task is not None:  # interrupted before the assignment
            task.cancel()
        try:
            return await work
        finally:
            self._running = None
