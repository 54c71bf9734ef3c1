"""Settings of training: algorithm, optimizer, passes, checkpoints and cold start."""

from __future__ import annotations

import string
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]

Option = bool | int | float | str | None


class _Settings(BaseModel):
    # The text under a field is its description in docs/reference/configuration.md.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class AlgorithmSettings(_Settings):
    """Estimator, loss and filters."""

    estimator: str = "tir_otb"
    """name of the rule that computes advantages (docs/reference/estimators.md lists them). remax adds one greedy
    rollout per problem, and gae trains a critic"""
    gamma: float = Field(1.0, gt=0, le=1)
    """discount factor per token"""
    lam: float = Field(1.0, ge=0, le=1)
    """lambda of gae: 0 bootstraps from the critic after one token, 1 uses the whole return"""
    leave_one_out: bool = False
    """leave a trajectory out of its own baseline"""
    tail: Literal["zero", "carry", "self"] = "zero"
    """baseline at positions that only one trajectory of the group reaches. zero: 0; carry: the last baseline of two or
    more trajectories; self: the trajectory's return"""
    siblings: Literal["none", "only", "pooled"] = "none"
    """baseline in forked rollouts. none: the estimator's baseline, over the leaves of the group; only: over the sibling
    branches of the token's nearest fork, without the token's branch; pooled: over the siblings and the group's other
    rollouts"""
    sibling_pool: float = Field(1.0, gt=0)
    """with siblings=pooled: total weight of the group's other rollouts, expressed as a number of siblings"""
    energy: Literal["logit_proxy", "head_exact", "length"] = "logit_proxy"
    """estimate of the per-token squared gradient norm that weights the optimal baselines"""
    normalize: Literal["group_std", "whiten"] | None = None
    """group_std: divide advantages by the group's standard deviation; whiten: whiten them over the step; null: the
    estimator's default (estimator_options={normalize: null} turns off whitening that is an estimator's default)"""
    loss: str = "reinforce"
    """name of the policy loss (docs/reference/losses.md lists them)"""
    clip_low: float | None = Field(None, ge=0)
    """lower clipping bound of the loss (ppo: clips ratios below 1 - clip_low); null: the loss's default"""
    clip_high: float | None = Field(None, ge=0)
    """upper clipping bound of the loss (ppo: clips ratios above 1 + clip_high); null: the loss's default"""
    dual_clip: float | None = Field(None, gt=1)
    """bound of the dual_clip loss for negative advantages; null: the loss's default"""
    estimator_options: dict[str, Option] = {}
    """additional options of the estimator by name, for example {epsilon: 1e-6}"""
    loss_options: dict[str, Option] = {}
    """additional options of the loss by name"""
    aggregation: Aggregation | None = None
    """reduction of token losses to one number; null: the default of the estimator or the loss"""
    norm_length: int | None = Field(None, ge=1)
    """constant L of seq_mean_token_sum_norm, in tokens; null: rollout.max_response_tokens"""
    entropy_coefficient: float = Field(0.0, ge=0)
    """weight of the entropy bonus"""
    updates_per_step: int = Field(1, ge=1)
    """optimizer updates per step. All updates after the first are off-policy"""
    void_turns: Literal["train", "mask", "exclude"] = "exclude"
    """use of rollouts that contain a turn with neither a program nor an answer; the values have the same meaning as for
    truncated. exclude: as in SimpleTIR's paper; mask: as in its published code"""
    truncated: Literal["train", "mask", "exclude"] = "train"
    """use of rollouts that ended at a limit of turns, tokens or time. train: like any other rollout; mask: tokens are
    removed from the loss, but the reward stays in the baseline; exclude: the rollout is removed from its group and
    counted. docs/concepts/exclusion.md describes the bias of each value"""
    accuracy_range: tuple[float, float] | None = None
    """drop groups whose fraction of correct verdicts is outside this range (SimpleTIR: 0.1, 0.9); null: keep all
    groups"""
    drop_zero_variance: bool | None = None
    """drop groups whose rewards are all equal; null: drop them unless the estimator learns from such groups, because
    its baseline also uses other groups (ogb_pooled)"""
    head_exact_every: int = Field(0, ge=0)
    """number of steps between head-exact variance diagnostics; 0: never"""
    fidelity_bound: float | None = Field(None, gt=0)
    """maximum mean |log-prob difference| between engine and trainer; a larger difference ends the run. In float32, the
    limit also applies to each trajectory. null: four times the difference measured at the start, within limits for the
    dtype"""

    @field_validator("void_turns", mode="before")
    @classmethod
    def _refuse_renamed_value(cls, value: object) -> object:
        new = {"remove": "exclude", "loss_only": "mask"}.get(str(value))
        if new is not None:
            raise ValueError(f"{value} was renamed: write {new} instead")
        return value

    @model_validator(mode="after")
    def _check_consistency(self) -> AlgorithmSettings:
        if self.accuracy_range is not None and not 0 <= self.accuracy_range[0] < self.accuracy_range[1] <= 1:
            raise ValueError(f"accuracy_range={list(self.accuracy_range)} must satisfy 0 <= low < high <= 1")
        return self


