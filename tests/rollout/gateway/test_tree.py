"""Requests are matched with what was sampled; whatever an agent does, each sampled token carries loss exactly once."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout.fakes import assert_routed
from rollout.gateway.chat import ADD, chat_codec, heard, rollout, say, speaking, user
from rollout.templates import QWEN, THINKING

from agentrl.trajectory import Trajectory
from agentrl_envs.types import Ended


def played(one: Any, ended: Ended = Ended.ANSWERED) -> tuple[Trajectory, ...]:
    one.reward = 1.0
    return one.build_trajectories(ended)


def engine_of(*texts: str) -> Any:
    return speaking(chat_codec()[1], lambda number: texts[number % len(texts)])


async def test_a_conversation_is_one_sequence_of_the_tokens_that_the_engine_was_given() -> None:
    engine = engine_of("first", "second")
    one = rollout(engine)
    first = await say(one, [user("a")])
    await say(one, [user("a"), heard(first), user("b")])
    (trajectory,) = played(one)
    assert [segment.origin for segment in trajectory.segments] == ["model", "observation", "model"]
    assert trajectory.segments[1].text == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    given_to_engine = engine.requests[1][1]
    assert (*trajectory.prompt_ids, *trajectory.response_ids)[: len(given_to_engine)] == given_to_engine
    assert (trajectory.reward, trajectory.weight, trajectory.branches) == (1.0, 1.0, 1)


async def test_a_reply_that_was_cut_gets_the_end_of_its_turn_as_an_observation() -> None:
    engine = speaking(chat_codec()[1], lambda number: "cut", end=None)
    one = rollout(engine)
    first = await say(one, [user("a")])
    await say(one, [user("a"), heard(first), user("b")])
    (trajectory,) = played(one)
    assert trajectory.segments[1].text.startswith("<|im_end|>\n<|im_start|>user\n")


async def test_an_edit_is_a_branch_whose_prompt_holds_what_both_share() -> None:
    engine = engine_of("one", "two", "three")
    one = rollout(engine)
    first = await say(one, [user("a")])
    await say(one, [user("a"), heard(first), user("b")])
    await say(one, [user("a"), heard(first), user("another")])
    main, branch = played(one)
    assert [segment.text for segment in main.segments if segment.origin == "model"] == ["one", "two"]
    assert [segment.text for segment in branch.segments] == ["three"]
    assert branch.prompt_ids == engine.requests[2][1]
    assert (main.reward, branch.reward) == (0.0, 1.0)
    assert main.weight + branch.weight == pytest.approx(1.0)
    assert (main.parent, main.fork, branch.parent) == (-1, 0, 0)
    assert branch.fork == len(main.segments[0].token_ids)
    assert one.counts == {}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"messages": lambda messages: [messages[0], {**messages[1], "content": "rewritten"}, messages[2]]}, "edited"),
        ({"tools": [ADD]}, "tools"),
        ({"messages": lambda m: [m[0], {**m[1], "reasoning_content": "other"}, m[2]]}, "reasoning"),
    ],
)
async def test_what_does_not_continue_the_last_reply_is_counted_by_its_cause(change: Any, cause: str) -> None:
    one = rollout(engine_of("<think>mine</think>said"))
    first = await say(one, [user("a")])
    messages = [user("a"), heard(first), user("b")]
    await say(one, change.get("messages", list)(messages), **{k: v for k, v in change.items() if k != "messages"})
    assert one.counts == {f"miss_{cause}": 1}
    assert len(played(one)) == 2


async def test_thoughts_that_a_client_drops_stay_in_the_sequence() -> None:
    engine = engine_of("<think>mine</think>said")
    one = rollout(engine)
    first = await say(one, [user("a")])
    assert (first.reply.reasoning, first.reply.content) == ("mine", "said")
    await say(one, [user("a"), {"role": "assistant", "content": "said"}, user("b")])
    (trajectory,) = played(one)
    assert trajectory.turns == 2


async def test_history_template_starts_a_sequence_where_the_template_strips_thoughts() -> None:
    engine = engine_of("<think>mine</think>said", "plain")
    one = rollout(engine, template=THINKING, history="template")
    codec = chat_codec(THINKING)[1]
    first = await say(one, [user("a")])
    second = await say(one, [user("a"), heard(first), user("b")])
    assert codec.decode(engine.requests[1][1]) == "user\na\nassistant\nsaid\nuser\nb\nassistant\n"
    third = await say(one, [user("a"), heard(first), user("b"), heard(second), user("c")])
    assert third.parent is second
    assert [item.turns for item in played(one)] == [1, 2]


async def test_calls_are_read_and_their_answers_continue_the_sequence() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    one = rollout(engine_of(f"sum\n{call}", "3"))
    first = await say(one, [user("a")], tools=[ADD])
    assert first.reply.content == "sum"
    assert [(made.id, made.name, made.arguments) for made in first.reply.calls] == [
        ("call_0_0", "add", '{"a": 1, "b": 2}')
    ]
    sent = heard(first)
    sent["tool_calls"][0] |= {"id": "other", "function": {"name": "add", "arguments": '{"b":2,"a":1}'}}
    answer = {"role": "tool", "content": "3", "tool_call_id": "other"}
    await say(one, [user("a"), sent, answer], tools=[ADD])
    (trajectory,) = played(one)
    assert trajectory.segments[1].text == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "no", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"\\ud800": 1}}</tool_call>',
        pytest.param(
            '<tool_call>{"name": "add", "arguments": ' + '{"a": ' * 300 + "1" + "}" * 301 + "</tool_call>", id="deep"
        ),
    ],
)
async def test_a_call_that_cannot_be_made_is_text(text: str) -> None:
    one = rollout(engine_of(text))
    assert (await say(one, [user("a")], tools=[ADD])).reply.content == text


@pytest.mark.parametrize("arguments", ['{"a": ', "add 1 and 2", '{"a":' * 1000 + "1" + "}" * 1000])
async def test_arguments_that_are_no_json_are_an_edit_that_is_told_as_text(arguments: str) -> None:
    engine = engine_of('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "next")
    one = rollout(engine)
    sent = heard(await say(one, [user("a")], tools=[ADD]))
    sent["tool_calls"][0]["function"]["arguments"] = arguments
    answer = {"role": "tool", "content": "3", "tool_call_id": "call_0_0"}
    reply = await say(one, [user("a"), sent, answer], tools=[ADD])
    assert (reply.parent, one.counts) == (None, {"miss_edited": 1})
    assert json.dumps(arguments) in chat_codec()[1].decode(engine.requests[1][1])


async def test_of_two_equal_siblings_the_one_whose_call_ids_occur_is_continued() -> None:
    one = rollout(engine_of('<tool_call>{"name": "add", "arguments": {}}</tool_call>'))
    first = await say(one, [user("a")], tools=[ADD])
    second = await say(one, [user("a")], tools=[ADD])
    for chosen in (first, second):
        answer = {"role": "tool", "content": "3", "tool_call_id": chosen.reply.calls[0].id}
        assert (await say(one, [user("a"), heard(chosen), answer], tools=[ADD])).parent is chosen


async def test_a_history_of_another_model_is_a_new_sequence_in_which_its_tokens_are_text() -> None:
    engine = engine_of("mine", "next")
    one = rollout(engine)
    await say(one, [user("a")])
    theirs = "<|start_header_id|>assistant<|end_header_id|>yours<|eot_id|>\u0120\u2581"
    reply = await say(one, [user("a"), {"role": "assistant", "content": theirs}, user("b")])
    assert (reply.parent, one.counts) == (None, {"miss_edited": 1})
    assert theirs in chat_codec()[1].decode(engine.requests[1][1])
    assert [[segment.text for segment in row.segments] for row in played(one)] == [["mine"], ["next"]]


async def test_special_tokens_in_what_others_say_are_text() -> None:
    engine = engine_of("x")
    one = rollout(engine)
    tool = {"type": "function", "function": {"name": "add", "description": "<|im_end|>", "parameters": {}}}
    calls = [{"id": "1", "function": {"name": "add", "arguments": '{"a": "<|im_end|>"}'}}]
    said = {"role": "assistant", "content": "<|im_end|>", "tool_calls": calls}
    await say(one, [user("<|im_end|>"), said, user("\ue0000\ue002")], tools=[tool])
    ids = engine.requests[0][1]
    plain, _ = chat_codec()
    # Those of the system's message, two of the user's and one of the assistant's, all set by the template.
    assert ids.count(plain.convert_tokens_to_ids("<|im_end|>")) == 4
    assert ids.count(plain.convert_tokens_to_ids("<|im_start|>")) == 5  # the fifth begins the reply


async def test_an_undelivered_reply_carries_no_loss_until_the_client_sends_it_back() -> None:
    one = rollout(engine_of("one", "two", "three"))
    first = await say(one, [user("a")])
    one.record_delivery(first, received=False)
    again = await say(one, [user("a")])
    (trajectory,) = played(one)
    assert [segment.text for segment in trajectory.segments] == ["two"]
    await say(one, [user("a"), heard(first), user("b")])
    assert first.delivered
    assert [item.turns for item in played(one)] == [1, 2]
    assert again.is_trained


async def test_what_is_not_to_be_trained_is_an_observation() -> None:
    one = rollout(engine_of("one", "two", "three"))
    messages = [user("a")]
    for train in (True, False, True):
        answer = await say(one, messages, trainable=train)
        messages += [heard(answer), user("more")]
    (trajectory,) = played(one)
    assert [segment.origin for segment in trajectory.segments] == ["model", "observation", "model"]
    assert "two" in trajectory.segments[1].text


async def test_a_template_that_writes_earlier_messages_anew_starts_a_sequence() -> None:
    moving = (
        "{%- for message in messages %}<|im_start|>{{ message.role }}{% if loop.last %} (last){% endif %}{{ '\\n' }}"
        "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    engine = engine_of("one", "two")
    one = rollout(engine, template=moving)
    first = await say(one, [user("a")])
    second = await say(one, [user("a"), heard(first), user("b")])
    assert (second.parent, one.counts) == (None, {"miss_template": 1})
    codec = chat_codec(moving)[1]
    assert codec.decode(engine.requests[1][1]) == "user\na\nassistant\none\nuser (last)\nb\nassistant\n"
    assert len(played(one)) == 2


# -- properties: any agent, against a slow reference that keeps every request ------------------------------------------

SAID = ["one", "two", " two\n", "<think>hm</think>one", "<think>so</think>two"]
CALLS = [
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call>',
    SAID[0] + "<tool_call>{}</tool_call>",
]


class Agent:
    """Does to its conversations what clients do, at random; remembers which replies it never heard."""

    def __init__(self, seed: int, template: str) -> None:
        self.random = random.Random(seed)
        texts = SAID + CALLS
        codec = chat_codec(template)[1]
        self.engine = speaking(codec, lambda number: self.random.choice(texts), end=None if seed % 3 == 0 else 258)
        self.one = rollout(self.engine, template=template)
        self.conversations: list[list[dict[str, Any]]] = [[user("start")]]
        self.frozen: set[int] = set()
        self.gone: set[int] = set()

    async def act(self, action: str) -> None:
        messages = json.loads(json.dumps(self.random.choice(self.conversations)))
        place = self.random.randrange(len(messages))
        if action == "edit":
            messages[place]["content"] = self.random.choice(SAID)
        elif action == "truncate":
            messages = messages[: place + 1]
        elif action == "drop_reasoning":
            for message in messages:
                message.pop("reasoning_content", None)
        elif action == "rename":
            for message in messages:
                for call in message.get("tool_calls", []):
                    value = json.loads(call["function"]["arguments"])
                    call["id"] = "renamed"
                    call["function"]["arguments"] = json.dumps(dict(reversed(value.items())), indent=1)
        if messages[-1]["role"] == "assistant":
            messages.append(self.answer(messages[-1]))
        tools = [ADD] if action != "other_tools" else [ADD, {**ADD, "function": {"name": "sub"}}]
        times = 2 if action == "parallel" else 1
        trained = action != "frozen"
        replies = await asyncio.gather(*(say(self.one, messages, tools=tools, trainable=trained) for _ in range(times)))
        for reply in replies:
            if action == "frozen":
                self.frozen.add(reply.id)
            if action == "gone":
                self.one.record_delivery(reply, received=False)
            self.conversations.append([*messages, heard(reply)])
        if action == "gone":
            self.conversations.pop()  # the client never heard it
            self.gone.add(replies[0].id)

    def answer(self, said: dict[str, Any]) -> dict[str, Any]:
        if said.get("tool_calls"):
            return {"role": "tool", "content": "3", "tool_call_id": said["tool_calls"][0]["id"]}
        return user(self.random.choice(["more", " more", "<|im_end|>"]))


ACTIONS = [
    "edit",
    "truncate",
    "drop_reasoning",
    "rename",
    "other_tools",
    "parallel",
    "frozen",
    "gone",
    "plain",
    "plain",
]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=14))
@pytest.mark.parametrize("template", [QWEN, THINKING])
def test_whatever_an_agent_does_every_sampled_token_is_trained_once_behind_what_the_engine_saw(
    template: str, seed: int, actions: list[str]
) -> None:
    agent = Agent(seed, template)

    async def play() -> None:
        for action in actions:
            await agent.act(action)

    asyncio.run(play())
    one = agent.one
    rows = played(one)
    # The reference: what each reply, known by its log-probability, was sampled behind.
    generations = {one.completion.log_probs[0]: one for one in one.tree.generations}
    seen = {round(-0.001 * (place + 1), 6): item[1] for place, item in enumerate(agent.engine.requests)}
    trained: list[float] = []
    for row in rows if not rows[0].is_excluded else ():
        context = row.prompt_ids
        for segment in row.segments:
            if segment.origin == "model":
                key = segment.log_probs[0]
                assert context == seen[round(key, 6)]
                assert segment.token_ids == generations[key].completion.token_ids
                trained.append(key)
            context += segment.token_ids
    delivered = {key for key, each in generations.items() if each.trainable and each.delivered is not False}
    assert sorted(trained) == sorted(delivered)
    assert {each.id for each in generations.values() if not each.trainable} == agent.frozen
    assert {each.id for each in generations.values() if each.delivered is False} <= agent.gone
    if trained:
        assert sum(row.weight for row in rows) == pytest.approx(1.0)
        assert [row.reward for row in rows] == [0.0] * (len(rows) - 1) + [1.0]
        for row in rows:
            first = generations[next(segment.log_probs[0] for segment in row.segments if segment.origin == "model")]
            before = [
                value for each in first.path_from_root[:-1] if each.is_trained for value in each.completion.log_probs
            ]
            assert trained_before(rows, row) == before


def trained_before(rows: tuple[Trajectory, ...], row: Trajectory) -> list[float]:
    """What the trained tokens on the way from the root to a row's first own one were sampled with."""
    if row.parent < 0:
        return []
    parent = rows[row.parent]
    own = [value for segment in parent.segments for value in segment.log_probs]
    return trained_before(rows, parent) + own[: row.fork]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=14))
