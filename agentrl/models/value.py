"""The critic's network: a transformer whose head gives one value a position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from agentrl.kernels.attention import AttentionBackend, PackedRow, SequenceGroup, packed_states, part_of
from agentrl.models.attention import use_packed_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
