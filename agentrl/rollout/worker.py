"""The rollout worker, which collects and filters the groups of each training step."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from agentrl.errors import WorldError
from agentrl.problems.sampler import ProblemSampler
from agentrl.rollout.driver import Driver
from agentrl.rollout.filters import FilterRules, filter_groups
from agentrl.rollout.metrics import StalenessTracker, rollout_metrics
from agentrl.rollout.schedule import BackgroundSource, GroupSchedule, OnDemandSource, RolloutSource
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.work_queue import QueueState, WorkQueue
from agentrl.telemetry.metrics import compute_user_metrics
from agentrl.telemetry.trace import add_slice_since, slice_start_time
from agentrl.trajectory import Group

# Number of consecutive steps with only excluded rollouts after which a run ends. Steps emptied by filters do not count.
_FAILED_STEPS = 3


@dataclass(kw_only=True)
class RolloutWorker:
    """Collects groups, filters them and tracks their age.

    ``greedy``: play every problem once more at temperature 0, for a baseline. ``last_step``: the run's last step;
    no rollouts are played for later steps. ``updates_posteriors``: after each training step, its rollouts update the
    sampler's posteriors, for a budget or a curriculum.

    After :meth:`next_batch`, ``version`` is the version of the policy to be trained, ``sampled_groups`` are all groups
    that were played for ``step``, and ``metrics`` describe them.
    """

    driver: Driver
    sampler: InitVar[ProblemSampler]
    settings: RolloutSettings
    rules: FilterRules
    greedy: bool = False
    last_step: int | None = None
    updates_posteriors: bool = False
    step: int = field(default=0, init=False)
    version: int = field(default=0, init=False)
    sampled_groups: tuple[Group, ...] = field(default=(), init=False)
    metrics: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self, sampler: ProblemSampler) -> None:
        self._queue = WorkQueue(sampler, self.settings, updates_posteriors=self.updates_posteriors)
        self._clock = StalenessTracker()
        self._source: RolloutSource | None = None
        self._failed_steps = 0

    async def next_batch(self, step: int) -> tuple[Group, ...]:
        """Return the groups to train on in this step. Raises WorldError after ``step_deadline``.

        Queued groups precede new ones. While the filters leave too few groups, up to ``max_extra_rounds`` additional
        rounds are played.
        """
        loop = asyncio.get_running_loop()
        began, collecting = loop.time(), slice_start_time()
        deadline = began + self.settings.step_deadline
        self.step = step
        if self._source is None:
            self._source = self._start_source(step)
        needed, in_first_round = self.settings.problems_per_step, self.settings.groups_per_round
        played = await self._source.take_groups(in_first_round, step=step, deadline=deadline)
        self._raise_if_all_failed(played, step)
        kept, counts = filter_groups(played, self.rules)
        extra_rounds = 0
        while len(kept) < needed and extra_rounds < self.settings.max_extra_rounds:
            more = problems_for_next_round(in_first_round, needed, collected=len(played), kept=len(kept))
            played += await self._source.take_groups(more, step=step, deadline=deadline, refill=True)
            kept, counts = filter_groups(played, self.rules)
            extra_rounds += 1
        groups = kept[:needed]
        if self.settings.schedule != "synchronous":
            groups = subsample_groups(kept, needed, step=step)
        metrics = rollout_metrics(played) | {f"groups/{name}": count for name, count in counts.items()}
        metrics |= self._queue.budget_metrics(played)
        metrics |= self._clock.metrics(played) | self._source.metrics() | self.driver.metrics()
        metrics |= {
            "groups/trained": len(groups),
            "groups/surplus": len(kept) - len(groups),
            "groups/extra_rounds": extra_rounds,
            "groups/skipped_long_prompt": self._queue.take_skipped_count(),
            "time/rollout_s": loop.time() - began,
        }
        add_slice_since(collecting, "collect groups", step=step)
        data = [item for group in played for item in group.trajectories if not item.is_excluded]
        metrics |= compute_user_metrics(data, metrics)
        self._raise_if_too_stale(step, metrics.get("staleness/max", 0))
        self._clock.record_training_start()
        self.version, self.sampled_groups, self.metrics = self._clock.version, tuple(played), metrics
        return groups

    def record_trained(self) -> None:
        """Remove the trained step's groups from the queue. Must run in the event loop if rollouts run ahead."""
        self._queue.remove_trained_and_update_posteriors(self.sampled_groups)
        self.sampled_groups = ()
        self._clock.record_training_end()
        if self._source is not None:
            self._source.record_trained()

    async def wait_until_weights_may_change(self) -> None:
        """Wait until the engine's weights may change. Raises WorldError after ``step_deadline``."""
        if self._source is not None:
            deadline = asyncio.get_running_loop().time() + self.settings.step_deadline
            await self._source.wait_until_weights_may_change(step=self.step, deadline=deadline)

    def record_install(self, version: int) -> None:
        """Record that ``version`` of the policy has been installed in the engine."""
        self._clock.record_install(version)

    async def close(self) -> None:
        if self._source is not None:
            await self._source.close()

    def state_dict(self) -> QueueState:
        return self._queue.state_dict()

    def load_state_dict(self, state: QueueState) -> None:
        self._queue.load_state_dict(state)

    def _start_source(self, step: int) -> RolloutSource:
        settings, queue = self.settings, self._queue
        if settings.schedule == "synchronous":
            return OnDemandSource(self.driver, queue, settings, greedy=self.greedy)
        schedule = GroupSchedule(
            groups=settings.groups_per_round,
            max_staleness=self.settings.staleness_bound,
            starts_early=settings.schedule == "asynchronous",
            batches=None if self.last_step is None else self.last_step - step + 1,
        )
        return BackgroundSource(self.driver, queue, settings, schedule, step=step, greedy=self.greedy)

    def _raise_if_all_failed(self, played: Sequence[Group], step: int) -> None:
        """Raise SettingsError if an agent crashed in every rollout.

        Raises WorldError after ``_FAILED_STEPS`` steps with only excluded rollouts.
        """
        self.driver.raise_if_all_crashed(played, f"step {step}")
        failed = all(item.is_excluded for group in played for item in group.rollouts)
        self._failed_steps = self._failed_steps + 1 if failed else 0
        if self._failed_steps == _FAILED_STEPS:
            raise WorldError(
                f"steps {step - _FAILED_STEPS + 1} to {step}: every rollout failed for reasons outside the policy, so "
                f"the policy was not trained. Last failure: {self.driver.last_failure or 'see the log above'}. Fix its "
                "cause, then continue the run with --resume"
            )

    def _raise_if_too_stale(self, step: int, stalest: float) -> None:
        bound = self.settings.staleness_bound
        if stalest > bound:
            raise RuntimeError(
                f"step {step}: a token is {stalest:g} steps old, but rollout.schedule={self.settings.schedule} "
                f"allows at most {bound}"
            )


def subsample_groups(groups: tuple[Group, ...], count: int, *, step: int) -> tuple[Group, ...]:
    """Draw ``count`` of ``groups`` uniformly, keeping their order. The draw is deterministic for each step.

    Of the groups played ahead, the last groups are present because they were short. Always leaving out the last groups
    would bias training towards longer groups.
    """
    if len(groups) <= count:
        return groups
    chosen = random.Random(step).sample(range(len(groups)), count)
    return tuple(groups[number] for number in sorted(chosen))


def problems_for_next_round(in_first_round: int, needed: int, *, collected: int, kept: int) -> int:
    """Return the number of problems for another round: enough to fill the batch at the fraction kept so far.

    The number never exceeds the number in the first round. If no group was kept, the number is as in the first round.

    >>> problems_for_next_round(8, 8, collected=8, kept=2)
    8
    >>> problems_for_next_round(8, 8, collected=16, kept=6)
    6
    """
    return in_first_round if kept == 0 else min(in_first_round, math.ceil((needed - kept) * collected / kept))
