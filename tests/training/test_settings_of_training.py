"""Settings that name an algorithm, the dry run, and the learning rate."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.models.loading import read_config
from agentrl.training.dry_run import dry_run
from agentrl.training.estimate import estimate_memory, planned_passes
from agentrl.training.launch import launch
from agentrl.training.options import estimator_options, loss_options
from agentrl.training.settings import AlgorithmSettings


def test_options_are_those_that_the_estimator_and_the_loss_know() -> None:
    assert estimator_options(AlgorithmSettings(tail="carry"))["tail"] == "carry"
    assert loss_options(AlgorithmSettings(loss="ppo", clip_high=0.3)) == {"clip_low": 0.2, "clip_high": 0.3}
    assert loss_options(AlgorithmSettings()) == {}


def test_a_changed_option_that_the_estimator_lacks_is_an_error() -> None:
    with pytest.raises(SettingsError, match=r"algorithm\.tail=carry: the estimator 'grpo' has no such option; it has"):
        estimator_options(AlgorithmSettings(estimator="grpo", tail="carry"))
    with pytest.raises(SettingsError, match=r"algorithm\.clip_low=0\.1: the loss 'reinforce' has no such option"):
        loss_options(AlgorithmSettings(clip_low=0.1))


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"algorithm\.estimator=tir_ot[^b].*tir_otb"):
        estimator_options(AlgorithmSettings(estimator="tir_ot"))


def test_dry_run_says_settings_passes_and_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dry_run(load_settings(overrides=["algorithm.normalize=whiten", "coldstart.count=16"]))
    said = capsys.readouterr().out
    assert "estimator: tir_otb" in said
    assert "passes: a statistics pass, then the training pass: whitening takes the mean over the whole step" in said
    assert "optimizer" in said
    assert list(tmp_path.iterdir()) == []


def test_memory_is_shared_out_as_the_stage_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parts = {}
    for stage in range(4):
        settings = load_settings(overrides=[f"training.zero_stage={stage}", "training.num_processes=4"])
        config = read_config(settings.model)
        made = estimate_memory(settings, config, 1000)
        parts[stage] = (made.weights, made.gradients, made.optimizer)
    # float32: 4 bytes a weight and a gradient, 8 for Adam's two moments.
    assert parts == {0: (4000, 4000, 8000), 1: (4000, 4000, 2000), 2: (4000, 1000, 2000), 3: (1000, 1000, 2000)}
    assert planned_passes(load_settings()).one_forward


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    settings = load_settings(overrides=["training.num_processes=2"])
    with pytest.raises(SettingsError, match=r"training\.num_processes=2: only 1 GPUs are visible"):
        launch(settings, tmp_path, resume=False)
