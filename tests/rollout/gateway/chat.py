"""What the tests of the gateway share: an engine that says what it is told, requests and a rollout."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rollout.fakes import ScriptedEngine, completion
from rollout.templates import QWEN, chat_tokenizer

from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.gateway.chat_completions import ChatCompletionsRequest
from agentrl.rollout.gateway.render import ChatRenderer
from agentrl.rollout.gateway.rollout import AgentRollout
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl.rollout.gateway.wire import AgentRequest, parse_api_request
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.settings import RolloutSettings
from agentrl_envs.types import Problem

PROBLEM = Problem(id="toy-0", statement="2 + 3?", answer="5", source="toy")
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
IM_END = 258
SETTINGS = RolloutSettings(max_turn_tokens=500, max_prompt_tokens=100_000, max_response_tokens=100_000)


def chat_codec(template: str | None = QWEN) -> tuple[Any, TextCodec]:
    tokenizer = chat_tokenizer(template)
    return tokenizer, TextCodec(tokenizer, turn_end="<|im_end|>" if template else "")


def speaking(codec: TextCodec, say: Callable[[int], str], *, end: int | None = IM_END) -> ScriptedEngine:
    """An engine whose n-th reply of all is ``say(n)`` with a log-probability of its own, ended by the token ``end``."""
    count = 0

    def script(trajectory_id: str, number: int) -> Any:
        nonlocal count
        count += 1
        made = completion(codec, say(count - 1), "eos" if end is not None else "length")
        ids = made.token_ids if end is None else (*made.token_ids[:-1], end)
        return type(made)(
            token_ids=ids,
            log_probs=(-0.001 * count,) * len(ids),
            finish_reason=made.finish_reason,
            version_spans=((0, len(ids)),),
        )

    return ScriptedEngine(script)


def rollout(
    engine: Any,
    *,
    template: str | None = QWEN,
    settings: RolloutSettings = SETTINGS,
    history: Any = "keep",
    generations: int = 1000,
    **place: Any,
) -> AgentRollout:
    tokenizer, codec = chat_codec(template)
    values = {
        "problem": PROBLEM,
        "step": 1,
        "group": 0,
        "sample_index": 0,
        "name": "r",
        "seed": 0,
        "start_time": 0.0,
    } | place
    return AgentRollout(
        policy=TokenPolicy(settings=settings, engine=engine, codec=codec, **values),
        settings=settings,
        gateway=AgentGatewaySettings(history=history, max_generations=generations),
        renderer=ChatRenderer(tokenizer, codec),
    )


def body(messages: Sequence[dict[str, Any]], **more: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": list(messages), **more}).encode()


def request(messages: Sequence[dict[str, Any]], *, trainable: bool = True, **more: Any) -> AgentRequest:
    call = parse_api_request(ChatCompletionsRequest, body(messages, **more), model="policy")
    return replace(call.to_agent_request(lambda id: ()), trainable=trainable)


async def say(one: AgentRollout, messages: Sequence[dict[str, Any]], *, trainable: bool = True, **more: Any) -> Any:
    """The generation that answers ``messages``."""
    asked = request(messages, trainable=trainable, **more)
    return await one.answer_request(asked, body=body(messages, **more), retry=False, key=None)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def heard(generation: Any) -> dict[str, Any]:
    """The reply as a client sends it back."""
    reply = generation.reply
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message
