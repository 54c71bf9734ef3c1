"""Continuous batching: waiting requests join the running batch at its next forward pass."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from agentrl.models.model_parts import ModelParts
from agentrl.models.routes import RoutingPass, record_and_replay_routes
from agentrl.rollout.engines.base import Completion, EngineError, Sampling
from agentrl.rollout.engines.decoding import SlotCache, use_decode_attention
from agentrl.rollout.engines.sampling import keyed_uniform_numbers, restrict_to_likely_tokens, sample_tokens

# Prefills interrupt decoding and are therefore delayed. A prefill starts when at most this many requests are running
# for each waiting request, or when a request has waited for this many decoding steps.
_RUNNING_PER_WAITING = 8
_MAX_STEPS_WAITED = 6


@dataclass(eq=False, slots=True)
class TurnInProgress:
    """A turn that is being sampled."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    trajectory_id: str
    request_id: str
    seed: int
    stop: tuple[bytes, ...]
    sampled: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    support_ids: array[int] = field(default_factory=lambda: array("i"))
    support_sizes: array[int] = field(default_factory=lambda: array("i"))
    routes: bytes = b""
    unmatched_text: bytes = b""
    version_spans: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: Literal["eos", "stop", "length"] | None = None
    cancelled: bool = False
    failure: str | None = None

    @property
    def context_tokens(self) -> tuple[int, ...]:
        return (*self.token_ids, *self.sampled) if self.sampled else self.token_ids

    def record_version_span(self, version: int) -> None:
        """Attribute the tokens sampled since the last span to ``version``."""
        count = len(self.sampled) - sum(count for _, count in self.version_spans)
        if count:
            self.version_spans.append((version, count))

    def build_completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            token_ids=tuple(self.sampled),
            log_probs=tuple(self.log_probs),
            finish_reason=self.finish_reason,
            version_spans=tuple(self.version_spans),
            support_ids=self.support_ids or (),
            support_sizes=self.support_sizes or (),
            routes=self.routes,
        )


@dataclass(eq=False, slots=True)
class _CacheRow:
    """A row of the cache. ``cached``: the tokens whose keys and values are stored. ``routes``: their experts.

    Routes of tokens that are no longer cached remain until later tokens overwrite them.
    """

    trajectory_id: str | None = None
    cached: list[int] = field(default_factory=list)
    request: TurnInProgress | None = None
    routes: array[int] = field(default_factory=lambda: array("h"))

    def append_computed(self, tokens: Sequence[int], routes: Tensor | None) -> None:
        """Add computed tokens and their routes [n, R], if they were recorded."""
        if routes is not None:
            del self.routes[len(self.cached) * routes.shape[1] :]
            self.routes.frombytes(routes.numpy().tobytes())
        self.cached.extend(tokens)


