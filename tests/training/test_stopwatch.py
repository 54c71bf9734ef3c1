"""Seconds of named sections, and modules hidden while DeepSpeed is imported."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from agentrl.training.engine import deepspeed_engine
from agentrl.training.engine.deepspeed_engine import Stopwatch, block_import


def test_seconds_add_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0, 10.0, 10.5, 20.0, 24.0])
    monkeypatch.setattr(deepspeed_engine.time, "monotonic", lambda: next(times))
    watch = Stopwatch(torch.device("cpu"))
    with watch.time_section("forward"):
        pass
    with pytest.raises(ValueError, match="lost"), watch.time_section("backward"):
        raise ValueError("lost")
    with watch.time_section("forward"):
        pass
    assert watch.read_and_reset_seconds() == {"forward": 6.0, "backward": 0.5}
    assert watch.read_and_reset_seconds() == {}


def test_a_hidden_module_cannot_be_imported_until_the_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hidden_for_a_while.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with block_import("hidden_for_a_while"), pytest.raises(ImportError):
        import_module("hidden_for_a_while")
    module = import_module("hidden_for_a_while")
    with block_import("hidden_for_a_while"):  # hides only modules that are not imported yet
        assert import_module("hidden_for_a_while") is module
