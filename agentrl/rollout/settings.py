"""Settings of rollouts: number, length, sampling, engine and rewards of trajectories."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.rollout.engines.vllm.plugin import VLLMSettings
from agentrl_envs.registry import grades_answers

if TYPE_CHECKING:
    from agentrl.models.settings import ModelSettings
    from agentrl.rollout.gateway.settings import AgentGatewaySettings
    from agentrl_envs.settings import EnvironmentOptions, GraderSettings, ReasoningSettings, SimpleTIRSettings
    from agentrl_sandbox.client import SandboxSettings


Budget = Literal["uniform", "neyman", "variance"]


UNMEASURED_WIDTH: Final = 2
"""Number of branches after a turn that has too few earlier forks for ``where=measured``."""


class BranchingSettings(BaseModel):
    """Forks of rollouts after turns.

    >>> BranchingSettings(width=4, where=(1, 3)).width_after(3, leaves=2)
    2
    >>> BranchingSettings(width=4, where="entropy>0.5").width_after(2, leaves=8, log_probs=(-1.0, -0.2))
    4
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: int = Field(
        1, ge=1, description="number of branches at a fork; with where=measured, the maximum; 1: rollouts do not fork"
    )
    where: (
        tuple[Annotated[int, Field(ge=1)], ...]
        | Annotated[str, Field(pattern=r"^(measured|(entropy|energy)>[0-9]+(\.[0-9]+)?)$")]
    ) = Field(
        (1,),
        description="turns after which a rollout forks. A list: turn numbers, counted from 1. entropy>X: turns whose "
        "sampled tokens have a mean -log p above X nats. energy>X: turns whose sampled tokens have a mean 1 - p above "
        "X. measured: turns where forks reduce the variance of the reward most, as estimated in earlier steps",
        json_schema_extra={"form": "a list of turns, entropy>X, energy>X or measured"},
    )
    leaves: int = Field(
        16, ge=2, description="maximum number of leaves of a rollout; the branches of a fork share the remaining leaves"
    )
    live: int = Field(
        16,
        ge=1,
        description="maximum number of branches of a rollout that are played at the same time. Lower it if the "
        "sandbox has too few sessions or too little memory",
    )

    def width_after(
        self, turn: int, *, leaves: int, log_probs: Sequence[float] = (), measured: Sequence[int] = ()
    ) -> int:
        """Return the number of branches after ``turn``, at most ``leaves``; 1 if the rollout does not fork there.

        ``log_probs``: log-probabilities of the turn's sampled tokens. ``measured``: the estimated best widths by turn.
        """
        width = self.width
        match self.where:
            case "measured":
                width = measured[turn - 1] if turn <= len(measured) else min(width, UNMEASURED_WIDTH)
            case str(rule):
                kind, _, bound = rule.partition(">")
                forks = fmean(map(_UNCERTAINTY[kind], log_probs)) > float(bound)
                width = width if forks else 1
            case turns:
                width = width if turn in turns else 1
        return min(width, leaves)

    @property
    def max_leaves(self) -> int:
        """The maximum number of leaves of a rollout."""
        if self.width == 1:
            return 1
        forks = self.leaves if isinstance(self.where, str) else len(set(self.where))
        return min(self.leaves, self.width ** min(forks, self.leaves))

    @property
    def max_live_branches(self) -> int:
        """The maximum number of branches of a rollout that are played at the same time."""
        return min(self.live, self.max_leaves)

    @property
    def max_open_episodes(self) -> int:
        """The maximum number of open episodes of a rollout: live branches, and the forks above them."""
        # Branches divide the leaves equally, so a path has at most log2(leaves) forks.
        depth = math.ceil(math.log2(self.max_leaves))
        if not isinstance(self.where, str):
            depth = min(depth, len(set(self.where)))
        return self.max_live_branches + sum(min(self.live, self.width**level) for level in range(depth))


# Uncertainty about a sampled token, computed from its log-probability. The mean over samples is the entropy, or the
# mean squared norm of the logits' gradient, because E[1 - p] = 1 - sum(p^2) = E[1 - 2 p + sum(p^2)].
_UNCERTAINTY: Final[dict[str, Callable[[float], float]]] = {
    "entropy": lambda log_prob: -log_prob,
    "energy": lambda log_prob: -math.expm1(log_prob),
}


