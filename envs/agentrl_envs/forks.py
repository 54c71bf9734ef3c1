"""Helpers for `Episode.fork`: close an incomplete copy, and copy an episode by repeating its actions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from agentrl_envs.episode import Episode, UnavailableError


class Closable(Protocol):
    """An object with resources to release."""

    async def close(self) -> None:
        """Release the resources."""
        ...


@asynccontextmanager
async def close_on_failure(copied: Closable) -> AsyncGenerator[None, None]:
    """Close the incomplete copy ``copied`` if the block fails or is cancelled. No other code can close the copy."""
    try:
        yield
    except BaseException:
        await copied.close()
        raise


async def replay_actions(twin: Episode, actions: Sequence[str]) -> None:
    """Start the fork ``twin`` of a running episode, and repeat its actions.

    Raises UnavailableError if the fork ends, because the environment failed or is not deterministic.
    """
    async with close_on_failure(twin):
        await twin.start()
        for number, action in enumerate(actions, 1):
            ended = (await twin.step(action)).ended
            if ended is not None:
                raise UnavailableError(
                    f"cannot fork the episode: replaying action {number} of {len(actions)} ended it ({ended}). The "
                    "environment failed or is not deterministic"
                )
