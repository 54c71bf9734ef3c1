"""Settings of training: algorithm, optimizer, passes, checkpoints and cold start."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]

Option = bool | int | float | str | None


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AlgorithmSettings(_Settings):
    """Estimator, loss and filters."""

    estimator: str = Field(
        "tir_otb",
        description="rule that computes advantages, by name (docs/estimators.md lists them); remax plays each problem "
        "once more, greedily, and gae trains a critic",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount of later rewards, per token")
    lam: float = Field(1.0, ge=0, le=1, description="how far gae looks ahead of the critic: 0 one token, 1 to the end")
    leave_one_out: bool = Field(False, description="a trajectory is left out of its own baseline")
    tail: Literal["zero", "carry", "self"] = Field(
        "zero", description="baseline where all others of the group have ended: 0, the last one, or the own return"
    )
    energy: Literal["logit_proxy", "head_exact", "length"] = Field(
        "logit_proxy", description="per-token squared gradient norm that weights the optimal baselines"
    )
    normalize: Literal["group_std", "whiten"] | None = Field(
        None,
        description="divide advantages by the group's standard deviation, or whiten them over the batch; none: as the "
        "estimator is defined (estimator_options={normalize: null} takes its whitening away)",
    )
    loss: str = Field(
        "reinforce",
        description="policy loss, by name (docs/losses.md lists them)",
    )
    clip_low: float | None = Field(
        None, ge=0, description="lower bound of the loss's clipping (ppo: ratios below 1 - clip_low); none: its own"
    )
    clip_high: float | None = Field(
        None, ge=0, description="upper bound of the loss's clipping (ppo: ratios above 1 + clip_high); none: its own"
    )
    dual_clip: float | None = Field(
        None, gt=1, description="bound of the loss at negative advantages (dual_clip); none: its own"
    )
    estimator_options: dict[str, Option] = Field(
        {}, description="further options of the estimator by name, such as {epsilon: 1e-6}"
    )
    loss_options: dict[str, Option] = Field({}, description="further options of the loss by name")
    aggregation: Aggregation | None = Field(
        None, description="how token losses become one number; none: what the loss and the estimator are defined with"
    )
    norm_length: int | None = Field(
        None, ge=1, description="the constant L of seq_mean_token_sum_norm; none: rollout.max_response_tokens"
    )
    entropy_coefficient: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    updates_per_step: int = Field(1, ge=1, description="optimizer updates on one step's trajectories")
    void_turns: Literal["remove", "loss_only"] = Field(
        "remove", description="remove: no data; loss_only: in the baseline, not in the loss (as published code does)"
    )
    accuracy_range: tuple[float, float] | None = Field(
        None, description="groups whose share of correct verdicts lies outside are dropped (SimpleTIR: 0.1, 0.9)"
    )
    drop_zero_variance: bool = Field(True, description="groups whose rewards are all equal are dropped")
    head_exact_every: int = Field(0, ge=0, description="steps between head-exact variance diagnostics; 0: never")
    fidelity_bound: float | None = Field(
        None,
        gt=0,
        description="mean |log-prob difference| between engine and trainer, in float32 of each trajectory too; none: "
        "by dtype",
    )

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmSettings:
        if self.accuracy_range is not None and not 0 <= self.accuracy_range[0] < self.accuracy_range[1] <= 1:
            raise ValueError(f"accuracy_range={list(self.accuracy_range)} needs 0 <= low < high <= 1")
        return self


class KLSettings(_Settings):
    """A penalty for leaving a frozen reference policy."""

    coefficient: float = Field(
        0.0, ge=0, description="weight of the penalty, that of the first step if it is adapted; 0: no reference policy"
    )
    placement: Literal["loss", "reward"] = Field(
        "loss", description="in the loss, or in each token's reward before advantages"
    )
    estimator: Literal["k1", "abs", "k2", "k3", "full", "k1+", "abs+", "k2+", "k3+", "full+"] | None = Field(
        None,
        description="of KL(policy || reference) at a token; full: exact over the vocabulary, at the cost of three more "
        "products with it; X+ has the value of X and the gradient of k2, and is for the loss only; none: k1+ in the "
        "loss, k1 in the reward",
    )
    controller: Literal["fixed", "adaptive"] = Field(
        "fixed", description="adaptive: the coefficient grows while the mean penalty is above target, else it falls"
    )
    target: float = Field(0.1, gt=0, description="mean penalty a token that the adaptive controller aims at")
    horizon: int = Field(10000, ge=1, description="trajectories over which the adaptive controller reacts")
    reference: str | None = Field(
        None, description="directory or Hugging Face id of the reference policy; none: the policy training starts from"
    )

    @property
    def in_loss(self) -> bool:
        return self.coefficient > 0 and self.placement == "loss"

    @property
    def resolved_estimator(self) -> str:
        """The estimator that is set, or that of the placement."""
        return self.estimator or ("k1+" if self.placement == "loss" else "k1")

    @property
    def over_vocabulary(self) -> bool:
        """Whether the estimator needs more of the reference than its log-probabilities."""
        return self.coefficient > 0 and self.resolved_estimator.startswith("full")

    @model_validator(mode="after")
    def _consistent(self) -> KLSettings:
        if self.placement == "reward" and self.resolved_estimator.endswith("+"):
            raise ValueError(
                f"estimator={self.estimator} differs from {self.resolved_estimator[:-1]} in its gradient "
                "alone, and placement=reward has none; valid: k1 (the only exact one there), abs, k2, k3, full"
            )
        if self.controller == "adaptive" and self.coefficient == 0:
            raise ValueError("controller=adaptive multiplies coefficient, which is 0: give a first coefficient above 0")
        return self


class CorrectionSettings(_Settings):
    """Correcting for tokens that the engine sampled with other probabilities than the trainer computes."""

    weights: Literal["token", "sequence", "geometric"] | None = Field(
        None, description="importance weights of the loss: of the token, its sequence's product or geometric mean"
    )
    weight_bound: Literal["truncate", "icepop"] = Field(
        "truncate", description="truncate: at most weight_high; icepop: 0 outside weight_low and weight_high"
    )
    weight_low: float = Field(0.5, ge=0, description="lower bound of icepop")
    weight_high: float = Field(2.0, gt=0, description="upper bound of the weights")
    self_normalize: bool = Field(False, description="divide the weights by their mean over the optimizer step")
    ratio_mask: Literal["token", "sequence", "geometric"] | None = Field(
        None, description="keep in the loss what has this ratio within ratio_low and ratio_high"
    )
    ratio_low: float = Field(0.5, ge=0, description="lower bound of ratio_mask")
    ratio_high: float = Field(2.0, gt=0, description="upper bound of ratio_mask")
    divergence_mask: Literal["k2", "k3"] | None = Field(
        None, description="keep in the loss what has at most divergence_high of this divergence from the engine"
    )
    divergence_level: Literal["token", "sequence_mean", "sequence_max"] = Field(
        "token", description="whose divergence: the token's, or the mean or largest of its sequence"
    )
    divergence_high: float = Field(0.1, gt=0, description="upper bound of divergence_mask")

    @model_validator(mode="after")
    def _consistent(self) -> CorrectionSettings:
        if self.weight_bound == "icepop" and self.weight_low > self.weight_high:
            raise ValueError(f"weight_low={self.weight_low} is above weight_high={self.weight_high}")
        if self.ratio_low > self.ratio_high:
            raise ValueError(f"ratio_low={self.ratio_low} is above ratio_high={self.ratio_high}")
        if self.self_normalize and self.weights is None:
            raise ValueError("self_normalize=true has no weights to normalise: set weights")
        return self

    @property
    def active(self) -> bool:
        """Whether anything is weighed or masked."""
        return self.weights is not None or self.masks

    @property
    def masks(self) -> bool:
        """Whether the loss mask depends on the forward."""
        return self.ratio_mask is not None or self.divergence_mask is not None


class CriticSettings(_Settings):
    """The value network of estimator gae: a transformer of the policy's architecture with a value head."""

    learning_rate: float = Field(1e-5, gt=0, description="of the critic; its schedule is the optimizer's")
    clip: float = Field(0.5, gt=0, description="how far a value may move from that of the rollout before it is clipped")
    path: str | None = Field(
        None, description="directory or Hugging Face id its transformer starts from; none: the policy's start"
    )


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
    zero_stage: int = Field(
        2,
        ge=0,
        le=3,
        description="DeepSpeed ZeRO: what is split over the ranks: 0 nothing, 1 the optimizer's state, 2 also "
        "gradients, 3 also weights; in bfloat16 0 and 1 run as 2, which accumulates gradients in float32",
    )
    persistence_threshold: int = Field(
        100_000, ge=0, description="parameters of at most so many elements stay whole on every rank at zero_stage=3"
    )
    micro_batch_tokens: int = Field(
        16384, ge=64, description="prompt and response tokens of one micro-batch, padding included"
    )
    head_backend: Literal["auto", "reference", "chunked", "triton"] = Field(
        "auto", description="how token statistics are computed; chunked and triton (on GPUs) never hold all logits"
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
    worker_timeout: float = Field(7200.0, gt=0, description="seconds a rank waits for its plan")
    collective_deadline: float = Field(
        1800.0,
        gt=0,
        description="seconds a rank waits in a collective for another one; nobody waits there for rollouts, but while "
        "another loads kernels, trains longer micro-batches or writes its part of a large checkpoint",
    )


class CheckpointSettings(_Settings):
    """When state is saved and how much is kept."""

    every: int = Field(50, ge=1, description="steps between checkpoints; the last step is always saved")
    keep: int = Field(2, ge=1, description="newest checkpoints kept")
    best: bool = Field(
        True, description="export the policy of the best evaluation on held-out problems to checkpoints/best"
    )


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
