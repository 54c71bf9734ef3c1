"""The other models of a step: the reference of the KL penalty, the teacher, and the critic of the estimator gae."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from agentrl.algorithms import AdaptiveKL, FixedKL, KLController, aggregate, value_loss
from agentrl.batch import Batch, scatter_tokens
from agentrl.errors import SettingsError
from agentrl.models.exactness import choose_attention_backend
from agentrl.models.lora import disabled_adapters
from agentrl.models.policy import FrozenDistribution, FrozenHead, FrozenPoliciesByToken, PolicyModel, ValueModel
from agentrl.models.settings import LoRASettings
from agentrl.models.tokenizer import read_tokenizer, special_token_differences
from agentrl.training.engine.deepspeed_engine import (
    TrainingEngine,
    build_frozen_forward,
    read_model_for_training,
    read_policy,
)
from agentrl.training.engine.groups import get_rank_groups
from agentrl.training.settings import CriticSettings, KLSettings, TeacherSettings
from agentrl.weights.sources import gathered_linear

if TYPE_CHECKING:
    from agentrl.config import Settings
    from agentrl.training.step.served_teacher import ServedTeacher


def create_kl_controller(settings: KLSettings) -> KLController:
    """Create the controller of the KL penalty's coefficient."""
    if settings.controller == "fixed":
        return FixedKL(settings.coefficient)
    return AdaptiveKL(settings.coefficient, target=settings.target, horizon=settings.horizon)


class ScoringPolicy(Protocol):
    """The reference or the teacher, as the trainer calls it."""

    needs_full_distribution: bool

    def score_batch(self, batch: Batch) -> tuple[Tensor, FrozenDistribution | None]:
        """Compute the log-probabilities and the inputs of the divergence of :meth:`FrozenPolicy.score_batch`."""


class FrozenPolicy:
    """A frozen policy: a separate model, or the base model of a policy with adapters."""

    def __init__(
        self,
        policy: PolicyModel,
        forward: Callable[..., Any],
        *,
        temperature: float,
        needs_full_distribution: bool = False,
        beta: float = 1.0,
        vocabulary: int | None = None,
        hinted: bool = False,
        refused_ids: Mapping[int, str] | None = None,
    ) -> None:
        """``forward`` runs the forward pass of ``policy``, whose parameters are frozen.

        ``needs_full_distribution`` enables the divergence over the whole vocabulary; ``beta`` selects the divergence
        (:func:`.full_kl`). If the parameters are sharded, every rank then needs a copy of the head. Rows of the head
        beyond ``vocabulary`` are omitted, because they only pad the vocabulary: no tokenizer has these ids. With
        ``hinted``, the policy reads the rows with hints. ``refused_ids`` maps token ids that must not occur to error
        messages.
        """
        self._policy = policy
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        if needs_full_distribution:
            with gathered_linear(policy.head) as (weight, bias):
                self._weight, self._bias = weight[:vocabulary], None if bias is None else bias[:vocabulary]
        self._forward = forward
        self._temperature = temperature
        self.needs_full_distribution = needs_full_distribution
        self._beta = beta
        self._hinted = hinted
        self._refused_ids = refused_ids or {}

    @torch.no_grad()
    def score_batch(self, batch: Batch, chosen: Tensor | None = None) -> tuple[Tensor, FrozenHead | None]:
        """Compute log-probabilities [B, T] of the sampled tokens; other entries are 0. Collective under ZeRO-3.

        The distributions of both policies are restricted to the batch's support, if there is one.

        Also returns the inputs of the divergence over the whole vocabulary, for model tokens in row-major order, or
        None if this divergence is not enabled. If ``chosen`` [B] is given, both results contain only the tokens of the
        chosen trajectories. Raises SettingsError if a refused token id occurs.
        """
        raise_for_refused_ids(batch, self._refused_ids, chosen)
        row = batch.teacher_row if self._hinted and batch.teacher_row is not None else batch.row
        statistics, hidden = self._forward(
            # A frozen policy selects its own experts.
            row if row.routes is None else replace(row, routes=None),
            batch.rows,
            batch.columns,
            temperature=self._temperature,
            keep_hidden=self.needs_full_distribution,
            support=batch.support,
        )
        log_probs = scatter_tokens(statistics.log_probs, batch.response_mask)
        if chosen is not None:
            log_probs = torch.where(chosen[:, None], log_probs, 0.0)
        if self._weight is None or hidden is None:
            return log_probs, None
        local, sequence = self._policy.local_token_indices(row, batch.rows, batch.columns), self._policy.sequence
        if local is not None and sequence is not None:
            hidden = sequence.all_gather(hidden[: len(local)], local, len(batch.rows))
        return log_probs, FrozenHead(
            hidden=hidden if chosen is None else hidden[chosen[batch.rows]],
            weight=self._weight,
            bias=self._bias,
            logit_map=self._policy.head.logit_map,
            temperature=self._temperature,
            beta=self._beta,
        )


