"""The language-model head that gives token statistics instead of logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor, nn

from agentrl.kernels import Backend, TokenStatistics, full_kl, token_statistics
from agentrl.models.anatomy import PLAIN, LogitMap


@dataclass(frozen=True, kw_only=True)
class ReferenceHead:
    """What the exact divergence from a reference policy is computed from; detached."""

    hidden: Tensor  # [N, E] its states at the same tokens
    weight: Tensor  # [V, E]
    bias: Tensor | None  # [V]
    logit_map: LogitMap = PLAIN


class FusedHead(nn.Linear):
    """Takes the place of a model's head: with targets it returns :class:`TokenStatistics`, without them its output.

    The statistics are of what ``logit_map`` makes of the output; a cap enters gradients and energies by its derivative.
    Its parameter is the head's own (tied or not), so ZeRO-3's hooks gather it as for any linear layer.
    """

    backend: Backend
    logit_map: LogitMap

    @classmethod
    def from_linear(cls, head: nn.Linear, *, backend: Backend = "auto", logit_map: LogitMap = PLAIN) -> FusedHead:
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
