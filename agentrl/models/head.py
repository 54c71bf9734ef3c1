"""The language-model head that gives token statistics instead of logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor, nn

from agentrl.kernels import Backend, TokenStatistics, full_kl, token_statistics


@dataclass(frozen=True, kw_only=True)
class ReferenceHead:
    """What the exact divergence from a reference policy is computed from; detached."""

    hidden: Tensor  # [N, E] its states at the same tokens
    weight: Tensor  # [V, E]
    bias: Tensor | None  # [V]


class FusedHead(nn.Linear):
    """Takes the place of ``lm_head``: with targets it returns :class:`TokenStatistics`, without them logits.

    It is a module whose parameter is the head's own (tied or not), so that hooks that gather a sharded weight around
    ``forward`` (ZeRO-3) work as for any linear layer. Logits of all targets never exist at once.
    """

    backend: Backend

    @classmethod
    def from_linear(cls, head: nn.Linear, *, backend: Backend = "auto") -> FusedHead:
        """A head that shares the parameters of ``head``."""
        fused = cls.__new__(cls)
        nn.Module.__init__(fused)
        fused.in_features, fused.out_features = head.in_features, head.out_features
        fused.weight = head.weight
        fused.bias = head.bias
        fused.backend = backend
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
        """Statistics of ``targets`` [N] given ``hidden`` [N, D]; without targets the logits of ``hidden`` [..., D].

        With a ``reference`` they hold the divergence from it.
        """
        if targets is None:
            return torch.nn.functional.linear(hidden, self.weight, self.bias)
        statistics = token_statistics(
            hidden, self.weight, targets, bias=self.bias, temperature=temperature, backend=self.backend
        )
        if reference is None:
            return statistics
        divergence = full_kl(
            hidden,
            self.weight,
            reference.hidden,
            reference.weight,
            temperature=temperature,
            bias=self.bias,
            reference_bias=reference.bias,
        )
        return replace(statistics, full_kl=divergence)