class TeachersBySource:
    """Several teachers. Each trajectory is scored by the teacher of its problem's source."""

    def __init__(self, by_source: Mapping[str | None, FrozenPolicy | ServedTeacher]) -> None:
        """``by_source`` maps sources to teachers. The key None is the teacher of all other sources."""
        self._teachers = [*dict.fromkeys(by_source.values())]
        self._numbers = {source: self._teachers.index(teacher) for source, teacher in by_source.items()}
        self.needs_full_distribution = self._teachers[0].needs_full_distribution

    def score_batch(self, batch: Batch) -> tuple[Tensor, FrozenPoliciesByToken | None]:
        """Score each trajectory with its teacher, like :meth:`FrozenPolicy.score_batch`.

        Every local teacher processes every batch, because ranks whose batch lacks a source take part in collectives.
        """
        numbers = torch.tensor([self._numbers.get(source, self._numbers.get(None, -1)) for source in batch.sources])
        log_probs, parts = torch.zeros_like(batch.rollout_log_probs), []
        for number, teacher in enumerate(self._teachers):
            chosen = (numbers == number).to(batch.rows.device)
            own, head = teacher.score_batch(batch, chosen)
            log_probs = log_probs + own
            tokens = chosen[batch.rows].nonzero()[:, 0]
            if head is not None and len(tokens):
                parts.append((tokens, head))
        return log_probs, FrozenPoliciesByToken(parts=parts) if parts else None


def raise_for_refused_ids(batch: Batch, refused_ids: Mapping[int, str], chosen: Tensor | None = None) -> None:
    """If a token id of ``refused_ids`` occurs in a trajectory, raise SettingsError with the message for this id."""
    if refused_ids:
        row_ids = batch.row.token_ids.cpu()
        for number, length in enumerate(batch.response_lengths.tolist()):
            if chosen is None or chosen[number]:
                ids = row_ids[batch.row.document_token_indices(number, length)]
                found = ids[torch.isin(ids, torch.tensor([*refused_ids]))].tolist()
                if found:
                    raise SettingsError(refused_ids[found[0]])


def reference_path(settings: KLSettings, initial: str) -> str | None:
    """Return the path of the reference policy (default: ``initial``), or None without a KL penalty."""
    return None if settings.coefficient == 0.0 else settings.reference or initial


def open_reference(
    path: str | None, settings: Settings, engine: TrainingEngine[PolicyModel], *, initial: str
) -> FrozenPolicy | None:
    """Open the reference policy on this rank, if there is one. Raises SettingsError if the model cannot be read."""
    if path is None:
        return None
    policy, forward = _frozen_policy(path, settings, engine, initial=initial)
    return FrozenPolicy(
        policy,
        forward,
        temperature=settings.rollout.temperature,
        needs_full_distribution=settings.kl.needs_full_distribution,
    )


def open_teachers(settings: Settings, engine: TrainingEngine[PolicyModel], *, initial: str) -> ScoringPolicy | None:
    """Open the teacher of every problem source on this rank, each model once. Returns None without a teacher.

    Raises SettingsError if a model cannot be read or does not fit the policy's vocabulary.
    """
    if not settings.teacher.active:
        return None
    opened: dict[tuple[str, str | None], FrozenPolicy | ServedTeacher] = {}
    by_source = settings.teacher.settings_by_source
    for one in by_source.values():
        if (one.path or initial, one.url) not in opened:
            opened[one.path or initial, one.url] = _open_teacher(one, settings, engine, initial=initial)
    if by_source.keys() == {None}:
        return next(iter(opened.values()))
    return TeachersBySource({source: opened[one.path or initial, one.url] for source, one in by_source.items()})


