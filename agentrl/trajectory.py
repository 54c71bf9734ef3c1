"""Trajectories: the exact tokens of a conversation, the origin of each token, and how the conversation ended.

The example has a first model turn ``A0``, its observation ``E0``, and a second model turn ``A1``:

>>> from agentrl_envs.types import Ended, Problem
>>> trajectory = Trajectory(
...     problem=Problem(id="toy-0", statement="2 + 3?", answer="5", source="toy"), step=0, group=0, sample=0,
...     prompt_ids=(11, 12),
...     segments=(
...         Segment(origin="model", token_ids=(1, 2), log_probs=(-0.1, -0.2), version_spans=((0, 2),), text="A0"),
...         Segment(origin="observation", token_ids=(7, 8, 9), text="E0"),
...         Segment(origin="model", token_ids=(3,), log_probs=(-0.3,), version_spans=((0, 1),), reward=1.0, text="A1"),
...     ),
...     ended=Ended.ANSWERED,
... )
>>> trajectory.response_ids
(1, 2, 7, 8, 9, 3)
>>> trajectory.response_mask
(True, True, False, False, False, True)
>>> trajectory.rewards
(0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
>>> trajectory.reward, trajectory.turns
(1.0, 2)
>>> print(trajectory)
--- problem
2 + 3?
--- model, 2 tokens
A0
--- observation, 3 tokens
E0
--- model, 1 token
A1
=== answered, reward 1
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import accumulate
from typing import Any, Literal

from agentrl_envs.types import MAX_REWARD, Ended, Problem, ToolCall, Verdict


class TrajectoryError(AssertionError):
    """Raised if an invariant of a trajectory is violated. This is always a bug, never a property of the data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive tokens of one origin.

    ``log_probs`` contains the log-probability of each model token under the distribution from which it was sampled.
    ``version_spans`` contains (policy version, number of tokens) in order. ``reward`` is assigned to the last token.
    ``support_ids`` concatenates, for each model token, the tokens to which its distribution was restricted, and
    ``support_sizes`` contains the number of these tokens. Both are empty if tokens were sampled from the whole
    vocabulary. ``routes`` contains the experts (int16) of tokens in every layer. The routes start after the last token
    that the previous model segment's routes cover. They exclude the last token of this segment, because the engine does
    not compute that token. ``routes`` is empty if routes are not replayed. It is omitted from records, because it needs
    up to a kilobyte per token.
    """

    origin: Literal["model", "observation"]
    token_ids: tuple[int, ...]
    text: str
    log_probs: tuple[float, ...] = ()
    version_spans: tuple[tuple[int, int], ...] = ()
    reward: float = 0.0
    support_ids: Sequence[int] = ()
    support_sizes: Sequence[int] = ()
    routes: bytes = b""

    def __post_init__(self) -> None:
        if self.origin not in ("model", "observation"):
            raise TrajectoryError(f"a segment's origin must be model or observation; got {self.origin!r}")
        if not self.token_ids:
            raise TrajectoryError(f"the {self.origin} segment has no tokens")
        if self.origin == "observation":
            if self.log_probs or self.version_spans or self.reward or self.support_sizes or self.routes:
                raise TrajectoryError(
                    "an observation must not have log-probabilities, version spans, a reward, a support or routes"
                )
            return
        if len(self.log_probs) != len(self.token_ids):
            raise TrajectoryError(f"{len(self.token_ids)} model tokens but {len(self.log_probs)} log-probabilities")
        # A sum is finite only if all its terms are finite.
        if not math.isfinite(sum(self.log_probs)) or max(self.log_probs) > 1e-6:
            raise TrajectoryError(f"log-probabilities of tokens must be finite and at most 0; got {self.log_probs}")
        counts = [count for _, count in self.version_spans]
        if min(counts, default=0) < 1 or sum(counts) != len(self.token_ids):
            raise TrajectoryError(f"version spans {self.version_spans} do not cover {len(self.token_ids)} tokens")
        if self.support_sizes:
            ends = [0, *accumulate(self.support_sizes)]
            if len(ends) != len(self.token_ids) + 1 or ends[-1] != len(self.support_ids):
                raise TrajectoryError(
                    f"the supports of {len(ends) - 1} tokens contain {ends[-1]} ids, but there are "
                    f"{len(self.token_ids)} tokens and {len(self.support_ids)} ids"
                )
            for token, start, end in zip(self.token_ids, ends, ends[1:], strict=False):
                if token not in self.support_ids[start:end]:
                    raise TrajectoryError(f"token {token} is not in its support {list(self.support_ids[start:end])}")
        if not abs(self.reward) <= MAX_REWARD:  # also rejects NaN
            raise TrajectoryError(f"the reward {self.reward} is outside {-MAX_REWARD:,.0f} to {MAX_REWARD:,.0f}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One conversation as tokens. Created once by the driver, and immutable afterwards.

    ``group`` identifies the trajectories that share a baseline. It is the problem's index, which is unique in a run.

    A rollout of an agent program may have several ``branches``. Each branch is a trajectory with the same ``group`` and
    ``sample``. Every sampled token is a model token of one branch. The prompt of a branch may continue the conversation
    of another branch, its parent. ``parent`` is the parent's index, and ``fork`` is the number of the parent's model
    tokens that the prompt contains. ``weight`` is the branch's fraction of the rollout's model tokens. A *forked*
    rollout is a tree of alternatives whose edges are the branches. A branch that ended as ``forked`` continues in
    several branches. Every other branch ends a path and has a separate reward. ``path_weight`` is the weight of the
    branch (:func:`assign_path_weights`), and None in rollouts that are not forked. In forked rollouts, the tokens in
    ``weight`` are weighted by ``path_weight``, and ``reward`` is the reward of the path or, for a forked branch, the
    mean over its paths.

    ``problem_weight`` is a factor in the loss. It gives problems with different numbers of rollouts the same weight.

    The rollout's reward is assigned to tokens of the last branch. ``reward_elsewhere`` is the reward on tokens of other
    branches, so that ``reward`` is equal on all branches. ``reward_parts`` contains the values of custom reward
    functions, each summed over all turns and without its weight.
    """

    problem: Problem
    step: int
    group: int
    sample: int
    prompt_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    ended: Ended
    verdict: Verdict | None = None
    answer: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    seconds: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    branch: int = 0
    branches: int = 1
    parent: int = -1  # -1: starts a conversation
    fork: int = 0
    weight: float = 1.0
    problem_weight: float = 1.0
    path_weight: float | None = None
    reward_elsewhere: float = 0.0

    def __str__(self) -> str:
        """Return the conversation as text. ``repr`` includes the tokens."""
        parts = [("problem", self.problem.statement)]
        for item in self.segments:
            count = len(item.token_ids)
            parts.append((f"{item.origin}, {count} token{'s' * (count > 1)}", item.text))
        branch = f"branch {self.branch + 1} of {self.branches}, " if self.branches > 1 else ""
        last = f"=== {branch}{self.ended}, reward {self.reward:g}"
        return "\n".join([*(f"--- {title}\n{text.strip()}" for title, text in parts), last])

    def __post_init__(self) -> None:
        if not 0 <= self.branch < self.branches:
            raise TrajectoryError(f"branch index {self.branch} is invalid for {self.branches} branches")
        if not -1 <= self.parent < self.branches or self.parent == self.branch or (self.parent >= 0) != (self.fork > 0):
            raise TrajectoryError(f"branch {self.branch} cannot fork after {self.fork} tokens of branch {self.parent}")
        if self.is_excluded:
            return
        if not self.prompt_ids:
            raise TrajectoryError(f"a trajectory that ended as '{self.ended}' must have a prompt")
        if not any(segment.origin == "model" for segment in self.segments):
            raise TrajectoryError(f"a trajectory that ended as '{self.ended}' must have at least one model token")

    @property
    def response_ids(self) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def response_mask(self) -> tuple[bool, ...]:
        """For each response token, True if the model sampled it."""
        return tuple(segment.origin == "model" for segment in self.segments for _ in segment.token_ids)

    @property
    def log_probs(self) -> tuple[float, ...]:
        """The engine's log-probability of each response token, or 0 if the model did not sample the token."""
        return tuple(value for item in self.segments for value in item.log_probs or (0.0,) * len(item.token_ids))

    @property
    def rewards(self) -> tuple[float, ...]:
        """The reward of each response token. A turn's reward is assigned to its last model token."""
        return tuple(value for item in self.segments for value in (*(0.0,) * (len(item.token_ids) - 1), item.reward))

    @property
    def reward(self) -> float:
        """The undiscounted reward of the whole rollout, equal on all of its branches."""
        return math.fsum([self.reward_elsewhere, *(segment.reward for segment in self.segments)])

    @property
    def turns(self) -> int:
        """Number of model turns. A turn that the engine generated in several parts is one segment, and counts once."""
        return sum(segment.origin == "model" for segment in self.segments)

    @property
    def model_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.segments if segment.origin == "model")

    @property
    def rollout_fraction(self) -> float:
        """Fraction of the rollout that this trajectory represents: ``path_weight``, or 1 without a fork."""
        return 1.0 if self.path_weight is None else self.path_weight

    @property
    def token_weight(self) -> float:
        """Weight of each model token of the trajectory, in the loss and in the loss's normalizer."""
        return self.problem_weight * self.rollout_fraction

    @property
    def length(self) -> int:
        """Number of prompt and response tokens."""
        return len(self.prompt_ids) + sum(len(segment.token_ids) for segment in self.segments)

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy version that sampled each response token, or -1 if the model did not sample the token."""
        spans = (span for item in self.segments for span in item.version_spans or ((-1, len(item.token_ids)),))
        return tuple(version for version, count in spans for _ in range(count))

    @property
    def receives_reward(self) -> bool:
        """True if this trajectory receives a reward: the rollout's last trajectory, or any leaf of a forked rollout."""
        return self.branch == self.branches - 1 if self.path_weight is None else self.ended is not Ended.FORKED

    @property
    def is_excluded(self) -> bool:
        """True if the rollout failed for reasons outside the policy.

        Rewards, baselines and averages ignore such rollouts.
        """
        return self.ended.is_excluded or (self.verdict is not None and self.verdict.is_excluded)

    def as_single_trajectory(self) -> Trajectory:
        """Return a copy that is the only trajectory of its rollout."""
        return replace(
            self, branch=0, branches=1, parent=-1, fork=0, weight=1.0, path_weight=None, reward_elsewhere=0.0
        )

    def with_rewards(self, turns: Sequence[float], parts: Mapping[str, float]) -> Trajectory:
        """Return a copy with one reward per model turn, and with the reward functions' values as ``reward_parts``."""
        rewards = iter(turns)
        segments = tuple(
            replace(segment, reward=next(rewards)) if segment.origin == "model" else segment
            for segment in self.segments
        )
        return replace(self, segments=segments, reward_parts=dict(parts))

    def to_record(self) -> dict[str, Any]:
        """Return a JSON-serializable record with all fields."""
        record = _fields_as_dict(self)  # asdict would copy every token separately
        record["problem"] = asdict(self.problem)
        record["segments"] = [_fields_as_dict(segment) for segment in self.segments]
        record["tool_calls"] = [asdict(call) for call in self.tool_calls]
        return record

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Trajectory:
        """Create a trajectory from the result of :meth:`to_record`, before or after a round trip through JSON.

        >>> problem = Problem(id="toy-0", statement="2 + 3?", answer="5", source="toy")
        >>> segment = Segment(origin="model", token_ids=(1,), log_probs=(-0.5,), version_spans=((3, 1),), text="5")
        >>> one = Trajectory(problem=problem, step=1, group=4, sample=0, prompt_ids=(9,), segments=(segment,),
        ...                  ended=Ended.STOPPED)
        >>> Trajectory.from_record(one.to_record()) == one
        True
        """
        segments = (
            {
                **item,
                "token_ids": tuple(item["token_ids"]),
                "log_probs": tuple(item["log_probs"]),
                "version_spans": tuple((version, count) for version, count in item["version_spans"]),
                "support_ids": tuple(item.get("support_ids", ())),
                "support_sizes": tuple(item.get("support_sizes", ())),
            }
            for item in record["segments"]
        )
        return cls(
            **{
                **record,
                "problem": Problem(**record["problem"]),
                "prompt_ids": tuple(record["prompt_ids"]),
                "segments": tuple(Segment(**item) for item in segments),
                "ended": Ended(record["ended"]),
                "verdict": None if record["verdict"] is None else Verdict(record["verdict"]),
                "tool_calls": tuple(ToolCall(**call) for call in record["tool_calls"]),
            }
        )


