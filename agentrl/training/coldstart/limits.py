"""The limits of rollouts, compared with the prompts of problems and with demonstrations before anything is trained."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.errors import SettingsError
from agentrl.problems.sources import FILE_KINDS, evaluation_set, load_source
from agentrl.rollout.environment import needs_answers
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from agentrl.config import Settings

_MEASURED = 64  # problems of each source


@dataclass(frozen=True, kw_only=True)
class EncodedDemonstration:
    """A demonstration in tokens: prompt, response and which response tokens are the model's."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    response_mask: tuple[bool, ...]

    @property
    def longest_turn(self) -> int:
        """The most tokens that the model writes without an observation in between."""
        return max((len(list(run)) for own, run in itertools.groupby(self.response_mask) if own), default=0)


def measured_problems(settings: Settings) -> list[Problem]:
    """Problems of each source to train on that needs no download, evenly spaced."""
    answered = needs_answers(settings)
    return [
        problem
        for entry in settings.data.train
        if entry.is_generated or entry.path.lower().endswith(FILE_KINDS)
        for problem in evaluation_set(load_source(entry, seed=settings.seed, answered=answered).source, _MEASURED)
    ]


def check_limits(settings: Settings, prompts: Sequence[int], shown: Sequence[EncodedDemonstration]) -> None:
    """Warn of prompts with more tokens than the limits of rollouts, and of demonstrations that these would cut off.

    Raises SettingsError if all ``prompts`` have more: nothing could be trained.
    """
    rollout = settings.rollout
    longest = max(prompts, default=0)
    if min(prompts, default=0) > rollout.max_prompt_tokens:
        raise SettingsError(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens}: each of {len(prompts)} prompts of data.train has "
            f"more tokens, up to {longest}; valid: at least {longest}"
        )
    _warn("max_prompt_tokens", rollout.max_prompt_tokens, prompts, "prompts of data.train have more tokens: skipped")
    responses = [len(row.response_ids) for row in shown]
    _warn("max_response_tokens", rollout.max_response_tokens, responses, "demonstrations have longer responses")
    turns = [row.longest_turn for row in shown]
    _warn("max_turn_tokens", rollout.max_turn_tokens, turns, "demonstrations have a longer turn")


def _warn(setting: str, limit: int, lengths: Sequence[int], what: str) -> None:
    over = sum(length > limit for length in lengths)
    if over:
        logger.warning(
            "rollout.%s=%d: %d of %d %s; rollout.%s=%d holds all of them",
            setting, limit, over, len(lengths), what, setting, max(lengths),
        )  # fmt: skip
