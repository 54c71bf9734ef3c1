"""How documents are packed into a row, and attention over it by each backend."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.gpu_attention import stand_in
from torch import Tensor

from agentrl.kernels import KernelInputError
from agentrl.kernels.attention import AttentionPass, PackedRow, attend, backends, pack_padded

pytestmark = pytest.mark.on_device


def documents(draw: random.Random, count: int) -> tuple[Tensor, list[int], list[int]]:
    """Return padded documents, the lengths of their prompts, and their lengths.

    Prompts are one of three, or parts of other documents.
    """

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(50) for _ in range(draw.randint(least, most))]

    prompts = [tokens(1, 6) for _ in range(3)]
    made: list[tuple[list[int], list[int]]] = []
    for _ in range(count):
        prompt = draw.choice(prompts)
        if made and draw.random() < 0.5:
            earlier = [token for part in draw.choice(made) for token in part]
            prompt = [*earlier[: draw.randint(1, len(earlier))], *tokens(0, 3)]
        made.append((prompt, tokens(0, 9)))
    draw.shuffle(made)
    lengths = [len(prompt) + len(rest) for prompt, rest in made]
    ids = torch.full((count, max(lengths)), 99)
    for row, (prompt, rest) in enumerate(made):
        ids[row, : lengths[row]] = torch.tensor(prompt + rest)
    return ids, [len(prompt) for prompt, _ in made], lengths


def packed(documents: tuple[Tensor, list[int], list[int]], *, share_prefixes: bool = True) -> PackedRow:
    """The row of documents whose response tokens all count."""
    ids, prompts, lengths = documents
    starts = torch.tensor(prompts)
    mask = torch.arange(ids.shape[1]) < (torch.tensor(lengths) - starts)[:, None]
    return pack_padded(ids, starts, mask, share_prefixes=share_prefixes)[0]


def indices_of(row: PackedRow, prompts: list[int], lengths: list[int]) -> list[list[int]]:
    """Where in the row the tokens of each document are."""
    rests = [length - prompt for prompt, length in zip(prompts, lengths, strict=True)]
    return [row.document_token_indices(number, rest).tolist() for number, rest in enumerate(rests)]


def distinct_tokens(ids: Tensor, prompts: list[int], lengths: list[int]) -> int:
    """Return the tokens of a row if each prompt shares its longest prefix with a document that has a shorter prompt."""
    total = 0
    before: list[list[int]] = []
    for number in sorted(range(len(prompts)), key=prompts.__getitem__):
        own = ids[number, : lengths[number]].tolist()
        prefixes = [own[:count] for count in range(prompts[number] + 1)]
        shared = [len(prefix) for prefix in prefixes for other in before if other[: len(prefix)] == prefix]
        total += len(own) - max(shared, default=0)
        before.append(own)
    return total


@given(st.integers(0, 10**6), st.integers(1, 9), st.booleans())
def test_every_document_finds_its_tokens_and_positions(seed: int, count: int, share: bool) -> None:
    ids, prompts, lengths = documents(random.Random(seed), count)
    row = packed((ids, prompts, lengths), share_prefixes=share)
    for document, places in enumerate(indices_of(row, prompts, lengths)):
        assert row.input_ids[0, places].tolist() == ids[document, : lengths[document]].tolist()
        assert row.position_ids[0, places].tolist() == list(range(lengths[document]))
    assert row.input_ids.shape[1] == (distinct_tokens(ids, prompts, lengths) if share else sum(lengths))
    assert row.lengths.sum() == row.input_ids.shape[1]
    assert row.longest_document_length == max(lengths)
    every = torch.arange(row.input_ids.shape[1])
    calls, places = row.segment_batches_by_length
    assert torch.equal(torch.cat([queries.flatten() for queries, _, _ in calls])[places], every)
    tables, places = row.document_batches_by_length
    assert torch.equal(torch.cat([table.flatten() for table in tables])[places], every)
    # Each token attends to the tokens on its path, whatever the order of the segments.
    paths = {int(path[-1 - back]): path[: len(path) - back] for path in row.segment_paths for back in range(len(path))}
    for token in every.tolist():
        assert torch.equal((row.end_of_attending_tokens[: token + 1] > token).nonzero()[:, 0], paths[token])


def test_segments_name_the_prompt_that_they_follow() -> None:
    documents = torch.tensor([[7, 8, 1], [7, 8, 2], [5, 6, 0]]), [2, 2, 1], [3, 3, 2]
    row = packed(documents)
    assert (row.lengths.tolist(), row.continued_segments.tolist()) == ([2, 1, 1, 2], [0, 0, 0, 3])
    bounds = row.varlen_bounds
    assert bounds.indices is not None
    assert bounds.indices.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5]
    assert (bounds.queries.tolist(), bounds.keys.tolist()) == ([0, 2, 3, 4, 6], [0, 2, 5, 8, 10])
    assert (bounds.max_queries, bounds.max_keys) == (2, 3)
    assert packed(documents, share_prefixes=False).varlen_bounds.indices is None


def one_at_a_time(
    documents: list[list[int]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """[1, L, H, E] by a product of each document alone."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    result = torch.zeros_like(query)
    for own in documents:
        scores = 0.4 * query[:, :, own] @ key[:, :, own].mT
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        apart = torch.arange(len(own))[:, None] - torch.arange(len(own))
        seen = (apart >= 0) & (apart < (window or len(own)))
        weights = scores.masked_fill(~seen, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks.exp()[:, None, None])
        result[:, :, own] = weights / total @ value[:, :, own]
    return result.transpose(1, 2)


