"""What a client is sent of a generation: a whole answer, or the events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

from agentrl.rollout.gateway.wire import AgentMessage, Json


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """A reply, whole before any of it is sent. ``logprobs`` are those of its tokens if they were asked for."""

    id: str
    model: str
    message: AgentMessage
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: Json | None

    def whole(self) -> dict[str, object]:
        """The JSON of an answer that is not streamed."""
        content = None if self.message.calls else ""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": content, **self._said()},
            "finish_reason": self.finish_reason,
            "logprobs": self.logprobs,
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage()}

    def events(self, *, usage: bool) -> Iterator[bytes]:
        """The events of a streamed answer."""
        deltas: list[Json] = [{"role": "assistant", "content": ""}]
        deltas += [{name: value} for name, value in self._said(numbered=True).items()]
        choices: list[Json] = [{"delta": delta, "finish_reason": None} for delta in deltas]
        choices[-1] = {**choices[-1], "logprobs": self.logprobs}
        choices.append({"delta": {}, "finish_reason": self.finish_reason})
        head = self._head("chat.completion.chunk")
        for choice in choices:
            yield _event({**head, "choices": [{"index": 0, **choice}]})
        if usage:
            yield _event({**head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def _said(self, *, numbered: bool = False) -> dict[str, object]:
        """Its thoughts, its text and its calls, where it has them. In a stream, calls are numbered."""
        message = self.message
        calls = [
            {
                **({"index": place} if numbered else {}),
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(message.calls)
        ]
        said = {"reasoning_content": message.reasoning, "content": message.content or None, "tool_calls": calls or None}
        return {name: value for name, value in said.items() if value is not None}


def _event(values: Json) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"
