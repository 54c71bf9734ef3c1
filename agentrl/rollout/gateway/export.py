"""From a tree of generations to trajectories: one for each leaf, every sampled token with loss in exactly one."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.rollout.gateway.tree import Generation, GenerationTree
from agentrl.trajectory import Segment, Trajectory
from agentrl_envs.types import Ended, Problem


def export(
    tree: GenerationTree,
    *,
    problem: Problem,
    step: int,
    group: int,
    sample: int,
    ended: Ended,
    reward: float,
    seconds: float,
) -> tuple[Trajectory, ...]:
    """The rollout's trajectories. The last one carries the reward; their weights sum to 1.

    A branch's prompt is everything before its first own generation. A rollout without a token to train, or without
    data, is one trajectory without segments.
    """
    lines = [] if ended.is_no_data else tree.branches()
    if not lines:
        failed = ended if ended.is_no_data else Ended.INFRASTRUCTURE_FAILURE
        return (
            Trajectory(
                problem=problem,
                step=step,
                group=group,
                sample=sample,
                prompt_ids=(),
                segments=(),
                ended=failed,
                seconds=seconds,
            ),
        )
    counts = [sum(len(one.completion.token_ids) for one in line if one.counts) for line in lines]
    total = sum(counts)
    return tuple(
        Trajectory(
            problem=problem,
            step=step,
            group=group,
            sample=sample,
            prompt_ids=_prompt(line),
            segments=_segments(line, reward if place == len(lines) - 1 else 0.0),
            ended=ended,
            seconds=seconds,
            branch=place,
            branches=len(lines),
            weight=count / total,
        )
        for place, (line, count) in enumerate(zip(lines, counts, strict=True))
    )


def _prompt(line: Sequence[Generation]) -> tuple[int, ...]:
    """Everything before the first generation that is trained."""
    first = next(one for one in line if one.counts)
    return (() if first.parent is None else first.parent.context) + first.prompt_ids


def _segments(line: Sequence[Generation], reward: float) -> tuple[Segment, ...]:
    """Sampled tokens and what stands between them; what is not to be trained is observation."""
    places = [place for place, one in enumerate(line) if one.counts]
    segments: list[Segment] = []
    waiting: list[tuple[tuple[int, ...], str]] = []
    for one in line[places[0] : places[-1] + 1]:
        if segments:
            waiting.append((one.prompt_ids, one.prompt_text))
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
