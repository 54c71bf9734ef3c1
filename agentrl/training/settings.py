"""Settings of training: algorithm, optimizer, passes, checkpoints and cold start."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AlgorithmSettings(_Settings):
    """Estimator, loss and filters."""

    estimator: str = Field(
        "tir_otb", description="rule that gives advantages: tir_otb, otb, grpo, rloo or a registered one"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount of later rewards, per token")
    leave_one_out: bool = Field(False, description="a trajectory is left out of its own baseline")
    tail: Literal["zero", "carry", "self"] = Field(
        "zero", description="baseline where all others of the group have ended: 0, the last one, or the own return"
    )
    energy: Literal["logit_proxy", "head_exact", "length"] = Field(
        "logit_proxy", description="per-token squared gradient norm that weights the optimal baselines"
    )
    normalize: Literal["group_std", "whiten"] | None = Field(
        None, description="divide advantages by the group's standard deviation, or whiten them over the batch"
    )
    loss: str = Field("reinforce", description="reinforce, ppo, dual_clip or a registered one")
    clip_low: float = Field(0.2, ge=0, lt=1, description="ratios below 1 - clip_low are clipped (ppo)")
    clip_high: float = Field(0.28, ge=0, description="ratios above 1 + clip_high are clipped (ppo)")
    dual_clip: float = Field(3.0, gt=1, description="bound of the loss at negative advantages (dual_clip)")
    aggregation: Aggregation = Field("token_mean", description="how token losses become one number")
    norm_length: int | None = Field(None, ge=1, description="the constant L of seq_mean_token_sum_norm")
    entropy_coefficient: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    updates_per_step: int = Field(1, ge=1, description="optimizer updates on one step's trajectories")
    void_turns: Literal["remove", "loss_only"] = Field(
        "remove", description="remove: no data; loss_only: in the baseline, not in the loss (as published code does)"
    )
    accuracy_range: tuple[float, float] | None = Field(
        None, description="groups whose share of correct answers lies outside are dropped (SimpleTIR: 0.1, 0.9)"
    )
    drop_zero_variance: bool = Field(True, description="groups whose rewards are all equal are dropped")
    head_exact_every: int = Field(0, ge=0, description="steps between head-exact variance diagnostics; 0: never")
    fidelity_bound: float | None = Field(
        None, gt=0, description="mean |log-prob difference| between engine and trainer; none: by dtype"
    )

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmSettings:
        if self.aggregation == "seq_mean_token_sum_norm" and self.norm_length is None:
            raise ValueError("aggregation seq_mean_token_sum_norm needs norm_length, the constant L")
        if self.accuracy_range is not None and not 0 <= self.accuracy_range[0] < self.accuracy_range[1] <= 1:
            raise ValueError("accuracy_range needs 0 <= low < high <= 1")
        return self


class OptimizerSettings(_Settings):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0, description="peak, after the warm-up")
    betas: tuple[float, float] = Field((0.9, 0.99), description="decay of AdamW's two moments")
    epsilon: float = Field(1e-8, gt=0, description="AdamW's, beside the root of the second moment")
    weight_decay: float = Field(0.01, ge=0, description="of matrices; vectors have none")
    gradient_clip: float = Field(1.0, gt=0, description="largest norm of an update's gradient")
    schedule: Literal["constant", "cosine"] = Field("constant", description="learning rate after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="updates of linear warm-up")
    final_fraction: float = Field(0.0, ge=0, le=1, description="learning rate at the end of cosine over its peak")


class TrainingSettings(_Settings):
    """How the steps run."""

    steps: int = Field(300, ge=1, description="rollout, filter and update, so many times")
    zero_stage: int = Field(2, ge=0, le=3, description="DeepSpeed ZeRO: what is split over the ranks")
    micro_batch_tokens: int = Field(
        16384, ge=64, description="prompt and response tokens of one micro-batch, padding included"
    )
    head_backend: Literal["auto", "reference", "chunked"] = Field(
        "auto", description="how token statistics are computed; chunked never holds all logits"
    )
    share_prompts: bool = Field(
        False,
        description="compute equal prompts of a micro-batch once; pays where groups stay whole and prompts are long "
        "for their responses; needs model.attention=sdpa without gradient checkpointing",
    )
    num_processes: int = Field(1, ge=1, description="training ranks on this machine")
    threads: int = Field(0, ge=0, description="CPU threads of each process; 0: the cores over the processes")
    deterministic: bool = Field(
        False, description="bitwise reproducible: turns in rounds, sorted requests, fixed threads"
    )
    plan_deadline: float = Field(7200.0, gt=0, description="seconds a rank waits for its plan")


class CheckpointSettings(_Settings):
    """When state is saved and how much is kept."""

    every: int = Field(50, ge=1, description="steps between checkpoints; the last step is always saved")
    keep: int = Field(2, ge=1, description="newest checkpoints kept")


class ColdstartSettings(_Settings):
    """A short supervised start on demonstrations, with the response mask."""

    demonstrations: str | None = Field(
        None, description="JSONL file, builtin:arithmetic or formula:FILE; none: no cold start"
    )
    count: int = Field(8192, ge=1, description="demonstrations drawn from a generator")
    variants: int = Field(4, ge=1, description="copies of each formula problem with other numbers")
    direct_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the demonstrations that state the answer without a program: a policy that imitates "
        "them guesses, and reinforcement learning finds that the tool pays",
    )
    direct_steps: int | None = Field(
        None, ge=1, description="steps at the end that show direct answers; none: all steps do"
    )
    steps: int = Field(200, ge=1, description="supervised updates")
    batch_size: int = Field(48, ge=1, description="demonstrations of one update")
    learning_rate: float = Field(2e-3, gt=0, description="peak; a cosine follows the warm-up")
    warmup_steps: int = Field(20, ge=0, description="updates of linear warm-up")
    seed: int | None = Field(None, description="none: the run's seed")
