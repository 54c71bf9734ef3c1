"""Sections add up by name, one that raises too."""

from __future__ import annotations

import pytest
import torch

from agentrl.training.engine import deepspeed_engine
from agentrl.training.engine.deepspeed_engine import Stopwatch


def test_seconds_add_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0, 10.0, 10.5, 20.0, 24.0])
    monkeypatch.setattr(deepspeed_engine.time, "monotonic", lambda: next(times))
    watch = Stopwatch(torch.device("cpu"))
    with watch.section("forward"):
        pass
    with pytest.raises(ValueError, match="lost"), watch.section("backward"):
        raise ValueError("lost")
    with watch.section("forward"):
        pass
    assert watch.take_seconds() == {"forward": 6.0, "backward": 0.5}
    assert watch.take_seconds() == {}