class Batcher:
    """Runs one model over the rows of a :class:`SlotCache`. Synchronous and not thread-safe."""

    def __init__(
        self,
        model: Any,
        parts: ModelParts,
        *,
        eos_ids: frozenset[int],
        token_bytes: list[bytes],
        max_batch_tokens: int,
        kv_cache_tokens: int,
        keep_prefixes: bool = True,
    ) -> None:
        self._model, self._parts = model, parts
        self._eos_ids = eos_ids
        self._token_bytes = token_bytes
        self._max_batch_tokens = max_batch_tokens
        self.kv_cache_tokens = kv_cache_tokens
        self._keep_prefixes = keep_prefixes
        self._device = next(model.parameters()).device
        self._attention = use_decode_attention if self._device.type == "cpu" else nullcontext
        self._cache = SlotCache(model.config.num_hidden_layers)
        self._rows: list[_CacheRow] = []
        self._row_of: dict[str, int] = {}  # trajectory -> row
        self._waiting: deque[TurnInProgress] = deque()
        self._steps_waited = 0
        self.evictions = 0  # number of trajectories that lost their prefix to another trajectory
        self._row_length = 0  # tokens reserved for every row; the cache itself grows with the rows

    # -- requests -------------------------------------------------------------------------------------------------

    def add_request(self, request: TurnInProgress) -> None:
        self._waiting.append(request)

    def release(self, trajectory_id: str) -> None:
        """Drop a trajectory's cached prefix. A late call does not affect a trajectory that was restarted."""
        index = self._row_of.get(trajectory_id)
        if index is None:
            return
        row = self._rows[index]
        if row.request is None or row.request.cancelled:
            del self._row_of[trajectory_id]
            row.trajectory_id, row.cached = None, []

    def update_cache_after_weight_change(self, old_version: int, *, keep_running: bool) -> None:
        """Update the cache after a change of weights. ``old_version``: the version that computed the cache.

        Prefixes without a running request are dropped. Keys and values of running requests are kept or, without
        ``keep_running``, recomputed with the new weights.
        """
        self.drop_cancelled()
        for request in (*self._waiting, *(row.request for row in self._rows if row.request is not None)):
            request.record_version_span(old_version)
        for row in self._rows:
            if row.request is None and row.trajectory_id is not None:
                self._row_of.pop(row.trajectory_id)
                row.trajectory_id, row.cached = None, []
            elif not keep_running:
                row.cached = []
        if all(row.request is None for row in self._rows):
            self.drop_prefixes()

    def drop_prefixes(self) -> None:
        """Drop every cached prefix. Raises EngineError if a request is running."""
        self.drop_cancelled()
        if any(row.request is not None for row in self._rows):
            raise EngineError("the cache cannot be cleared while a request is running")
        self._rows = []
        self._row_of = {}
        self._row_length = 0
        self._cache.clear()

    def drop_requests_and_prefixes(self) -> None:
        """Drop all requests and cached prefixes after a failure."""
        self._waiting.clear()
        for row in self._rows:
            row.request = None
        self.drop_prefixes()
        self._cache = SlotCache(self._model.config.num_hidden_layers)  # a failed forward pass may have stored NaN

    def halve_batch_size(self) -> tuple[int, int]:
        """Permanently halve the token limit per forward pass, and limit the cache to half its rows (at least one).

        Returns the new limits on tokens per forward pass and in the cache.
        """
        self._max_batch_tokens = max(1, self._max_batch_tokens // 2)
        self.kv_cache_tokens = max(
            1, self._row_length, min(self.kv_cache_tokens, len(self._rows) * self._row_length) // 2
        )
        return self._max_batch_tokens, self.kv_cache_tokens

    @property
    def cache_usage(self) -> float:
        return len(self._row_of) * self._row_length / self.kv_cache_tokens

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting) or any(row.request is not None for row in self._rows)

    # -- one step -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run_forward_pass(self) -> list[TurnInProgress]:
        """Run one forward pass: a prefill, or one token for each running request. Returns the requests that ended."""
        ended = self.drop_cancelled()
        running = [index for index, row in enumerate(self._rows) if row.request is not None]
        outdated = [index for index in running if self._count_uncached_tokens(index) > 1]
        if outdated:  # the weights changed while these requests were running
            return ended + self._prefill(self._rows_that_fit(outdated))
        if self._waiting and self._should_prefill(len(running)):
            self._steps_waited = 0
            assigned = self._assign_rows()
            if assigned:
                return ended + self._prefill(assigned)
        if running:
            self._steps_waited += bool(self._waiting)
            return ended + self._decode(running)
        if self._waiting:
            # No request is running, so only prefixes of other trajectories can occupy the cache: drop them.
            self.evictions += len(self._row_of)
            self.drop_prefixes()
            assigned = self._assign_rows()
            return ended + (self._prefill(assigned) if assigned else [self._fail_first_waiting_request()])
        return ended

    def _fail_first_waiting_request(self) -> TurnInProgress:
        """Fail the first waiting request, which is longer than the whole cache."""
        request = self._waiting.popleft()
        request.failure = (
            f"a context of {len(request.token_ids)} tokens and up to {request.sampling.max_tokens} new tokens do not "
            f"fit into the engine's cache: raise rollout.kv_cache_tokens={self.kv_cache_tokens}"
        )
        return request

    def _should_prefill(self, running: int) -> bool:
        return running <= len(self._waiting) * _RUNNING_PER_WAITING or self._steps_waited >= _MAX_STEPS_WAITED

    def drop_cancelled(self) -> list[TurnInProgress]:
        cancelled_requests = [request for request in self._waiting if request.cancelled]
        for request in cancelled_requests:
            self._waiting.remove(request)
        for row in self._rows:
            if row.request is not None and row.request.cancelled:
                cancelled_requests.append(row.request)
                row.request = None
        return cancelled_requests

    # -- rows -----------------------------------------------------------------------------------------------------

    def _assign_rows(self) -> list[int]:
        """Assign rows to waiting requests, as far as the cache and the batch allow."""
        assigned: list[int] = []
        longest = 0
        while self._waiting:
            request = self._waiting[0]
            length = len(request.token_ids) + request.sampling.max_tokens
            row = self._find_or_add_row(request, length)
            if row is None:
                break
            longest = max(longest, len(request.token_ids) - len(self._rows[row].cached))
            if assigned and longest * (len(assigned) + 1) > self._max_batch_tokens:
                break
            self._waiting.popleft()
            self._rows[row].request = request
            assigned.append(row)
        return assigned

    def _find_or_add_row(self, request: TurnInProgress, length: int) -> int | None:
        """Return the row that holds the trajectory's prefix, a free row or a new row; None if no row is available."""
        index = self._row_of.get(request.trajectory_id)
        if index is not None and self._rows[index].request is not None:
            return None  # wait for the trajectory's running request
        if index is None:
            index = next((i for i, row in enumerate(self._rows) if row.trajectory_id is None), None)
        length = max(length, self._row_length)
        if index is None and (len(self._rows) + 1) * length <= self.kv_cache_tokens:
            index = len(self._rows)
            self._rows.append(_CacheRow())
        if index is None:
            index = next((i for i, row in enumerate(self._rows) if row.request is None), None)
        if index is None or len(self._rows) * length > self.kv_cache_tokens:
            return None
        row = self._rows[index]
        if row.trajectory_id != request.trajectory_id or not self._keep_prefixes:
            if row.trajectory_id is not None:
                self.evictions += row.trajectory_id != request.trajectory_id
                self._row_of.pop(row.trajectory_id, None)
            row.trajectory_id, row.cached = request.trajectory_id, []
            self._row_of[request.trajectory_id] = index
        row.cached = row.cached[: _common_prefix(row.cached, request.token_ids[:-1])]
        self._row_length = length
        # Reserve room for waiting requests too, because growing the cache copies it.
        room = min(len(self._rows) + len(self._waiting) - 1, self.kv_cache_tokens // length)
        self._cache.reserve(max(len(self._rows), room))
        return index

    def _move_running_to_front(self, running: list[int]) -> list[int]:
        """Move running rows to the front if fewer than half of the rows up to the last running row are running.

        Returns the new indices of the running rows.
        """
        count = len(running)
        if running[-1] + 1 <= 2 * count:
            return running
        free = [index for index in range(count) if self._rows[index].request is None]
        moved = [index for index in running if index >= count]
        longest = max(len(self._rows[index].cached) for index in (*free, *moved))
        self._cache.swap_rows(
            torch.tensor(free, device=self._device), torch.tensor(moved, device=self._device), longest
        )
        for free_index, moved_index in zip(free, moved, strict=True):
            self._rows[free_index], self._rows[moved_index] = self._rows[moved_index], self._rows[free_index]
            for index in (free_index, moved_index):
                owner = self._rows[index].trajectory_id
                if owner is not None:
                    self._row_of[owner] = index
        return list(range(count))

    def _count_uncached_tokens(self, index: int) -> int:
        """Return the number of tokens of a running row that are not cached: 1 while the row decodes."""
        row = self._rows[index]
        return len(_require_request(row).token_ids) + len(_require_request(row).sampled) - len(row.cached)

    def _rows_that_fit(self, indices: list[int]) -> list[int]:
        """Return the first rows (at least one) whose uncached tokens fit into one forward pass."""
        longest = 0
        for count, index in enumerate(indices):
            longest = max(longest, self._count_uncached_tokens(index))
            if count and longest * (count + 1) > self._max_batch_tokens:
                return indices[:count]
        return indices

    # -- forward passes -------------------------------------------------------------------------------------------

    def _prefill(self, assigned: list[int]) -> list[TurnInProgress]:
        """Run one forward pass over the rows' uncached tokens. Equal new prompts are computed once."""
        first: dict[tuple[int, ...], int] = {}
        leader_of = {
            index: index
            if self._rows[index].cached
            else first.setdefault(_require_request(self._rows[index]).context_tokens, index)
            for index in assigned
        }
        computed = [index for index in assigned if leader_of[index] == index]
        followers = [index for index in assigned if leader_of[index] != index]
        hidden = self._compute_last_hidden_states(computed)
        if followers:
            source = torch.tensor([leader_of[index] for index in followers], device=self._device)
            contexts = [_require_request(self._rows[index]).context_tokens for index in followers]
            self._cache.copy_rows(source, torch.tensor(followers, device=self._device), max(map(len, contexts)))
            for index, context in zip(followers, contexts, strict=True):
                row, leader = self._rows[index], self._rows[leader_of[index]]
                row.cached, row.routes = list(context), leader.routes[:]
        order = {index: position for position, index in enumerate(computed)}
        leaders = [order[leader_of[index]] for index in assigned]
        return self._sample_one_token_each(
            assigned, self._parts.logits(hidden)[torch.tensor(leaders, device=self._device)]
        )

    def _compute_last_hidden_states(self, indices: list[int]) -> Tensor:
        """Return the hidden states [m, D] at the last uncached token of each row."""
        uncached = [_require_request(self._rows[i]).context_tokens[len(self._rows[i].cached) :] for i in indices]
        longest = max(len(tokens) for tokens in uncached)
        ids = torch.zeros(len(indices), longest, dtype=torch.int64)
        positions = torch.full((len(indices), longest), -1, dtype=torch.int64)
        for line, (index, tokens) in enumerate(zip(indices, uncached, strict=True)):
            start = len(self._rows[index].cached)
            ids[line, : len(tokens)] = torch.tensor(tokens)
            positions[line, : len(tokens)] = torch.arange(start, start + len(tokens))
        width = max(len(self._rows[i].cached) + len(tokens) for i, tokens in zip(indices, uncached, strict=True))
        rows = torch.tensor(indices, device=self._device)
        hidden, routes = self._compute_hidden_states(ids.to(self._device), positions.to(self._device), rows, width)
        for line, (index, tokens) in enumerate(zip(indices, uncached, strict=True)):
            self._rows[index].append_computed(tokens, None if routes is None else routes[line, : len(tokens)])
        last = torch.tensor([len(tokens) - 1 for tokens in uncached], device=self._device)
        return hidden[torch.arange(len(indices), device=self._device), last]

    def _decode(self, running: list[int]) -> list[TurnInProgress]:
        running = self._move_running_to_front(running)
        count = running[-1] + 1
        ids, positions = [0] * count, [-1] * count
        for index in running:
            row = self._rows[index]
            token = _require_request(row).sampled[-1]
            ids[index], positions[index] = token, len(row.cached)
        width = max(positions) + 1
        with self._attention(self._model.config):
            hidden, routes = self._compute_hidden_states(
                torch.tensor(ids, device=self._device)[:, None],
                torch.tensor(positions, device=self._device)[:, None],
                count,
                width,
            )
        for index in running:
            self._rows[index].append_computed([ids[index]], None if routes is None else routes[index])
        hidden = hidden[:, 0]
        if len(running) < count:
            hidden = hidden[torch.tensor(running, device=self._device)]
        return self._sample_one_token_each(running, self._parts.logits(hidden))

    def _compute_hidden_states(
        self, ids: Tensor, positions: Tensor, rows: Tensor | int, width: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states [m, q, D] and, if a request needs them, the routes [m, q, R] on the host."""
        mask = self._cache.select_entries_and_build_mask(rows, positions, width)
        wanted = any(row.request is not None and row.request.sampling.routes_from is not None for row in self._rows)
        routes = RoutingPass(num_layers=self._model.config.get_text_config().num_hidden_layers) if wanted else None
        with record_and_replay_routes(routes):
            hidden = self._parts.backbone(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions.clamp(min=0),
                past_key_values=self._cache,
                use_cache=True,
            ).last_hidden_state
        return hidden, None if routes is None else routes.recorded_routes().cpu().unflatten(0, ids.shape)

    # -- sampling -------------------------------------------------------------------------------------------------

    def _sample_one_token_each(self, indices: list[int], logits: Tensor) -> list[TurnInProgress]:
        """Sample one token for each row's request. Returns the requests that ended."""
        requests = [_require_request(self._rows[index]) for index in indices]
        keys = np.array([request.seed for request in requests], dtype=np.uint64)
        counts = np.array([len(request.sampled) for request in requests], dtype=np.uint64)
        temperatures = torch.tensor([request.sampling.temperature for request in requests], device=self._device)
        uniforms = torch.from_numpy(keyed_uniform_numbers(keys, counts)).to(self._device)
        wanted = [request.sampling for request in requests]
        limits = {
            "min_ps": torch.tensor([one.min_p for one in wanted], device=self._device),
            "top_ks": torch.tensor([one.top_k for one in wanted], device=self._device),
            "top_ps": torch.tensor([one.top_p for one in wanted], device=self._device),
        }
        limited = any(one.min_p > 0 or one.top_k > 0 or one.top_p < 1 for one in wanted)
        restriction = partial(restrict_to_likely_tokens, **limits) if limited else None
        tokens, log_probs, distribution = sample_tokens(logits, temperatures, uniforms, restriction)
        for line, request in enumerate(requests):
            if request.sampling.returns_support:
                support = (distribution[line] > -torch.inf).nonzero()[:, 0].tolist()
                request.support_ids.extend(support)
                request.support_sizes.append(len(support))
        ended = []
        for index, request, token, log_prob in zip(indices, requests, tokens.tolist(), log_probs.tolist(), strict=True):
            request.sampled.append(token)
            request.log_probs.append(log_prob)
            if self._has_ended(request, token):
                row = self._rows[index]
                row.request = None
                if request.sampling.routes_from is not None:
                    width = len(row.routes) // len(row.cached)
                    request.routes = row.routes[request.sampling.routes_from * width :].tobytes()
                ended.append(request)
        return ended

    def _has_ended(self, request: TurnInProgress, token: int) -> bool:
        if token in self._eos_ids:
            request.finish_reason = "eos"
            return True
        if request.stop and self._reaches_stop_string(request, token):
            request.finish_reason = "stop"
        elif len(request.sampled) >= request.sampling.max_tokens:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def _reaches_stop_string(self, request: TurnInProgress, token: int) -> bool:
        """Return True if the token completes a stop string. Keeps trailing text in which a stop string may begin."""
        longest = max(map(len, request.stop))
        text = request.unmatched_text + (self._token_bytes[token] if token < len(self._token_bytes) else b"")
        request.unmatched_text = text[-longest + 1 :] if longest > 1 else b""
        return any(stop in text for stop in request.stop)


def _require_request(row: _CacheRow) -> TurnInProgress:
    assert row.request is not None
    return row.request


def _common_prefix(first: list[int], second: tuple[int, ...]) -> int:
    if tuple(first) == second[: len(first)]:
        return len(first)
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
