"""Parts of a causal language model of `transformers`: transformer, head, and the map from head output to logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from agentrl.errors import SettingsError
from agentrl.kernels.arithmetic import write_tempered_logits

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_DIVISOR = "logits_scaling"  # Granite
_FACTOR = "logit_scale"  # Cohere
_CAP = "final_logit_softcapping"  # Gemma
_EXTREME = 80.0
"""Largest logit in the test of a model's logit map. Far above the caps of real models."""


@dataclass(frozen=True, kw_only=True)
class LogitMap:
    """Map from head output x to logits z. Without a cap, z = scale x. With a cap, z = cap tanh(scale x / cap).

    >>> LogitMap(scale=0.5, cap=2.0)(torch.tensor([2.0, 800.0]))
    tensor([0.9242, 2.0000])
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, output: Tensor) -> Tensor:
        """Return the logits, in float32 or wider unless the map is the identity."""
        if self == LogitMap():
            return output
        scaled = output.to(torch.promote_types(output.dtype, torch.float32)) * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)

    def logits_and_slope(self, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits and their derivative with respect to scale times output (None without a cap)."""
        logits = self(output)
        return logits, None if self.cap is None else 1 - (logits / self.cap).square()

    def head_temperature(self, temperature: float) -> float:
        """Return the temperature of the head's output that is equivalent to ``temperature`` for the logits."""
        return temperature / self.scale

    @property
    def output_cap(self) -> float | None:
        """The cap in units of the head's output."""
        return None if self.cap is None else self.cap / self.scale


IDENTITY_LOGIT_MAP = LogitMap()


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """Transformer, head and logit map of a model. The modules are shared with the model."""

    backbone: nn.Module  # returns the hidden states after the last norm
    head: nn.Linear
    logit_map: LogitMap

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of hidden states [..., D], in float32 or wider, as training computes them.

        For inference only.
        """
        weight, bias = self.head.weight, self.head.bias
        dtype = torch.promote_types(weight.dtype, torch.float32)
        if weight.dtype == dtype:
            return self.logit_map(self.head(hidden))
        rows = hidden.flatten(0, -2)
        output = write_tempered_logits(
            rows, weight, bias, rows.new_empty(len(rows), len(weight), dtype=dtype), 1.0, None
        )
        return self.logit_map(output).view(*hidden.shape[:-1], -1)


def split_model(causal_lm: PreTrainedModel) -> ModelParts:
    """Split a model into its parts. Raises SettingsError if the logits depend on anything except these parts.

    Checks the logits with artificial hidden states and head outputs. Runs no layer and reads no weight, so the model
    may be sharded or on the meta device.
    """
    name = type(causal_lm).__name__
    backbone, head = causal_lm.get_decoder(), causal_lm.get_output_embeddings()
    if not isinstance(head, nn.Linear) or backbone is causal_lm:
        raise SettingsError(f"model.path: {name} is not a causal language model with a linear head; use another model")
    parts = ModelParts(backbone=backbone, head=head, logit_map=_declared_logit_map(causal_lm.config))
    problem = _describe_logit_difference(causal_lm, parts)
    if problem is not None:
        raise SettingsError(
            f"model.path: {name} {problem}, so training would use a different policy than this model. Supported: "
            f"models whose configuration divides ({_DIVISOR}), multiplies ({_FACTOR}) or caps ({_CAP}) the logits"
        )
    return parts


def _declared_logit_map(config: PreTrainedConfig) -> LogitMap:
    """Return the logit map that the configuration declares under the names of `transformers`."""
    text = config.get_text_config()
    scale = 1.0 / (getattr(text, _DIVISOR, None) or 1.0) * (getattr(text, _FACTOR, None) or 1.0)
    return LogitMap(scale=scale, cap=getattr(text, _CAP, None) or None)


@torch.no_grad()
def _describe_logit_difference(causal_lm: PreTrainedModel, parts: ModelParts) -> str | None:
    """Describe how the model's logits differ from the logits of ``parts``. Returns None if they agree."""
    if not parts.logit_map.scale > 0:
        return f"multiplies its head's output by {parts.logit_map.scale}"
    device, head = parts.head.weight.device, parts.head
    steps = torch.linspace(-1, 1, head.out_features, device=device)
    # Use large, reversed and cubic rows, so that a scale, a cap or a shift changes at least one of them.
    output = torch.stack([_EXTREME * steps, steps.flip(0), 10 * steps**3])[None]  # [1, 3, V]
    hidden = torch.linspace(-1, 1, 3 * head.in_features, device=device).view(1, 3, -1).to(head.weight.dtype)
    ids = torch.zeros(1, 3, dtype=torch.int64, device=device)
    given: list[Tensor] = []
    taken: list[Tensor] = []

    def transformer(*args: object, **kwargs: object) -> _HiddenStatesOutput:
        given.extend(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value is not ids)
        return _HiddenStatesOutput(hidden)

    def linear(states: Tensor) -> Tensor:
        taken.append(states)
        return output

    with _replaced_forward(parts.backbone, transformer), _replaced_forward(head, linear):
        logits = causal_lm(input_ids=ids, use_cache=False).logits
    if given:
        return "passes more than token ids to its transformer"
    if len(taken) != 1:
        return f"calls its head {len(taken)} times in one forward pass"
    if not torch.equal(taken[0], hidden):
        return "changes the hidden states between its transformer and its head"
    wanted = parts.logit_map(output)
    if logits.shape != wanted.shape or not torch.allclose(logits.to(wanted), wanted, rtol=1e-5, atol=1e-5):
        return "changes its head's output in an unsupported way"
    return None


class _HiddenStatesOutput:
    """A transformer's output, readable by attribute or as a tuple. Every attribute except the hidden states is None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
