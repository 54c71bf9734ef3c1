"""The modules that training runs: the policy, its head and the critic. They map tokens to statistics or values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor, nn

from agentrl.errors import SettingsError
from agentrl.kernels import (
    Backend,
    Support,
    TokenStatistics,
    full_kl,
    reason_triton_unavailable,
    token_statistics,
    top_divergence,
    trajectory_energies,
)
from agentrl.kernels.attention import (
    AttentionBackend,
    PackedRow,
    SequenceParallelGroup,
    compute_packed_states,
    rank_slice,
)
from agentrl.models.attention import use_attention_backend
from agentrl.models.model_parts import IDENTITY_LOGIT_MAP, LogitMap, split_model
from agentrl.models.routes import RoutingPass, install_route_hooks, record_and_replay_routes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class FrozenHead:
    """A frozen policy's inputs to the exact divergence, detached."""

    hidden: Tensor  # [N, E] hidden states of the frozen policy at the same tokens
    weight: Tensor  # [V, E]
    bias: Tensor | None  # [V]
    logit_map: LogitMap = IDENTITY_LOGIT_MAP
    temperature: float | None = None  # None: the temperature of the trained policy
    beta: float = 1.0  # selects the divergence; see full_kl

    def select_tokens(self, indices: Tensor) -> FrozenHead:
        """Return the inputs at the tokens ``indices``."""
        return replace(self, hidden=self.hidden[indices])

    def divergence_of_policy(
        self,
        head: FusedHead,
        hidden: Tensor,
        targets: Tensor,
        log_probs: Tensor,
        temperature: float,
        support: Support | None,
    ) -> Tensor:
        """Return the divergence [N] of the policy with ``head`` and ``hidden`` [N, D] from the frozen policy.

        ``log_probs`` [N] are the policy's log-probabilities of ``targets`` [N].
        """
        own, other = head.logit_map, self.logit_map
        return full_kl(
            hidden,
            head.weight,
            self.hidden,
            self.weight,
            temperature=own.head_temperature(temperature),
            bias=head.bias,
            cap=own.output_cap,
            reference_bias=self.bias,
            reference_temperature=other.head_temperature(temperature if self.temperature is None else self.temperature),
            reference_cap=other.output_cap,
            support=support,
            beta=self.beta,
        )


@dataclass(frozen=True, kw_only=True)
class FrozenTopTokens:
    """The most likely tokens of a frozen policy whose hidden states are not available."""

    ids: Tensor  # [N, K]
    log_probs: Tensor  # [N, K]
    beta: float

    def select_tokens(self, indices: Tensor) -> FrozenTopTokens:
        """Like :meth:`FrozenHead.select_tokens`."""
        return replace(self, ids=self.ids[indices], log_probs=self.log_probs[indices])

    def divergence_of_policy(
        self,
        head: FusedHead,
        hidden: Tensor,
        targets: Tensor,
        log_probs: Tensor,
        temperature: float,
        support: Support | None,
    ) -> Tensor:
        """Like :meth:`FrozenHead.divergence_of_policy`, but over ``ids``, with all other tokens merged into one."""
        assert support is None  # the settings reject restricted sampling with a teacher server
        return top_divergence(
            hidden,
            head.weight,
            targets,
            log_probs,
            self.ids,
            self.log_probs,
            temperature=head.logit_map.head_temperature(temperature),
            bias=head.bias,
            cap=head.logit_map.output_cap,
            beta=self.beta,
        )


@dataclass(frozen=True, kw_only=True)
class FrozenPoliciesByToken:
    """Several frozen policies, each for some of the tokens."""

    parts: Sequence[tuple[Tensor, FrozenHead | FrozenTopTokens]]  # (ascending indices of tokens, their frozen policy)

    def select_tokens(self, indices: Tensor) -> FrozenPoliciesByToken:
        """Like :meth:`FrozenHead.select_tokens`."""
        parts = []
        for own, part in self.parts:
            chosen = torch.isin(indices, own).nonzero()[:, 0]
            parts.append((chosen, part.select_tokens(torch.searchsorted(own, indices[chosen]))))
        return FrozenPoliciesByToken(parts=parts)

    def divergence_of_policy(
        self,
        head: FusedHead,
        hidden: Tensor,
        targets: Tensor,
        log_probs: Tensor,
        temperature: float,
        support: Support | None,
    ) -> Tensor:
        """Like :meth:`FrozenHead.divergence_of_policy`, but from the frozen policy of each token."""
        result = torch.zeros_like(log_probs)
        for own, part in self.parts:
            sets = None if support is None else support.select_tokens(own)
            values = part.divergence_of_policy(head, hidden[own], targets[own], log_probs[own], temperature, sets)
            result = result.index_copy(0, own, values)
        return result


