"""The policy that a run starts from: the model in ``model.path``, or the cached result of a cold start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl.errors import AgentRLError, SettingsError, WorldError
from agentrl.evaluation.during_training import score_groups
from agentrl.models.loading import read_model
from agentrl.models.tokenizer import read_tokenizer
from agentrl.rollout.driver import Driver
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.environment import build_environment_and_codec, build_rewards
from agentrl.telemetry.console import Console
from agentrl.telemetry.files import atomic_write, malformed_as_world_error
from agentrl.training.coldstart.demonstrations import problems_for_length_check
from agentrl.training.coldstart.train import cold_start, policy_cache_directory, read_coldstart_demonstrations
from agentrl.training.engine.determinism import set_determinism, set_threads
from agentrl.training.settings import ColdstartSettings
from agentrl.trajectory import Group
from agentrl_envs.episode import UnavailableError
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from agentrl.config import Settings


_PROGRESS_LINES = 20  # number of progress lines without a live display
_SCORED_PROBLEMS = 64  # number of problems that a new policy attempts
_TOO_FEW_SOLVED = 0.05  # fraction of solved problems below which training usually has too little success to reinforce
_SCORE_FILE = "coldstart.json"  # name of a file in the policy's directory


@dataclass(frozen=True, kw_only=True)
class StartingPolicyScore:
    """Score of a policy right after its cold start, from one rollout per problem, sampled as in training.

    A rollout with a reward of at least 1 solves its problem. ``problems`` is the number of problems that were played,
    and ``source`` is the origin of the problems. ``low`` and ``high`` are the bounds of the 95 % interval for the
    fraction of similar problems that the policy solves.
    """

    source: str
    problems: int
    solved: int
    low: float
    high: float
    mean_reward: float
    highest_reward: float

    @classmethod
    def read(cls, policy: Path) -> StartingPolicyScore | None:
        """Return the score stored with a policy, or None. Raises WorldError if the stored score is damaged."""
        path = policy / _SCORE_FILE
        if not path.is_file():
            return None
        with malformed_as_world_error(str(path)):
            return cls(**json.loads(path.read_text()))

    def write(self, policy: Path) -> None:
        """Store the score with its policy. Raises WorldError if writing fails."""
        atomic_write(policy / _SCORE_FILE, lambda out: out.write(json.dumps(asdict(self), indent=1).encode()))

    def print(self, console: Console) -> None:
        """Print how many problems the policy solves, and a warning with advice if it solves hardly any."""
        line = f"cold start: the policy solves {self.solved} of {self.problems} problems of {self.source}, "
        line += f"{self.solved / self.problems:.3f} [{self.low:.3f}, {self.high:.3f}]"
        if not self.solved and self.highest_reward > 0:
            line += f"; mean reward {self.mean_reward:.3f}"
        console.note(line)
        # Even if no problem is solved, training can reinforce partial success that is rewarded.
        if self.solved < _TOO_FEW_SOLVED * self.problems and (self.solved or self.highest_reward <= 0):
            few = f"only {self.solved} of {self.problems} problems" if self.solved else "no problem"
            console.warning(
                f"the policy solves {few} after its cold start, so training has little success to reinforce: set "
                "coldstart.copy_steps to most of coldstart.steps if the policy must copy results, increase the steps, "
                "add demonstrations (coldstart.count, or more rows), or start with easier problems "
                "(docs/how-to/data.md#cold-starts-that-fail)"
            )


def prepare_starting_policy(settings: Settings, console: Console, *, announce_cached: bool = True) -> str:
    """Return the directory or id of the initial policy. Runs and caches a cold start if it is configured."""
    if settings.coldstart.demonstrations is None and settings.model.path is not None:
        return settings.model.path
    loaded = read_coldstart_demonstrations(settings)
    path = policy_cache_directory(settings, loaded.demonstrations)
    if path.exists():
        if announce_cached:
            console.note(f"policy: {path} (cold start of an earlier run)")
            try:
                score = StartingPolicyScore.read(path)
            except WorldError as error:  # the policy is complete; only its score is unreadable
                console.warning(f"the score of the cold start cannot be read: {error}")
            else:
                if score is not None:
                    score.print(console)
        return str(path)
    console.note(f"cold start: {settings.coldstart.steps} steps on {loaded.description}")
    if settings.coldstart.direct_share:
        console.note(_describe_direct_answers(settings.coldstart))
    create_coldstart_policy(settings, path, console, problems_for_length_check(settings))
    return str(path)


def create_coldstart_policy(
    settings: Settings, output: Path, console: Console, problems: Sequence[Problem] = ()
) -> None:
    """Run the cold start, export its policy to ``output``, and report how many of ``problems`` it solves.

    Without ``problems``, the policy plays the problems of the demonstrations.
    """
    began = time.monotonic()
    losses: list[float] = []
    with console.progress(settings.coldstart.steps, unit="cold-start step", lines=_PROGRESS_LINES) as progress:

        def report(step: int, loss: float) -> None:
            losses.append(loss)
            progress.update(step, {"policy/loss": loss})

        asyncio.run(cold_start(settings, output, report, problems))
    perplexity = math.exp(min(sum(losses[-10:]) / len(losses[-10:]), 50.0))
    console.note(f"policy: {output}, trained in {time.monotonic() - began:.0f} s, final perplexity {perplexity:.3f}")
    cold = settings.coldstart
    late = (cold.direct_steps or 0) if cold.direct_share else 0  # the last steps use other demonstrations
    console.note(describe_loss_trend(losses, final=late))
    try:
        score = asyncio.run(_score_policy(settings, output, problems))
    except (AgentRLError, UnavailableError) as error:  # the policy is saved; only its score is missing
        console.warning(f"the cold-start policy has no score, because its rollouts failed: {error}")
        return
    if score is not None:
        score.write(output)
        score.print(console)


async def _score_policy(settings: Settings, path: Path, problems: Sequence[Problem]) -> StartingPolicyScore | None:
    """Play up to 64 problems with the policy in ``path`` as in training, and return its score.

    Returns None if every prompt is too long.
    """
    source = ", ".join(sorted({problem.source for problem in problems}))
    if not problems:
        demonstrations = read_coldstart_demonstrations(settings).demonstrations
        problems, source = [item.problem for item in demonstrations], "the demonstrations"
    count = min(_SCORED_PROBLEMS, len(problems))
    chosen = [problems[index * len(problems) // count] for index in range(count)]
    environment, codec = build_environment_and_codec(settings, read_tokenizer(str(path)), str(path))
    rewards = build_rewards(settings)
    with torch.random.fork_rng():  # training must draw the same random numbers as with a cached policy
        model = read_model(str(path), settings.model).to("cuda" if torch.cuda.is_available() else "cpu").eval()
        deterministic = settings.training.deterministic
        engine = TransformersEngine(model, codec, settings.rollout, deterministic=deterministic)
        driver = Driver(
            environment=environment,
            engine=engine,
            codec=codec,
            settings=settings.rollout,
            seed=settings.seed,
            deterministic=deterministic,
            rewards=rewards,
        )
        async with contextlib.AsyncExitStack() as opened:
            opened.push_async_callback(engine.close)
            opened.push_async_callback(environment.close)
            await environment.open()
            if rewards is not None:
                opened.push_async_callback(rewards.close)
                await rewards.open()
            requests = [Group(index=index, problem=problem) for index, problem in enumerate(chosen)]
            played = driver.play_groups(requests, step=0, group_size=1, skip_long=True)
            groups = sorted([group async for group in played], key=lambda group: group.index)
            if not groups:
                return None
            driver.raise_if_all_crashed(groups, "the cold start's policy")
            report = score_groups(groups, step=0, samples=1)
    score, like_these = report.overall, report.overall.problems_like_these
    earned = [item.reward for group in groups for item in group.rollouts if not item.is_excluded]
    return StartingPolicyScore(
        source=source,
        problems=score.problems,
        solved=round(score.mean * score.problems),
        low=like_these.low,
        high=like_these.high,
        mean_reward=statistics.fmean(earned),
        highest_reward=max(earned),
    )


def describe_loss_trend(losses: Sequence[float], *, final: int = 0) -> str:
    """Describe the trend of the loss: compare the last tenth of the steps with the tenth before it.

    The loss falls if the two means differ by more than two standard errors. The ``final`` steps, which include direct
    answers, are ignored unless there are no other steps.

    >>> describe_loss_trend([1.0, 1.2] * 20)
    'cold start: the loss is on a plateau (1.100, before 1.100)'
    >>> describe_loss_trend([1.0 - step / 100 for step in range(40)])
    'cold start: the loss is still falling (0.625, before 0.665): raise coldstart.steps to lower it further'
    >>> describe_loss_trend([0.02 - step / 2000 for step in range(40)])
    'cold start: the loss is near 0 (0.001, before 0.003)'
    >>> describe_loss_trend([0.0] * 40 + [0.8] * 10, final=10)
    'cold start: in steps 1 to 40, without direct answers, the loss is near 0 (0.000, before 0.000)'
    """
    where = "cold start:"
    if 0 < final < len(losses):
        losses = losses[:-final]
        where = f"cold start: in steps 1 to {len(losses)}, without direct answers,"
    count = max(4, len(losses) // 10)
    if len(losses) < 2 * count:
        return f"{where} too few steps to determine whether the loss is still falling"
    before, last = losses[-2 * count : -count], losses[-count:]
    error = math.sqrt((statistics.variance(before) + statistics.variance(last)) / count)
    means = f"({statistics.fmean(last):.3f}, before {statistics.fmean(before):.3f})"
    if statistics.fmean(last) < 0.01:  # the demonstrations are memorized, so more steps do not help
        return f"{where} the loss is near 0 {means}"
    if statistics.fmean(before) - statistics.fmean(last) > 2 * error:
        return f"{where} the loss is still falling {means}: raise coldstart.steps to lower it further"
    return f"{where} the loss is on a plateau {means}"


def _describe_direct_answers(cold: ColdstartSettings) -> str:
    last = "all steps" if cold.direct_steps is None else f"the last {cold.direct_steps} steps"
    how = "contain only their answer" if cold.direct_turn == "first" else "answer too early, in a random turn"
    return f"cold start: in {last}, {cold.direct_share:.0%} of the demonstrations {how} (direct_share)"


def coldstart_command(settings: Settings, output: Path) -> None:
    """Run ``agentrl coldstart``: train a policy on demonstrations and write it to ``output``, a new or empty directory.

    Raises SettingsError before training if ``output`` exists and is not empty, or cannot be written.
    """
    _create_output_directory(output)
    set_determinism(settings.training)
    set_threads(settings, processes=1)
    create_coldstart_policy(settings, output, Console(settings.telemetry))


def _create_output_directory(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise SettingsError(f"--output {output} already exists: choose a new or empty directory")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"cannot create --output {output}: {error.strerror}") from error