@pytest.mark.parametrize(
    ("window", "cap", "sunk"),
    [(None, None, False), (3, None, False), (None, 2.0, False), (3, 2.0, False), (None, None, True), (3, None, True)],
)
@pytest.mark.parametrize("backend", ["sdpa", "flex", "flash", "torch"])
@pytest.mark.parametrize("seed", range(3))
def test_attention_is_that_of_each_document_alone(
    monkeypatch: pytest.MonkeyPatch, backend: Any, window: int | None, cap: float | None, sunk: bool, seed: int
) -> None:
    torch_kernel = backend == "torch"  # which `flash` calls without flash-attn
    stand_in(monkeypatch, torch_kernel=torch_kernel)
    backend = "flash" if torch_kernel else backend
    ids, prompts, lengths = documents(random.Random(seed), 7)
    row = packed((ids, prompts, lengths))
    now = AttentionPass(row=row, backend=backend)
    torch.manual_seed(seed)
    query = torch.randn(1, 4, row.input_ids.shape[1], 8, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, row.input_ids.shape[1], 8, dtype=torch.float64)
    inputs = [query.requires_grad_(), key.requires_grad_(), value.requires_grad_()]
    sinks = torch.randn(4, dtype=torch.float64).requires_grad_() if sunk else None
    if torch_kernel and cap is not None:
        with pytest.raises(KernelInputError, match="cannot cap scores"):
            attend(now, *inputs, scale=0.4, window=window, cap=cap)
        return
    found = attend(now, *inputs, scale=0.4, window=window, cap=cap, sinks=sinks)
    wanted = one_at_a_time(indices_of(row, prompts, lengths), *inputs, sinks=sinks, window=window, cap=cap)
    inputs += [] if sinks is None else [sinks]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    gradient = torch.randn(found.shape, dtype=torch.float64)
    for one, other in zip(*(torch.autograd.grad(made, inputs, gradient) for made in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_a_change_in_one_document_changes_no_other_by_one_bit() -> None:
    row = packed(documents(random.Random(4), 9))
    now = AttentionPass(row=row, backend="sdpa")
    query, key, value = torch.randn(3, 1, 4, row.input_ids.shape[1], 8).unbind()
    before = attend(now, query, key, value)
    own = int(row.segment_prefix_lengths.argmax())  # the end of the longest path
    changed = slice(int(row.segment_starts[own]), int(row.segment_starts[own] + row.lengths[own]))
    for states in (query, key, value):
        states[:, :, changed] = torch.nan
    after = attend(now, query, key, value)
    others = torch.ones(row.input_ids.shape[1], dtype=torch.bool)
    others[changed] = False
    assert torch.equal(after[:, others], before[:, others])
    assert not torch.isfinite(after[:, changed]).any()


def test_a_layer_is_one_call_that_copies_nothing_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def counting(query: Tensor, *_: Tensor, **given: Any) -> Tensor:
        calls.append(given)
        return query

    monkeypatch.setattr(backends, "varlen_attention_function", lambda: counting)
    for seed in range(3):
        row = packed(documents(random.Random(seed), 9))
        now = AttentionPass(row=row, backend="flash")
        layers = 4
        for _ in range(layers):
            attend(now, *torch.randn(3, 1, 4, row.input_ids.shape[1], 8).unbind())
        own, calls[:] = list(calls), []
        assert len(own) == layers
        # The same tensors in every layer: the lengths were copied once.
        assert len({(id(given["cu_seqlens_q"]), id(given["cu_seqlens_k"])) for given in own}) == 1