FrozenDistribution = FrozenHead | FrozenTopTokens | FrozenPoliciesByToken


class FusedHead(nn.Linear):
    """A language-model head that returns :class:`TokenStatistics` if called with targets, otherwise its output.

    The statistics refer to the logits, that is, to ``logit_map`` of the output. A cap enters gradients and energies
    through its derivative. The weight is the original parameter (tied or not), so the hooks of ZeRO-3 gather it as for
    any linear layer.
    """

    backend: Backend
    logit_map: LogitMap

    @classmethod
    def from_linear(
        cls, head: nn.Linear, *, backend: Backend = "auto", logit_map: LogitMap = IDENTITY_LOGIT_MAP
    ) -> FusedHead:
        """Return a head that shares the parameters of ``head``."""
        fused = cls.__new__(cls)
        nn.Module.__init__(fused)
        fused.in_features, fused.out_features = head.in_features, head.out_features
        fused.weight = head.weight
        fused.bias = head.bias
        fused.backend = backend
        fused.logit_map = logit_map
        return fused

    @overload  # type: ignore[override]
    def forward(self, hidden: Tensor, targets: None = None, temperature: float = 1.0) -> Tensor: ...
    @overload
    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        reference: FrozenHead | None = None,
        teacher: FrozenDistribution | None = None,
        support: Support | None = None,
    ) -> TokenStatistics: ...
    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        reference: FrozenHead | None = None,
        teacher: FrozenDistribution | None = None,
        support: Support | None = None,
    ) -> Tensor | TokenStatistics:
        """Return the statistics of ``targets`` [N] for ``hidden`` [N, D].

        Without targets, return the output for ``hidden`` [..., D]. With a ``reference`` or a ``teacher``, the
        statistics contain the divergence from it. A ``support`` restricts the distributions of all policies.
        """
        if targets is None:
            return torch.nn.functional.linear(hidden, self.weight, self.bias)
        own = self.logit_map
        statistics = token_statistics(
            hidden,
            self.weight,
            targets,
            bias=self.bias,
            temperature=own.head_temperature(temperature),
            cap=own.output_cap,
            backend=self.backend,
            support=support,
        )
        inputs = (self, hidden, targets, statistics.log_probs, temperature, support)
        return replace(
            statistics,
            full_kl=None if reference is None else reference.divergence_of_policy(*inputs),
            teacher_divergence=None if teacher is None else teacher.divergence_of_policy(*inputs),
        )