def _open_teacher(
    teacher: TeacherSettings, settings: Settings, engine: TrainingEngine[PolicyModel], *, initial: str
) -> FrozenPolicy | ServedTeacher:
    """Open one teacher: a server, or the model at ``teacher.path`` (default: the policy ``initial``).

    Raises SettingsError if the model cannot be read, if its vocabulary is smaller than the policy's, or if its
    tokenizer has different ids for ordinary tokens. A special token with a different id is refused when it occurs.
    """
    path = teacher.path or initial
    refused_ids = special_token_differences(read_tokenizer(initial), read_tokenizer(path), owner=f"the teacher {path}")
    vocabulary = engine.module.head.out_features
    if teacher.url is not None:
        from agentrl.training.step.served_teacher import ServedTeacher

        return ServedTeacher(teacher, refused_ids=refused_ids, vocabulary=vocabulary)
    policy, forward = _frozen_policy(path, settings, engine, initial=initial)
    logits = policy.head.out_features
    if teacher.needs_full_distribution and logits < vocabulary:
        raise SettingsError(
            f"teacher.path={path} has {logits} logits, but the policy has {vocabulary}: teacher.objective="
            f"{teacher.objective} needs a teacher with at least as many logits; set teacher.objective=sampled"
        )
    return FrozenPolicy(
        policy,
        forward,
        temperature=teacher.temperature or settings.rollout.temperature,
        needs_full_distribution=teacher.needs_full_distribution,
        beta=teacher.resolved_beta,
        vocabulary=vocabulary,
        hinted=teacher.hint is not None,
        refused_ids=refused_ids,
    )


def _frozen_policy(
    path: str, settings: Settings, engine: TrainingEngine[PolicyModel], *, initial: str
) -> tuple[PolicyModel, Callable[..., Any]]:
    """Return a frozen model and its forward function.

    For the base model ``initial`` of a policy with adapters, the policy is used with its adapters disabled.
    """
    training = settings.training
    if settings.model.lora.rank and path == initial:

        def forward_of_base_model(*args: Any, **kwargs: Any) -> Any:
            with disabled_adapters(engine.module.causal_lm):
                return engine(*args, **kwargs)

        return engine.module, forward_of_base_model
    policy = read_policy(path, settings.model.model_copy(update={"lora": LoRASettings()}), training)
    return policy, build_frozen_forward(policy, training, bfloat16=settings.model.dtype == "bfloat16")


def open_critic(settings: Settings, *, initial: str, updates: int) -> Critic:
    """Open a critic on this rank, with the transformer of ``critic.path`` or of the policy ``initial``."""
    causal_lm = read_model_for_training(settings.critic.path or initial, settings.model, settings.training)
    attention = choose_attention_backend(settings.model, causal_lm.config)
    engine = TrainingEngine(
        ValueModel(causal_lm, attention=attention, sequence=get_rank_groups(settings.training).sequence),
        optimizer=settings.optimizer.model_copy(update={"learning_rate": settings.critic.learning_rate}),
        training=settings.training,
        bfloat16=settings.model.dtype == "bfloat16",
        updates=updates,
    )
    return Critic(engine, settings.critic)


class Critic:
    """A value network with a separate DeepSpeed engine."""

    def __init__(self, engine: TrainingEngine[ValueModel], settings: CriticSettings) -> None:
        self.engine = engine
        self._clip = settings.clip

    @torch.no_grad()
    def values_and_final_values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute values before each response token [B, T] and after the last token [B]."""
        values = self._forward(batch)
        return values[:, :-1], values.gather(1, batch.response_lengths[:, None])[:, 0]

    def backward(self, batch: Batch, *, tokens: int) -> dict[str, Tensor]:
        """Accumulate the gradient of this micro-batch's part of the critic's loss.

        The loss is a mean over the update's ``tokens``. Returns metrics as means over the model tokens of ``batch``.
        """
        mask, now = batch.counted_mask, self._forward(batch)[:, :-1]
        per_token, metrics = value_loss(
            now, batch.computed_estimate.returns, mask, old_values=batch.values, clip=self._clip
        )
        value = aggregate(per_token, mask, "token_mean", normalizer=tokens)
        self.engine.backward(value * self.engine.world_size)
        return metrics | {"loss": torch.where(mask, per_token.detach(), 0.0).sum() / mask.sum().clamp(min=1)}

    def _forward(self, batch: Batch) -> Tensor:
        values: Tensor = self.engine(batch.row, batch.response_mask.shape[1])
        return values
