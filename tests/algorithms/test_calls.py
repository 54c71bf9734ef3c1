"""A step in several calls, as on several ranks: the numbers are those of one call."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import AdvantageInputs, Advantages, compute_advantages


@dataclass
class Meeting:
    """Where threads, one a call, bring their tensors together."""

    calls: int
    places: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.calls, timeout=20)


@dataclass
class Call:
    meeting: Meeting
    participant_index: int

    def all_gather(self, values: Tensor) -> Tensor:
        self.meeting.places[self.participant_index] = values
        self.meeting.barrier.wait()
        found = torch.stack([self.meeting.places[place] for place in range(self.meeting.calls)])
        self.meeting.barrier.wait()
        return found


def rows_of(groups: list[int], lengths: list[int], seed: int) -> AdvantageInputs:
    """As wide as its longest row, as an exchange between ranks leaves them; without rows one column."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths, default=1)
    mask = torch.arange(width) < torch.tensor(lengths, dtype=torch.int64).reshape(-1, 1)
    rewards = torch.zeros(len(groups), width, dtype=torch.float64)
    for row, length in enumerate(lengths):
        rewards[row, length - 1] = float(torch.randint(0, 2, (), generator=generator)) - 0.3
    energy = torch.rand(len(groups), width, generator=generator, dtype=torch.float64) ** 4
    return AdvantageInputs(rewards=rewards, response_mask=mask, groups=torch.tensor(groups).long(), token_energy=energy)


def together(parts: list[AdvantageInputs]) -> AdvantageInputs:
    width = max(part.rewards.shape[1] for part in parts)

    def wide(values: list[Tensor]) -> Tensor:
        return torch.cat([torch.nn.functional.pad(item, (0, width - item.shape[1])) for item in values])

    energies = [part.token_energy for part in parts if part.token_energy is not None]
    return AdvantageInputs(
        rewards=wide([part.rewards for part in parts]),
        response_mask=wide([part.response_mask for part in parts]),
        groups=torch.cat([part.groups for part in parts]),
        token_energy=wide(energies),
    )


PARTS = [
    rows_of([0, 0, 0, 1, 1], [3, 5, 2, 4, 4], 0),
    rows_of([2, 2, 3, 3, 3, 3], [9, 1, 6, 6, 2, 7], 1),
    rows_of([], [], 2),
    rows_of([4], [3], 3),
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ogb_pooled", {}),
        ("ogb_pooled", {"leave_one_out": True, "normalize": "whiten"}),
        ("tir_otb", {"normalize": "whiten"}),
        ("reinforce_pp", {}),
        ("gpg", {}),
    ],
)
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 3, 1, 0], [1, 2]])
def test_several_calls_are_as_one(name: str, options: dict[str, object], order: list[int]):
    parts = [PARTS[number] for number in order]
    expected = compute_advantages(name, together(parts), **options)
    meeting = Meeting(len(parts))

    def compute(index: int) -> Advantages:
        try:
            return compute_advantages(name, parts[index], communicator=Call(meeting, index), **options)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(len(parts)) as pool:
        found = list(pool.map(compute, range(len(parts))))
    start = 0
    for part, made in zip(parts, found, strict=True):
        rows, width = part.rewards.shape
        for field_name in ("advantages", "returns", "baselines"):
            whole = getattr(expected, field_name)[start : start + rows, :width]
            torch.testing.assert_close(getattr(made, field_name), whole, rtol=1e-12, atol=1e-14)
        start += rows