class PolicyModel(nn.Module):
    """A causal language model of `transformers` whose head is a :class:`FusedHead`.

    Processes trajectories as one packed row without padding, in which a shared prefix is stored once.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        backend: Backend = "auto",
        attention: AttentionBackend = "sdpa",
        sequence: SequenceParallelGroup | None = None,
    ) -> None:
        """Replace the head of ``causal_lm`` with a :class:`FusedHead` that uses ``backend``.

        The ranks of a sequence-parallel group (``sequence``) must receive the same batches.

        Raises SettingsError if the backend cannot run, the model does not support packed rows, or `split_model` fails.
        """
        super().__init__()
        if backend == "triton":
            obstacle = reason_triton_unavailable(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            if obstacle is not None:
                raise SettingsError(f"training.head_backend=triton {obstacle}; set training.head_backend=auto")
        parts = split_model(causal_lm)
        install_route_hooks(causal_lm)
        use_attention_backend(causal_lm, attention, ranks=1 if sequence is None else sequence.size)
        if not isinstance(parts.head, FusedHead):
            head = FusedHead.from_linear(parts.head, backend=backend, logit_map=parts.logit_map)
            causal_lm.set_output_embeddings(head)
        self.causal_lm = causal_lm
        self.attention: AttentionBackend = attention
        self.sequence = sequence
        self.records_routes = False
        self.routes: RoutingPass | None = None  # routes of the last forward pass that recorded or replayed routes

    @property
    def head(self) -> FusedHead:
        head: FusedHead = self.causal_lm.get_output_embeddings()
        return head

    @property
    def backbone(self) -> nn.Module:
        """The transformer, which returns the hidden states after the last norm."""
        return self.causal_lm.get_decoder()

    @property
    def row_length_multiple(self) -> int:
        """The number of sequence-parallel ranks. The length of every row must be a multiple of this number."""
        return 1 if self.sequence is None else self.sequence.size

    def forward(
        self,
        row: PackedRow,
        rows: Tensor,
        columns: Tensor,
        temperature: float = 1.0,
        keep_hidden: bool = False,
        reference: FrozenHead | None = None,
        teacher: FrozenDistribution | None = None,
        support: Support | None = None,
    ) -> tuple[TokenStatistics, Tensor | None]:
        """Return the statistics of N response tokens of a packed row, each [N], and optionally their hidden states.

        Token n is at index ``columns[n]`` of the response of document ``rows[n]``, both [N] int64. With
        ``keep_hidden``, the second value contains the detached hidden states that predict these tokens, [N, D]. If
        ranks share the row, it is [n, D], with only the n tokens that this rank computes (:meth:`local_token_indices`).
        Without ``keep_hidden``, it is None. With a ``reference`` or a ``teacher``, which must contain all N tokens,
        the statistics include the divergence from it. The routes of ``row`` are replayed, if it has any.
        ``support``: the sets from which the N tokens were sampled.
        """
        layers = self.causal_lm.config.get_text_config().num_hidden_layers
        given = None if row.routes is None else row.routes[rank_slice(row, self.sequence)]
        self.routes = (
            RoutingPass(num_layers=layers, replayed=given) if self.records_routes or given is not None else None
        )
        with record_and_replay_routes(self.routes):
            states = compute_packed_states(
                row, self.backbone, layers=layers, backend=self.attention, sequence=self.sequence
            )  # [l, D]
        indices, targets = row.predicting_positions(rows, columns), row.response_token_ids(rows, columns)
        if self.sequence is None:
            selected = states[indices]  # [N, D]
            statistics = self.head(selected, targets, temperature, reference, teacher, support)
            return statistics, selected.detach() if keep_hidden else None
        numbers = self.local_token_indices(row, rows, columns)
        assert numbers is not None  # ranks share the row
        held = _indices_or_first_row(numbers)
        # A rank without tokens computes one token and discards it, because the head is a collective under ZeRO-3.
        own = (indices[held] - rank_slice(row, self.sequence).start).clamp(min=0, max=len(states) - 1)
        selected = states[own]
        statistics = self.head(
            selected,
            targets[held],
            temperature,
            None if reference is None else reference.select_tokens(held),
            None if teacher is None else teacher.select_tokens(held),
            None if support is None else support.select_tokens(held),
        )
        return _gather_statistics(
            statistics, numbers, len(indices), self.sequence
        ), selected.detach() if keep_hidden else None

    def local_token_indices(self, row: PackedRow, rows: Tensor, columns: Tensor) -> Tensor | None:
        """Return the indices [n] of the tokens whose hidden states this rank computes, or None for all tokens.

        If the result is empty, :meth:`forward` still computes one state, so that all ranks run the same collectives.
        """
        if self.sequence is None:
            return None
        part, indices = rank_slice(row, self.sequence), row.predicting_positions(rows, columns)
        return ((indices >= part.start) & (indices < part.stop)).nonzero().squeeze(-1)

    def trajectory_energies(
        self,
        input_ids: Tensor,
        prompt_lengths: Tensor,
        response_mask: Tensor,
        *,
        importance_weights: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Return the exact energy ``||grad_theta sum_t rho_t ln p(y_t)||^2`` of every trajectory, [B].

        Costs one forward and one backward pass. ``input_ids`` [B, S], ``prompt_lengths`` [B] and ``response_mask``
        [B, T] are as in :class:`agentrl.batch.Batch`. ``importance_weights`` are [B, T]. See
        :func:`agentrl.kernels.trajectory_energies`. Collective under ZeRO-3. Sequence-parallel ranks divide the
        trajectories among themselves.
        """
        rows, columns = response_mask.nonzero(as_tuple=True)
        places = (rows, prompt_lengths[rows] + columns)
        token_mask = torch.zeros_like(input_ids, dtype=torch.bool)
        token_mask[places] = True
        weights = None
        if importance_weights is not None:
            weights = torch.zeros(input_ids.shape, dtype=importance_weights.dtype, device=input_ids.device)
            weights[places] = importance_weights[rows, columns]
        every = torch.arange(len(input_ids), device=input_ids.device)
        numbers = every if self.sequence is None else every[self.sequence.rank :: self.sequence.size]
        own = _indices_or_first_row(numbers)
        energies = trajectory_energies(
            self.causal_lm,
            input_ids[own],
            token_mask[own],
            importance_weights=None if weights is None else weights[own],
            temperature=self.head.logit_map.head_temperature(temperature),
            cap=self.head.logit_map.output_cap,
            packed=None if self.attention == "padded" else self.attention,
        )
        if self.sequence is None:
            return energies
        return self.sequence.all_gather(energies[: len(numbers)], numbers, len(every))


