"""Which modules have a closed form, and the refusal of every model where one parameter would be left out."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.kernels.records import KernelInputError

MODELS = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("GraniteForCausalLM", "Gemma2ForCausalLM"),
)
"""Classes of `transformers`. Others may scale embeddings outside of any module, so each must be looked at."""

_NORMS = {
    **dict.fromkeys(
        ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "GraniteRMSNorm"), "variance_epsilon"
    ),
    "Gemma2RMSNorm": "eps",  # multiplies by 1 + weight: the same gradient
}
"""RMSNorms, and their name of the number that they add to the mean square."""
_SCALED_EMBEDDINGS = {"Gemma2TextScaledWordEmbedding": "embed_scale"}
"""Embeddings that multiply their rows, and their name of the factor."""
_HEADS = ("FusedHead",)  # agentrl.models.FusedHead, a linear layer whose forward gives statistics
_CHECKPOINTED = "GradientCheckpointingLayer"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A causal language model taken apart. `layers` are the modules in the middle with trainable parameters of their
    own: (name, module, whether its forward is computed again in backward)."""

    backbone: Any
    depth: int  # attention layers
    embedding: nn.Embedding
    head: nn.Linear
    layers: tuple[tuple[str, nn.Module, bool], ...]

    @property
    def embedding_scale(self) -> float:
        """The factor by which the embedding multiplies its rows, in its own precision."""
        name = _SCALED_EMBEDDINGS.get(type(self.embedding).__name__)
        return 1.0 if name is None else float(getattr(self.embedding, name).to(self.embedding.weight.dtype))

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one parameter."""
        return self.embedding.weight is self.head.weight


def take_apart(model: Any) -> Parts:
    """The parts of a causal language model of `transformers`.

    Raises KernelInputError for a class that is not in MODELS, and names every module with trainable parameters that
    has no closed form here (adapters, quantised layers), and parameters that several modules share.
    """
    if type(model).__name__ not in MODELS:
        raise KernelInputError(
            f"exact energies are known for {', '.join(MODELS)} of transformers, not for {type(model).__name__}"
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    unknown = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if _trainable(module) and not _is_known(module, is_head=module is head)
    ]
    if unknown:
        raise KernelInputError(
            "exact energies have no closed form for the trainable parameters of " + "; ".join(unknown)
        )
    if not any(item.requires_grad for item in model.parameters()):
        raise KernelInputError("the model has no trainable parameter: every energy would be 0")
    _check_shared(model, embedding, head)
    recomputed = _recomputed_modules(model)
    layers = tuple(
        (name, module, module in recomputed)
        for name, module in model.named_modules()
        if module is not embedding and module is not head and _trainable(module)
    )
    depth = model.config.get_text_config().num_hidden_layers
    return Parts(backbone=model.base_model, depth=depth, embedding=embedding, head=head, layers=layers)


def normalized_input(norm: nn.Module, hidden: Tensor) -> Tensor:
    """What an RMSNorm of `transformers` multiplies by its weight, by the very operations of its forward."""
    epsilon: float = getattr(norm, _NORMS[type(norm).__name__])
    wide = hidden.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(hidden.dtype)


def _trainable(module: nn.Module) -> bool:
    return any(item.requires_grad for item in module.parameters(recurse=False))


def _is_known(module: nn.Module, *, is_head: bool) -> bool:
    if type(module) is nn.Embedding or type(module).__name__ in _SCALED_EMBEDDINGS:
        return module.max_norm is None and not module.scale_grad_by_freq  # type: ignore[union-attr]
    kind = type(module).__name__
    return type(module) is nn.Linear or kind in _NORMS or (is_head and kind in _HEADS)


def _check_shared(model: nn.Module, embedding: nn.Module, head: nn.Module) -> None:
    """Only embedding and head may be one parameter: every other pair would need a cross term of its own."""
    owner: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            first, other = owner.setdefault(id(parameter), (name, module))
            if other is not module and parameter.requires_grad and {other, module} != {embedding, head}:
                raise KernelInputError(f"{first} and {name} share a parameter: exact energies have no cross term there")


def _recomputed_modules(model: nn.Module) -> set[nn.Module]:
    """Modules inside layers whose forward runs again in backward (gradient checkpointing, in training mode alone)."""
    found: set[nn.Module] = set()
    for module in model.modules():
        classes = {kind.__name__ for kind in type(module).__mro__}
        if _CHECKPOINTED in classes and module.training and getattr(module, "gradient_checkpointing", False):
            found.update(module.modules())
    return found
