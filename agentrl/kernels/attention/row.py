"""Documents packed into one row of tokens without padding. A prefix that several prompts share is stored once.

A row may be divided over ranks (Ulysses, arXiv 2309.14509). Each rank holds a slice of the tokens. Only attention mixes
tokens. For attention, the ranks exchange their tokens of all heads for all tokens of some heads, and back.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed
from torch import Tensor, nn

from agentrl.kernels.records import KernelInputError


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceParallelGroup:
    """A sequence-parallel group. All methods but :meth:`rank_slice` are collective in the forward and backward pass."""

    rank: int  # rank of this process in the group
    size: int
    group: torch.distributed.ProcessGroup

    def rank_slice(self, length: int) -> slice:
        """Return this rank's slice of a row of ``length`` tokens, a multiple of the group size."""
        own = length // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def tokens_to_heads(self, states: Tensor) -> Tensor:
        """Exchange this rank's tokens [1, H, l, E] for all tokens of its heads [1, H / size, L, E]."""
        received = self._exchange_blocks(
            states[0].unflatten(0, (self.size, -1))
        )  # [size, H / size, l, E], tokens in order
        return received.transpose(0, 1).flatten(1, 2)[None]

    def kv_tokens_to_heads(self, states: Tensor) -> Tensor:
        """Apply :meth:`tokens_to_heads` to G key-value heads, which query heads may share.

        Every rank that needs a head receives a copy of it.
        """
        copies = math.lcm(states.shape[1], self.size) // states.shape[1]
        return self.tokens_to_heads(states.repeat_interleave(copies, 1) if copies > 1 else states)

    def heads_to_tokens(self, states: Tensor) -> Tensor:
        """Exchange all tokens of this rank's heads [1, L, H / size, E] for its tokens [1, l, H, E]."""
        received = self._exchange_blocks(
            states[0].unflatten(0, (self.size, -1))
        )  # [size, l, H / size, E], heads in order
        return received.transpose(0, 1).flatten(1, 2)[None]

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over the ranks, detached."""
        summed = values.detach().clone()
        torch.distributed.all_reduce(summed, group=self.group)
        return summed

    def all_gather(self, values: Tensor, indices: Tensor, total: int) -> Tensor:
        """All-gather ``values`` [n, ...], ordered by their global indices ``indices`` [n]. Returns [total, ...].

        Every rank must compute the same loss from the result. The gradient of ``values`` is the gradient of this loss,
        not the sum over ranks, so that the ranks' gradients of a parameter sum to the gradient of the loss.
        """
        own = values.new_zeros(total, *values.shape[1:]).index_copy(0, indices, values)
        every = self.all_reduce(own)
        held = torch.zeros(total, dtype=torch.bool, device=values.device)
        held[indices] = True
        return torch.where(held.view(-1, *[1] * (values.dim() - 1)), own, every)

    def _exchange_blocks(self, blocks: Tensor) -> Tensor:
        swapped: Tensor = _AllToAll.apply(blocks.contiguous(), self)
        return swapped


class _AutogradContext(Protocol):
    """Values that the backward pass needs."""

    ranks: SequenceParallelGroup


class _AllToAll(torch.autograd.Function):
    """Autograd function of (blocks [size, ...], ranks). Sends block r to rank r, and receives block r from rank r."""

    @staticmethod
    def forward(ctx: _AutogradContext, blocks: Tensor, ranks: SequenceParallelGroup) -> Tensor:
        ctx.ranks = ranks
        received = torch.empty_like(blocks)
        torch.distributed.all_to_all_single(received, blocks, group=ranks.group)
        return received

    @staticmethod
    def backward(ctx: _AutogradContext, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient.contiguous(), ctx.ranks), None


AttentionBackend = Literal["sdpa", "flex", "flash", "padded"]
"""How a model reads a row: with an attention function for packed documents, or as padded documents."""


class VarlenBounds(NamedTuple):
    """Lengths of a row's segments and of their keys. A segment's keys are all tokens on the path to its end."""

    indices: Tensor | None  # [K] int64, index in the row of each key; None: keys are the row in order
    queries: Tensor  # [S + 1] int32, cumulative lengths
    keys: Tensor  # [S + 1] int32, cumulative lengths
    max_queries: int
    max_keys: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRow:
    """B documents, each a prompt and a response, as S segments of one row of L tokens.

    The segments form a tree. A segment continues another segment or starts a document. A token attends to the tokens
    before it in its segment, and to all tokens on the path to its segment. All segments that continue a segment,
    directly or indirectly, follow it before any other segment. Segments stay on the host, where attention plans its
    calls; nothing is read back from the device.

    Two documents with the prompt (7, 8), and a third document whose prompt continues the first document:

    >>> ids = torch.tensor
    >>> row = pack_row([(ids([7, 8]), ids([1])), (ids([7, 8]), ids([2])), (ids([7, 8, 1, 5]), ids([3]))])
    >>> row.input_ids.tolist(), row.position_ids.tolist()
    ([[7, 8, 1, 5, 3, 2]], [[0, 1, 2, 3, 4, 2]])
    >>> row.lengths.tolist(), row.continued_segments.tolist()
    ([2, 1, 2, 1], [0, 0, 1, 0])
    """

    token_ids: Tensor  # [L] int32
    lengths: Tensor  # [S] int64, number of tokens of each segment, in row order; on the host
    continued_segments: Tensor  # [S] int64, index of the segment that each segment continues, or its own; on the host
    prompt_ends: Tensor  # [B] int64, index in the row of each document's last prompt token
    response_starts: Tensor  # [B] int64, index in the row of each document's first response token; the others follow it
    routes: Tensor | None = None  # [L, R] int16, experts of each token in every layer, -1 if unknown

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle a row on the host as NumPy arrays. A multiprocessing connection sends a tensor as a file descriptor,
        # which the receiver can open only with the sender's authentication key. Worker and ranks have different keys.
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        return _row_from_arrays, ({name: value.numpy() for name, value in given.items() if value is not None},)

    @cached_property
    def input_ids(self) -> Tensor:
        """The token ids as the input of a model, [1, L] int64."""
        return self.token_ids.long()[None]

    @cached_property
    def position_ids(self) -> Tensor:
        """Position of each token in its document, from 0, [1, L] int64."""
        # Difference between a token's position in the document and its index in the row.
        shift = self.segment_prefix_lengths - self.segment_starts
        positions = torch.arange(len(self.token_ids), device="cpu") + shift.repeat_interleave(self.lengths)
        return positions[None].to(self.token_ids.device)

    def response_token_ids(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the ids of the response tokens at ``columns`` of the documents ``rows``. Both are broadcast."""
        return self.input_ids[0, self.response_starts[rows] + columns]

    def predicting_positions(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the row index of the state that predicts each response token at ``columns`` of the documents ``rows``.

        For a column after the end of a response, the index is inside the row but arbitrary.
        """
        before = (self.response_starts[rows] + columns - 1).clamp(max=len(self.token_ids) - 1)
        return torch.where(columns == 0, self.prompt_ends[rows], before)

    def to(self, device: torch.device | str) -> PackedRow:
        """Return the row on ``device``."""
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            prompt_ends=self.prompt_ends.to(device),
            response_starts=self.response_starts.to(device),
            routes=None if self.routes is None else self.routes.to(device),
        )

    def pad_to_multiple(self, multiple: int) -> PackedRow:
        """Pad the row to a multiple of ``multiple`` tokens, so that ranks sharing the row have equal numbers of tokens.

        The padding is a final segment of zeros that no document attends to.
        """
        missing = -len(self.token_ids) % multiple
        if not missing:
            return self
        return replace(
            self,
            token_ids=torch.nn.functional.pad(self.token_ids, (0, missing)),
            lengths=torch.nn.functional.pad(self.lengths, (0, 1), value=missing),
            continued_segments=torch.nn.functional.pad(self.continued_segments, (0, 1), value=len(self.lengths)),
            routes=None if self.routes is None else torch.nn.functional.pad(self.routes, (0, 0, 0, missing), value=-1),
        )

    @cached_property
    def segment_paths(self) -> list[Tensor]:
        """Row indices of the tokens from the start of a document to the end of each segment. On the host."""
        paths: list[Tensor] = []
        spans = zip(self.continued_segments.tolist(), self.segment_starts.tolist(), self.lengths.tolist(), strict=True)
        for number, (parent, start, length) in enumerate(spans):
            own = torch.arange(start, start + length, device="cpu")
            paths.append(own if parent == number else torch.cat([paths[parent], own]))
        return paths

    @cached_property
    def longest_document_length(self) -> int:
        """Number of tokens of the longest document."""
        return max(map(len, self.segment_paths))

    @cached_property
    def segment_prefix_lengths(self) -> Tensor:
        """Number of tokens of the document before each segment, [S]."""
        return torch.tensor([len(path) for path in self.segment_paths], device="cpu") - self.lengths

    def document_token_indices(self, document: int, response_length: int) -> Tensor:
        """Return the row indices of a document's prompt and first ``response_length`` response tokens. On the host."""
        end, start = int(self.prompt_ends[document]), int(self.response_starts[document])
        segment = int(torch.searchsorted(self.segment_starts, end, right=True)) - 1
        count = int(self.segment_prefix_lengths[segment]) + end - int(self.segment_starts[segment]) + 1
        response = torch.arange(start, start + response_length, device="cpu")
        return torch.cat([self.segment_paths[segment][:count], response])

    @cached_property
    def segment_starts(self) -> Tensor:
        """Index in the row of each segment's first token, [S]."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def mask_cache(self) -> dict[object, Any]:
        """Cache of the backends' masks for this row."""
        return {}

    @cached_property
    def end_of_attending_tokens(self) -> Tensor:
        """For each token, the row index after the last segment that continues the token's segment, [L].

        A token attends to each earlier token of the row whose value here exceeds the attending token's index.
        """
        ends = (self.segment_starts + self.lengths).tolist()
        for number, parent in reversed([*enumerate(self.continued_segments.tolist())]):
            ends[parent] = max(ends[parent], ends[number])
        return torch.tensor(ends, device="cpu").repeat_interleave(self.lengths).to(self.token_ids.device)

    @cached_property
    def varlen_bounds(self) -> VarlenBounds:
        """Segment boundaries for variable-length kernels, copied to the device once instead of in every layer."""
        device = self.token_ids.device
        keys = self.lengths + self.segment_prefix_lengths

        def ends(lengths: Tensor) -> Tensor:
            return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(device)

        indices = torch.cat(self.segment_paths) if bool(self.segment_prefix_lengths.any()) else None
        return VarlenBounds(
            indices=None if indices is None else indices.to(device),
            queries=ends(self.lengths),
            keys=ends(keys),
            max_queries=int(self.lengths.max()),
            max_keys=int(keys.max()),
        )

    @cached_property
    def segment_batches_by_length(self) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:
        """Batches of segments with nearly equal numbers of queries and keys, for one attention call each.

        ([(row indices [n, w] of the queries, row indices [n, k] of the keys, position [n] or [1] of each first query)
        of each call], index [L] of each token of the row in the concatenation of all queries). Each row of a table is
        padded with its last index. If w = k, the queries are whole documents.
        """
        # A causal call without a mask skips half of the scores, so a segment is computed separately only if it is not
        # longer than its prefix. Either way, no token attends to another document.
        first = torch.where(self.segment_prefix_lengths >= self.lengths, self.segment_prefix_lengths, 0)
        counts = [
            (len(path) - start, len(path)) for path, start in zip(self.segment_paths, first.tolist(), strict=True)
        ]
        calls = []
        places, offset = torch.empty(len(self.token_ids), dtype=torch.int64, device="cpu"), 0
        device = self.token_ids.device
        for part in _group_similar_counts(counts):
            queries = _stack_padded([self.segment_paths[number][first[number] :] for number in part])
            keys = _stack_padded([self.segment_paths[number] for number in part])
            starts = first[part]
            starts = starts[:1] if bool((starts == starts[0]).all()) else starts
            calls.append((queries.to(device), keys.to(device), starts.to(device)))
            for number in part:
                stop = offset + counts[number][0]
                own = self.segment_paths[number][-int(self.lengths[number]) :]
                places[own] = torch.arange(stop - len(own), stop, device="cpu")
                offset += queries.shape[1]
        return calls, places.to(device)

    @cached_property
    def document_batches_by_length(self) -> tuple[list[Tensor], Tensor]:
        """Batches of whole documents of nearly equal lengths, as tables [n, w] of row indices.

        Also returns the index [L] of each token in the concatenation of all tables. A token of several documents has
        the index in one of them.
        """
        inner = {parent for number, parent in enumerate(self.continued_segments.tolist()) if parent != number}
        paths = [path for number, path in enumerate(self.segment_paths) if number not in inner]
        tables = []
        places, offset = torch.empty(len(self.token_ids), dtype=torch.int64, device="cpu"), 0
        for part in _group_similar_counts([(len(path),) for path in paths]):
            tables.append(_stack_padded([paths[number] for number in part]))
            for number in part:
                places[paths[number]] = torch.arange(offset, offset + len(paths[number]), device="cpu")
                offset += tables[-1].shape[1]
        device = self.token_ids.device
        return [table.to(device) for table in tables], places.to(device)


def _row_from_arrays(arrays: dict[str, Any]) -> PackedRow:
    return PackedRow(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def _group_similar_counts(counts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Group the indices of tuples whose counts differ by at most about 20 % or a few tokens.

    Tuples with different numbers of distinct counts are kept apart.
    """
    parts: dict[tuple[int, ...], list[int]] = {}
    for number, own in enumerate(counts):
        sizes = (int(math.log(count + 32, 1.25)) for count in own)  # padding short segments costs less than a call
        parts.setdefault((len({*own}), *sizes), []).append(number)
    return [*parts.values()]


def _stack_padded(lines: Sequence[Tensor]) -> Tensor:
    width = max(map(len, lines))
    return torch.stack([torch.cat([line, line[-1:].expand(width - len(line))]) for line in lines])


class PrefixTree:
    """Documents, each with the longest prefix of its prompt that an earlier document contains.

    Add documents in ascending order of the lengths of their prompts, so that a prompt follows the documents that it
    continues. Documents are bytes of int32 token ids.
    """

    def __init__(self) -> None:
        self.branches: list[tuple[int, int]] = []  # (document, shared tokens); (-1, 0): no shared tokens
        self._sorted: list[tuple[bytes, int]] = []

    def add_and_count_shared_tokens(self, document: bytes, prompt_tokens: int) -> int:
        """Add a document with a prompt of ``prompt_tokens`` tokens, and return the number of its shared tokens."""
        index = bisect_left(self._sorted, (document, 0))
        shared, owner = 0, -1
        # In lexicographic order, a neighbour has the longest common prefix.
        for other, number in self._sorted[max(0, index - 1) : index + 1]:
            most = min(prompt_tokens, len(other) // 4)
            found = bisect_left(range(most), True, key=lambda n: document[: 4 * n + 4] != other[: 4 * n + 4])
            shared, owner = max((shared, owner), (found, number))
        while owner >= 0 and shared <= self.branches[owner][1]:
            owner = self.branches[owner][0]  # the document that itself stores the last shared token
        self._sorted.insert(index, (document, len(self.branches)))
        self.branches.append((owner, shared))
        return shared


def pack_row(documents: Sequence[tuple[Tensor, Tensor]], *, share_prefixes: bool = True) -> PackedRow:
    """Pack documents into one row. Each document is a pair (prompt, response) of token ids on the CPU.

    With ``share_prefixes``, the longest prefix of a prompt that another document contains is not stored again. Response
    tokens are stored for each document.
    """
    tokens = [torch.cat(document).int() for document in documents]
    prompts = [len(prompt) for prompt, _ in documents]
    limits = prompts if share_prefixes else [0] * len(prompts)
    order = sorted(range(len(documents)), key=limits.__getitem__)
    tree = PrefixTree()
    for number in order:
        tree.add_and_count_shared_tokens(tokens[number].numpy().tobytes(), limits[number])
    pairs = zip(order, tree.branches, strict=True)
    branches = {number: (order[owner] if owner >= 0 else -1, shared) for number, (owner, shared) in pairs}
    children: dict[int, list[int]] = {}
    for number in reversed(range(len(documents))):
        children.setdefault(branches[number][0], []).append(number)
    segments: list[Tensor] = []
    continued: list[int] = []
    ends: dict[tuple[int, int], tuple[int, int]] = {}  # (document, position): segment and row index that end there
    prompt_ends, starts, length = [0] * len(documents), [0] * len(documents), 0
    stack = children.get(-1, [])
    while stack:
        number = stack.pop()
        owner, shared = branches[number]
        own = children.get(number, [])
        starts[number] = length + prompts[number] - shared
        parent, end = ends.get((owner, shared), (len(segments), length))
        prompt_ends[number] = (starts[number] if prompts[number] > shared else end) - 1
        start = shared
        for stop in sorted({*(branches[child][1] for child in own), len(tokens[number])} - {shared}):
            segments.append(tokens[number][start:stop])
            continued.append(parent)
            length += stop - start
            parent, start = len(segments) - 1, stop
            ends[number, stop] = parent, length
        # The last entry of the stack is packed next: the document with the longest shared prefix, which continues the
        # newest segment.
        stack += sorted(own, key=lambda child: branches[child][1])
    return PackedRow(
        token_ids=torch.cat(segments),
        lengths=torch.tensor([len(segment) for segment in segments], device="cpu"),
        continued_segments=torch.tensor(continued, device="cpu"),
        prompt_ends=torch.tensor(prompt_ends, device="cpu"),
        response_starts=torch.tensor(starts, device="cpu"),
    )


def pack_padded(
    input_ids: Tensor, prompt_lengths: Tensor, mask: Tensor, *, share_prefixes: bool = True, multiple: int = 1
) -> tuple[PackedRow, Tensor, Tensor]:
    """Pack left-aligned documents in ``input_ids`` [B, S], and return (row, rows [N], columns [N]) on their device.

    ``mask`` [B, T] bool is True on the N response tokens of interest, whose rows and columns are returned in row-major
    order. Tokens after a document's last True are omitted. Each of the ``prompt_lengths`` [B] must be at least 1. For
    use outside the training step only, because the tensors are read back to the host.
    """
    device, on_host = input_ids.device, mask.cpu()
    counts = torch.where(on_host, torch.arange(1, mask.shape[1] + 1, device="cpu"), 0).amax(-1)
    lines = zip(input_ids.cpu(), prompt_lengths.tolist(), counts.tolist(), strict=True)
    documents = [(line[:start], line[start : start + count]) for line, start, count in lines]
    row = pack_row(documents, share_prefixes=share_prefixes).pad_to_multiple(multiple)
    rows, columns = on_host.nonzero(as_tuple=True)
    return row.to(device), rows.to(device), columns.to(device)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPass:
    """One forward pass of a transformer over a packed row, or over this rank's part of a shared row."""

    row: PackedRow
    backend: AttentionBackend
    sequence: SequenceParallelGroup | None = None
    layers: set[int] = field(default_factory=set)  # ids of the attention modules that have read the row


# A context variable, not an argument of the model's forward method, because layers of some models (StableLM, Nemotron)
# do not pass keyword arguments to their attention.
_current: ContextVar[AttentionPass | None] = ContextVar("attention_pass", default=None)


def compute_packed_states(
    row: PackedRow,
    transformer: nn.Module,
    *,
    layers: int,
    backend: AttentionBackend,
    sequence: SequenceParallelGroup | None = None,
) -> Tensor:
    """Run a `transformers` model with ``layers`` layers, and return the states [l, D] of this rank's tokens.

    Without a ``sequence`` of ranks, these are all L tokens. The transformer's attention must be
    :func:`agentrl.models.attention.attention`, which reads :func:`current_attention_pass`. Raises KernelInputError if a
    layer did not call this function, because the layer would have mixed documents. With the backend "padded", documents
    are not packed, and any causal model is exact.
    """
    if backend == "padded":
        return _compute_padded_states(row, transformer)
    now, part = AttentionPass(row=row, backend=backend, sequence=sequence), rank_slice(row, sequence)
    with _set_current_pass(now):
        output = transformer(
            input_ids=row.input_ids[:, part],
            position_ids=row.position_ids[:, part],
            # With a four-dimensional mask, transformers does not create an [L, L] mask.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=row.input_ids.device),
            use_cache=False,
        )
    if len(now.layers) != layers:
        raise KernelInputError(
            f"{type(transformer).__name__} does not support packed documents: {len(now.layers)} attention modules "
            f"called agentrl's attention function, but its configuration has {layers} layers"
        )
    states: Tensor = output.last_hidden_state[0]
    return states


def _compute_padded_states(row: PackedRow, transformer: nn.Module) -> Tensor:
    """Return the states [L, D] of a row whose documents are batch entries with padding on the right.

    A causal model's states do not depend on later tokens, so the padding needs no mask. A shared prefix is computed
    with each document. Runs one forward pass for each batch of documents of nearly equal lengths.
    """
    tables, places = row.document_batches_by_length
    parts = [transformer(input_ids=row.input_ids[0][table], use_cache=False).last_hidden_state for table in tables]
    return torch.cat([states.flatten(0, 1) for states in parts]).index_select(0, places)


def rank_slice(row: PackedRow, sequence: SequenceParallelGroup | None) -> slice:
    """Return the slice of the row whose states a rank of ``sequence`` computes."""
    length = row.input_ids.shape[1]
    return slice(0, length) if sequence is None else sequence.rank_slice(length)


def current_attention_pass() -> AttentionPass | None:
    """Return the forward pass that runs in this thread, or None outside :func:`compute_packed_states`."""
    return _current.get()


def attention_recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of `torch.utils.checkpoint`. Layers are recomputed in the context of their forward pass.

    The backward pass runs outside :func:`compute_packed_states`, on GPUs in another thread.
    """
    return nullcontext(), _set_current_pass(_current.get())


@contextmanager
def _set_current_pass(now: AttentionPass | None) -> Iterator[None]:
    token = _current.set(now)
    try:
        yield
    finally:
        _current.reset(token)
