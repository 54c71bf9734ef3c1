"""A lack of memory ends in one message that names what to change."""

from __future__ import annotations

import pytest
import torch

from agentrl.errors import WorldError
from agentrl.training.engine.memory import shortages_named
from agentrl.training.run.session import Session
from agentrl.training.settings import TrainingSettings

SETTINGS = TrainingSettings(micro_batch_tokens=1000)


def test_the_machines_own_message_is_known() -> None:
    with (
        pytest.raises(WorldError, match=r"^step 3 ran out of memory while training \(.*alloc.*--resume"),
        shortages_named(SETTINGS, step=3),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried ..."), MemoryError()])
def test_it_names_a_budget_that_may_fit(error: Exception) -> None:
    remedies = r"training\.micro_batch_tokens=500\..*training\.offload=optimizer or all"
    with pytest.raises(WorldError, match=remedies), shortages_named(SETTINGS, step=1):
        raise error


def test_a_critic_makes_room_for_servers_too() -> None:
    calls: list[str] = []

    class Engine:
        def __init__(self, name: str) -> None:
            self._name = name

        def offload(self) -> None:
            calls.append(self._name)

    session = Session.__new__(Session)
    session.__dict__ |= {"_moves_state": True, "_engines": {name: Engine(name) for name in ("engine", "critic")}}
    session._make_room()
    assert calls == ["engine", "critic"]


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shape"), shortages_named(SETTINGS, step=1):
        raise RuntimeError("shape mismatch")