class RolloutSettings(BaseModel):
    """Rollouts of a step: ``problems_per_step`` groups of ``group_size`` trajectories."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str = Field(
        "transformers",
        description="engine that samples from the policy: transformers (in the rollout worker), vllm (in servers), or"
        " a plug-in's engine, specified by its registered name or as module:Class",
    )
    problems_per_step: int = Field(128, ge=1, description="groups (problems) to train on per step")
    group_size: int = Field(16, ge=1, description="trajectories per problem, on average over a step")
    budget: Budget = Field(
        "uniform",
        description="distribution of a step's rollouts over its problems. uniform: group_size each; neyman: by the "
        "standard deviation of a rollout's gradient, to minimize the variance of the step's gradient; variance: by "
        "p (1 - p), where p is the probability of success. Every problem has the same weight in the loss",
    )
    budget_max: int | None = Field(
        None, ge=2, description="with budget=neyman or variance: maximum rollouts per problem; null: 4 x group_size"
    )
    oversampling: float = Field(
        1.0,
        ge=1.0,
        description="groups generated, before filters, per group trained on. Raise it if filters drop many groups",
    )
    max_extra_rounds: int = Field(
        0,
        ge=0,
        description="dynamic sampling: maximum number of additional rollout rounds in a step while filters leave "
        "fewer than problems_per_step groups",
    )
    schedule: Literal["synchronous", "overlapped", "asynchronous"] = Field(
        "synchronous",
        description="time at which rollouts run. synchronous: between training steps; overlapped: the next batch "
        "during training, one step stale; asynchronous: continuously, at most max_staleness steps ahead, "
        "while the weights change",
    )
    max_staleness: int = Field(
        1,
        ge=0,
        description="with schedule=asynchronous: maximum age, in training steps, of the weights that sampled a "
        "trajectory's oldest token, when the policy is trained on the trajectory",
    )
    kv_on_update: Literal["recomputed", "kept"] = Field(
        "recomputed",
        description="recomputed: running requests recompute their keys and values when the weights change; kept: "
        "running requests keep their keys and values",
    )
    temperature: float = Field(
        1.0, gt=0, description="sampling temperature, which also applies to the log-probabilities in training"
    )
    top_k: int = Field(0, ge=0, description="sample from the top_k most likely tokens; 0: from all tokens")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="nucleus sampling: the cumulative probability of the tokens to sample from. Training renormalizes "
        "its distribution over the tokens that the engine kept (support replay), as it does for top_k and min_p",
    )
    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="sample from tokens with at least this fraction of the largest probability; 0: from all tokens",
    )
    max_prompt_tokens: int = Field(
        2048, ge=1, description="maximum prompt length in tokens; problems with longer prompts are skipped and counted"
    )
    max_turn_tokens: int = Field(8192, ge=1, description="maximum number of model tokens in one turn")
    max_response_tokens: int = Field(
        8192, ge=1, description="maximum number of tokens of a trajectory after its prompt, including observations"
    )
    concurrency: int = Field(1024, ge=1, description="maximum number of concurrent trajectories")
    kv_high_watermark: float = Field(
        0.9,
        gt=0,
        le=1,
        description="fraction of the engine's KV cache above which fewer trajectories are admitted. Trajectories that"
        " fit at their maximum length are always admitted. Lower it if trajectories are preempted",
    )
    program_seconds: float | None = Field(
        None,
        gt=0,
        description="maximum total seconds that the programs and tools of a trajectory run; a trajectory that exceeds "
        "this limit ends with the outcome deadline. null: only the limit of each program applies",
    )
    environment_deadline: float = Field(
        3600.0,
        gt=0,
        description="maximum seconds for one turn of an environment, including waiting; a trajectory that exceeds this "
        "limit counts as an infrastructure failure",
    )
    step_deadline: float = Field(
        7200.0, gt=0, description="maximum seconds for the rollouts of a step; after this limit, the run fails"
    )
    retries: int = Field(
        2, ge=0, description="number of times that a trajectory is restarted after an infrastructure failure"
    )
    max_batch_tokens: int = Field(65536, ge=64, description="tokens per forward pass of the transformers engine")
    kv_cache_tokens: int = Field(1_048_576, ge=64, description="size of the transformers engine's KV cache in tokens")
    branching: BranchingSettings = BranchingSettings()
    vllm: VLLMSettings = VLLMSettings()
    options: dict[str, Any] = Field(default={}, description="settings of an engine that is added by a plug-in")

    @model_validator(mode="after")
    def _consistent(self) -> RolloutSettings:
        if self.budget != "uniform" and self.group_size < 2:
            raise ValueError(f"budget={self.budget} needs at least 2 rollouts per problem: raise group_size")
        if self.budget_max is not None and self.budget_max < self.group_size:
            raise ValueError(
                f"budget_max={self.budget_max} must be at least group_size={self.group_size}, "
                "the average number of rollouts per problem: raise budget_max"
            )
        return self

    @property
    def restricts_sampling(self) -> bool:
        """True if tokens are sampled from a part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def largest_group(self) -> int:
        """The maximum number of rollouts of a problem in a step."""
        return self.group_size if self.budget == "uniform" else self.budget_max or 4 * self.group_size

    @property
    def groups_per_round(self) -> int:
        """The number of problems that a step starts with."""
        return math.ceil(self.problems_per_step * self.oversampling)

    @property
    def staleness_bound(self) -> int:
        """The maximum age of a token, in training steps, when the policy is trained on it."""
        return {"synchronous": 0, "overlapped": 1, "asynchronous": self.max_staleness}[self.schedule]


