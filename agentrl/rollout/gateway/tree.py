"""The tree of one rollout's generations. Requests are matched against the tree message by message.

A generation is a node. It contains the messages after its parent's reply, the tokens of these messages, and the sampled
tokens. A request continues the deepest generation whose path, including its reply, is a prefix of the request. Messages
after an edit start a branch, and a request without a match starts a new root. :func:`build_trajectories` returns one
trajectory per leaf. Every trained token is in the loss of exactly one trajectory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from agentrl.rollout.engines.base import Completion
from agentrl.rollout.gateway.wire import AgentMessage, AgentRequest
from agentrl.rollout.policy import TokenPolicy
from agentrl.trajectory import Segment, Trajectory
from agentrl_envs.types import Ended

MismatchReason = Literal["edited", "tools", "reasoning", "template"]
MISMATCH_REASONS: tuple[MismatchReason, ...] = ("edited", "tools", "reasoning", "template")
"""Reasons why a request does not continue the last reply that it contains."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The messages since the parent's reply (without a parent, all messages), with their tokens and text.

    ``leading_texts``: the template's texts around all messages, used to check that a later rendering only appends.
    """

    parent: Generation | None
    messages: tuple[AgentMessage, ...]
    token_ids: tuple[int, ...]
    text: str
    leading_texts: tuple[str, ...]

    @property
    def context_tokens(self) -> tuple[int, ...]:
        """All tokens that are passed to the engine."""
        return self.token_ids if self.parent is None else self.parent.context_tokens + self.token_ids

    @property
    def tokens_before_first_reply(self) -> int:
        """The number of tokens before the first reply."""
        return len(self.token_ids) if self.parent is None else self.parent.prompt.tokens_before_first_reply


@dataclass(kw_only=True, slots=True, eq=False)
class Generation:
    """One reply and its prompt. ``cache_sequence_id`` names the sequence in the engine's cache.

    ``starts_with_instructions``: the conversation starts with instructions that later requests do not inherit.
    """

    id: int
    prompt: Prompt
    completion: Completion
    text: str
    reply: AgentMessage
    cache_sequence_id: str
    trainable: bool
    starts_with_instructions: bool = False
    delivered: bool | None = None  # None: not known yet
    children: list[Generation] = field(default_factory=list)

    @property
    def parent(self) -> Generation | None:
        """The generation that this generation continues, or None."""
        return self.prompt.parent

    @property
    def path_from_root(self) -> list[Generation]:
        """The generations from the root to this generation."""
        path = [self]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]

    @property
    def conversation(self) -> tuple[AgentMessage, ...]:
        """All messages of the conversation, including this reply."""
        return tuple(message for one in self.path_from_root for message in (*one.prompt.messages, one.reply))

    @property
    def replies_by_position(self) -> dict[int, Generation]:
        """The path's generations, by the position of their replies in the conversation."""
        found: dict[int, Generation] = {}
        position = -1
        for one in self.path_from_root:
            position += len(one.prompt.messages) + 1
            found[position] = one
        return found

    @property
    def context_tokens(self) -> tuple[int, ...]:
        """All tokens of the conversation, including this generation's tokens."""
        return tuple(token for one in self.path_from_root for token in one.prompt.token_ids + one.completion.token_ids)

    @property
    def is_trained(self) -> bool:
        """True unless the request excludes training or the client did not receive the reply."""
        return self.trainable and self.delivered is not False


class GenerationTree:
    """The generations of one rollout, indexed by their messages."""

    def __init__(self) -> None:
        self.generations: list[Generation] = []
        self._transitions: dict[tuple[int, str], int] = {}  # a trie: (state, next message's key) to next state
        self._replies: dict[int, list[Generation]] = {}
        self._digests: set[str] = set()

    def add(self, generation: Generation, tools_digest: str) -> None:
        """Add a finished generation. ``tools_digest``: digest of the request's tools and template options."""
        self._digests.add(tools_digest)
        state = 0
        for key in (tools_digest, *(message.content_key for message in generation.conversation)):
            state = self._transitions.setdefault((state, key), len(self._transitions) + 1)
        self._replies.setdefault(state, []).append(generation)
        self.generations.append(generation)
        if generation.parent is not None:
            generation.parent.children.append(generation)

    def match_request(
        self, request: AgentRequest
    ) -> tuple[Generation | None, tuple[AgentMessage, ...], MismatchReason | None]:
        """Return the generation that a request continues, the request's new messages, and the reason for a mismatch.

        The generation is the deepest one whose path is a prefix of the request. :func:`_choose_candidate_by_call_ids`
        breaks ties.
        """
        messages = request.messages
        known = list(self._matching_generations(request.tools_digest, messages))
        found: Generation | None = None
        depth = 0
        for position, candidates in reversed(known):
            agreeing = [one for one in candidates if _reasoning_matches(one, messages)]
            if agreeing:
                found, depth = _choose_candidate_by_call_ids(agreeing, messages), position + 1
                break
        for one in found.path_from_root if found is not None else ():
            one.delivered = True  # the client has received the reply, because the request contains it
        return found, messages[depth:], self._mismatch_reason(request, depth, known)

    def _mismatch_reason(
        self, request: AgentRequest, depth: int, known: Sequence[tuple[int, list[Generation]]]
    ) -> MismatchReason | None:
        """Return the reason why replies after ``depth`` do not match, or None if the request has no such replies."""
        if not any(message.role == "assistant" for message in request.messages[depth:]):
            return None
        deepest = max((position + 1 for position, _ in known), default=0)
        for digest in self._digests - {request.tools_digest}:
            if any(
                position >= max(depth, deepest) for position, _ in self._matching_generations(digest, request.messages)
            ):
                return "tools"
        return "reasoning" if deepest > depth else "edited"

    def _matching_generations(
        self, digest: str, messages: Sequence[AgentMessage]
    ) -> Iterator[tuple[int, list[Generation]]]:
        """Yield (message index, generations) for each message at which generations end."""
        state = self._transitions.get((0, digest))
        for position, message in enumerate(messages):
            if state is None:
                return
            state = self._transitions.get((state, message.content_key))
            if state in self._replies:
                yield position, self._replies[state]

    def trained_branches(self) -> list[list[Generation]]:
        """Return the branches with trained tokens, sorted by last generation.

        A branch is the list of its generations after the fork. A generation is continued by its first child that leads
        to a trained token. Its other children that lead to trained tokens start new sequences. Generations that lead to
        no trained token are left out.
        """
        live: set[int] = set()
        for one in self.generations:
            if one.is_trained:
                live.update(step.id for step in one.path_from_root)
        following = {one.id: [child for child in one.children if child.id in live] for one in self.generations}
        roots = [one for one in self.generations if one.parent is None and one.id in live]
        branches = []
        for first in [*roots, *(child for children in following.values() for child in children[1:])]:
            branch = [first]
            while following[branch[-1].id]:
                branch.append(following[branch[-1].id][0])
            branches.append(branch)
        return sorted(branches, key=lambda branch: branch[-1].id)


