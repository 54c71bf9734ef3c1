"""Problems of a measurement and their rollouts. Requesting more problems does not change the order of earlier ones."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentrl.errors import SettingsError
from agentrl.lab.settings import LabSections, LabSettings
from agentrl.problems.exercises import ExerciseSource
from agentrl.problems.sampler import ProblemSource
from agentrl.problems.settings import ProblemSourceSettings
from agentrl.problems.sources import load_source
from agentrl.rollout.driver import Driver
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.environment import build_rewards, rewards_compare_answers
from agentrl.rollout.filters import FilterRules, filter_groups
from agentrl.trajectory import Group
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentrl.models.tokenizer import TextCodec
    from agentrl_envs.episode import Environment

# At this temperature, sampling almost always returns the most likely token.
_GREEDY_TEMPERATURE = 1e-4
# Ratio of sampled to required trajectories: above 1, because some are excluded. If too few remain, another round is
# sampled.
_SAMPLING_MARGIN = 1.2
_MAX_ROUNDS = 4
_USABLE = FilterRules(void_turns="exclude", truncated="train", accuracy_range=None, drop_zero_variance=False)
# Ratio of sampled to required problems: above 1, because some are always or never solved.
_PROBLEM_MARGIN = 8


def load_lab_problems(
    settings: LabSections, lab: LabSettings, selection: str | None
) -> tuple[LabSettings, list[Problem]]:
    """Load the problems selected by ``--problems``. Returns the updated settings and the problems in sampling order.

    ``selection`` is a file, whose problems are all used, or a number of problems from data.train (None:
    ``lab.problems``).
    """
    if selection is not None and not selection.isdigit():
        source = load_source(ProblemSourceSettings(path=selection), answered=rewards_compare_answers(settings)).source
        problems = [source.problem(index) for index in range(source.size or 0)]
        text = "".join(map(repr, problems))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return replace(lab, problems=len(problems), problem_file=digest), problems
    if selection is not None:
        if int(selection) < 2:
            raise SettingsError(f"--problems {selection}: a measurement needs at least 2 problems")
        lab = replace(lab, problems=int(selection))
    if not settings.data.train:
        raise SettingsError(
            "there are no problems to measure, because data.train is empty: use --problems FILE or "
            "data.train.0.path=FILE"
        )
    most = lab.problems * _PROBLEM_MARGIN
    answered = rewards_compare_answers(settings)
    loaded = [load_source(entry, seed=settings.seed, answered=answered).source for entry in settings.data.train]
    turns = itertools.zip_longest(*(_problems_in_order(source, most, settings.seed) for source in loaded))
    every = (problem for turn in turns for problem in turn if problem is not None)
    return lab, list(itertools.islice(every, most))


def _problems_in_order(source: ProblemSource, most: int, seed: int) -> Iterator[Problem]:
    if isinstance(source, ExerciseSource):
        yield from source.distinct_problems(most)
        return
    numbers = list(range(most if source.size is None else source.size))
    if source.size is not None:
        random.Random(seed).shuffle(numbers)
    for number in numbers[:most]:
        yield source.problem(number)


@dataclass(frozen=True, kw_only=True)
class UsableGroup:
    """Usable rollouts of one problem.

    ``greedy_return`` is 0 if no greedy rollout was requested, and None if the greedy rollout was excluded.
    """

    group: Group
    greedy_return: float | None


class GroupSampler:
    """Samples rollouts as training does."""

    def __init__(
        self,
        settings: LabSections,
        causal_lm: PreTrainedModel,
        environment: Environment,
        codec: TextCodec,
        *,
        samples: int,
        greedy: bool,
    ) -> None:
        """Create the engine and the driver. With ``greedy``, sample an additional greedy rollout per problem."""
        self._environment = environment
        self._engine = TransformersEngine(causal_lm, codec, settings.rollout)
        self._rewards = build_rewards(settings)
        self._driver = Driver(
            environment=environment,
            engine=self._engine,
            codec=codec,
            settings=settings.rollout,
            seed=settings.seed,
            rewards=self._rewards,
        )
        self._samples = samples
        self._greedy = greedy

    @contextmanager
    def opened(self) -> Iterator[Callable[[Sequence[tuple[int, Problem]]], list[UsableGroup]]]:
        """Open the environment. Yields a function that samples problems and returns their groups, ordered by number."""
        with asyncio.Runner() as runner:
            runner.run(self._open())
            try:
                yield lambda problems: runner.run(self._sample(problems))
            finally:
                runner.run(self._close())

    async def _sample(self, problems: Sequence[tuple[int, Problem]]) -> list[UsableGroup]:
        requests = [Group(index=number, problem=problem) for number, problem in problems]
        groups = await sample_until_usable(self._driver, requests, samples=self._samples)
        greedy: dict[int, float | None] = dict.fromkeys(groups, None if self._greedy else 0.0)
        if self._greedy:
            async for group in self._driver.play_groups(
                requests, step=_MAX_ROUNDS, group_size=1, temperature=_GREEDY_TEMPERATURE
            ):
                for item in group.trajectories:
                    if not item.is_excluded:
                        greedy[group.index] = item.reward
        return [UsableGroup(group=groups[number], greedy_return=greedy[number]) for number in sorted(groups)]

    async def _open(self) -> None:
        await self._environment.open()
        if self._rewards is not None:
            await self._rewards.open()

    async def _close(self) -> None:
        await self._engine.close()
        if self._rewards is not None:
            await self._rewards.close()
        await self._environment.close()


async def sample_until_usable(driver: Driver, requests: Sequence[Group], *, samples: int) -> dict[int, Group]:
    """Sample until each request has ``samples`` usable trajectories or the last round ends. Returns groups by index.

    Trajectories with a void turn are excluded, as in training. Dropping problems with many void turns instead would
    bias the selection towards problems on which the policy is certain.
    """
    groups = {item.index: item for item in requests}
    for step in range(_MAX_ROUNDS):
        short = [item for item in requests if len(groups[item.index].trajectories) < samples]
        if not short:
            break
        async for group in driver.play_groups(short, step=step, group_size=round(samples * _SAMPLING_MARGIN)):
            for usable in filter_groups([group], _USABLE)[0]:
                before = groups[group.index].trajectories
                groups[group.index] = replace(usable, trajectories=(*before, *usable.trajectories))
    return groups
