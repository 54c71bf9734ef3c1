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
        self, *, driver: Driver, sampler: ProblemSampler, settings: RolloutSettings, rules: FilterRules
    ) -> None:
        self._driver = driver
        self._sampler = sampler
        self._settings = settings
        self._rules = rules
        self._next_index = 0
        self._ledger: list[Issue] = []
        self._skipped = 0

    async def harvest(self, step: int) -> Harvest:
        """Play this step's groups: those of the ledger first, then new ones. Raises WorldError past the deadline."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._skipped = 0
        wanted = math.ceil(self._settings.problems_per_step * self._settings.oversampling)
        await self._issue(wanted)
        issues = self._ledger[:wanted]
        played: list[Group] = []
        try:
            async with asyncio.timeout(self._settings.step_deadline):
                async for group in self._driver.play(issues, step=step, group_size=self._settings.group_size):
                    played.append(group)
        except TimeoutError as error:
            raise WorldError(
                f"step {step}: {len(played)} of {len(issues)} groups were rolled out within "
                f"rollout.step_deadline={self._settings.step_deadline:g} s"
            ) from error
        played.sort(key=lambda group: group.index)
        filtered = filter_groups(played, self._rules)
        groups = filtered.groups[: self._settings.problems_per_step]
        metrics = rollout_metrics(played) | {f"groups/{name}": count for name, count in filtered.counts.items()}
        metrics |= {
            "groups/trained": len(groups),
            "groups/surplus": len(filtered.groups) - len(groups),
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
