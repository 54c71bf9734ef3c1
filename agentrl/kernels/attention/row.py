"""Documents packed into one row of tokens without padding; documents with the same prompt share its tokens.

A row may be divided over ranks (Ulysses, arXiv 2309.14509). Each rank holds a slice of the tokens. Only attention mixes
tokens. For attention, the ranks exchange their tokens of all heads for all tokens of some heads, and back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
import torch.distributed
from torch import Tensor, nn

from agentrl.kernels.records import KernelInputError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceGroup:
    """The ranks that share rows. All methods except :meth:`part` are collective, forward and backward."""

    rank: int  # in the group
    size: int
    group: torch.distributed.ProcessGroup

    def part(self, length: int) -> slice:
        """Return this rank's slice of a row of ``length`` tokens, a multiple of the group size."""
        own = length // self.size
        return slice(self.rank * own, (self.rank + 1) * own)

    def by_heads(self, states: Tensor) -> Tensor:
        """Exchange this rank's tokens [1, H, l, E] for all tokens of its heads [1, H / size, L, E]."""
        received = self._swapped(states[0].unflatten(0, (self.size, -1)))  # [size, H / size, l, E], tokens in order
        return received.transpose(0, 1).flatten(1, 2)[None]

    def keys_by_heads(self, states: Tensor) -> Tensor:
        """Apply :meth:`by_heads` to G heads shared by queries. Ranks that need the same head receive a copy each."""
        copies = math.lcm(states.shape[1], self.size) // states.shape[1]
        return self.by_heads(states.repeat_interleave(copies, 1) if copies > 1 else states)

    def by_tokens(self, states: Tensor) -> Tensor:
        """Exchange all tokens of this rank's heads [1, L, H / size, E] for its tokens [1, l, H, E]."""
        received = self._swapped(states[0].unflatten(0, (self.size, -1)))  # [size, l, H / size, E], heads in order
        return received.transpose(0, 1).flatten(1, 2)[None]

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over the ranks, detached."""
        summed = values.detach().clone()
        torch.distributed.all_reduce(summed, group=self.group)
        return summed

    def gather(self, values: Tensor, numbers: Tensor, total: int) -> Tensor:
        """All-gather ``values`` [n, ...], ordered by their global indices ``numbers`` [n]. Returns [total, ...].

        Every rank must compute the same loss from the result. The gradient of ``values`` is the gradient of this loss,
        not the sum over ranks, so that the ranks' gradients of a parameter sum to the gradient of the loss.
        """
        own = values.new_zeros(total, *values.shape[1:]).index_copy(0, numbers, values)
        every = self.total(own)
        held = torch.zeros(total, dtype=torch.bool, device=values.device)
        held[numbers] = True
        return torch.where(held.view(-1, *[1] * (values.dim() - 1)), own, every)

    def _swapped(self, blocks: Tensor) -> Tensor:
        swapped: Tensor = _Swap.apply(blocks.contiguous(), self)
        return swapped


class _Context(Protocol):
    """Values that the backward pass needs."""

    ranks: SequenceGroup


class _Swap(torch.autograd.Function):
    """Autograd function of (blocks [size, ...], ranks). Sends block r to rank r, and receives the result's block r."""

    @staticmethod
    def forward(ctx: _Context, blocks: Tensor, ranks: SequenceGroup) -> Tensor:
        ctx.ranks = ranks
        received = torch.empty_like(blocks)
        torch.distributed.all_to_all_single(received, blocks, group=ranks.group)
        return received

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _Swap.apply(gradient.contiguous(), ctx.ranks), None


AttentionBackend = Literal["sdpa", "flex", "flash", "padded"]
"""How a model reads a row: with an attention function for packed documents, or as padded documents."""


