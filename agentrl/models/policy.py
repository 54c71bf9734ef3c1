"""The policy as training sees it: tokens in, statistics of the model-generated tokens out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor, nn

from agentrl.errors import SettingsError
from agentrl.kernels import Backend, TokenStatistics, full_kl, token_statistics, trajectory_energies, triton_obstacle
from agentrl.kernels.attention import AttentionBackend, PackedRow, SequenceGroup, packed_states, part_of
from agentrl.models.attention import use_packed_attention
from agentrl.models.model_parts import IDENTITY, LogitMap, split_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class ReferenceHead:
    """What the exact divergence from a reference policy is computed from; detached."""

    hidden: Tensor  # [N, E] its states at the same tokens
    weight: Tensor  # [V, E]
    bias: Tensor | None  # [V]
    logit_map: LogitMap = IDENTITY


class FusedHead(nn.Linear):
    """Takes the place of a model's head: with targets it returns :class:`TokenStatistics`, without them its output.

    The statistics are of what ``logit_map`` makes of the output; a cap enters gradients and energies by its derivative.
    Its parameter is the head's own (tied or not), so ZeRO-3's hooks gather it as for any linear layer.
    """

    backend: Backend
    logit_map: LogitMap

    @classmethod
    def from_linear(cls, head: nn.Linear, *, backend: Backend = "auto", logit_map: LogitMap = IDENTITY) -> FusedHead:
        """A head that shares the parameters of ``head``."""
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
        self, hidden: Tensor, targets: Tensor, temperature: float = 1.0, reference: ReferenceHead | None = None
    ) -> TokenStatistics: ...
    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        reference: ReferenceHead | None = None,
    ) -> Tensor | TokenStatistics:
        """Statistics of ``targets`` [N] given ``hidden`` [N, D]; without targets the output of ``hidden`` [..., D].

        With a ``reference`` they hold the divergence from it.
        """
        if targets is None:
            return torch.nn.functional.linear(hidden, self.weight, self.bias)
        own = self.logit_map
        statistics = token_statistics(
            hidden,
            self.weight,
            targets,
            bias=self.bias,
            temperature=own.temperature(temperature),
            cap=own.output_cap,
            backend=self.backend,
        )
        if reference is None:
            return statistics
        other = reference.logit_map
        divergence = full_kl(
            hidden,
            self.weight,
            reference.hidden,
            reference.weight,
            temperature=own.temperature(temperature),
            bias=self.bias,
            cap=own.output_cap,
            reference_bias=reference.bias,
            reference_temperature=other.temperature(temperature),
            reference_cap=other.output_cap,
        )
        return replace(statistics, full_kl=divergence)


class PolicyModel(nn.Module):
    """A causal language model of `transformers` whose head is a :class:`FusedHead`.

    It reads trajectories as one row without padding, in which equal prompts stand once.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        backend: Backend = "auto",
        attention: AttentionBackend = "sdpa",
        sequence: SequenceGroup | None = None,
    ) -> None:
        """``backend`` is that of the head. The ranks of a ``sequence`` share rows: they get the same batches.

        Raises SettingsError for a model that cannot run it, read packed rows or pass `split_model`.
        """
        super().__init__()
        if backend == "triton":
            _check_triton(triton_obstacle(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
        parts = split_model(causal_lm)
        use_packed_attention(causal_lm, ranks=1 if sequence is None else sequence.size)
        if not isinstance(parts.head, FusedHead):
            head = FusedHead.from_linear(parts.head, backend=backend, logit_map=parts.logit_map)
            causal_lm.set_output_embeddings(head)
        self.causal_lm = causal_lm
        self.attention: AttentionBackend = attention
        self.sequence = sequence

    @property
    def head(self) -> FusedHead:
        head: FusedHead = self.causal_lm.get_output_embeddings()
        return head

    @property
    def backbone(self) -> nn.Module:
        """The transformer, which gives the states after the last norm."""
        return self.causal_lm.get_decoder()

    @property
    def row_multiple(self) -> int:
        """The number that divides the tokens of every row: the ranks that share rows."""
        return 1 if self.sequence is None else self.sequence.size

    def forward(
        self,
        row: PackedRow,
        rows: Tensor,
        columns: Tensor,
        temperature: float = 1.0,
        keep_hidden: bool = False,
        reference: ReferenceHead | None = None,
    ) -> tuple[TokenStatistics, Tensor | None]:
        """Return the statistics of N response tokens of a packed row, each [N].

        Token n is the one at ``columns[n]`` of the response of document ``rows[n]``, both [N] int64. The second value
        is the hidden states that predict these tokens, detached, if ``keep_hidden``: [N, D], or where ranks share the
        row [n, D] of those that this rank computes (:meth:`held_tokens`). With a ``reference``, of the same tokens, the
        statistics contain the divergence from it.
        """
        layers = self.causal_lm.config.get_text_config().num_hidden_layers
        states = packed_states(
            row, self.backbone, layers=layers, backend=self.attention, sequence=self.sequence
        )  # [l, D]
        indices, targets = row.predicting(rows, columns), row.tokens(rows, columns)
        if self.sequence is None:
            selected = states[indices]  # [N, D]
            statistics = self.head(selected, targets, temperature, reference)
            return statistics, selected.detach() if keep_hidden else None
        numbers = self.local_tokens(row, rows, columns)
        assert numbers is not None  # ranks share the row
        held = _at_least_one(numbers)
        # A rank without tokens computes one that counts nowhere, to take part in collectives.
        own = (indices[held] - part_of(row, self.sequence).start).clamp(min=0, max=len(states) - 1)
        selected = states[own]
        statistics = self.head(selected, targets[held], temperature, reference)
        return _gathered(statistics, numbers, len(indices), self.sequence), selected.detach() if keep_hidden else None

    def local_tokens(self, row: PackedRow, rows: Tensor, columns: Tensor) -> Tensor | None:
        """Return the numbers [n] of the tokens whose states this rank computes; None: all of them.

        :meth:`forward` keeps one state where there are none, so that every rank does the same work.
        """
        if self.sequence is None:
            return None
        part, indices = part_of(row, self.sequence), row.predicting(rows, columns)
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
        """``||grad_theta sum_t rho_t ln p(y_t)||^2`` of every row [B], exact; one forward and one backward.

        ``input_ids`` [B, S] left aligned, ``prompt_lengths`` [B], ``response_mask`` and ``importance_weights`` [B, T]
        as in a batch. See :func:`agentrl.kernels.trajectory_energies`. Under ZeRO-3 every rank must call it. Ranks that
        share rows compute whole ones here, each its part of them.
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
        own = _at_least_one(numbers)
        energies = trajectory_energies(
            self.causal_lm,
            input_ids[own],
            token_mask[own],
            importance_weights=None if weights is None else weights[own],
            temperature=self.head.logit_map.temperature(temperature),
            cap=self.head.logit_map.output_cap,
            packed=self.attention,
        )
        if self.sequence is None:
            return energies
        return self.sequence.gather(energies[: len(numbers)], numbers, len(every))


def _at_least_one(numbers: Tensor) -> Tensor:
    """``numbers`` [n], or 0 where there are none: a rank without work takes part in collectives as the others do."""
    return numbers if len(numbers) else numbers.new_zeros(1)


def _gathered(own: TokenStatistics, numbers: Tensor, total: int, sequence: SequenceGroup) -> TokenStatistics:
    """The statistics of all tokens on every rank, from those of ``numbers`` on this one."""
    given = {name: values for name, values in vars(own).items() if values is not None}
    every = sequence.gather(torch.stack([*given.values()], dim=-1)[: len(numbers)], numbers, total).unbind(-1)
    learns = [values.requires_grad for values in given.values()]
    return TokenStatistics(
        **{name: item if learn else item.detach() for name, item, learn in zip(given, every, learns, strict=True)}
    )


def _check_triton(obstacle: str | None) -> None:
    if obstacle is not None:
        raise SettingsError(f"training.head_backend=triton {obstacle}; set training.head_backend=auto")


class ValueModel(nn.Module):
    """The transformer of a causal language model, whose own head is left out, under a linear value head.

    The head starts at zero, so every value does. It reads trajectories as one row without padding.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        attention: AttentionBackend = "sdpa",
        sequence: SequenceGroup | None = None,
    ) -> None:
        """The ranks of a ``sequence`` share rows. Raises SettingsError for a model that cannot read packed rows."""
        super().__init__()
        use_packed_attention(causal_lm, ranks=1 if sequence is None else sequence.size)
        self._sequence = sequence
        self._attention: AttentionBackend = attention
        self._layers: int = causal_lm.config.get_text_config().num_hidden_layers
        self.backbone = causal_lm.get_decoder()
        self.value_head = nn.Linear(causal_lm.config.hidden_size, 1, dtype=causal_lm.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, row: PackedRow, steps: int) -> Tensor:
        """Return the values [B, steps + 1] of a packed row's B documents, float32 or wider.

        The value at t is the value of the state before response token t. After a response of L tokens it is at index L.
        Positions past it are meaningless.
        """
        states = packed_states(
            row, self.backbone, layers=self._layers, backend=self._attention, sequence=self._sequence
        )
        rows = torch.arange(len(row.starts), device=states.device)
        columns = torch.arange(steps + 1, device=states.device)
        indices = row.predicting(rows[:, None], columns)  # [B, steps + 1]
        if self._sequence is None:
            values: Tensor = self.value_head(states[indices]).squeeze(-1)
        else:
            every = torch.arange(row.input_ids.shape[1], device=states.device)
            own = self.value_head(states).squeeze(-1)
            values = self._sequence.gather(own, every[part_of(row, self._sequence)], len(every))[indices]
        return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
