"""The policy as training sees it: tokens in, statistics of the model-generated tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from agentrl.errors import SettingsError
from agentrl.kernels import Backend, TokenStatistics, trajectory_energies, triton_obstacle
from agentrl.kernels.attention import AttentionBackend, PackedRow, SequenceGroup, pack_row
from agentrl.models.anatomy import take_apart
from agentrl.models.attention import use_packed_attention
from agentrl.models.head import FusedHead, ReferenceHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PolicyModel(nn.Module):
    """A causal language model of `transformers` whose head is a :class:`FusedHead`.

    It reads a batch as one row without padding, in which equal prompts stand once.
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

        Raises SettingsError for a model that cannot run it, read packed rows or pass :func:`.anatomy.take_apart`.
        """
        super().__init__()
        if backend == "triton":
            _check_triton(triton_obstacle(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
        parts = take_apart(causal_lm)
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

    def forward(
        self,
        input_ids: Tensor,
        prompt_lengths: Tensor,
        response_ids: Tensor,
        response_mask: Tensor,
        temperature: float = 1.0,
        keep_hidden: bool = False,
        reference: ReferenceHead | None = None,
    ) -> tuple[TokenStatistics, Tensor | None]:
        """Statistics of the tokens where ``response_mask`` is True, in row-major order: each [N].

        ``input_ids`` [B, S] left aligned, ``prompt_lengths`` [B], ``response_ids`` and ``response_mask`` [B, T].
        The second value is the hidden states of those tokens, detached, if ``keep_hidden``: [N, D], or where ranks
        share the row [n, D] of this rank's. With a ``reference``, of the same tokens, the statistics hold the
        divergence from it.
        """
        row, places = self._packed(input_ids, prompt_lengths, response_mask)
        layers = self.causal_lm.config.get_text_config().num_hidden_layers
        states, targets = row.states(self.backbone, layers=layers), response_ids[response_mask]
        if self.sequence is None:
            selected = states[places]  # [N, D]
            statistics = self.head(selected, targets, temperature, reference)
            return statistics, selected.detach() if keep_hidden else None
        numbers, own = row.held(places)
        selected, targets = states[_at_least_one(own)], targets[_at_least_one(numbers)]
        statistics = self.head(selected, targets, temperature, reference)
        return _gathered(statistics, numbers, len(places), self.sequence), selected.detach() if keep_hidden else None

    def held_tokens(self, input_ids: Tensor, prompt_lengths: Tensor, response_mask: Tensor) -> Tensor | None:
        """The numbers [n] of the model tokens whose states :meth:`forward` keeps on this rank; None: of all.

        It keeps one state where there are none, so that every rank does the same work.
        """
        if self.sequence is None:
            return None
        row, places = self._packed(input_ids, prompt_lengths, response_mask)
        return row.held(places)[0]

    def _packed(self, input_ids: Tensor, prompt_lengths: Tensor, response_mask: Tensor) -> tuple[PackedRow, Tensor]:
        """The batch as one row, and where the states stand in it that the statistics of its N model tokens come from.

        What the last model token is followed by, and that token itself, predict nothing that is asked for.
        """
        rows, columns = response_mask.nonzero(as_tuple=True)
        steps = torch.arange(response_mask.shape[1], device=response_mask.device)
        read = prompt_lengths + torch.where(response_mask, steps, 0).amax(-1)  # [B]
        row = pack_row(
            input_ids, prompt_lengths.tolist(), read.tolist(), backend=self.attention, sequence=self.sequence
        )
        # The statistics of the token at position t come from the state at t - 1.
        return row, row.places[rows, prompt_lengths[rows] + columns - 1]

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


def scatter_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """Per-token values [N] in row-major order to [B, T], zero where ``mask`` is False. Differentiable."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