class KLSettings(_Settings):
    """Penalty on the divergence from a frozen reference policy."""

    coefficient: float = Field(0.0, ge=0)
    """weight of the penalty; with controller=adaptive, its initial value. 0: no reference policy is loaded"""
    placement: Literal["loss", "reward"] = "loss"
    """loss: add the penalty to the loss; reward: add it to each token's reward before advantages are computed"""
    estimator: Literal["k1", "abs", "k2", "k3", "full", "k1+", "abs+", "k2+", "k3+", "full+"] | None = None
    """estimator of KL(policy || reference) at a token. full: exact over the vocabulary, which costs two further
    matrix products with the vocabulary, and four in the backward pass; X+: the value of X with the gradient of k2, only
    in the loss; null: k1+ in the loss, k1 in the reward"""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """fixed: constant coefficient; adaptive: raise the coefficient while the mean penalty is above target, and lower it
    while the penalty is below target"""
    target: float = Field(0.1, gt=0)
    """mean penalty per token that the adaptive controller maintains"""
    horizon: int = Field(10000, ge=1)
    """number of trajectories over which the adaptive controller reacts; raise it for slower changes"""
    reference: str | None = None
    """directory or Hugging Face id of the reference policy; null: the initial policy"""

    @property
    def in_loss(self) -> bool:
        return self.coefficient > 0 and self.placement == "loss"

    @property
    def resolved_estimator(self) -> str:
        """The configured estimator, or the default of the placement."""
        return self.estimator or ("k1+" if self.placement == "loss" else "k1")

    @property
    def needs_full_distribution(self) -> bool:
        """True if the estimator needs the whole distribution of the reference, not only its log-probabilities."""
        return self.coefficient > 0 and self.resolved_estimator.startswith("full")

    @model_validator(mode="after")
    def _check_consistency(self) -> KLSettings:
        if self.placement == "reward" and self.resolved_estimator.endswith("+"):
            raise ValueError(
                f"estimator={self.estimator} differs from {self.resolved_estimator[:-1]} only in its gradient, "
                "which placement=reward does not use: set k1 (the only estimator that is exact for "
                "rewards), abs, k2, k3 or full"
            )
        if self.controller == "adaptive" and self.coefficient == 0:
            raise ValueError(
                "controller=adaptive scales the coefficient, which is 0: set an initial coefficient above 0"
            )
        return self


class SourceTeacherSettings(_Settings):
    """Teacher of the problems of one source."""

    path: str
    url: str | None = None


