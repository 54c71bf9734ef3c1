"""The critic's network: a transformer whose head gives one value a position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueModel(nn.Module):
    """The transformer of a causal language model, whose own head is left out, under a linear value head.

    The head starts at zero, so every value does.
    """

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = causal_lm.get_decoder()
        self.value_head = nn.Linear(causal_lm.config.hidden_size, 1, dtype=causal_lm.dtype)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids: Tensor, prompt_lengths: Tensor, steps: int) -> Tensor:
        """Values [B, steps + 1], float32 or wider: at t the value of the state before response token t.

        ``input_ids`` [B, S] left aligned, ``prompt_lengths`` [B]. The value after a response of L tokens is at index L.
        Positions past a row's end are meaningless.
        """
        hidden = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state  # [B, S, D]
        places = prompt_lengths[:, None] - 1 + torch.arange(steps + 1, device=input_ids.device)
        rows = torch.arange(len(input_ids), device=input_ids.device)[:, None]
        states = hidden[rows, places.clamp(max=input_ids.shape[1] - 1)]  # [B, steps + 1, D]
        values: Tensor = self.value_head(states).squeeze(-1)
        return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
