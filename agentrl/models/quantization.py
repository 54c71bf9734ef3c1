"""Fake quantization, to measure quantized rollouts: rounds weights to fp8 or int8, but keeps their dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMATS = ("fp8", "int8")


@torch.no_grad()
def fake_quantize(model: PreTrainedModel, number_format: str) -> PreTrainedModel:
    """Round the weights of all linear layers except the head to one of `FORMATS`, in place, and return the model.

    As in vLLM's per-channel formats, each output has a scale, and embeddings, norms, routers and the head keep their
    values. Activations are not rounded. Experts may be linear layers or share one weight [experts, out, in].
    """
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            module.weight.copy_(round_weight(module.weight, number_format))
        elif name.endswith("experts"):
            for weight in module.parameters(recurse=False):
                if weight.dim() == 3:
                    outputs = weight.mT if getattr(module, "is_transposed", False) else weight
                    outputs.copy_(round_weight(outputs, number_format))
    return model


def round_weight(weight: Tensor, number_format: str) -> Tensor:
    """Round a weight [out, in] with one scale per output.

    >>> round_weight(torch.tensor([[127.0, 1.4], [2.0, -0.99]]), "int8")
    tensor([[127.0000,   1.0000],
            [  2.0000,  -0.9921]])
    """
    largest = torch.finfo(torch.float8_e4m3fn).max if number_format == "fp8" else 127.0
    wide = weight.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / largest
    steps = wide / scale
    steps = steps.to(torch.float8_e4m3fn).float() if number_format == "fp8" else steps.round()
    return (steps * scale).to(weight.dtype)
