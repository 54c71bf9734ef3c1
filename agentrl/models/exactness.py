"""Comparison of training's forward pass with a model's own forward pass over one unpadded row.

A model can accept packed rows and still compute wrong values. For example, BART adds positions by index and ignores
``position_ids``. :func:`check_forward_matches_unpadded` tests a model's code on a small random copy before a run
begins. :func:`check_packed_forward` tests the loaded weights, in their dtype, on their device and on their
sequence-parallel group.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from agentrl.errors import SettingsError, is_out_of_memory
from agentrl.kernels import KernelInputError
from agentrl.kernels.attention import AttentionBackend, pack_padded
from agentrl.models.attention import (
    ATTENTION,
    choose_packed_attention,
    reason_not_packable,
    register_attention,
)
from agentrl.models.loading import disable_dropout
from agentrl.models.policy import PolicyModel
from agentrl.models.settings import ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_DIFFERENCES = {torch.float32: 1e-2, torch.bfloat16: 0.3}
"""Largest mean absolute difference (nats) for loaded weights, by dtype. Ten times the smallest fidelity bounds,
because the test tokens are random, and rounding errors are larger for unlikely tokens."""
_COPY_BOUND = 1e-3
"""Largest absolute difference (nats) of any token for a small float32 copy. Rounding errors are about 1e-5."""
_LARGEST = 50_000_000
"""Maximum number of parameters of a tested copy: 200 MB in float32, under two seconds."""
_PROMPT = 5
_RESPONSES = (9, 7)
_LAYERS, _HEADS, _HEAD_WIDTH, _INTERMEDIATE, _VOCABULARY, _WINDOW = 2, 4, 16, 64, 128, 4


def choose_attention_backend(model: ModelSettings, config: PreTrainedConfig) -> AttentionBackend:
    """Return "padded" or the backend for packed rows (``model.rows``).

    Raises SettingsError if the backend cannot run.
    """
    return (
        "padded"
        if uses_padded_rows(model, config)
        else choose_packed_attention(model.attention, config, dtype=model.dtype)
    )


def uses_padded_rows(model: ModelSettings, config: PreTrainedConfig) -> bool:
    """Return True if the model reads padded trajectories (``model.rows``), regardless of what this machine can run."""
    return model.rows == "padded" or (model.rows == "auto" and packing_error(config) is not None)


_packing_errors: dict[str, SettingsError | None] = {}  # cached by configuration, because a test takes up to two seconds


def packing_error(config: PreTrainedConfig) -> SettingsError | None:
    """Return the error of :func:`check_forward_matches_unpadded` for packed rows, or None. Cached."""
    key = config.to_json_string()
    if key not in _packing_errors:
        try:
            check_forward_matches_unpadded("model.path", config, padded=False)
            _packing_errors[key] = None
        except SettingsError as error:
            _packing_errors[key] = error
    return _packing_errors[key]


@torch.no_grad()
def check_forward_matches_unpadded(name: str, config: PreTrainedConfig, *, padded: bool) -> bool:
    """Raise SettingsError if the forward pass of model ``name`` over packed or padded rows differs from unpadded rows.

    Compares log-probabilities on a random float32 copy with few heads, layers and tokens. Returns False if the copy
    itself cannot run; :func:`check_packed_forward` then tests the loaded model.
    """
    obstacle = None if padded else reason_not_packable(config)
    if obstacle is not None:
        raise SettingsError(obstacle)
    backend: AttentionBackend = "padded" if padded else "sdpa"  # both run on any machine
    with torch.random.fork_rng(devices=[]):
        try:
            small = shrink_config(config)
            if count_parameters(small) > _LARGEST:
                return False
            own = random_model(small, attention="eager")
            rows = make_test_sequences(small.get_text_config().vocab_size)
            wanted = unpacked_log_probs(own, rows)
        except Exception:  # noqa: BLE001 - a copy of these sizes cannot run, but the model itself may
            return False
        if not bool(wanted.isfinite().all()):
            return False
        mode = "padded" if padded else "packed"
        with _errors_with_model_name(name, type(own).__name__, mode):
            copied = random_model(small, attention=None if padded else register_attention(), weights_from=own)
            found = packed_log_probs(PolicyModel(copied, attention=backend), rows)
            _check_difference((found - wanted).abs().max(), _COPY_BOUND, mode)
    return True


@torch.no_grad()
def check_packed_forward(name: str, policy: PolicyModel) -> None:
    """Raise SettingsError if the forward pass of ``policy`` differs from the model's own forward pass over one row.

    ``name`` is the name of the model in messages. Costs one forward pass for each of two short rows and one for both
    together. Collective over ranks that share parameters or form a sequence-parallel group.
    """
    model, head = policy.causal_lm, policy.head
    rows = [row.to(head.weight.device) for row in make_test_sequences(head.out_features)]
    mode = "padded" if policy.attention == "padded" else "packed"
    with _errors_with_model_name(name, type(model).__name__, mode):
        found = packed_log_probs(policy, rows)
        implementation = model.config._attn_implementation
        model.set_attn_implementation("eager")
        try:
            wanted = unpacked_log_probs(model, rows)
        finally:
            model.set_attn_implementation(implementation)
        _check_difference((found - wanted).abs().mean(), MAX_DIFFERENCES[model.dtype], mode)


_CAUSES = {
    "packed": "The model's code probably ignores position_ids or the configured attention function",
    "padded": "Its states depend on later tokens or on other rows, so it is not causal",
}
_REMEDIES = {
    "packed": "Valid: a model whose layers all call the attention function of transformers with position_ids, such as "
    "Qwen, Llama or Mistral, or model.rows=padded",
    "padded": "Valid: any causal language model of transformers with a linear head",
}


def _check_difference(difference: Tensor, bound: float, mode: str) -> None:
    if not float(difference) <= bound:
        raise KernelInputError(
            f"log-probabilities of {mode} and un{mode} trajectories differ by {float(difference):.2g} "
            f"nats (rounding explains at most {bound:g}). {_CAUSES[mode]}"
        )


@contextmanager
def _errors_with_model_name(name: str, kind: str, mode: str) -> Iterator[None]:
    """Convert every error in a model's code, except out-of-memory errors, to a SettingsError with the model's name."""
    try:
        yield
    except Exception as error:  # a model's code may raise any exception
        if is_out_of_memory(error):
            raise
        cause = str(error).removeprefix("model.path: ")
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            cause = "its layers accept only the attention functions of their class"
        elif not isinstance(error, KernelInputError | SettingsError):
            cause = f"{type(error).__name__}: {cause}"
        raise SettingsError(
            f"model.path={name!r}: {kind} cannot be trained on {mode} trajectories: {cause}. {_REMEDIES[mode]}"
        ) from error


def make_test_sequences(vocabulary: int) -> list[Tensor]:
    """Return two sequences [S] of token ids with the same prompt and different lengths."""
    draw = torch.Generator().manual_seed(0)
    low, high = vocabulary // 4, max(vocabulary // 4 + 1, 3 * vocabulary // 4)  # special tokens have low or high ids
    prompt, *responses = (torch.randint(low, high, (length,), generator=draw) for length in (_PROMPT, *_RESPONSES))
    return [torch.cat([prompt, response]) for response in responses]


def unpacked_log_probs(model: PreTrainedModel, rows: Sequence[Tensor]) -> Tensor:
    """Return the log-probabilities [N] of the responses from the model's forward pass, one unpadded row at a time."""
    found = []
    for row in rows:
        logits = model(input_ids=row[None], use_cache=False).logits[0, _PROMPT - 1 : -1]
        wide = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        found.append(wide.gather(1, row[_PROMPT:, None])[:, 0])
    return torch.cat(found)


