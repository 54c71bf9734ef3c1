"""Reading a model into shards, one per rank (ZeRO-3), so that the whole model need not fit any rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agentrl.models.loading import empty_model, finish_model, read_model
from agentrl.models.settings import ModelSettings
from agentrl.weights.sources import GROUP_ELEMENTS, gathered_groups


def read_sharded(path: str | Path, settings: ModelSettings, config: dict[str, Any]) -> Any:
    """As :func:`.loading.read_model`, with parameters sharded over all ranks by DeepSpeed's ``config``. Collective.

    Only rank 0 reads the weights, into host memory; the others never hold more than a group beside their shard.
    """
    import deepspeed
    from transformers.initialization import no_init_weights

    # Keep DeepSpeed's own linear function off: it would replace torch's permanently.
    with no_init_weights(), deepspeed.zero.Init(config_dict_or_path=config, mem_efficient_linear=False):
        model = empty_model(path, settings)
    model.tie_weights()
    whole = read_model(path, settings) if torch.distributed.get_rank() == 0 else None
    _fill(model, whole)
    return finish_model(model, settings)


@torch.no_grad()
def _fill(model: Any, whole: Any | None) -> None:
    """Fill ``model`` with the parameters and buffers of ``whole``, which only rank 0 has."""
    values = {} if whole is None else dict(whole.named_parameters())
    for group in gathered_groups(list(model.named_parameters()), group_elements=GROUP_ELEMENTS, modifier_rank=0):
        for name, parameter in group:
            if whole is not None:
                parameter.copy_(values[name])
    # Buffers are not parameters; they are computed while a model is built, when DeepSpeed sets the dtype.
    box = [None if whole is None else (dict(whole.named_buffers()), whole.generation_config)]
    torch.distributed.broadcast_object_list(box)
    assert box[0] is not None
    buffers, model.generation_config = box[0]
    for name, value in buffers.items():
        buffer = model.get_buffer(name)
        buffer.data = value.to(buffer.device)
