"""Attention function that all models use, registered with `transformers`. Supports padded batches and packed rows."""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from agentrl.errors import SettingsError
from agentrl.kernels import KernelInputError
from agentrl.kernels.attention import AttentionBackend, attend, current_attention_pass
from agentrl.kernels.attention.backends import eager_attention, torch_varlen_attention, varlen_attention_function

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ATTENTION = "agentrl"
PADDED_ROWS_NOT_SHAREABLE = (
    "training.sequence_parallel needs packed trajectories, but the model reads padded ones (model.rows): set "
    "training.sequence_parallel=1"
)
_PACKABLE_LAYERS = ("full_attention", "sliding_attention")
_FLASH_HEAD_DIM = 256
_FLASH_CAPABILITY = (8, 0)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention, with the signature that `transformers` requires.

    Inside :func:`.compute_packed_states`, each document of the row attends only to itself. Otherwise,
    ``attention_mask`` is applied as in `sdpa`. ``softcap`` caps the scores, and ``s_aux`` contains the attention sink
    of each head.
    """
    now = current_attention_pass()
    if kwargs.get("position_bias") is not None:
        raise SettingsError(
            f"model.path: {type(module).__name__} adds biases to its attention scores, which packed rows do not "
            "support: choose another model"
        )
    if now is not None:
        now.layers.add(id(module))
        obstacle = reason_too_long_to_pack(module.config, now.row.longest_document_length)
        if obstacle is not None:
            raise SettingsError(obstacle)
        window = _checked_window(module, sliding_window)
        return attend(now, query, key, value, scale=scaling, window=window, cap=softcap, sinks=s_aux), None
    if attention_mask is not None and attention_mask.numel() == 1 and query.shape[2] > 1:
        raise KernelInputError(
            "a checkpointed layer was recomputed outside its packed row: enable gradient checkpointing with "
            "agentrl.models.loading.enable_gradient_checkpointing"
        )
    if softcap is None and s_aux is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if attention_mask is None and query.shape[2] > 1:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    attended = eager_attention(query, key, value, attention_mask, scale=scaling, cap=softcap, sinks=s_aux)
    return attended.transpose(1, 2).contiguous(), None


def _checked_window(module: torch.nn.Module, window: int | None) -> int | None:
    """Return the layer's attention window. Raises SettingsError if it differs from the window in the configuration."""
    config = module.config
    kinds = getattr(config, "layer_types", None)  # not every architecture has layer_types and sliding_window
    wanted = getattr(config, "sliding_window", None)
    if kinds is not None and kinds[module.layer_idx] != "sliding_attention":
        wanted = None
    if window != wanted:
        raise SettingsError(
            f"model.path: {type(module).__name__} has a window of {wanted} but calls attention with {window}, so its "
            "documents cannot be packed: choose another model"
        )
    return window


@cache
def register_attention() -> str:
    """Register :func:`attention` with `transformers` and return its registered name.

    Disables cuDNN attention in this process.
    """
    # torch prefers cuDNN on Hopper, but cuDNN plans a graph for every new shape (20 to 40 ms each, never evicted:
    # pytorch#190388), and nearly every packed row and decoded batch has a new shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    return ATTENTION


def use_agentrl_attention(model: PreTrainedModel) -> None:
    """Make ``model`` compute attention with :func:`attention`."""
    if model.config._attn_implementation != ATTENTION:
        model.set_attn_implementation(register_attention())


def use_attention_backend(model: PreTrainedModel, backend: AttentionBackend, *, ranks: int = 1) -> None:
    """Make ``model`` compute attention over rows that ``ranks`` ranks share.

    With the backend "padded", the model computes its own attention. Raises SettingsError if the model does not support
    packed rows, or if ``ranks`` does not divide its heads.
    """
    if backend == "padded":
        if ranks > 1:
            raise SettingsError(PADDED_ROWS_NOT_SHAREABLE)
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        return
    for obstacle in (reason_not_packable(model.config), reason_sequence_parallel_unsupported(model.config, ranks)):
        if obstacle is not None:
            raise SettingsError(obstacle)
    use_agentrl_attention(model)


def reason_sequence_parallel_unsupported(config: PreTrainedConfig, ranks: int) -> str | None:
    """Return the reason why ``ranks`` ranks cannot share rows (training.sequence_parallel), or None if they can."""
    if ranks == 1:
        return None
    heads: int = config.get_text_config().num_attention_heads
    if heads % ranks:
        valid = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        return f"training.sequence_parallel={ranks} does not divide the model's {heads} query heads; valid: {valid}"
    return None