def _reasoning_matches(generation: Generation, messages: Sequence[AgentMessage]) -> bool:
    """Return True if the reasoning in ``messages`` matches the path. Missing reasoning counts as a match."""
    pairs = (
        (messages[position].reasoning, one.reply.reasoning) for position, one in generation.replies_by_position.items()
    )
    return all(sent is None or sent.strip() == (sampled or "").strip() for sent, sampled in pairs)


def _choose_candidate_by_call_ids(candidates: Sequence[Generation], messages: Sequence[AgentMessage]) -> Generation:
    """Return the candidate with the most call ids in the request, or the newest candidate in a tie."""
    if len(candidates) == 1:
        return candidates[0]
    ids = {call.id for message in messages for call in message.calls} | {message.call_id for message in messages}
    return max(
        candidates,
        key=lambda one: (sum(call.id in ids for step in one.path_from_root for call in step.reply.calls), one.id),
    )


def build_trajectories(
    tree: GenerationTree, policy: TokenPolicy, *, ended: Ended, reward: float, seconds: float
) -> tuple[Trajectory, ...]:
    """Return the rollout's trajectories. The last trajectory carries the reward. All weights sum to 1.

    A branch's prompt contains all tokens before its first trained generation. An excluded rollout, or a rollout without
    trained tokens, becomes one trajectory without segments.
    """
    made = partial(policy.build_trajectory, seconds=seconds)
    branches = [] if ended.is_excluded else tree.trained_branches()
    if not branches:
        failed = ended if ended.is_excluded else Ended.INFRASTRUCTURE_FAILURE
        return (made(prompt_ids=(), segments=(), ended=failed),)
    counts = [_count_trained_tokens(branch) for branch in branches]
    forks = _find_parents_and_fork_positions(branches)
    return tuple(
        made(
            prompt_ids=next(one for one in branch if one.is_trained).prompt.context_tokens,
            segments=_build_segments(branch, reward if number == len(branches) - 1 else 0.0),
            ended=ended,
            branch=number,
            branches=len(branches),
            parent=forks[number][0],
            fork=forks[number][1],
            weight=count / sum(counts),
        )
        for number, (branch, count) in enumerate(zip(branches, counts, strict=True))
    )


def _count_trained_tokens(branch: Sequence[Generation]) -> int:
    """Return the number of trained tokens of a branch."""
    return sum(len(one.completion.token_ids) for one in branch if one.is_trained)


def _find_parents_and_fork_positions(branches: Sequence[Sequence[Generation]]) -> list[tuple[int, int]]:
    """Return each branch's parent and the number of the parent's trained tokens before the fork.

    Returns (-1, 0) for a branch without a parent.
    """
    branch_of = {one.id: number for number, branch in enumerate(branches) for one in branch}
    found = []
    for branch in branches:
        parent, number, fork = branch[0].parent, -1, 0
        while parent is not None and not fork:  # skip branches without trained tokens before the fork
            number = branch_of[parent.id]
            shared = [one for one in branches[number] if one.id <= parent.id]
            fork, parent = _count_trained_tokens(shared), branches[number][0].parent
        found.append((number, fork) if fork else (-1, 0))
    return found


def _build_segments(branch: Sequence[Generation], reward: float) -> tuple[Segment, ...]:
    """Return a branch's segments: its trained replies, and all tokens between them as observations."""
    positions = [position for position, one in enumerate(branch) if one.is_trained]
    segments: list[Segment] = []
    waiting: list[tuple[tuple[int, ...], str]] = []
    routes = b"".join(one.completion.routes for one in branch[positions[0]].path_from_root[:-1])
    for one in branch[positions[0] : positions[-1] + 1]:
        if segments:
            waiting.append((one.prompt.token_ids, one.prompt.text))
        if not one.is_trained:
            waiting.append((one.completion.token_ids, one.text))
            routes += one.completion.routes
            continue
        token_ids = tuple(token for ids, _ in waiting for token in ids)
        if token_ids:
            text = "".join(text for _, text in waiting)
            segments.append(Segment(origin="observation", token_ids=token_ids, text=text))
        waiting = []
        complete = replace(one.completion, routes=routes + one.completion.routes)
        segments.append(complete.to_segment(one.text, reward=reward if one is branch[positions[-1]] else 0.0))
        routes = b""
    return tuple(segments)