def _indices_or_first_row(indices: Tensor) -> Tensor:
    """Return ``indices`` [n], or [0] if empty, because a rank without work must still take part in collectives."""
    return indices if len(indices) else indices.new_zeros(1)


def _gather_statistics(
    own: TokenStatistics, indices: Tensor, total: int, sequence: SequenceParallelGroup
) -> TokenStatistics:
    """Gather the statistics of all tokens on every rank. ``indices`` are the indices of this rank's tokens."""
    given = {name: values for name, values in vars(own).items() if values is not None}
    every = sequence.all_gather(torch.stack([*given.values()], dim=-1)[: len(indices)], indices, total).unbind(-1)
    learns = [values.requires_grad for values in given.values()]
    return TokenStatistics(
        **{name: item if learn else item.detach() for name, item, learn in zip(given, every, learns, strict=True)}
    )


class ValueModel(nn.Module):
    """The critic: a causal language model with a linear value head instead of the language-model head.

    The value head starts at zero, so all initial values are zero. Trajectories are processed as one packed row.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        attention: AttentionBackend = "sdpa",
        sequence: SequenceParallelGroup | None = None,
    ) -> None:
        """Build the critic on the transformer of ``causal_lm``. ``sequence``: the sequence-parallel group, if any.

        Raises SettingsError if the model does not support packed rows.
        """
        super().__init__()
        use_attention_backend(causal_lm, attention, ranks=1 if sequence is None else sequence.size)
        self._sequence = sequence
        self._attention: AttentionBackend = attention
        self._layers: int = causal_lm.config.get_text_config().num_hidden_layers
        self.backbone = causal_lm.get_decoder()
        self.value_head = nn.Linear(causal_lm.config.hidden_size, 1, dtype=causal_lm.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, row: PackedRow, response_width: int) -> Tensor:
        """Return the values [B, response_width + 1] of a packed row's B documents, in float32 or wider.

        Index t contains the value of the state before response token t. For a response of L tokens, index L contains
        the value of the final state, and values at larger indices are undefined.
        """
        states = compute_packed_states(
            row, self.backbone, layers=self._layers, backend=self._attention, sequence=self._sequence
        )
        rows = torch.arange(len(row.response_starts), device=states.device)
        columns = torch.arange(response_width + 1, device=states.device)
        indices = row.predicting_positions(rows[:, None], columns)  # [B, response_width + 1]
        if self._sequence is None:
            values: Tensor = self.value_head(states[indices]).squeeze(-1)
        else:
            every = torch.arange(row.input_ids.shape[1], device=states.device)
            own = self.value_head(states).squeeze(-1)
            values = self._sequence.all_gather(own, every[rank_slice(row, self._sequence)], len(every))[indices]
        return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