def reason_too_long_to_pack(config: PreTrainedConfig, longest: int) -> str | None:
    """Return the reason why sequences of up to ``longest`` tokens cannot be packed, or None if they can.

    For some types of rotary embeddings, `transformers` rotates all tokens of a row according to the longest sequence in
    the row. Up to a model-specific length, the rotation is constant.
    """
    text = config.get_text_config()
    rotary: dict[str, object] = getattr(text, "rope_parameters", None) or {}  # may be nested by layer type
    for one in (rotary, *rotary.values()):
        if not isinstance(one, dict):
            continue
        kind, limit, remedy = str(one.get("rope_type")), math.inf, ""
        if "dynamic" in kind:
            limit = text.max_position_embeddings
        elif kind == "longrope" and one["short_factor"] != one["long_factor"]:
            limit = one["original_max_position_embeddings"]
            remedy = ", or use a copy of the model whose config.json sets short_factor to long_factor"
        if longest > limit:
            return (
                f"model.path: beyond {limit} tokens, the model's rotary embeddings ({kind}) depend on the longest "
                f"sequence in a row, so packed sequences of up to {longest} tokens would affect each other: lower the "
                f"sum of rollout.max_prompt_tokens and rollout.max_response_tokens to {limit}{remedy}"
            )
    return None


def reason_not_packable(config: PreTrainedConfig) -> str | None:
    """Return the reason why a model's configuration does not support packed documents, or None if it does."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    others = sorted({kind for kind in kinds if kind not in _PACKABLE_LAYERS})
    if not others:
        return None
    return (
        f"model.path: the model ({config.model_type}) has layers of type {', '.join(others)}, which would mix the "
        "documents of a packed row: set model.rows=auto or padded, or choose a model with only full_attention and "
        "sliding_attention, such as Qwen2.5"
    )


def choose_packed_attention(
    wanted: AttentionBackend | Literal["auto"], config: PreTrainedConfig, *, dtype: str
) -> AttentionBackend:
    """Return the backend for ``model.attention`` on this machine. Raises SettingsError if the backend cannot run."""
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    capped = bool(getattr(text, "attn_logit_softcapping", None))
    if wanted == "auto":
        if reason_attention_unavailable("flash", dtype=dtype, head_dim=head_dim, capped=capped) is None:
            return "flash"
        masked = getattr(text, "sliding_window", None) or capped
        return "flex" if masked and reason_attention_unavailable("flex", dtype=dtype) is None else "sdpa"
    obstacle = reason_attention_unavailable(wanted, dtype=dtype, head_dim=head_dim, capped=capped)
    if obstacle is not None:
        raise SettingsError(obstacle)
    return wanted


def reason_attention_unavailable(
    backend: AttentionBackend, *, dtype: str, head_dim: int = 0, capped: bool = False
) -> str | None:
    """Return the reason why this machine cannot train with ``backend`` in ``dtype``, or None if it can.

    ``head_dim`` is 0 if unknown. ``capped`` is true if the model caps its attention scores.
    """
    if backend == "sdpa":
        return None
    problem = None
    if not torch.cuda.is_available():
        problem = "needs a GPU"
    elif backend == "flash" and dtype == "float32":
        problem = "needs model.dtype=bfloat16"
    elif backend == "flash" and head_dim > _FLASH_HEAD_DIM:
        problem = f"supports heads of up to {_FLASH_HEAD_DIM} dimensions, but the model's have {head_dim}"
    elif backend == "flash" and not _has_flash_attn():
        # Without flash-attn, agentrl.kernels.attention.backends calls torch's varlen_attn, which has these limits.
        if capped or head_dim % 8:
            why = "caps its scores" if capped else f"has heads of {head_dim} dimensions"
            problem = f"needs the package flash-attn (pip install flash-attn), because the model {why}"
        elif torch.cuda.get_device_capability() < _FLASH_CAPABILITY:
            problem = "needs a GPU of compute capability 8.0 or above"
        elif not _has_torch_varlen():
            problem = "needs the package flash-attn (pip install flash-attn), because torch lacks varlen_attn with GQA"
    return None if problem is None else f"model.attention={backend} {problem}; otherwise set model.attention=auto"


def document_length_where_attention_dominates(config: PreTrainedConfig) -> float:
    """Return the document length at which attention costs as much as the linear layers.

    A layer of P weights takes 2 P operations per token. Causal attention of H heads of E dimensions takes 2 H E l^2 for
    l tokens, so l = P / (H E). Returns infinity if the configuration lacks the sizes.
    """
    text = config.get_text_config()
    inner, heads = getattr(text, "intermediate_size", None), getattr(text, "num_attention_heads", None)
    if inner is None or heads is None:
        return math.inf
    hidden = text.hidden_size
    width = heads * (getattr(text, "head_dim", None) or hidden // heads)
    kept = width * (getattr(text, "num_key_value_heads", None) or heads) // heads
    return (2 * hidden * (width + kept) + 3 * hidden * inner) / width


def _has_flash_attn() -> bool:
    """Return True if flash-attn can be imported. A build for a different torch release cannot be imported."""
    return varlen_attention_function() is not torch_varlen_attention


def _has_torch_varlen() -> bool:
    """Return True if torch's varlen_attn supports windows and grouped queries. Older releases do not."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()
