"""The slot cache against a plain table of what every row holds, and decoding attention against PyTorch's."""

from __future__ import annotations

import random

import pytest
import torch
from rollout.fakes import tiny_model

from agentrl.rollout.engines.decoding import SlotCache, decode_attention, use_decode_attention

HEADS, DIM, LAYERS = 3, 4, 2


class Table:
    """What every row should hold: for each layer a list of [heads, dim] by position."""

    def __init__(self) -> None:
        self.cache = SlotCache(LAYERS)
        self.rows: dict[int, list[list[torch.Tensor]]] = {}

    def feed(self, rows: list[int], counts: list[int], *, first: bool = False) -> None:
        """Append ``counts`` tokens to ``rows`` in one forward; ``first``: choose them as the first so many rows."""
        starts = [len(self.rows.get(row, [[]])[0]) for row in rows]
        positions = torch.full((len(rows), max(counts)), -1)
        for place, (start, count) in enumerate(zip(starts, counts, strict=True)):
            positions[place, :count] = torch.arange(start, start + count)
        width = int(positions.max()) + 1
        mask = self.cache.select_entries_and_build_mask(len(rows) if first else torch.tensor(rows), positions, width)
        for layer in range(LAYERS):
            keys = torch.randn(len(rows), HEADS, max(counts), DIM)
            found = self.cache.update(keys, -keys, layer)
            for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
                stored = self.rows.setdefault(row, [[] for _ in range(LAYERS)])[layer]
                stored += list(keys[place, :, :count].unbind(1))
                if count:
                    self._check(found, mask, place, stored, starts[place], count)

    @staticmethod
    def _check(
        found: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        place: int,
        stored: list[torch.Tensor],
        start: int,
        count: int,
    ) -> None:
        expected = torch.stack(stored, dim=1)  # [heads, length, dim]
        for query in range(count):
            seen = mask[place, 0, query]
            assert seen.tolist() == [column <= start + query for column in range(len(seen))]
        assert torch.equal(found[0][place][:, mask[place, 0, count - 1]], expected)
        assert torch.equal(found[1][place][:, mask[place, 0, count - 1]], -expected)
        assert bool(found[0].isfinite().all())


@pytest.mark.parametrize("seed", range(8))
def test_rows_hold_what_was_stored_through_growth_moves_swaps_and_forgetting(seed: int) -> None:
    draw = random.Random(seed)
    table = Table()
    for _ in range(60):
        action = draw.random()
        known = sorted(table.rows)
        if action < 0.35 or not known:
            rows = draw.sample(range(12), draw.randint(1, 6))
            if draw.random() < 0.3:
                table.cache.reserve(draw.randint(1, 14))
            table.feed(rows, [draw.randint(1, 9) for _ in rows])
        elif action < 0.75:
            count = max(known) + 1
            fed = [int(row in known and draw.random() < 0.8) for row in range(count - 1)]
            table.feed(list(range(count)), [*fed, 1], first=True)
        elif action < 0.85:
            source, target = draw.choice(known), draw.randrange(16)
            length = len(table.rows[source][0])
            table.cache.copy_rows(torch.tensor([source]), torch.tensor([target]), length)
            table.rows[target] = [list(layer) for layer in table.rows[source]]
        elif action < 0.97 and len(known) > 1:
            one, two = draw.sample(known, 2)
            length = max(len(table.rows[one][0]), len(table.rows[two][0]))
            table.cache.swap_rows(torch.tensor([one]), torch.tensor([two]), length)
            table.rows[one], table.rows[two] = table.rows[two], table.rows[one]
        else:
            table.cache.clear()
            table.rows = {}


def test_the_cache_is_hardly_longer_than_its_longest_row() -> None:
    table = Table()
    table.feed([0, 1], [3, 40])
    for _ in range(100):
        table.feed([0, 1], [1, 1], first=True)
        longest = len(table.rows[1][0])
        assert longest <= table.cache.length <= longest * 9 / 8 + 16
    table.cache.clear()
    assert table.cache.length == 0


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_decoding_attention_is_scaled_dot_product_attention(groups: int) -> None:
    torch.manual_seed(groups)
    rows, heads, width, dim = 5, 6, 11, 8
    query = torch.randn(rows, heads, 1, dim)
    key, value = torch.randn(2, rows, groups, width, dim)
    mask = torch.rand(rows, 1, 1, width) < 0.6
    mask[..., 0] = True
    with torch.no_grad():
        found, weights = decode_attention(None, query, key, value, mask, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(found, expected.transpose(1, 2))
    assert weights is None


def test_only_decoding_forwards_take_the_decoding_attention() -> None:
    model = tiny_model()
    ids = torch.tensor([[5, 6, 7, 8]])
    usual = model(input_ids=ids).logits
    with use_decode_attention(model.config):
        assert model.config._attn_implementation != "sdpa"
        assert torch.equal(model(input_ids=ids).logits, usual)
    assert model.config._attn_implementation == "sdpa"
