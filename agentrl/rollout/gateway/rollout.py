"""One rollout behind the gateway: its limits, its calls to the engine and its tree of generations."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from agentrl.rollout.engines.base import Completion, EngineError
from agentrl.rollout.gateway.render import ChatRenderer, TemplateLayout
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl.rollout.gateway.tree import (
    Generation,
    GenerationTree,
    MismatchReason,
    Prompt,
    build_trajectories,
)
from agentrl.rollout.gateway.wire import AgentMessage, AgentRequest, GatewayAccess, GatewayRequestError, Reply
from agentrl.rollout.policy import TokenPolicy
from agentrl.rollout.settings import RolloutSettings
from agentrl.trajectory import Trajectory
from agentrl_envs.chat import MarkedText
from agentrl_envs.types import Ended

_NO_ROOM = "leaves no room for a reply (rollout.max_prompt_tokens, rollout.max_response_tokens)"
# Maximum factor by which a tokenizer's normalization may shorten a text.
_MAX_SHORTENING = 4


@dataclass(kw_only=True, eq=False)
class AgentRollout:
    """One rollout of an agent. Samples the replies to its requests from ``policy``, within limits."""

    policy: TokenPolicy
    settings: RolloutSettings
    gateway: AgentGatewaySettings
    renderer: ChatRenderer
    max_context: int | None = None  # maximum total tokens of prompt and response
    tree: GenerationTree = field(default_factory=GenerationTree)
    counts: Counter[str] = field(default_factory=Counter)
    stopped: Ended | None = None
    stop_reason: str = ""
    failure: str | None = None  # reason for a failure of the engine
    abandon_reason: str | None = None  # reason why the agent ended the rollout without a reward
    reward: float | None = None
    access: GatewayAccess = field(init=False, repr=False)  # set by AgentGateway.register_rollout
    taken_event: asyncio.Event = field(default_factory=asyncio.Event)  # set when a worker takes the rollout
    finished_event: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._generation_count = 0
        self._cache_lines: set[str] = set()
        self._continued_ids: set[int] = set()
        self._running: set[asyncio.Task[Generation]] = set()
        self._tasks_by_request: dict[str, asyncio.Task[Generation]] = {}

    @property
    def finished(self) -> bool:
        """True if the rollout accepts no further requests."""
        return self.finished_event.is_set()

    def raise_if_finished(self) -> None:
        """Raise GatewayRequestError if the rollout accepts no further requests."""
        if self.finished:
            raise _finished_error()

    def restart_deadline_clock(self) -> None:
        """Restart the clock of the rollout's deadline."""
        self._began = time.monotonic()

    async def answer_request(self, request: AgentRequest, *, body: bytes, retry: bool, key: str | None) -> Generation:
        """Return the generation that answers a request. A marked retry receives the generation of the first request.

        A disconnected client does not cancel the generation, because the client may retry. Raises GatewayRequestError
        if the request is rejected.
        """
        digest = key or hashlib.sha256(body).hexdigest()
        task = self._tasks_by_request.get(digest) if retry or key is not None else None
        if task is None or (task.done() and task.exception() is not None):
            self._check_limits()
            task = asyncio.create_task(self.sample_reply(request))
            self._tasks_by_request[digest] = task
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        else:
            self.counts["replayed"] += 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise  # the caller was cancelled, not the generation
            raise _finished_error() from None

    def build_reply(self, generation: Generation, request: AgentRequest) -> Reply:
        """Build the reply to a request's client."""
        completion, text = generation.completion, generation.text
        found = [(text.find(stop), stop) for stop in request.stop if stop in text]
        return Reply(
            id=f"{self.policy.name}-{generation.id}",
            message=generation.reply,
            truncated=completion.finish_reason == "length",
            stop_string=min(found)[1] if found else None,
            prompt_tokens=len(generation.context_tokens) - len(completion.token_ids),
            completion_tokens=len(completion.token_ids),
            tokens=partial(self._token_details, completion),
        )

    def conversation_up_to(self, reply_id: str) -> tuple[AgentMessage, ...]:
        """Return the conversation up to a reply, without its instructions.

        ``reply_id``: the id of the response or of one of its items. Raises GatewayRequestError if this
        rollout has no such reply.
        """
        number = reply_id.partition(f"_{self.policy.name}-")[2].partition("/")[0]
        for generation in self.tree.generations:
            if str(generation.id) == number:
                return generation.conversation[generation.starts_with_instructions :]
        raise GatewayRequestError(
            f"this rollout contains no response {reply_id!r}", code="previous_response_not_found", status=404
        )

    def count_context_tokens(self, request: AgentRequest) -> int:
        """Return the number of tokens of a request's context. Raises GatewayRequestError if the request is rejected."""
        self.raise_if_finished()
        if reason := self._reason_too_long(request):
            raise GatewayRequestError(
                reason, code=Ended.TOKEN_LIMIT.value
            )  # unlike a failed generation, a failed count does not stop the rollout
        return len(self._build_prompt(request)[0].context_tokens)

    def describe_state(self) -> dict[str, object]:
        """Return the state of the rollout for clients."""
        return {
            "problem": self.policy.problem.id,
            "generations": len(self.tree.generations),
            "finished": self.finished,
            "stopped": None if self.stopped is None else self.stopped.value,
            "reward": self.reward,
        }

    def record_delivery(self, generation: Generation, *, received: bool) -> None:
        """Record whether the client received a reply. Any successful delivery counts, because clients may retry."""
        generation.delivered = bool(generation.delivered) or received

    async def reject_further_requests(self) -> None:
        """Reject further requests, cancel running requests and release the rollout's caches in the engine."""
        self.finished_event.set()
        for task in tuple(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for cache_sequence_id in self._cache_lines:
            self.policy.engine.release(cache_sequence_id)

    def build_trajectories(self, ended: Ended) -> tuple[Trajectory, ...]:
        """Return the sampled tokens as trajectories. ``ended`` applies unless a limit stopped the rollout."""
        ended = ended if self.stopped is None or ended.is_excluded else self.stopped
        return build_trajectories(
            self.tree, self.policy, ended=ended, reward=self.reward or 0.0, seconds=time.monotonic() - self._began
        )

    def _token_details(self, completion: Completion) -> Iterator[tuple[str, bytes, float]]:
        """Yield the text, bytes and log-probability of each sampled token."""
        codec = self.renderer.codec
        for token, value in zip(completion.token_ids, completion.log_probs, strict=True):
            yield codec.decode((token,)), codec.token_bytes[token] if token < len(codec.token_bytes) else b"", value

    # -- limits, sampling and prompts ---------------------------------------------------------------------------------

    def _check_limits(self) -> None:
        self.raise_if_finished()
        limits = self.gateway
        if self._generation_count >= limits.max_generations:
            self._stop(Ended.TURN_LIMIT, f"all {limits.max_generations} generations (gateway.max_generations) are used")
        if time.monotonic() - self._began > limits.deadline:
            self._stop(Ended.DEADLINE, f"the deadline of {limits.deadline:g} s (gateway.deadline) has passed")

    def _stop(self, ended: Ended, reason: str) -> None:
        self.stopped, self.stop_reason = ended, f": {reason}"
        raise GatewayRequestError(f"the rollout was stopped: {reason}", code=ended.value, kind="rollout_stopped")

    async def sample_reply(self, request: AgentRequest) -> Generation:
        """Sample the reply to a request. Raises GatewayRequestError if the request is rejected or the engine fails."""
        if reason := self._reason_too_long(request):
            self._stop(Ended.TOKEN_LIMIT, reason)
        prompt, mismatch = self._build_prompt(request)
        if mismatch is not None:
            self.counts[f"miss_{mismatch}"] += 1
        context = prompt.context_tokens
        limit = self._max_reply_tokens(request, prompt.tokens_before_first_reply, len(context))
        number, self._generation_count = self._generation_count, self._generation_count + 1
        cache_sequence_id = self._choose_cache_sequence_id(prompt.parent, number)
        try:
            completion = await self.policy.generate(
                context,
                cache_sequence_id=cache_sequence_id,
                limit=limit,
                stop=request.stop,
                turn=number,
                routes_from=0 if prompt.parent is None else len(prompt.parent.context_tokens) - 1,
            )
        except EngineError as error:
            self.failure = f"the engine failed: {error}"
            raise GatewayRequestError(self.failure, status=503, kind="server_error") from error
        text = self.renderer.codec.decode(completion.token_ids)
        shown = text[: min((at for stop in request.stop if (at := text.find(stop)) >= 0), default=len(text))]
        reply = self.renderer.parse_reply(shown, request, before=prompt.text, call_id_prefix=f"call_{number}")
        generation = Generation(
            id=number,
            prompt=prompt,
            completion=completion,
            text=text,
            reply=reply,
            cache_sequence_id=cache_sequence_id,
            trainable=request.trainable,
            starts_with_instructions=request.starts_with_instructions,
        )
        self.tree.add(generation, request.tools_digest)
        return generation

    def _reason_too_long(self, request: AgentRequest) -> str:
        """Return an error message if the request is too long in any tokenization, otherwise "".

        Requests are checked before they are encoded, because encoding megabytes would block all rollouts.
        """
        characters = sum(len(message.content) for message in request.messages)
        tokens = self.settings.max_prompt_tokens + self.settings.max_response_tokens
        too_long = characters > tokens * self.renderer.longest_token * _MAX_SHORTENING
        return f"a context of {characters} characters {_NO_ROOM}" if too_long else ""

    def _max_reply_tokens(self, request: AgentRequest, root: int, context: int) -> int:
        """Return the maximum number of tokens of a reply.

        Raises GatewayRequestError if there is no room for a reply.
        """
        room = self.settings.max_response_tokens - (context - root)
        if self.max_context is not None:
            room = min(room, self.max_context - context)
        if root > self.settings.max_prompt_tokens or room < 1:
            self._stop(Ended.TOKEN_LIMIT, f"a context of {context} tokens {_NO_ROOM}")
        return min(self.settings.max_turn_tokens, room, request.max_tokens or room)

    def _choose_cache_sequence_id(self, parent: Generation | None, number: int) -> str:
        """Return a generation's cache sequence id: its parent's id for the first continuation, otherwise a new id."""
        if parent is not None and parent.id not in self._continued_ids:
            self._continued_ids.add(parent.id)
            return parent.cache_sequence_id
        cache_sequence_id = self.policy.name if not self._cache_lines else f"{self.policy.name}/{number}"
        self._cache_lines.add(cache_sequence_id)
        return cache_sequence_id

    def _build_prompt(self, request: AgentRequest) -> tuple[Prompt, MismatchReason | None]:
        """Return the prompt of a request, and the reason why it does not continue the last reply (None if it does)."""
        parent, new_messages, mismatch = self.tree.match_request(request)
        if parent is not None:
            appended = self._append_to_parent(request, parent, new_messages)
            if appended is not None:
                return appended, mismatch
            mismatch = "template"
        return self._build_root_prompt(request), mismatch

    def _build_root_prompt(self, request: AgentRequest) -> Prompt:
        layout = self.renderer.layout(request.messages, request)
        parts = layout.interleave_contents([message.content for message in request.messages])
        return Prompt(
            parent=None,
            messages=request.messages,
            token_ids=self.renderer.encode(parts),
            text=str(MarkedText(*parts)),
            leading_texts=layout.text_strings,
        )

    def _append_to_parent(
        self, request: AgentRequest, parent: Generation, new_messages: tuple[AgentMessage, ...]
    ) -> Prompt | None:
        """Return the prompt appended to the parent's tokens, or None if the template changes any earlier text."""
        replies = parent.replies_by_position
        messages = (*parent.conversation, *new_messages)
        try:
            layout = self.renderer.layout(messages, request, sampled=replies.keys())
        except GatewayRequestError:
            return None  # a template may require calls before their responses: render all messages again
        before = layout.texts_before(max(replies))
        if (
            before is None
            or before[:-1] != parent.prompt.leading_texts[:-1]
            or not parent.prompt.leading_texts[-1].startswith(before[-1])
        ):
            return None
        if self.gateway.history == "template" and not self._renders_as_sampled(request, layout, messages, replies):
            return None
        rest = self.renderer.mark_leading_token_as_turn_end(
            layout.interleave_contents([one.content for one in messages], len(before))
        )
        parts = (
            self.renderer.codec.parts_without_sampled_turn_end(MarkedText(*rest), parent.context_tokens) if rest else ()
        )
        return Prompt(
            parent=parent,
            messages=new_messages,
            token_ids=self.renderer.codec.encode_parts(parts),
            text=str(MarkedText(*parts)),
            leading_texts=layout.text_strings,
        )

    def _renders_as_sampled(
        self,
        request: AgentRequest,
        layout: TemplateLayout,
        messages: Sequence[AgentMessage],
        replies: Mapping[int, Generation],
    ) -> bool:
        """Return True if the template renders the client's messages as they were sampled."""
        contents = [message.content for message in messages]
        for position, one in replies.items():
            before = layout.texts_before(position)
            if before is None:
                return False
            contents[position] = one.prompt.leading_texts[-1].removeprefix(before[-1]) + one.text
        shown = self.renderer.layout(request.messages, request)
        return shown.fill_slots([message.content for message in request.messages]) == layout.fill_slots(contents)


def _finished_error() -> GatewayRequestError:
    return GatewayRequestError("the rollout is finished", status=409, code="rollout_finished")