class Bounds(NamedTuple):
    """Lengths of the segments of a row, and of their keys: the keys of a shared prompt, then the segment's own."""

    indices: Tensor | None  # [K] int64, index in the row of each key; None: keys are the row in order
    queries: Tensor  # [S + 1] int32, cumulative lengths
    keys: Tensor  # [S + 1] int32, cumulative lengths
    most_queries: int
    most_keys: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRow:
    """B documents, each a prompt and a response, as S segments of one row of L tokens.

    A token attends to the tokens before it in its segment, and to all tokens of the segment that its segment continues,
    if there is one: a prompt that several documents share. The segments stay on the host, where attention plans its
    calls; nothing is read back from the device.

    Two documents, the prompt (7, 8) and one token of response each:

    >>> prompt, one, two = torch.tensor([7, 8]), torch.tensor([1]), torch.tensor([2])
    >>> row = pack_row([(prompt, one), (prompt, two)])
    >>> row.input_ids.tolist(), row.position_ids.tolist()
    ([[7, 8, 1, 2]], [[0, 1, 2, 2]])
    >>> row.lengths.tolist(), row.continued.tolist()
    ([2, 1, 1], [0, 0, 0])
    """

    token_ids: Tensor  # [L] int32
    lengths: Tensor  # [S] int64, number of tokens of each segment, in row order; on the host
    continued: Tensor  # [S] int64, index of the segment that it continues, its own index if none; on the host
    prompt_ends: Tensor  # [B] int64, index in the row of each document's last prompt token
    starts: Tensor  # [B] int64, index in the row of each document's first response token; the others follow it

    @cached_property
    def input_ids(self) -> Tensor:
        """The token ids as the input of a model, [1, L] int64."""
        return self.token_ids.long()[None]

    @cached_property
    def position_ids(self) -> Tensor:
        """Position of each token in its document, from 0, [1, L] int64."""
        # From the index in the row to the position in the document.
        shift = self.before - self.segment_starts
        positions = torch.arange(len(self.token_ids), device="cpu") + shift.repeat_interleave(self.lengths)
        return positions[None].to(self.token_ids.device)

    def tokens(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the ids of the response tokens at ``columns`` of the documents ``rows``; both broadcast."""
        return self.input_ids[0, self.starts[rows] + columns]

    def predicting(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the row index of the state that predicts each of these response tokens.

        For a column after the end of a response, the index is inside the row but arbitrary.
        """
        before = (self.starts[rows] + columns - 1).clamp(max=len(self.token_ids) - 1)
        return torch.where(columns == 0, self.prompt_ends[rows], before)

    def to(self, device: torch.device | str) -> PackedRow:
        """Return the row on ``device``."""
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            prompt_ends=self.prompt_ends.to(device),
            starts=self.starts.to(device),
        )

    def padded(self, multiple: int) -> PackedRow:
        """Pad the row to a multiple, so that ranks that share it have the same number of tokens.

        The padding is a last segment of zeros, which no document reads.
        """
        missing = -len(self.token_ids) % multiple
        if not missing:
            return self
        return replace(
            self,
            token_ids=torch.nn.functional.pad(self.token_ids, (0, missing)),
            lengths=torch.nn.functional.pad(self.lengths, (0, 1), value=missing),
            continued=torch.nn.functional.pad(self.continued, (0, 1), value=len(self.lengths)),
        )

    @cached_property
    def longest(self) -> int:
        """Number of tokens of the longest document."""
        return int((self.lengths + self.before).max())

    @cached_property
    def before(self) -> Tensor:
        """Number of tokens of the document before each segment, [S]: the tokens of the prompt that it continues."""
        alone = self.continued == torch.arange(len(self.lengths), device="cpu")
        return torch.where(alone, 0, self.lengths[self.continued])

    @cached_property
    def segment_starts(self) -> Tensor:
        """Index in the row of each segment's first token, [S]."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def window_masks(self) -> dict[int | None, BlockMask]:
        """Cache of `flex`'s block masks for this row, by window."""
        return {}

    @cached_property
    def segment_of(self) -> tuple[Tensor, Tensor]:
        """Indices of each token's segment and of the segment that it continues, both [L]. Tokens attend to both."""
        device = self.token_ids.device
        numbers = torch.arange(len(self.lengths), device="cpu").repeat_interleave(self.lengths)
        return numbers.to(device), self.continued[numbers].to(device)

    @cached_property
    def bounds(self) -> Bounds:
        """Segment boundaries for kernels with variable lengths, copied to the device once, not in every layer."""
        device = self.token_ids.device
        keys = self.lengths + self.before

        def ends(lengths: Tensor) -> Tensor:
            return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(device)

        indices = None
        if bool(self.before.any()):
            numbers = torch.arange(len(keys), device="cpu").repeat_interleave(keys)
            columns = torch.arange(len(numbers), device="cpu") - (keys.cumsum(0) - keys)[numbers]
            indices = self._indices(numbers, columns)
        return Bounds(
            indices=None if indices is None else indices.to(device),
            queries=ends(self.lengths),
            keys=ends(keys),
            most_queries=int(self.lengths.max()),
            most_keys=int(keys.max()),
        )

    @cached_property
    def calls(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """Batches of documents of nearly equal lengths, for one attention call each.

        (row indices [n, w] of the documents of each call, padded with their last index; index [L] of each token of the
        row in the concatenation of all calls). A shared prompt is also a document, from which its states are taken.
        """
        lengths = self.lengths + self.before
        tables: list[Tensor] = []
        first, offset = torch.empty_like(lengths), 0  # of each segment's document among all tables
        for part in self._of_nearly_equal_length():
            numbers = torch.tensor(part, device="cpu")
            width = int(lengths[part[0]])
            columns = torch.minimum(torch.arange(width, device="cpu"), lengths[numbers, None] - 1)
            tables.append(self._indices(numbers[:, None], columns))
            first[numbers] = offset + width * torch.arange(len(part), device="cpu")
            offset += tables[-1].numel()
        shift = first + self.before - self.segment_starts
        own = torch.arange(len(self.token_ids), device="cpu") + shift.repeat_interleave(self.lengths)
        device = self.token_ids.device
        return tuple(table.to(device) for table in tables), own.to(device)

    def _indices(self, numbers: Tensor, columns: Tensor) -> Tensor:
        """Return row indices of the tokens at ``columns`` of the documents that end with the segments ``numbers``."""
        before, starts = self.before[numbers], self.segment_starts
        return torch.where(
            columns < before, starts[self.continued[numbers]] + columns, starts[numbers] + columns - before
        )

    def _of_nearly_equal_length(self) -> list[list[int]]:
        """Split segment indices into parts of documents of nearly equal lengths, the longest first.

        The shortest document of a part has at least four fifths of the tokens of its longest one.
        """
        lengths = (self.lengths + self.before).tolist()
        parts: list[list[int]] = []
        for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
            if parts and 5 * lengths[number] >= 4 * lengths[parts[-1][0]]:
                parts[-1].append(number)
            else:
                parts.append([number])
        return parts


def pack_row(documents: Sequence[tuple[Tensor, Tensor]], *, share_prompts: bool = True) -> PackedRow:
    """Pack documents (prompt, response) of token ids, all on the host.

    With ``share_prompts``, the row contains a prompt that several documents have only once.
    """
    names = [tuple(prompt.tolist()) if share_prompts else number for number, (prompt, _) in enumerate(documents)]
    counts = Counter(names)
    shared: dict[object, int] = {}  # index of the segment of each shared prompt
    segments: list[Tensor] = []
    continued: list[int] = []
    ends = [0]  # of the segments in the row
    prompt_ends: list[int] = []
    starts: list[int] = []

    def append(segment: Tensor, to: int) -> None:
        segments.append(segment)
        continued.append(to)
        ends.append(ends[-1] + len(segment))

    for name, (prompt, response) in zip(names, documents, strict=True):
        if counts[name] == 1:
            starts.append(ends[-1] + len(prompt))
            prompt_ends.append(starts[-1] - 1)
            append(torch.cat([prompt, response]), len(segments))
            continue
        if name not in shared:
            shared[name] = len(segments)
            append(prompt, len(segments))
        starts.append(ends[-1])
        prompt_ends.append(ends[shared[name] + 1] - 1)
        append(response, shared[name])
    return PackedRow(
        token_ids=torch.cat(segments).int(),
        lengths=torch.tensor([len(segment) for segment in segments], device="cpu"),
        continued=torch.tensor(continued, device="cpu"),
        prompt_ends=torch.tensor(prompt_ends, device="cpu"),
        starts=torch.tensor(starts, device="cpu"),
    )


def pack_padded(
    input_ids: Tensor, prompt_lengths: Tensor, mask: Tensor, *, share_prompts: bool = True, multiple: int = 1
) -> tuple[PackedRow, Tensor, Tensor]:
    """Pack left-aligned documents in ``input_ids`` [B, S], and return (row, rows [N], columns [N]) on their device.

    ``mask`` [B, T] bool is True on the N response tokens of interest, whose rows and columns are returned in row-major
    order. Tokens after a document's last True are omitted. ``prompt_lengths`` [B], each at least 1. For callers outside
    the training step: reads the tensors back to the host.
    """
    device, on_host = input_ids.device, mask.cpu()
    counts = torch.where(on_host, torch.arange(1, mask.shape[1] + 1, device="cpu"), 0).amax(-1)
    lines = zip(input_ids.cpu(), prompt_lengths.tolist(), counts.tolist(), strict=True)
    documents = [(line[:start], line[start : start + count]) for line, start, count in lines]
    row = pack_row(documents, share_prompts=share_prompts).padded(multiple)
    rows, columns = on_host.nonzero(as_tuple=True)
    return row.to(device), rows.to(device), columns.to(device)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPass:
    """One forward of a transformer over a packed row, or over this rank's part of a shared row."""

    row: PackedRow
    backend: AttentionBackend
    sequence: SequenceGroup | None = None
    layers: set[int] = field(default_factory=set)  # ids of the attention modules that have read the row

    @property
    def part(self) -> slice:
        """Slice of the tokens whose states are computed on this rank."""
        return part_of(self.row, self.sequence)


# A context variable, not an argument of the forward, because layers of some models (StableLM, Nemotron) do not pass
# keyword arguments to their attention.
_current: ContextVar[AttentionPass | None] = ContextVar("attention_pass", default=None)


def packed_states(
    row: PackedRow,
    transformer: nn.Module,
    *,
    layers: int,
    backend: AttentionBackend,
    sequence: SequenceGroup | None = None,
) -> Tensor:
    """Run a `transformers` model with ``layers`` layers, and return the states [l, D] of this rank's tokens.

    Without a ``sequence`` of ranks, these are all L tokens. The transformer's attention must be
    :func:`agentrl.models.attention.attention`, which reads :func:`current_pass`. Raises KernelInputError if a layer did
    not call this function, because the layer would have mixed documents. With the backend "padded", documents are not
    packed, and any causal model is exact.
    """
    if backend == "padded":
        return _padded_states(row, transformer)
    now = AttentionPass(row=row, backend=backend, sequence=sequence)
    with _during(now):
        output = transformer(
            input_ids=row.input_ids[:, now.part],
            position_ids=row.position_ids[:, now.part],
            # Four-dimensional, so that transformers does not create an [L, L] mask.
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


def _padded_states(row: PackedRow, transformer: nn.Module) -> Tensor:
    """Return the states [L, D] of a row whose documents are batch entries with padding on the right.

    A causal model's states do not depend on later tokens, so the padding needs no mask. A shared prompt is computed
    with each document. One forward pass for each batch of documents of nearly equal lengths.
    """
    tables, numbers = row.calls
    parts = [transformer(input_ids=row.input_ids[0][table], use_cache=False).last_hidden_state for table in tables]
    return torch.cat([states.flatten(0, 1) for states in parts]).index_select(0, numbers)


def part_of(row: PackedRow, sequence: SequenceGroup | None) -> slice:
    """Return the slice of the row whose states a rank of ``sequence`` computes."""
    length = row.input_ids.shape[1]
    return slice(0, length) if sequence is None else sequence.part(length)


def current_pass() -> AttentionPass | None:
    """Return the forward that runs in this thread, or None outside :func:`packed_states`."""
    return _current.get()


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of `torch.utils.checkpoint`. Layers are recomputed in the context of their forward pass.

    The backward pass runs outside :func:`packed_states`, on GPUs in another thread.
    """
    return nullcontext(), _during(_current.get())


@contextmanager
def _during(now: AttentionPass | None) -> Iterator[None]:
    token = _current.set(now)
    try:
        yield
    finally:
        _current.reset(token)