class RewardSettings(BaseModel):
    """Reward of a trajectory, and a length penalty that is added after the filters and before advantages."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    functions: dict[Annotated[str, Field(pattern=r"^[^:\s]+(:[^:\s]+)?$")], float] = Field(
        default={},
        description="functions whose weighted sum is the reward of a trajectory: module:function or a registered "
        "name, each with its weight. The name environment refers to the environment's reward. If "
        "this setting is empty, the environment's reward is used alone",
    )
    deadline: float = Field(
        30.0,
        gt=0,
        description="maximum seconds for each of reward.functions; a trajectory that exceeds this limit counts as an "
        "infrastructure failure",
    )

    overlong_buffer: int = Field(
        0,
        ge=0,
        description="soft length penalty (DAPO): 0 up to overlong_limit - overlong_buffer model tokens, then falling "
        "linearly to -1 at overlong_limit; 0: no penalty",
    )
    overlong_limit: int | None = Field(
        None,
        ge=1,
        description="number of model tokens at which the length penalty reaches -1; null: rollout.max_response_tokens",
    )
    overlong_factor: float = Field(1.0, ge=0, description="factor on the length penalty")

    @model_validator(mode="after")
    def _consistent(self) -> RewardSettings:
        if self.overlong_limit is not None and self.overlong_buffer > self.overlong_limit:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} is above overlong_limit={self.overlong_limit}: the penalty "
                "cannot begin below 0 tokens. Lower overlong_buffer"
            )
        return self


class EnvironmentRelatedSettings(Protocol):
    """The sections of a run's settings that select the environment."""

    @property
    def env(self) -> str: ...
    @property
    def environment(self) -> SimpleTIRSettings | ReasoningSettings | EnvironmentOptions: ...
    @property
    def sandbox(self) -> SandboxSettings: ...
    @property
    def grader(self) -> GraderSettings: ...
    @property
    def gateway(self) -> AgentGatewaySettings: ...


class RewardRelatedSettings(EnvironmentRelatedSettings, Protocol):
    """The sections of a run's settings that determine a trajectory's reward."""

    @property
    def reward(self) -> RewardSettings: ...


class EngineRelatedSettings(Protocol):
    """The sections of a run's settings that select the sampling policy and its engine."""

    @property
    def seed(self) -> int: ...
    @property
    def model(self) -> ModelSettings: ...
    @property
    def rollout(self) -> RolloutSettings: ...


def longest_request_tokens(rollout: RolloutSettings, evaluated: int | None) -> int:
    """Return the length in tokens of the longest sequence that a run requests from its engine.

    ``evaluated``: ``evaluation.max_response_tokens``, for evaluations between training steps.
    """
    return rollout.max_prompt_tokens + max(rollout.max_response_tokens, evaluated or 0)


def environment_compares_answers(settings: EnvironmentRelatedSettings) -> bool:
    """Return True if each problem needs a reference answer, because the environment compares answers with it."""
    return grades_answers(settings.env) and settings.grader.function is None