class TeacherSettings(_Settings):
    """On-policy distillation: the policy learns from a frozen teacher on the tokens that the policy samples."""

    path: str | None = None
    """directory or Hugging Face id of the teacher; null: no teacher or, with hint, the initial policy"""
    hint: str | None = None
    """text that only the teacher reads, at the start of its prompt. {statement}, {answer} and the names of further
    columns in braces are replaced by the values of the problem; null: the teacher reads the prompt of the policy"""
    url: str | None = None
    """base URL of a server that scores token ids and serves the teacher under the name in path, such as
    http://HOST:8000/v1 for vLLM; null: the teacher is loaded on the training ranks"""
    by_source: dict[str, SourceTeacherSettings] = {}
    """path and url of the teachers of problem sources, such as {code: {path: TEACHER}}; a source is named after its
    file, data set or generator. path is the teacher of all other sources"""
    top_tokens: int = Field(20, ge=1)
    """with url: number of most likely tokens per position that exact objectives distinguish; all other tokens are
    merged into one. vLLM limits the number by --max-logprobs (20)"""
    objective: Literal["reverse_kl", "forward_kl", "jsd", "sampled"] = "reverse_kl"
    """divergence between policy and teacher at each model token. reverse_kl: KL(policy || teacher); forward_kl:
    KL(teacher || policy); jsd: generalized Jensen-Shannon divergence. These three are exact over the vocabulary, or,
    with url, over top_tokens and the rest. sampled: reverse_kl, estimated from the log-probabilities of the sampled
    token"""
    beta: float = Field(0.5, gt=0, lt=1)
    """weight of the teacher in the mixture of objective=jsd"""
    coefficient: float = Field(1.0, gt=0)
    """weight of the divergence in the loss. With algorithm.estimator=none, the divergence is the whole loss"""
    final_coefficient: float = Field(0.0, ge=0)
    """weight after decay_steps; no effect without decay_steps. 0: the teacher is not computed after decay_steps"""
    decay_steps: int | None = Field(None, ge=1)
    """number of steps over which the weight changes linearly from coefficient to final_coefficient; null: the weight is
    constant"""
    temperature: float | None = Field(None, gt=0)
    """temperature of the teacher's distribution; null: rollout.temperature"""

    @field_validator("hint")
    @classmethod
    def _check_hint(cls, value: str | None) -> str | None:
        try:
            fields = [*string.Formatter().parse(value or "")]
        except ValueError as error:
            raise ValueError(f"{value!r} is not a template ({error}); write {{{{ and }}}} for plain braces") from None
        for _, name, specification, conversion in fields:
            if name is not None and (not name or name.isdigit() or {*name} & {*".["} or specification or conversion):
                raise ValueError(f"{value!r} may contain only column names in braces, such as {{answer}}")
        return value

    @property
    def active(self) -> bool:
        """True if there is a teacher."""
        return bool(self.settings_by_source)

    @property
    def settings_by_source(self) -> dict[str | None, TeacherSettings]:
        """Teacher settings by source, without ``by_source``. The key None is the teacher of all other sources."""
        teachers: dict[str | None, TeacherSettings] = {
            source: self.model_copy(update={"path": one.path, "url": one.url, "by_source": {}})
            for source, one in self.by_source.items()
        }
        if self.path is not None or self.hint is not None:
            teachers[None] = self.model_copy(update={"by_source": {}})
        return teachers

    @property
    def local_paths(self) -> set[str | None]:
        """Paths of the teachers that are loaded on the training ranks. The entry None is the initial policy."""
        return {one.path for one in self.settings_by_source.values() if one.url is None}

    @property
    def needs_full_distribution(self) -> bool:
        """True if the objective needs the whole distribution of the teacher, not only its log-probabilities."""
        return self.objective != "sampled"

    @property
    def estimator(self) -> str:
        """The KL estimator of the divergence in the loss."""
        return "full" if self.needs_full_distribution else "k1+"

    @property
    def resolved_beta(self) -> float:
        """The argument ``beta`` of :func:`agentrl.kernels.full_kl` for the objective."""
        return {"reverse_kl": 1.0, "forward_kl": 0.0}.get(self.objective, self.beta)

    def coefficient_at(self, step: int) -> float:
        """Return the weight of the divergence in a step, counted from 1.

        >>> teacher = TeacherSettings(path="teacher", coefficient=1.0, final_coefficient=0.2, decay_steps=4)
        >>> [round(teacher.coefficient_at(step), 1) for step in (1, 3, 5, 9)]
        [1.0, 0.6, 0.2, 0.2]
        """
        if self.decay_steps is None:
            return self.coefficient
        done = min(1.0, (step - 1) / self.decay_steps)
        return (1 - done) * self.coefficient + done * self.final_coefficient


