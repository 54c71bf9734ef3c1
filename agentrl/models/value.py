"""The critic's network: a transformer whose head gives one value a position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from agentrl.kernels.attention import AttentionBackend, SequenceGroup, pack_row
from agentrl.models.attention import use_packed_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueModel(nn.Module):
    """The transformer of a causal language model, whose own head is left out, under a linear value head.

    The head starts at zero, so every value does. It reads a batch as one row without padding.
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

    def forward(self, input_ids: Tensor, prompt_lengths: Tensor, response_lengths: Tensor) -> Tensor:
        """Values [B, T + 1], float32 or wider: at t the value of the state before response token t.

        ``input_ids`` [B, S] left aligned, ``prompt_lengths`` and ``response_lengths`` [B], the longest T. The value
        after a response of L tokens is at index L. Positions past it are meaningless.
        """
        lengths = (prompt_lengths + response_lengths).tolist()
        row = pack_row(input_ids, prompt_lengths.tolist(), lengths, backend=self._attention, sequence=self._sequence)
        columns = prompt_lengths[:, None] - 1 + torch.arange(int(response_lengths.max()) + 1, device=input_ids.device)
        places = row.places.gather(1, columns.clamp(max=row.places.shape[1] - 1))  # [B, T + 1]
        states = row.states(self.backbone, layers=self._layers)
        if self._sequence is None:
            values: Tensor = self.value_head(states[places]).squeeze(-1)
        else:
            every = torch.arange(row.input_ids.shape[1], device=input_ids.device)
            own = self.value_head(states).squeeze(-1)
            values = self._sequence.gather(own, every[row.part], len(every))[places]
        return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