def packed_log_probs(policy: PolicyModel, rows: Sequence[Tensor]) -> Tensor:
    """Return the log-probabilities [N] of the responses from the packed forward pass that training uses."""
    input_ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)  # [2, S]
    prompts = input_ids.new_full((len(rows),), _PROMPT)
    lengths = torch.tensor([len(row) for row in rows], device=input_ids.device)
    mask = torch.arange(_PROMPT, input_ids.shape[1], device=input_ids.device) < lengths[:, None]  # [2, T]
    statistics, _ = policy(*pack_padded(input_ids, prompts, mask, multiple=policy.row_length_multiple))
    log_probs: Tensor = statistics.log_probs
    return log_probs


def shrink_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of ``config`` with few layers, few narrow heads and a small vocabulary, otherwise unchanged.

    Keeps enough layers to contain each kind of layer once. Attention windows become shorter than the sequences of
    :func:`make_test_sequences`.
    """
    small = copy.deepcopy(config)
    for part in _nested_configs(small):
        _keep_few_layers(part)
        _keep_few_heads(part)
        for name, value in _integer_fields(part):
            if "vocab" in name:
                setattr(part, name, min(value, _VOCABULARY))
            elif "window" in name or name == "local_attention":
                setattr(part, name, min(value, _WINDOW))
            elif name.endswith("_token_id") and value >= _VOCABULARY:
                setattr(part, name, 1)
    return small


def _nested_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield the configuration and all nested configurations."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "model_type"):
            yield from _nested_configs(value)


def _integer_fields(config: PreTrainedConfig) -> list[tuple[str, int]]:
    return [(name, value) for name, value in vars(config).items() if type(value) is int]


def _keep_few_layers(config: PreTrainedConfig) -> None:
    layers = getattr(config, "num_hidden_layers", None) or getattr(config, "num_layers", None)
    if not isinstance(layers, int):
        return
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == layers}
    kept = min(layers, max([_LAYERS, *(value.index(kind) + 1 for value in lists.values() for kind in value)]))
    for name, kinds in lists.items():
        setattr(config, name, kinds[:kept])
    for name, value in _integer_fields(config):
        if ("layer" in name and value == layers) or name.endswith(("num_layers", "coder_layers")):
            setattr(config, name, kept)


def _keep_few_heads(config: PreTrainedConfig) -> None:
    """Keep at most four heads and scale widths accordingly.

    Grouped-query attention keeps at least two query heads per key head.
    """
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not isinstance(width, int):
        return
    if not isinstance(heads, int):
        heads = _HEADS
    keys = getattr(config, "num_key_value_heads", None) or heads
    few = min(heads, _HEADS)
    few_keys = few if keys == heads else min(keys, few // 2)
    # Keep the width of a head if rotary factors are listed per dimension. Latent attention splits a head into parts, so
    # keep the fields with the widths of the parts too.
    listed = _contains_list(getattr(config, "rope_parameters", None))
    head = width // heads if listed else min(width // heads, _HEAD_WIDTH)
    divided = listed or hasattr(config, "qk_rope_head_dim")
    for name, value in _integer_fields(config):
        if value == width:
            setattr(config, name, head * few)
        elif "intermediate" in name or "ffn" in name:
            setattr(config, name, min(value, _INTERMEDIATE))
        elif name.endswith(("head_dim", "rotary_dim")) and not divided:
            setattr(config, name, min(value, _HEAD_WIDTH))
        elif value == heads and name.endswith(("heads", "n_head")):
            setattr(config, name, few)
        elif value == keys and name.endswith("heads"):
            setattr(config, name, few_keys)


def _contains_list(value: object) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, dict) and any(map(_contains_list, value.values())))


def count_parameters(config: PreTrainedConfig) -> int:
    """Return the number of parameters of a model. Builds the model on the meta device, which allocates no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(item.numel() for item in AutoModelForCausalLM.from_config(config).parameters())


def random_model(
    config: PreTrainedConfig, *, attention: str | None, weights_from: PreTrainedModel | None = None
) -> PreTrainedModel:
    """Return a float32 model in evaluation mode, with the weights of ``weights_from`` or, if None, random weights.

    The random weights are large enough that the predicted distributions are far from uniform.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        ).eval()
    disable_dropout(model)
    if weights_from is not None:
        model.load_state_dict(weights_from.state_dict())
        return model
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            embeds = isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False):
                noise = torch.randn(parameter.shape, generator=draw)
                if parameter.dim() < 2:
                    parameter.copy_(1 + 0.1 * noise)
                else:
                    parameter.copy_(noise if embeds else noise / math.sqrt(parameter.shape[-1]))
    return model
