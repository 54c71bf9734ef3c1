"""The work queue. Issues problems with shares of the step's budget, and keeps them until their step is finished."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain, groupby, islice
from statistics import fmean
from typing import Any, TypedDict

from agentrl.errors import SettingsError
from agentrl.problems.sampler import ProblemSampler, SamplerState
from agentrl.rollout.branching import ForkStatistics
from agentrl.rollout.budget import (
    SCORES,
    allocate_group_sizes,
    expected_energy,
    expected_gradient_variance,
    success_fraction,
)
from agentrl.rollout.settings import RolloutSettings
from agentrl.trajectory import Group, Trajectory
from agentrl_envs.types import Problem

logger = logging.getLogger(__name__)

# Number of consecutive problems with prompts over the limit after which the limit is considered wrong.
_MAX_SKIPPED_IN_A_ROW = 1000
# Number of skipped problems that are logged individually.
_MAX_LOGGED = 10
# Fields of an issued group in a checkpoint, besides its problem.
_SAVED_FIELDS = ("index", "size", "problem_weight", "key", "widths")


class QueueState(TypedDict):
    """State of a work queue in a checkpoint.

    ``queue`` contains the fields of issued groups whose training step is not finished. ``planned`` contains the same
    fields of later groups, whose prompts are not yet measured.
    """

    sampler: SamplerState
    next_index: int
    planned: list[dict[str, Any]]
    queue: list[dict[str, Any]]
    forks: list[list[float]]


class PromptTooLongError(Exception):
    """Raised if the prompt of a problem is too long.

    ``replacement``: the group to play instead; None to omit the problem.
    """

    def __init__(self, replacement: Group | None) -> None:
        super().__init__("the prompt is too long")
        self.replacement = replacement


class WorkQueue:
    """Issues problems in the sampler's order and keeps them until their training step is finished.

    The first rollout of a problem measures its prompt, because only a started episode has a prompt. Until then, no
    other problem is issued, so that indices do not depend on which environment starts fastest. After a restart, issued
    problems whose training step was not finished come first, with their previous indices.

    Problems are drawn in blocks of ``settings.groups_per_round``. ``settings.budget`` distributes a block's rollouts
    over its problems. A problem that replaces a skipped problem has the same number of rollouts.
    """

    def __init__(self, sampler: ProblemSampler, settings: RolloutSettings, *, updates_posteriors: bool = False) -> None:
        """Create a queue. Problems with prompts over ``settings.max_prompt_tokens`` are skipped and counted.

        ``updates_posteriors``: after each training step, its rollouts update the sampler's posteriors.
        """
        self._sampler = sampler
        self._settings = settings
        self._updates_posteriors = updates_posteriors
        self._measures_forks = settings.branching.width > 1 and settings.branching.where == "measured"
        self._forks = ForkStatistics(decay=sampler.posteriors.decay)
        self._requeued: deque[Group] = deque()
        self._untrained: dict[int, Group] = {}
        self._newest: Group | None = None
        self._newest_is_measured = asyncio.Event()
        self._newest_is_measured.set()
        self._next_index = 0
        self._drawn: deque[Group] = deque()  # drawn, but their prompts are not yet measured
        self._skipped = 0
        self._skipped_in_a_row = 0
        self._logged_count = 0

    async def issue_next_group(self) -> Group:
        """Wait until the previous problem's prompt is measured, and issue the next problem."""
        await self._newest_is_measured.wait()
        if self._requeued:
            self._newest = self._requeued.popleft()
            self._untrained[self._newest.index] = self._newest
            return self._newest
        return self._issue_group()

    async def wait_for_newest_prompt_length(self) -> Group:
        """Wait until the newest group's prompt is measured, and return the group.

        If the group's problem was skipped, the group contains its replacement.
        """
        await self._newest_is_measured.wait()
        assert self._newest is not None
        return self._newest

    def record_prompt_length(self, group: Group, tokens: int | None) -> None:
        """Record the length in tokens of a group's prompt; None if the first rollout failed before it had a prompt.

        Only the first call for a group has an effect. Raises PromptTooLongError if the prompt is too long, and
        SettingsError if too many consecutive prompts are too long.
        """
        newest = self._newest
        if self._newest_is_measured.is_set() or newest is None:
            return
        # Compare index and problem: the replacement of a skipped problem has the same index, and a problem may repeat.
        if group.index != newest.index or group.problem is not newest.problem:
            return
        if tokens is not None and tokens > self._settings.max_prompt_tokens:
            self._replace_problem(group, tokens)
            raise PromptTooLongError(self._issue_group())
        self._skipped_in_a_row = 0
        self._drawn.popleft()
        self._next_index += 1
        self._untrained[group.index] = group
        self._newest_is_measured.set()

    def requeue_untrained(self) -> None:
        """Reissue all problems whose training step was not finished, before any new problems."""
        self._requeued = deque(self._untrained_in_order())
        self._untrained = {}
        self._newest_is_measured.set()  # the requeued problems come before the unmeasured problem

    def upcoming_groups(self, count: int) -> list[Group]:
        """Return the next ``count`` groups. Problems that are skipped later are replaced."""
        while len(self._requeued) + len(self._drawn) < count:
            self._draw_problem_block()
        return list(islice(chain(self._requeued, self._drawn), count))

    def remove_trained_and_update_posteriors(self, groups: Sequence[Group]) -> None:
        """Remove a finished step's groups, and update the posteriors of their problems and the statistics of forks."""
        for group in groups:
            del self._untrained[group.index]
        if self._updates_posteriors:
            self._sampler.posteriors.add_training_step(
                (group.key, list(map(success_fraction, rollouts)), self._expected_energies_if_needed(rollouts))
                for group, rollouts in zip(groups, map(_included_rollouts, groups), strict=True)
            )
        if self._measures_forks:
            self._forks.add_step(map(_included_rollouts, groups))

    def budget_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return metrics of the budget, and of the posteriors for the problems that were played."""
        if not self._updates_posteriors:
            return {}
        posteriors = self._sampler.posteriors
        sizes = [group.size for group in groups]
        variances = [expected_gradient_variance(posteriors, group.key) for group in groups]
        allocated = math.fsum(value / size for value, size in zip(variances, sizes, strict=True))
        metrics = {
            "budget/rollouts_min": min(sizes),
            "budget/rollouts_max": max(sizes),
            "budget/variance_ratio": allocated / (math.fsum(variances) / fmean(sizes)),
            "posterior/known_share": fmean(posteriors.is_known(group.key) for group in groups),
            "posterior/success": fmean(posteriors.expected_success(group.key) for group in groups),
        }
        errors = [
            abs(posteriors.expected_success(group.key) - fmean(map(success_fraction, rollouts)))
            for group in groups
            if (rollouts := _included_rollouts(group))
        ]
        return metrics | ({"posterior/success_error": fmean(errors)} if errors else {})

    def take_skipped_count(self) -> int:
        """Return the number of problems skipped since the last call."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def state_dict(self) -> QueueState:
        """Return the sampler's position and the queued problems as JSON values. May be called at any time."""
        return {
            "sampler": self._sampler.state_dict(),
            "next_index": self._next_index,
            "planned": list(map(_group_to_record, self._drawn)),
            "queue": list(map(_group_to_record, self._untrained_in_order())),
            "forks": self._forks.state_dict(),
        }

    def load_state_dict(self, state: QueueState) -> None:
        self._sampler.load_state_dict(state["sampler"])
        self._next_index = state["next_index"]
        self._drawn = deque(map(_group_from_record, state["planned"]))
        self._untrained = {}
        self._requeued = deque(map(_group_from_record, state["queue"]))
        self._forks.load_state_dict(state["forks"])

    def _expected_energies_if_needed(self, rollouts: Sequence[Sequence[Trajectory]]) -> list[float]:
        """Return the expected energies of rollouts, or [] if the budget does not need them."""
        return list(map(expected_energy, rollouts)) if self._settings.budget == "neyman" else []

    def _untrained_in_order(self) -> list[Group]:
        return sorted([*self._untrained.values(), *self._requeued], key=lambda group: group.index)

    def _issue_group(self) -> Group:
        """Issue a group for the next new problem, whose prompt is not yet measured."""
        if not self._drawn:
            self._draw_problem_block()
        self._newest = replace(self._drawn[0], index=self._next_index)
        self._newest_is_measured.clear()
        return self._newest

    def _draw_problem_block(self) -> None:
        """Draw the next block of problems and distribute its rollouts."""
        settings = self._settings
        draws = self._sampler.draw(settings.groups_per_round)
        sizes = [settings.group_size] * len(draws)
        if settings.budget != "uniform":
            scores = [SCORES[settings.budget](self._sampler.posteriors, draw.key) for draw in draws]
            sizes = allocate_group_sizes(scores, sum(sizes), most=settings.largest_group)
        for draw, size in zip(draws, sizes, strict=True):
            group = Group(
                index=-1,  # known when the prompts of earlier problems are measured
                problem=draw.problem,
                size=size,
                problem_weight=settings.group_size / size,
                key=draw.key,
                widths=self._forks.best_widths(settings.branching.width),
            )
            self._drawn.append(group)

    def _replace_problem(self, group: Group, tokens: int) -> None:
        problem = group.problem
        self._sampler.exclude_problem(group.key)
        (other,) = self._sampler.draw(1)
        self._drawn[0] = replace(self._drawn[0], problem=other.problem, key=other.key)
        self._skipped += 1
        self._skipped_in_a_row += 1
        self._log_skipped(problem, tokens)
        if self._skipped_in_a_row == _MAX_SKIPPED_IN_A_ROW:
            raise SettingsError(
                f"{_MAX_SKIPPED_IN_A_ROW} consecutive problems have prompts longer than "
                f"rollout.max_prompt_tokens={self._settings.max_prompt_tokens}: raise the limit or shorten the prompts "
                f"(the last problem, {problem.id}, has {tokens} tokens)"
            )

    def _log_skipped(self, problem: Problem, tokens: int) -> None:
        """Log the first skipped problems. ``groups/skipped_long_prompt`` counts all skipped problems."""
        self._logged_count += 1
        if self._logged_count > _MAX_LOGGED:
            return
        logger.warning(
            "problem %s is skipped: its prompt has %d tokens, more than rollout.max_prompt_tokens=%d%s",
            problem.id, tokens, self._settings.max_prompt_tokens,
            "; later skips are only counted (groups/skipped_long_prompt)" if self._logged_count == _MAX_LOGGED else "",
        )  # fmt: skip


def _included_rollouts(group: Group) -> list[list[Trajectory]]:
    """Return the branches of each rollout that was not excluded. A forked rollout is one rollout."""
    data = [item for item in group.trajectories if not item.is_excluded and item.rollout_fraction > 0]
    return [list(branches) for _, branches in groupby(data, key=lambda item: item.sample)]


def _group_to_record(group: Group) -> dict[str, Any]:
    return {name: getattr(group, name) for name in _SAVED_FIELDS} | {"problem": asdict(group.problem)}


def _group_from_record(row: dict[str, Any]) -> Group:
    return Group(**{**row, "problem": Problem(**row["problem"]), "widths": tuple(row["widths"])})
