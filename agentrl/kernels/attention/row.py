"""Documents packed into one row of tokens without padding; documents with the same prompt share its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from agentrl.kernels.attention.sequence import SequenceGroup
from agentrl.kernels.records import KernelInputError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

AttentionBackend = Literal["sdpa", "flex", "flash"]

# A context variable, not an argument of the forward: the layers of some models (StableLM, Nemotron) pass no further
# keyword arguments to their attention.
_current: ContextVar[PackedRow | None] = ContextVar("packed_row", default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Consecutive tokens of the row: each sees those before it in the segment, and all of the prefix if there is one.

    A prefix is a segment of its own that has none: a prompt that several documents share.
    """

    start: int
    stop: int
    prefix: tuple[int, int] | None = None

    @property
    def bounds(self) -> tuple[int, int]:
        return self.start, self.stop


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reading:
    """Tokens that attend to each other by their order, and the first of them whose states the row takes from here."""

    places: Tensor  # [n] int64, on the CPU
    first: int = 0


class Bounds(NamedTuple):
    """Lengths of the N segments of a row, and of their keys: the keys of a shared prefix, then the segment's own."""

    places: Tensor | None  # [K] int64, index in the row of each key; None: the keys are the row, in order
    queries: Tensor  # [N + 1] int32, cumulative lengths
    keys: Tensor  # [N + 1] int32, cumulative lengths
    most_queries: int
    most_keys: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRow:
    """The tokens of B documents in one row of L, and where each document finds its own.

    With a ``sequence`` of ranks each of them computes the states of its slice of the row; all of them hold this record.

    Two documents, the prompt (7, 8) and one token of response each:

    >>> row = pack_row(torch.tensor([[7, 8, 1], [7, 8, 2]]), [2, 2], [3, 3])
    >>> row.input_ids.tolist(), row.position_ids.tolist()
    ([[7, 8, 1, 2]], [[0, 1, 2, 2]])
    >>> row.places.tolist()
    [[0, 1, 2], [0, 1, 3]]
    """

    input_ids: Tensor  # [1, L] int64
    position_ids: Tensor  # [1, L] int64, from 0 in each document
    places: Tensor  # [B, S] int64: where each document's tokens stand; past its end, where its last one stands
    lengths: tuple[int, ...]  # [B] tokens of each document
    segments: tuple[Stretch, ...]  # the row from its start to its end
    readings: tuple[Reading, ...]  # every document, and every prompt that is shared
    backend: AttentionBackend = "sdpa"
    sequence: SequenceGroup | None = None
    layers: set[int] = field(default_factory=set)  # ids of the attention modules that have read the row

    def states(self, transformer: nn.Module, *, layers: int) -> Tensor:
        """The states [L, D] that a transformer of `transformers` with ``layers`` gives for :attr:`part` of the row.

        Its attention must be :func:`agentrl.models.attention.attention`, which reads :func:`current_row`. Raises
        KernelInputError where a layer did not call it: that layer would have mixed the documents.
        """
        with _reading(self):
            output = transformer(
                input_ids=self.input_ids[:, self.part],
                position_ids=self.position_ids[:, self.part],
                attention_mask=self._nothing_to_mask,
                use_cache=False,
            )
        if len(self.layers) != layers:
            raise KernelInputError(
                f"{type(transformer).__name__} cannot read packed documents: {len(self.layers)} attention modules "
                f"called the attention function that is set, and its configuration has {layers} layers"
            )
        states: Tensor = output.last_hidden_state[0]
        return states

    @property
    def part(self) -> slice:
        """The tokens whose states are computed on this rank."""
        length = self.input_ids.shape[1]
        return slice(0, length) if self.sequence is None else self.sequence.part(length)

    def held(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """(the numbers [n] of those of ``places`` [N] that are in :attr:`part`, where they stand in its states [n])."""
        part = self.part
        numbers = ((places >= part.start) & (places < part.stop)).nonzero().squeeze(-1)
        return numbers, places[numbers] - part.start

    @cached_property
    def _nothing_to_mask(self) -> Tensor:
        """Four-dimensional, so `transformers` makes no mask [L, L] of its own."""
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.input_ids.device)

    @cached_property
    def window_masks(self) -> dict[int | None, BlockMask]:
        """The block masks that `flex` has made for this row, by window."""
        return {}

    @cached_property
    def segment_of(self) -> tuple[Tensor, Tensor]:
        """(number of the segment, number of its prefix or its own), both [L]: a token sees these two segments."""
        counts = torch.tensor([one.stop - one.start for one in self.segments])
        numbers = {one.bounds: number for number, one in enumerate(self.segments)}
        seen = [numbers[one.prefix or one.bounds] for one in self.segments]
        pair = torch.arange(len(counts)).repeat_interleave(counts), torch.tensor(seen).repeat_interleave(counts)
        return pair[0].to(self.input_ids.device), pair[1].to(self.input_ids.device)

    @cached_property
    def bounds(self) -> Bounds:
        """The row for kernels that take segments of several lengths; copied to the device once, not in every layer."""
        device = self.input_ids.device
        queries = [one.stop - one.start for one in self.segments]
        parts = [torch.cat([torch.arange(*(one.prefix or (0, 0))), _places(one)]) for one in self.segments]
        keys = [len(part) for part in parts]

        def ends(lengths: Sequence[int]) -> Tensor:
            return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)

        shared = any(one.prefix is not None for one in self.segments)
        return Bounds(
            places=torch.cat(parts).to(device) if shared else None,
            queries=ends(queries),
            keys=ends(keys),
            most_queries=max(queries),
            most_keys=max(keys),
        )

    @cached_property
    def calls(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """(places [n, w] of readings of nearly equal lengths, for one call of attention each; [L] the number of each
        token of the row in all of these)."""
        tables: list[Tensor] = []
        numbers, offset = torch.empty(self.input_ids.shape[1], dtype=torch.int64), 0
        for part in _of_nearly_equal(sorted(self.readings, key=lambda reading: -len(reading.places))):
            width = len(part[0].places)
            columns = torch.arange(width)
            tables.append(torch.stack([one.places[columns.clamp(max=len(one.places) - 1)] for one in part]))
            for line, one in enumerate(part):
                start = offset + line * width
                numbers[one.places[one.first :]] = torch.arange(start + one.first, start + len(one.places))
            offset += tables[-1].numel()
        return tuple(table.to(self.input_ids.device) for table in tables), numbers.to(self.input_ids.device)


def current_row() -> PackedRow | None:
    """The row whose states are being computed in this thread; None outside :meth:`PackedRow.states`."""
    return _current.get()


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The ``context_fn`` of `torch.utils.checkpoint`: layers are recomputed with the row of their forward.

    The backward pass runs outside :meth:`PackedRow.states`, on GPUs in another thread.
    """
    return nullcontext(), _reading(_current.get())


@contextmanager
def _reading(row: PackedRow | None) -> Iterator[None]:
    token = _current.set(row)
    try:
        yield
    finally:
        _current.reset(token)


def pack_row(
    input_ids: Tensor,
    prompt_lengths: Sequence[int],
    lengths: Sequence[int],
    *,
    backend: AttentionBackend = "sdpa",
    share_prompts: bool = True,
    sequence: SequenceGroup | None = None,
) -> PackedRow:
    """Pack the first ``lengths`` [B] tokens of documents that stand left-aligned in ``input_ids`` [B, S].

    With ``share_prompts`` equal prompts, the first ``prompt_lengths`` [B] tokens, stand in the row once. A document
    has at least one token and is not shorter than its prompt. With a ``sequence`` the row ends with a document of zeros
    that nobody asks for, so that all its ranks have equally many tokens.
    """
    device, ids = input_ids.device, input_ids.cpu()
    prompts = [tuple(line[:count].tolist()) for line, count in zip(ids, prompt_lengths, strict=True)]
    shared = {prompt for prompt, count in Counter(prompts).items() if count > 1 and share_prompts}
    segments: list[Stretch] = []
    tokens: list[Tensor] = []
    found: dict[tuple[int, ...], Stretch] = {}
    readings: list[Reading] = []
    documents: list[Tensor] = []

    def append(part: Tensor, prefix: tuple[int, int] | None = None) -> Stretch:
        start = segments[-1].stop if segments else 0
        segments.append(Stretch(start=start, stop=start + len(part), prefix=prefix))
        tokens.append(part)
        return segments[-1]

    for line, prompt, count in zip(ids, prompts, lengths, strict=True):
        first = len(prompt) if prompt in shared else 0
        parts = []
        if first:
            if prompt not in found:
                found[prompt] = append(line[:first])
                readings.append(Reading(places=_places(found[prompt])))
            parts.append(_places(found[prompt]))
        if count > first:
            parts.append(_places(append(line[first:count], found[prompt].bounds if first else None)))
            readings.append(Reading(places=torch.cat(parts), first=first))
        documents.append(torch.cat(parts))
    if sequence is not None and (missing := -segments[-1].stop % sequence.size):
        readings.append(Reading(places=_places(append(ids.new_zeros(missing)))))
    columns = torch.arange(max(lengths))
    places = torch.stack([one[columns.clamp(max=len(one) - 1)] for one in documents])
    return PackedRow(
        input_ids=torch.cat(tokens)[None].to(device),
        position_ids=torch.cat([_positions(one) for one in segments])[None].to(device),
        places=places.to(device),
        lengths=tuple(lengths),
        segments=tuple(segments),
        readings=tuple(readings),
        backend=backend,
        sequence=sequence,
    )


def _places(segment: Stretch) -> Tensor:
    return torch.arange(segment.start, segment.stop)


def _positions(segment: Stretch) -> Tensor:
    before = 0 if segment.prefix is None else segment.prefix[1] - segment.prefix[0]
    return torch.arange(before, before + segment.stop - segment.start)


def _of_nearly_equal(readings: Sequence[Reading]) -> list[list[Reading]]:
    """Readings, the longest first, in parts whose shortest has at least four fifths of its longest's tokens."""
    parts: list[list[Reading]] = []
    for one in readings:
        if parts and 5 * len(one.places) >= 4 * len(parts[-1][0].places):
            parts[-1].append(one)
        else:
            parts.append([one])
    return parts
