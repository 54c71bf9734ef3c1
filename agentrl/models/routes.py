"""Route replay: the experts of every token and layer, recorded in one forward pass and used again in another.

A router selects the experts with the largest scores for each token. Because of rounding, the trainer and the engine can
select different experts. With routes from the engine, the trainer computes the same experts. The experts are weighted
by the trainer's scores, through which gradients reach the router.

One mechanism serves all families: while a block of experts runs, a call of `topk` over the scores of all its experts
returns the scores of the replayed experts. :func:`reason_routes_not_replayable` tests with a small copy whether a
model routes this way.

Routes have the shape [tokens, layers * k] for k experts per token, with zeros in layers without experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from agentrl.kernels import attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(eq=False)
class RoutingPass:
    """The routes of one forward pass. ``num_layers``: number of layers of the model, with or without experts."""

    num_layers: int
    replayed: Tensor | None = None  # [tokens, layers * k]; negative: the token is routed by its own scores
    chosen: dict[int, Tensor] = field(default_factory=dict)  # [tokens, k] by layer, selected by the scores
    modes: list[TorchFunctionMode] = field(default_factory=list)  # active modes of the running block

    def select_experts(self, layer: int, scores: Tensor, top: Any) -> Any:
        """Return the scores and indices [tokens, k] of the experts to compute, given the largest scores ``top``."""
        self.chosen[layer] = top.indices.detach()
        if self.replayed is None:
            return top
        count = top.indices.shape[-1]
        wanted = self.replayed[:, layer * count : (layer + 1) * count].long().view_as(top.indices)
        wanted = torch.where(wanted < 0, top.indices, wanted)
        return type(top)((scores.gather(-1, wanted), wanted))

    def recorded_routes(self) -> Tensor:
        """Return the routes [tokens, layers * k] that the scores selected, int16."""
        first = next(iter(self.chosen.values()))
        empty = torch.zeros_like(first)
        return torch.cat([self.chosen.get(layer, empty) for layer in range(self.num_layers)], dim=-1).short()

    def count_changed_and_replayed(self) -> tuple[Tensor, int]:
        """Return (number of routes for which the scores select other experts, number of replayed routes)."""
        assert self.replayed is not None
        count = next(iter(self.chosen.values())).shape[-1]
        total, other = 0, torch.zeros((), dtype=torch.int64, device=self.replayed.device)
        for layer, own in self.chosen.items():
            given = self.replayed[:, layer * count : (layer + 1) * count].long()
            replayed = given[:, 0] >= 0
            same = (own.view_as(given).sort(-1).values == given.sort(-1).values).all(-1)
            other += (replayed & ~same).sum()
            total += int(replayed.sum())
        return other, total


_current: ContextVar[RoutingPass | None] = ContextVar("routes", default=None)


@contextmanager
def record_and_replay_routes(routes: RoutingPass | None) -> Iterator[None]:
    """Record and replay ``routes`` in this thread's forward passes inside the block. If None, do nothing."""
    token = _current.set(routes)
    try:
        yield
    finally:
        _current.reset(token)


def routing_recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts for `torch.utils.checkpoint`. Layers are recomputed in the context of their forward pass."""
    first, again = attention.attention_recompute_contexts()
    routes = _current.get()

    @contextmanager
    def both() -> Iterator[None]:
        with again, record_and_replay_routes(routes):
            yield

    return first, both()


class _TopKOverride(TorchFunctionMode):
    """Replaces the selection of experts while a block of ``experts`` experts runs."""

    def __init__(self, routes: RoutingPass, layer: int, experts: int) -> None:
        super().__init__()
        self._routes, self._layer, self._experts = routes, layer, experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            scores = args[0] if args else kwargs["input"]
            if scores.shape[-1] == self._experts:
                return self._routes.select_experts(self._layer, scores, result)
        return result


def install_route_hooks(model: PreTrainedModel) -> int:
    """Install the hooks for :func:`record_and_replay_routes`. Returns the number of layers with experts."""
    count = 0
    for name, block in model.get_decoder().named_modules():
        experts = getattr(block, "experts", None)
        number = re.search(r"(?:^|\.)(\d+)\.", name)
        if not isinstance(experts, nn.Module) or number is None:
            continue
        count += 1
        if not hasattr(block, "_agentrl_routes"):
            size = len(experts) if isinstance(experts, nn.ModuleList) else int(getattr(experts, "num_experts", 0))
            enter = partial(_enter, layer=int(number[1]), experts=size)
            block._agentrl_routes = (  # installed once, because engine and trainer may share the model
                block.register_forward_pre_hook(enter),
                block.register_forward_hook(_leave, always_call=True),
            )
    return count


def _enter(block: nn.Module, arguments: object, *, layer: int, experts: int) -> None:
    routes = _current.get()
    if routes is not None:
        routes.modes.append(_TopKOverride(routes, layer, experts))
        routes.modes[-1].__enter__()


def _leave(block: nn.Module, arguments: object, output: object) -> None:
    routes = _current.get()
    if routes is not None:
        routes.modes.pop().__exit__(None, None, None)


@torch.no_grad()
def reason_routes_not_replayable(config: PreTrainedConfig) -> str | None:
    """Return the reason why the routes of a model cannot be replayed, or None if they can.

    Tests a small random copy of the model. It must record one route in every layer with experts, compute the same
    states with these routes, and compute different states with different routes.
    """
    from agentrl.models.exactness import make_test_sequences, random_model, shrink_config

    small = shrink_config(config)
    text = small.get_text_config()
    if getattr(text, "first_k_dense_replace", 0):
        text.first_k_dense_replace = 1  # keep a layer with experts
    name = f"model.path: route replay (correction.route_replay) does not support {config.model_type}"
    with torch.random.fork_rng(devices=[]):
        model = random_model(small, attention="eager")
    layers = install_route_hooks(model)
    if not layers:
        return f"{name}: it has no layers with experts; set correction.route_replay=off"
    ids = make_test_sequences(text.vocab_size)[0][None]

    def states(replayed: Tensor | None) -> tuple[Tensor, RoutingPass]:
        routes = RoutingPass(num_layers=text.num_hidden_layers, replayed=replayed)
        with record_and_replay_routes(routes):
            return model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state, routes

    plain, routes = states(None)
    shapes = {tuple(chosen.shape) for chosen in routes.chosen.values()}
    if len(routes.chosen) != layers or len(shapes) != 1 or shapes.pop()[0] != ids.shape[1]:
        return (
            f"{name}: its {layers} layers with experts must each select the same number of experts per token by one "
            f"top-k of all scores; {len(routes.chosen)} of them use such a top-k"
        )
    same, _ = states(routes.recorded_routes())
    others, _ = states(routes.recorded_routes().flip(0))  # the routes of other tokens
    if not torch.equal(plain, same) or torch.equal(plain, others):
        return f"{name}: its layers do not compute exactly the selected experts"
    return None