class CorrectionSettings(_Settings):
    """Correction of differences between the sampling probabilities of the engine and the trainer's probabilities."""

    weights: Literal["token", "sequence", "geometric"] | None = None
    """importance weights in the loss: per token, or the product or geometric mean over the sequence; null: no
    weights"""
    weight_bound: Literal["truncate", "icepop"] = "truncate"
    """truncate: cap weights at weight_high; icepop: set weights that are not between weight_low and weight_high to 0"""
    weight_low: float = Field(0.5, ge=0)
    """lower bound of weights with icepop"""
    weight_high: float = Field(2.0, gt=0)
    """upper bound of weights"""
    self_normalize: bool = False
    """divide the weights by their mean over the optimizer update"""
    ratio_mask: Literal["token", "sequence", "geometric"] | None = None
    """mask tokens or sequences whose ratio is not between ratio_low and ratio_high; null: no mask"""
    ratio_low: float = Field(0.5, ge=0)
    """lower bound of ratio_mask"""
    ratio_high: float = Field(2.0, gt=0)
    """upper bound of ratio_mask"""
    divergence_mask: Literal["k2", "k3"] | None = None
    """mask tokens whose divergence from the engine, by this estimator, exceeds divergence_high; null: no mask"""
    divergence_level: Literal["token", "sequence_mean", "sequence_max"] = "token"
    """divergence that is compared with divergence_high: the token's own, or the mean or maximum over its sequence"""
    divergence_high: float = Field(0.1, gt=0)
    """upper bound of divergence_mask"""
    route_replay: Literal["off", "rollout", "trainer"] = "off"
    """experts that the trainer computes for each token of a mixture-of-experts model. off: its router selects them in
    each forward pass; rollout: the experts that the engine computed; trainer: the experts of the trainer's first
    forward pass in a step"""

    @model_validator(mode="after")
    def _check_consistency(self) -> CorrectionSettings:
        if self.weight_bound == "icepop" and self.weight_low > self.weight_high:
            raise ValueError(f"weight_low={self.weight_low} is above weight_high={self.weight_high}")
        if self.ratio_low > self.ratio_high:
            raise ValueError(f"ratio_low={self.ratio_low} is above ratio_high={self.ratio_high}")
        if self.self_normalize and self.weights is None:
            raise ValueError("self_normalize=true has no weights to normalize: set weights")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options of `rollout_correction`."""
        return self.model_dump(exclude={"route_replay"})

    @property
    def active(self) -> bool:
        """True if any token is weighted or masked."""
        return self.weights is not None or self.masks_tokens

    @property
    def masks_tokens(self) -> bool:
        """True if the loss mask depends on the log-probabilities of the forward pass."""
        return self.ratio_mask is not None or self.divergence_mask is not None


class CriticSettings(_Settings):
    """The value network of the estimator gae: a transformer of the policy's architecture with a value head."""

    learning_rate: float = Field(1e-5, gt=0)
    """peak learning rate of the critic; it follows the optimizer's schedule"""
    clip: float = Field(0.5, gt=0)
    """maximum change of a value from its value at rollout time; larger changes are clipped"""
    path: str | None = None
    """directory or Hugging Face id of the critic's initial transformer; null: the initial policy"""


