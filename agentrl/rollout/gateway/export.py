"""From a tree of generations to trajectories: one for each leaf, every sampled token with loss in exactly one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from agentrl.rollout.gateway.tree import Generation, GenerationTree
from agentrl.rollout.policy import TokenPolicy
from agentrl.trajectory import Segment, Trajectory
from agentrl_envs.types import Ended


def export(
    tree: GenerationTree, policy: TokenPolicy, *, ended: Ended, reward: float, seconds: float
) -> tuple[Trajectory, ...]:
    """The rollout's trajectories. The last one carries the reward; their weights sum to 1.

    A branch's prompt is everything before its first own generation. A rollout without a token to train, or without
    data, is one trajectory without segments.
    """
    made = partial(policy.trajectory, seconds=seconds)
    lines = [] if ended.is_no_data else tree.branches()
    if not lines:
        failed = ended if ended.is_no_data else Ended.INFRASTRUCTURE_FAILURE
        return (made(prompt_ids=(), segments=(), ended=failed),)
    counts = [_sampled(line) for line in lines]
    forks = _forks(lines)
    return tuple(
        made(
            prompt_ids=_prompt(line),
            segments=_segments(line, reward if number == len(lines) - 1 else 0.0),
            ended=ended,
            branch=number,
            branches=len(lines),
            parent=forks[number][0],
            fork=forks[number][1],
            weight=count / sum(counts),
        )
        for number, (line, count) in enumerate(zip(lines, counts, strict=True))
    )


def _sampled(line: Sequence[Generation]) -> int:
    """How many tokens are to be trained."""
    return sum(len(one.completion.token_ids) for one in line if one.counts)


def _forks(lines: Sequence[Sequence[Generation]]) -> list[tuple[int, int]]:
    """The line behind whose tokens each one begins, and how many of these it trains; (-1, 0) if there are none."""
    line_of = {one.id: number for number, line in enumerate(lines) for one in line}
    found = []
    for line in lines:
        parent, number, fork = line[0].parent, -1, 0
        while parent is not None and not fork:  # a line that trains nothing before the fork passes its own fork on
            number = line_of[parent.id]
            shared = [one for one in lines[number] if one.id <= parent.id]
            fork, parent = _sampled(shared), lines[number][0].parent
        found.append((number, fork) if fork else (-1, 0))
    return found


def _prompt(line: Sequence[Generation]) -> tuple[int, ...]:
    """Everything before the first generation that is trained."""
    return next(one for one in line if one.counts).prompt.context


def _segments(line: Sequence[Generation], reward: float) -> tuple[Segment, ...]:
    """Sampled tokens and what stands between them; what is not to be trained is observation."""
    places = [place for place, one in enumerate(line) if one.counts]
    segments: list[Segment] = []
    waiting: list[tuple[tuple[int, ...], str]] = []
    for one in line[places[0] : places[-1] + 1]:
        if segments:
            waiting.append((one.prompt.token_ids, one.prompt.text))
        if not one.counts:
            waiting.append((one.completion.token_ids, one.text))
            continue
        token_ids = tuple(token for ids, _ in waiting for token in ids)
        if token_ids:
            text = "".join(said for _, said in waiting)
            segments.append(Segment(origin="observation", token_ids=token_ids, text=text))
        waiting = []
        segments.append(
            Segment(
                origin="model",
                token_ids=one.completion.token_ids,
                text=one.text,
                log_probs=one.completion.log_probs,
                version_spans=one.completion.version_spans,
                reward=reward if one is line[places[-1]] else 0.0,
            )
        )
    return tuple(segments)