def assign_path_weights(branches: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """Return the branches of a forked rollout, parents first, with their weights and the rewards of their paths.

    Every fork divides its weight equally among its branches. Excluded branches, and forks whose branches are all
    excluded, have the weight 0. The remaining branches have the weights of a fork with fewer branches. Failures affect
    no other weights.

    >>> problem = Problem(id="toy-0", statement="2 + 3?", answer="5", source="toy")
    >>> turn = Segment(origin="model", token_ids=(1,), log_probs=(-0.5,), version_spans=((3, 1),), text="5")
    >>> def branch(number, parent, ended):
    ...     return Trajectory(problem=problem, step=1, group=4, sample=0, prompt_ids=(9,), segments=(turn,),
    ...                       ended=ended, branch=number, branches=4, parent=parent, fork=int(parent >= 0),
    ...                       path_weight=1.0)
    >>> ends = (Ended.FORKED, Ended.STOPPED, Ended.STOPPED, Ended.INFRASTRUCTURE_FAILURE)
    >>> branches = [branch(n, -1 if n == 0 else 0, end) for n, end in enumerate(ends)]
    >>> [item.path_weight for item in assign_path_weights(branches)]
    [1.0, 0.5, 0.5, 0.0]
    """
    children: dict[int, int] = {}
    counted = set()
    for item in reversed(branches):
        if children.get(item.branch) if item.ended is Ended.FORKED else not item.is_excluded:
            counted.add(item.branch)
            children[item.parent] = children.get(item.parent, 0) + 1
    weights: dict[int, float] = {}
    path_rewards: dict[int, float] = {-1: 0.0}  # rewards on the path up to the end of the branch
    for item in branches:
        share = 1.0 if item.parent < 0 else weights[item.parent] / children.get(item.parent, 1)
        weights[item.branch] = share if item.branch in counted else 0.0
        rewards = math.fsum(segment.reward for segment in item.segments)
        path_rewards[item.branch] = path_rewards[item.parent] + rewards
    totals: dict[int, float] = {}  # weighted rewards of the paths through the branch
    for item in reversed(branches):
        if item.ended is not Ended.FORKED:
            totals[item.branch] = weights[item.branch] * path_rewards[item.branch]
        totals[item.parent] = totals.get(item.parent, 0.0) + totals.get(item.branch, 0.0)
    tokens = math.fsum(item.model_tokens * weights[item.branch] for item in branches)

    def reward(item: Trajectory) -> float:
        mean = item.ended is Ended.FORKED and weights[item.branch] > 0
        return totals[item.branch] / weights[item.branch] if mean else path_rewards[item.branch]

    return tuple(
        replace(
            item,
            path_weight=weights[item.branch],
            weight=item.model_tokens * weights[item.branch] / tokens if tokens else 0.0,
            reward_elsewhere=reward(item) - math.fsum(segment.reward for segment in item.segments),
        )
        for item in branches
    )


def concatenate_branches(branches: Sequence[Trajectory]) -> Trajectory:
    """Concatenate the branches of one rollout into one trajectory. For display only, not for training."""
    *_, last = branches
    segments = tuple(segment for item in branches for segment in item.segments)
    return replace(last.as_single_trajectory(), prompt_ids=branches[0].prompt_ids, segments=segments)


def _fields_as_dict(record: Trajectory | Segment) -> dict[str, Any]:
    return {item.name: getattr(record, item.name) for item in fields(record) if item.name != "routes"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The rollouts of one problem in one step. The work queue creates a group, and the driver adds ``trajectories``.

    ``index`` numbers the problems of a run. ``size`` is the number of rollouts to sample, without the greedy rollout,
    and ``step`` is the training step for which they are sampled. ``problem_weight`` is the factor of each rollout in
    the loss. ``key`` identifies the problem's posterior. ``widths`` contains the number of branches after each turn if
    ``rollout.branching.where=measured``.

    The branches of a rollout are adjacent and in order. ``greedy`` was sampled at temperature 0 for a baseline. It is
    graded and counted, but never trained on. ``masked`` contains the ``sample`` and ``branch`` of each trajectory that
    filters removed from the loss. The rewards of these rollouts remain in the baseline.
    """

    problem: Problem
    index: int
    step: int = 0
    size: int = 1
    problem_weight: float = 1.0
    key: str = ""
    widths: tuple[int, ...] = ()
    trajectories: tuple[Trajectory, ...] = ()
    greedy: Trajectory | None = None
    masked: frozenset[tuple[int, int]] = frozenset()

    @property
    def rollouts(self) -> tuple[Trajectory, ...]:
        """The last trajectory of each rollout, which receives the rollout's reward."""
        return tuple(item for item in self.trajectories if item.receives_reward)

    @property
    def all_trajectories(self) -> tuple[Trajectory, ...]:
        """All trajectories, including the greedy trajectory if there is one."""
        return self.trajectories if self.greedy is None else (*self.trajectories, self.greedy)

    def without_trajectories(self, removed: Sequence[Trajectory]) -> Group:
        """Return a copy of the group without the trajectories in ``removed``."""
        dropped = {id(trajectory) for trajectory in removed}
        return replace(self, trajectories=tuple(item for item in self.trajectories if id(item) not in dropped))