class OptimizerSettings(_Settings):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, gt=0)
    """peak learning rate, after the warm-up"""
    betas: tuple[float, float] = (0.9, 0.99)
    """decay rates of AdamW's first and second moment"""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon, added to the root of the second moment"""
    weight_decay: float = Field(0.01, ge=0)
    """weight decay of matrices; vectors (norms, biases) are not decayed"""
    gradient_clip: float = Field(1.0, gt=0)
    """maximum gradient norm of an update; larger gradients are scaled down"""
    schedule: Literal["constant", "cosine"] = "constant"
    """learning rate schedule after the warm-up"""
    warmup_steps: int = Field(0, ge=0)
    """number of optimizer updates of linear warm-up"""
    final_fraction: float = Field(0.0, ge=0, le=1)
    """final learning rate of the cosine schedule, as a fraction of the peak"""


class TrainingSettings(_Settings):
    """Steps, processes and memory of training."""

    steps: int = Field(300, ge=1)
    """number of training steps"""
    zero_stage: int = Field(2, ge=0, le=3)
    """DeepSpeed ZeRO stage: 0 shards nothing over the ranks, 1 the optimizer state, 2 also gradients, 3 also weights.
    In bfloat16, stages 0 and 1 run as stage 2, which accumulates gradients in float32"""
    offload: Literal["none", "optimizer", "all"] = "none"
    """state that is kept in host memory. optimizer: the optimizer state, which is also updated on the CPU (zero_stage 1
    to 3); all: also the weights (zero_stage=3). This is slower, and saves no memory without a GPU"""
    persistence_threshold: int = Field(100_000, ge=0)
    """with zero_stage=3, parameters with at most this many elements are not sharded"""
    micro_batch_tokens: int = Field(16384, ge=64)
    """maximum tokens of a micro-batch. A shared prefix counts once, or for each trajectory if the model reads padded
    rows (model.rows) or algorithm.estimator is eob. If training runs out of memory, cluster.restarts and --resume
    continue with a smaller value until this setting changes"""
    head_backend: Literal["auto", "reference", "chunked", "triton"] = "auto"
    """implementation of token statistics; chunked and triton (GPUs) never store all logits"""
    num_processes: int = Field(1, ge=1)
    """number of training ranks on this machine"""
    sequence_parallel: int = Field(1, ge=1)
    """number of consecutive ranks that share a packed micro-batch (Ulysses), each holding a slice of its tokens, for
    sequences that do not fit on one rank. Must divide the number of ranks and the number of query heads; 1: each rank
    has separate micro-batches"""
    threads: int = Field(0, ge=0)
    """CPU threads per process; 0: the number of cores divided by the number of processes"""
    deterministic: bool = False
    """make runs bitwise reproducible: turns are sampled in rounds, requests are sorted, and the number of threads is
    fixed. This is slower"""
    worker_timeout: float = Field(7200.0, gt=0)
    """maximum seconds that a rank waits for a response from the rollout worker, such as its plan; after this limit, the
    run fails. Raise it if the rollouts of one step take longer"""
    collective_deadline: float = Field(1800.0, gt=0)
    """maximum seconds that a rank waits for another rank in a collective. Such a wait never includes rollouts, but may
    include kernel compilation, longer micro-batches or a large checkpoint on another rank. A rank without progress for
    this time in an update, a transfer, a checkpoint or the first step counts as stuck; in other activities,
    cluster.deadline applies"""

    def effective_zero_stage(self, *, bfloat16: bool) -> int:
        """Return the ZeRO stage that DeepSpeed runs.

        In bfloat16, stage 0 would accumulate in bfloat16, and stage 1 would keep the accumulated gradients on the GPU.
        In float32 with an offloaded optimizer, stage 2 runs as 1, because DeepSpeed 0.19 accumulates wrong gradients at
        stage 2 once a backward pass fills several reduction buckets. Both stages keep the gradients on the device.
        """
        if bfloat16:
            return max(self.zero_stage, 2)
        return 1 if self.zero_stage == 2 and self.offload == "optimizer" else self.zero_stage


class CheckpointSettings(_Settings):
    """Frequency and number of checkpoints."""

    every: int = Field(50, ge=1)
    """steps between checkpoints; the last step is always saved"""
    keep: int = Field(2, ge=1)
    """number of checkpoints to keep; older ones are deleted"""
    asynchronous: bool | None = None
    """write checkpoints in the background: a step waits only until the state is copied to host memory (12 bytes per
    trained parameter over all ranks). A checkpoint becomes valid at the end of the step in which its files are
    complete. null: only checkpoints of more than 1 GB over all ranks"""
    best: bool = True
    """export the policy with the best score on held-out problems to checkpoints/best"""


class ColdstartSettings(_Settings):
    """Short supervised fine-tuning on demonstrations before RL, with the response mask."""

    demonstrations: str | None = None
    """demonstrations to start from: a JSONL file, builtin:arithmetic, builtin:horizon or formula:FILE; null: no cold
    start"""
    families: list[str] | None = None
    """problem families of the generated demonstrations; null: all families of arithmetic, and the horizon
    families with two and four turns"""
    count: int = Field(8192, ge=1)
    """number of demonstrations drawn from a generator"""
    variants: int = Field(4, ge=1)
    """number of copies of each formula problem, each with different numbers"""
    direct_share: float = Field(0.0, ge=0, le=1)
    """fraction of the demonstrations that state the answer immediately: in the form of their last turn if the
    environment is a class, otherwise in a box (also for agent programs). A policy that imitates such demonstrations
    guesses the answer. Reinforcement learning can then improve the policy by making it use the tool. The tiny preset
    sets direct_share only for generated demonstrations"""
    direct_turn: Literal["first", "any"] = "first"
    """turn of a direct answer. first: the first turn; any: a random turn before the last, after observations that do
    not yet determine the answer. With any, the policy learns to give up early, and more often in longer tasks"""
    direct_steps: int | None = Field(None, ge=1)
    """number of final steps that include direct answers; null: all steps"""
    steps: int = Field(200, ge=1)
    """number of supervised updates"""
    copy_steps: int = Field(0, ge=0)
    """number of initial steps whose batches also contain one repeated sequence of random tokens per demonstration.
    From these sequences, a new model learns to copy, for example the result of a tool into the next call or the
    answer"""
    batch_size: int = Field(48, ge=1)
    """number of demonstrations per update"""
    learning_rate: float = Field(2e-3, gt=0)
    """peak learning rate, with a cosine schedule after the warm-up"""
    warmup_steps: int = Field(20, ge=0)
    """number of updates of linear warm-up"""
    seed: int | None = None
    """seed of the cold start; null: the run's seed"""
