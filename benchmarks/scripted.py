"""Common code of the benchmarks' scripted engines: everything that does not depend on the script."""

from __future__ import annotations

from typing import Generic, TypeVar

from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import Completion

State = TypeVar("State")


class ScriptedEngine(Generic[State]):
    """Engine without ``generate``. ``playing`` holds the state of a subclass for each running trajectory."""

    def __init__(self) -> None:
        self.playing: dict[str, State] = {}

    def release(self, trajectory_id: str) -> None:
        self.playing.pop(trajectory_id, None)

    async def cache_use(self) -> None:
        return None

    async def health(self) -> str:
        return "scripted"

    async def close(self) -> None:
        self.playing.clear()


def written(codec: TextCodec, text: str, *, ended: bool = False) -> Completion:
    """Return a turn with this text. It ends with the end-of-sequence token if ``ended``, otherwise at a stop string."""
    ids = codec.encode(text) + ((codec.eos_id,) if ended else ())
    return Completion(
        token_ids=ids,
        log_probs=(-0.5,) * len(ids),
        finish_reason="eos" if ended else "stop",
        version_spans=((0, len(ids)),),
    )
