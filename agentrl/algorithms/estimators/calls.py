"""The groups of a step in several calls, one on each rank: what a call learns from the others."""

from typing import Protocol

from torch import Tensor


class Calls(Protocol):
    """The calls that together hold the groups of a step. All make the same requests in the same order."""

    @property
    def place(self) -> int:
        """The number of this call, from 0."""

    def gather(self, values: Tensor) -> Tensor:
        """``values`` of all calls in their order, [calls, ...]; of one shape everywhere."""


class OneCall:
    """All groups of the step are here."""

    place = 0

    def gather(self, values: Tensor) -> Tensor:
        """[1, ...]."""
        return values.unsqueeze(0)


ONE_CALL = OneCall()
