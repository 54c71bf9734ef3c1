"""The critic's network: a transformer whose head gives one value a position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from agentrl.kernels.attention import AttentionBackend, pack_row
from agentrl.models.attention import use_packed_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueModel(nn.Module):
    """The transformer of a causal language model, whose own head is left out, under a linear value head.

    The head starts at zero, so every value does. It reads a batch as one row without padding.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, attention: AttentionBackend = "sdpa") -> None:
        """Raises SettingsError for a model that cannot read packed rows."""
        super().__init__()
        use_packed_attention(causal_lm)
        self._attention: AttentionBackend = attention
        self._layers: int = causal_lm.config.get_text_config().num_hidden_layers
        self.backbone = causal_lm.get_decoder()
        self.value_head = nn.Linear(causal_lm.config.hidden_size, 1, dtype=causal_lm.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids: Tensor, prompt_lengths: Tensor, response_lengths: Tensor) -> Tensor:
        """Values [B, T + 1], float32 or wider: at t the value of the state before response token t.

        ``input_ids`` [B, S] left aligned, ``prompt_lengths`` and ``response_lengths`` [B], the longest T. The value
        after a response of L tokens is at index L. Positions past it are meaningless.
        """
        lengths = (prompt_lengths + response_lengths).tolist()
        row = pack_row(input_ids, prompt_lengths.tolist(), lengths, backend=self._attention)
        columns = prompt_lengths[:, None] - 1 + torch.arange(int(response_lengths.max()) + 1, device=input_ids.device)
        places = row.places.gather(1, columns.clamp(max=row.places.shape[1] - 1))  # [B, T + 1]
        values: Tensor = self.value_head(row.states(self.backbone, layers=self._layers)[places]).squeeze(-1)
        return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
