"""The work queue: issues problems for rollouts and keeps them until they are trained."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

from agentrl.errors import SettingsError
from agentrl.problems.sampler import ProblemSampler, SamplerState
from agentrl_envs.types import Problem

logger = logging.getLogger(__name__)

# Number of consecutive problems with prompts over the limit after which the limit is considered wrong.
_MOST_SKIPPED = 1000
# Number of skipped problems that are logged individually.
_MOST_LOGGED = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """A rollout to play.

    ``index`` numbers the problems of a run and identifies the group. The work queue issues a problem once. ``sample``
    is the number of the rollout in its group, and ``step`` the training step for which it is played.
    """

    index: int
    problem: Problem
    sample: int = 0
    step: int = 0


class RequestState(TypedDict):
    """A request in a checkpoint. ``problem`` contains the problem's fields."""

    index: int
    problem: dict[str, Any]


class QueueState(TypedDict):
    """A work queue in a checkpoint.

    ``queue`` contains the untrained requests. ``drawn`` is a problem from the sampler whose prompt is not yet measured.
    """

    sampler: SamplerState
    next_index: int
    drawn: dict[str, Any] | None
    queue: list[RequestState]


class SkippedProblemError(Exception):
    """Raised if the prompt of a problem is too long.

    ``replacement``: the request to play instead; None to leave the problem out.
    """

    def __init__(self, replacement: RolloutRequest | None) -> None:
        super().__init__("the prompt is too long")
        self.replacement = replacement


class WorkQueue:
    """Issues problems in the sampler's order and keeps them until they are trained.

    The first rollout of a problem measures its prompt, because only a started episode has a prompt. Until then, no
    other problem is issued, so that indices do not depend on which environment starts fastest. After a restart, issued
    but untrained problems are issued first, with their previous indices.
    """

    def __init__(self, sampler: ProblemSampler, *, max_prompt_tokens: int) -> None:
        """Skip and count problems with prompts over ``max_prompt_tokens``."""
        self._sampler = sampler
        self._max_prompt_tokens = max_prompt_tokens
        self._again: deque[RolloutRequest] = deque()
        self._untrained: dict[int, RolloutRequest] = {}
        self._newest: RolloutRequest | None = None
        self._measured = asyncio.Event()  # set unless the newest request awaits its prompt
        self._measured.set()
        self._next_index = 0
        self._drawn: Problem | None = None  # taken from the sampler, but its prompt is not yet measured
        self._skipped = 0
        self._skipped_in_a_row = 0
        self._logged = 0

    async def next(self) -> RolloutRequest:
        """Wait until the previous problem's prompt is measured, and issue the next problem."""
        await self._measured.wait()
        if self._again:
            self._newest = self._again.popleft()
            self._untrained[self._newest.index] = self._newest
            return self._newest
        return self._draw()

    async def newest(self) -> RolloutRequest:
        """Wait until the newest request's prompt is measured, and return the request.

        If the request's problem was skipped, the request contains its replacement.
        """
        await self._measured.wait()
        assert self._newest is not None
        return self._newest

    def measure(self, request: RolloutRequest, tokens: int | None) -> None:
        """Record the length in tokens of a request's prompt; None if the first rollout failed before it had a prompt.

        Only the first call for a request has an effect. Raises SkippedProblemError if the prompt is too long, and
        SettingsError if too many consecutive prompts are too long.
        """
        # Compare by identity, because the replacement of a skipped problem has the same index.
        if self._measured.is_set() or self._newest is None or request.problem is not self._newest.problem:
            return
        if tokens is not None and tokens > self._max_prompt_tokens:
            self._skip(request.problem, tokens)
            raise SkippedProblemError(self._draw())
        self._skipped_in_a_row = 0
        self._drawn = None
        self._next_index += 1
        self._untrained[request.index] = request
        self._measured.set()

    def requeue(self) -> None:
        """Issue untrained problems again, before new ones."""
        self._again = deque(self._all_untrained())
        self._untrained = {}
        self._measured.set()  # a drawn problem without a measured prompt follows these problems

    def trained(self, indices: Collection[int]) -> None:
        for index in indices:
            self._untrained.pop(index, None)

    def take_skipped(self) -> int:
        """Return the number of problems skipped since the last call."""
        skipped, self._skipped = self._skipped, 0
        return skipped

    def state_dict(self) -> QueueState:
        """Return the sampler's position and the untrained problems as JSON values. May be called at any time."""
        rows: list[RequestState] = [
            {"index": request.index, "problem": asdict(request.problem)} for request in self._all_untrained()
        ]
        return {
            "sampler": self._sampler.state_dict(),
            "next_index": self._next_index,
            "drawn": None if self._drawn is None else asdict(self._drawn),
            "queue": rows,
        }

    def load_state_dict(self, state: QueueState) -> None:
        self._sampler.load_state_dict(state["sampler"])
        self._next_index = state["next_index"]
        self._drawn = None if state["drawn"] is None else Problem(**state["drawn"])
        self._untrained = {}
        self._again = deque(
            RolloutRequest(index=row["index"], problem=Problem(**row["problem"])) for row in state["queue"]
        )

    def _all_untrained(self) -> list[RolloutRequest]:
        return sorted([*self._untrained.values(), *self._again], key=lambda request: request.index)

    def _draw(self) -> RolloutRequest:
        """Create a request for the next problem, whose prompt is not yet measured."""
        self._drawn = self._drawn or self._sampler.next(1)[0]
        self._newest = RolloutRequest(index=self._next_index, problem=self._drawn)
        self._measured.clear()
        return self._newest

    def _skip(self, problem: Problem, tokens: int) -> None:
        self._drawn = None
        self._skipped += 1
        self._skipped_in_a_row += 1
        self._log_skipped(problem, tokens)
        if self._skipped_in_a_row == _MOST_SKIPPED:
            raise SettingsError(
                f"{_MOST_SKIPPED} consecutive problems have prompts longer than "
                f"rollout.max_prompt_tokens={self._max_prompt_tokens}: raise the limit or shorten the prompts (the "
                f"last problem, {problem.id}, has {tokens} tokens)"
            )

    def _log_skipped(self, problem: Problem, tokens: int) -> None:
        """Log the first skipped problems. All are counted in ``groups/skipped_long_prompt``."""
        self._logged += 1
        if self._logged > _MOST_LOGGED:
            return
        logger.warning(
            "problem %s is skipped: its prompt has %d tokens, more than rollout.max_prompt_tokens=%d%s",
            problem.id, tokens, self._max_prompt_tokens,
            "; further ones are only counted (groups/skipped_long_prompt)" if self._logged == _MOST_LOGGED else "",
        )  # fmt: skip
