"""Replies of other families behind the gateway: their calls are read, and a history continues what was sampled."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rollout.fakes import ScriptedEngine, completion
from rollout.families import FAMILIES, MISTRAL, family_tokenizer
from rollout.gateway.chat import PROBLEM, SETTINGS, heard, request, say, user
from rollout.templates import QWEN, chat_tokenizer

from agentrl.errors import SettingsError
from agentrl.models.chat_template import ChatTemplate
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.gateway.environment import build_agent_renderer
from agentrl.rollout.gateway.render import ChatRenderer, find_call_format, find_turn_end
from agentrl.rollout.gateway.rollout import AgentRollout
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl.rollout.policy import TokenPolicy
from agentrl_envs.types import Ended

CALLS = {
    "llama": 'Let me see.\n{"name": "add", "parameters": {"a": 1}}',
    "mistral": 'Let me see.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
    "qwen_coder": (
        "Let me see.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    ),
}
TYPED = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def renderer(template: str) -> ChatRenderer:
    tokenizer = family_tokenizer(template)
    chat = ChatTemplate(tokenizer)
    return ChatRenderer(
        tokenizer,
        TextCodec(tokenizer, turn_end=find_turn_end(chat), shown_special_tokens=find_call_format(chat).tokens),
    )


@pytest.mark.parametrize("family", list(FAMILIES))
def test_calls_are_read_in_the_form_of_the_template(family: str) -> None:
    made = renderer(FAMILIES[family])
    assert made.call_format.name == family
    asked = request([user("2 + 3?")], tools=[TYPED])
    reply = made.parse_reply(CALLS[family], asked, before="", call_id_prefix="call_0")
    assert (reply.content, [(call.name, json.loads(call.arguments)) for call in reply.calls]) == (
        "Let me see.",
        [("add", {"a": 1})],
    )
    unknown = CALLS[family].replace("add", "sub")
    assert made.parse_reply(unknown, asked, before="", call_id_prefix="call_0").content == unknown


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_call_with_an_infinite_number_is_text_in_every_form(family: str) -> None:
    number = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
    asked = request([user("2 + 3?")], tools=[{"type": "function", "function": number}])
    text = re.sub(r"(?<=\W)1(?=\W)", "1e999", CALLS[family])
    reply = renderer(FAMILIES[family]).parse_reply(text, asked, before="", call_id_prefix="call_0")
    assert (reply.content, reply.calls) == (text, ())


def conversation(family: str) -> tuple[AgentRollout, ScriptedEngine]:
    """A rollout in which the model calls, and then answers."""
    made = renderer(FAMILIES[family])
    turns = iter([CALLS[family], "Five."])
    end = next(iter(made.codec.end_ids - {made.codec.eos_id}))

    def script(*_: object) -> object:
        said = completion(made.codec, next(turns), "eos")
        return type(said)(
            token_ids=(*said.token_ids[:-1], end),
            log_probs=said.log_probs,
            finish_reason="eos",
            version_spans=said.version_spans,
        )

    engine = ScriptedEngine(script)
    policy = TokenPolicy(
        problem=PROBLEM,
        settings=SETTINGS,
        step=1,
        group=0,
        sample_index=0,
        name="r",
        seed=0,
        start_time=0.0,
        engine=engine,
        codec=made.codec,
    )
    return AgentRollout(policy=policy, settings=SETTINGS, gateway=AgentGatewaySettings(), renderer=made), engine


@pytest.mark.parametrize("family", ["llama", "qwen_coder"])
async def test_a_call_and_its_response_continue_the_sequence(family: str) -> None:
    one, engine = conversation(family)
    first = await say(one, [user("2 + 3?")], tools=[TYPED])
    (call,) = first.reply.calls
    told = {"role": "tool", "content": 'It is "5"', "tool_call_id": call.id}
    last = await say(one, [user("2 + 3?"), heard(first), told], tools=[TYPED])
    assert last.parent is first
    assert engine.requests[1][1][: len(first.context_tokens)] == first.context_tokens
    shown = 'It is \\"5\\"' if family == "llama" else 'It is "5"'  # as the template writes it
    assert shown in one.renderer.codec.decode(engine.requests[1][1][len(first.context_tokens) :])


async def test_a_template_that_wants_the_call_before_its_response_writes_it_anew() -> None:
    one, engine = conversation("mistral")
    first = await say(one, [user("2 + 3?")], tools=[TYPED])
    told = {"role": "tool", "content": "5", "tool_call_id": first.reply.calls[0].id}
    last = await say(one, [user("2 + 3?"), heard(first), told], tools=[TYPED])
    assert (last.parent, one.counts) == (None, {"miss_template": 1})
    shown = one.renderer.codec.decode(engine.requests[1][1])
    assert shown.endswith(
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}] {"content": 5, "call_id": "call00000"}'
    )
    rows = one.build_trajectories(Ended.ANSWERED)
    assert [row.turns for row in rows] == [1, 1]


def test_the_form_of_hermes_is_read_where_a_template_writes_no_calls() -> None:
    bare = "{% for message in messages %}{{ message.content }}{% endfor %}"
    for template in (None, bare, QWEN):
        tokenizer = chat_tokenizer(template)
        assert ChatRenderer(tokenizer, TextCodec(tokenizer)).call_format.name == "hermes"
    assert renderer(MISTRAL).call_format.tokens[0] == "[TOOL_CALLS]"


def test_a_template_that_cannot_be_rendered_is_reported_with_its_setting(tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{{ broken }")
    tokenizer = chat_tokenizer(QWEN)
    settings = AgentGatewaySettings(chat_template=str(template))
    with pytest.raises(SettingsError, match=r"rejects several turns \(.*\): set gateway\.chat_template"):
        build_agent_renderer(tokenizer, "broken", settings)