def test_a_request_continues_the_deepest_reply_that_a_search_through_every_request_finds(
    seed: int, actions: list[str]
) -> None:
    agent = Agent(seed, QWEN)
    history: list[tuple[Any, ...]] = []  # tools, keys of messages with the reply, thoughts, the generation
    original = agent.one.tree.match_request

    def checked(request: Any) -> Any:
        parent, new_messages, mismatch = original(request)
        keys = [message.content_key for message in request.messages]
        depths = [
            len(told)
            for digest, told, thoughts, _ in history
            if digest == request.tools_digest
            and told == keys[: len(told)]
            and all(
                request.messages[place].reasoning is None or request.messages[place].reasoning == thought
                for place, thought in thoughts.items()
            )
        ]
        assert len(request.messages) - len(new_messages) == max(depths, default=0)
        return parent, new_messages, mismatch

    add = agent.one.tree.add

    def noted(generation: Any, digest: str) -> None:
        add(generation, digest)
        thoughts = {place: each.reply.reasoning or "" for place, each in generation.replies_by_position.items()}
        history.append((digest, [message.content_key for message in generation.conversation], thoughts, generation))

    agent.one.tree.match_request, agent.one.tree.add = checked, noted  # type: ignore[method-assign]

    async def play() -> None:
        for action in actions:
            await agent.act(action)

    asyncio.run(play())


async def test_every_branch_has_the_routes_of_all_its_tokens() -> None:
    """Includes prompt tokens that other branches or a generation without loss have sampled."""
    one = rollout(engine_of("one", "two", "three", "four"), routed=True)
    first = await say(one, [user("a")])
    one.tree.generations[0].trainable = False
    second = await say(one, [user("a"), heard(first), user("b")])
    await say(one, [user("a"), heard(first), user("b"), heard(second), user("c")])
    await say(one, [user("a"), heard(first), user("another")])
    branches = played(one)
    assert [len(item.segments) for item in branches] == [3, 1]
    for item in branches:
        assert_routed(item)
