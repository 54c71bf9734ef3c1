"""The rollout worker: owns the sampler, the ledger, the environment and the engine, and harvests groups."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import asdict, dataclass
from typing import Any

from agentrl.errors import SettingsError, WorldError
from agentrl.problems.sampler import ProblemSampler
from agentrl.rollout.driver import Driver, Issue
from agentrl.rollout.filters import FilterRules, filter_groups
from agentrl.rollout.metrics import rollout_metrics
from agentrl.rollout.settings import RolloutSettings
from agentrl.trajectory import Group
from agentrl_envs.types import Problem

logger = logging.getLogger(__name__)

# So many problems in a row with prompts over the limit mean that the limit is wrong.
_MOST_SKIPPED = 1000


@dataclass(frozen=True, kw_only=True)
class Harvest:
    """One step's rollouts: ``played`` is everything, ``groups`` what is trained, ``no_loss`` rows without loss."""

    step: int
    played: tuple[Group, ...]
    groups: tuple[Group, ...]
    no_loss: frozenset[tuple[int, int]]
    metrics: dict[str, float]


class RolloutWorker:
    """Issues problems, plays them, filters groups. The ledger holds what was issued and not yet trained."""

    def __init__(
        self,
        *,
        driver: Driver,
        sampler: ProblemSampler,
        settings: RolloutSettings,
        rules: FilterRules,
        greedy: bool = False,
    ) -> None:
        """``greedy``: every problem is also played once at temperature 0, for a baseline."""
        self._driver = driver
        self._sampler = sampler
        self._settings = settings
        self._rules = rules
        self._greedy = greedy
        self._next_index = 0
        self._ledger: list[Issue] = []
        self._skipped = 0

    async def harvest(self, step: int) -> Harvest:
        """Play this step's groups: those of the ledger first, then new ones. Raises WorldError past the deadline.

        While the filters leave too few groups, up to ``max_extra_rounds`` further rounds are played.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        deadline = began + self._settings.step_deadline
        self._skipped = 0
        needed = self._settings.problems_per_step
        first = math.ceil(needed * self._settings.oversampling)
        played = await self._round(first, step, deadline, [])
        filtered = filter_groups(played, self._rules)
        rounds = 0
        while len(filtered.groups) < needed and rounds < self._settings.max_extra_rounds:
            more = further_problems(first, needed, played=len(played), kept=len(filtered.groups))
            played = await self._round(more, step, deadline, played)
            filtered = filter_groups(played, self._rules)
            rounds += 1
        groups = filtered.groups[:needed]
        metrics = rollout_metrics(played) | {f"groups/{name}": count for name, count in filtered.counts.items()}
        metrics |= {
            "groups/trained": len(groups),
            "groups/surplus": len(filtered.groups) - len(groups),
            "groups/extra_rounds": rounds,
            "groups/skipped_long_prompt": self._skipped,
            "time/rollout_s": loop.time() - began,
        }
        return Harvest(step=step, played=tuple(played), groups=groups, no_loss=filtered.no_loss, metrics=metrics)

    def confirm(self, harvest: Harvest) -> None:
        """The step was trained: its groups leave the ledger."""
        done = {group.index for group in harvest.played}
        self._ledger = [issue for issue in self._ledger if issue.index not in done]

    def state_dict(self) -> dict[str, Any]:
        """The sampler's position and the ledger, JSON-able."""
        ledger = [{"index": issue.index, "problem": asdict(issue.problem)} for issue in self._ledger]
        return {"sampler": self._sampler.state_dict(), "next_index": self._next_index, "ledger": ledger}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; what was issued and not trained is issued first."""
        self._sampler.load_state_dict(state["sampler"])
        self._next_index = state["next_index"]
        self._ledger = [Issue(index=row["index"], problem=Problem(**row["problem"])) for row in state["ledger"]]

    async def _round(self, count: int, step: int, deadline: float, before: list[Group]) -> list[Group]:
        """Play ``count`` problems more than those of ``before``; all groups of the step in the order of issue."""
        await self._issue(len(before) + count)
        issues = self._ledger[len(before) : len(before) + count]
        played: list[Group] = []
        try:
            async with asyncio.timeout_at(deadline):
                async for group in self._driver.play(
                    issues, step=step, group_size=self._settings.group_size, greedy=self._greedy
                ):
                    played.append(group)
        except TimeoutError as error:
            raise WorldError(
                f"step {step}: {len(before) + len(played)} of {len(before) + len(issues)} groups were rolled out "
                f"within rollout.step_deadline={self._settings.step_deadline:g} s"
            ) from error
        return before + sorted(played, key=lambda group: group.index)

    async def _issue(self, wanted: int) -> None:
        skipped = 0
        while len(self._ledger) < wanted:
            problem = self._sampler.next(1)[0]
            tokens = await self._driver.prompt_tokens(problem)
            if tokens > self._settings.max_prompt_tokens:
                skipped += 1
                self._skipped += 1
                logger.warning(
                    "problem %s is skipped: its prompt has %d tokens, rollout.max_prompt_tokens is %d",
                    problem.id, tokens, self._settings.max_prompt_tokens,
                )  # fmt: skip
                if skipped >= _MOST_SKIPPED:
                    raise SettingsError(
                        f"{skipped} problems in a row have prompts over "
                        f"rollout.max_prompt_tokens={self._settings.max_prompt_tokens}: raise it or shorten them"
                    )
                continue
            skipped = 0
            self._ledger.append(Issue(index=self._next_index, problem=problem))
            self._next_index += 1


def further_problems(first: int, needed: int, *, played: int, kept: int) -> int:
    """How many problems another round issues: what should fill the batch if as many are kept as so far.

    Never more than the first round's, which is also the number where nothing was kept.

    >>> further_problems(8, 8, played=8, kept=2)
    8
    >>> further_problems(8, 8, played=16, kept=6)
    6
    """
    return first if kept == 0 else min(first, math.ceil((needed - kept) * played / kept))
