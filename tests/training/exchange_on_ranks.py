"""Rows sent to the ranks of their groups and back, on as many ranks as the environment says: ``OUTPUT``.

Run by test_exchange.py in processes of its own; every rank writes what it held.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from agentrl.training.engine.collectives import RowExchange

LENGTHS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8)
"""Tokens of each row; three rows a group, dealt out to the ranks one by one."""


@dataclass(frozen=True, kw_only=True)
class Record:
    mask: Tensor
    tokens: Tensor
    numbers: Tensor
    nothing: Tensor | None = None


def micro_batch(rows: list[int]) -> Record:
    """Rows whose token at position t is 100 times the row plus t, a mask with a hole, and padding."""
    width = 2 + max((LENGTHS[row] for row in rows), default=1)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    tokens = torch.full(mask.shape, torch.nan, dtype=torch.float64)
    for place, row in enumerate(rows):
        mask[place, : LENGTHS[row]] = True
        mask[place, 1 : LENGTHS[row] - 1] = False
        tokens[place, : LENGTHS[row]] = 100 * row + torch.arange(LENGTHS[row])
    return Record(mask=mask, tokens=tokens, numbers=torch.tensor(rows, dtype=torch.int64))


def main() -> None:
    torch.distributed.init_process_group("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rows = list(range(rank, len(LENGTHS), ranks))
    # The second micro-batch is a dummy: it has no rows.
    parts = [micro_batch(rows[:2]), micro_batch([]), micro_batch(rows[2:])]
    result: dict[str, Any] = {}
    for name, home in (("groups", lambda group: group % ranks), ("one rank", lambda group: ranks - 1)):
        homes = torch.tensor([home(row // 3) for row in rows])
        exchange = RowExchange([part.mask for part in parts], homes)
        held = exchange.send_records_to_home_ranks(parts)
        back = exchange.return_results_to_senders(2 * held.tokens)
        result[name] = {
            "held": vars(held),
            "back": [part.nan_to_num(-1.0) for part in back],
            "sent": [part.tokens for part in parts],
            "spare": [part.untyped_storage().nbytes() - part.nbytes for part in back],
        }
    torch.save(result, f"{sys.argv[1]}.{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
