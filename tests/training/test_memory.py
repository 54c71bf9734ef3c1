"""A lack of memory halves the micro-batches, is remembered, and else ends in one message that names what to change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentrl.errors import SettingsError, WorldError
from agentrl.training.engine import memory
from agentrl.training.engine.memory import Attempt, Fitted, MicroBatchBudget
from agentrl.training.engine.recovery import Agreement, Shortage, ShortageError
from agentrl.training.run.session import Session


def budget(folder: Path | None = None, *, configured: int = 1000, told: list[str] | None = None) -> MicroBatchBudget:
    return MicroBatchBudget(configured, folder, told=(told if told is not None else []).append, writes=True)


def test_the_machines_own_message_is_known() -> None:
    with (
        pytest.raises(WorldError, match=r"^step 3 ran out of memory while training \(.*alloc.*--resume"),
        budget().named(step=3),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)


NCCL = """NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled cuda error (run with NCCL_DEBUG=INFO for details)
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
"""


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried ..."),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        torch.distributed.DistBackendError(NCCL + "Failed to CUDA calloc async 6291456 bytes"),
        torch.distributed.DistBackendError(NCCL + "Cuda failure 2 'out of memory'"),
    ],
    ids=str,
)
def test_what_cannot_be_repeated_names_remedies_and_is_remembered(error: Exception, tmp_path: Path) -> None:
    remedies = r"training\.micro_batch_tokens=500\..*training\.offload=optimizer or all"
    with pytest.raises(WorldError, match=remedies), budget(tmp_path).named(step=1):
        raise error
    resumed = budget(tmp_path)
    resumed.recall()
    assert resumed.tokens == 500


@pytest.mark.parametrize("text", ["shape mismatch", NCCL + "Cuda failure 700 'an illegal memory access'"])
def test_another_error_stays_what_it_is(text: str) -> None:
    with pytest.raises(RuntimeError, match=r"shape|unhandled"), budget().named(step=1):
        raise RuntimeError(text)


@pytest.mark.parametrize(("size", "left"), [(5000, 500), (1000, 500), (999, 500), (500, 250), (100, 62)])
def test_the_micro_batch_that_failed_does_not_fit_again(size: int, left: int) -> None:
    told: list[str] = []
    now = budget(told=told)
    now.halve(Shortage(rank=1, tokens=size, alone=False), step=7)
    assert now.tokens == left
    assert told == [
        f"step 7: rank 1 ran out of memory in a micro-batch of {size} tokens; training.micro_batch_tokens is {left} "
        "from now on instead of 1000, and the step is repeated with the same trajectories"
    ]


def test_a_second_shortage_halves_again_and_both_are_remembered(tmp_path: Path) -> None:
    now = budget(tmp_path)
    for size in (1000, 500):
        now.halve(Shortage(rank=0, tokens=size, alone=False), step=1)
    told: list[str] = []
    resumed = budget(tmp_path, told=told)
    resumed.recall()
    assert resumed.tokens == now.tokens == 250
    assert told[0].startswith("training: micro-batches of 250 tokens, since memory ran out")


def test_a_changed_setting_counts_more_than_what_is_remembered(tmp_path: Path) -> None:
    budget(tmp_path).halve(Shortage(rank=0, tokens=1000, alone=False), step=1)
    resumed = budget(tmp_path, configured=800)
    resumed.recall()
    assert resumed.tokens == 800


def test_one_trajectory_cannot_be_halved(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"on rank 3, with one trajectory of 900 tokens .*checkpoint_offload"):
        budget(tmp_path).halve(Shortage(rank=3, tokens=900, alone=True), step=2)
    assert not list(tmp_path.iterdir())


def test_outside_micro_batches_smaller_ones_are_tried_once_a_step() -> None:
    now, outside = budget(), Shortage(rank=1, tokens=0, alone=False)
    now.halve(outside, step=1)
    now.halve(outside, step=2)
    assert now.tokens == 250
    with pytest.raises(SettingsError, match=r"^step 2 .* on rank 1, outside micro-batches, .*training\.offload"):
        now.halve(outside, step=2)


def test_what_began_to_change_weights_is_not_repeated_and_the_next_run_has_smaller_ones(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"had begun to change the weights.*training.micro_batch_tokens=500\."):
        budget(tmp_path).halve(Shortage(rank=0, tokens=0, alone=False, changed=True), step=1)
    resumed = budget(tmp_path)
    resumed.recall()
    assert resumed.tokens == 500


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


def test_what_has_fitted_counts_by_kind_from_the_second_step_on() -> None:
    fitted = Fitted()
    for _ in range(2):
        fitted.add("scoring", 100)
        assert not fitted.holds("scoring", 200)
        fitted.end_step()
    assert fitted.holds("scoring", 100)
    assert not fitted.holds("scoring", 101)
    assert not fitted.holds("training", 1)
    first = Fitted()
    first.add("scoring", 100)
    first.end_step()
    assert not first.holds("scoring", 100)  # its optimizer had no states yet


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone, of which no environment variable tells."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_only_a_watched_try_agrees_before_its_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    agreement = Agreement(torch.distributed.group.WORLD)
    monkeypatch.setattr(memory, "agreement_of_ranks", lambda: agreement)
    agreed: list[int] = []
    monkeypatch.setattr(agreement, "outcome", lambda own=None: agreed.append(1) or own)

    def work() -> None:
        for _ in range(3):
            agreement.before_collective()

    def fail() -> None:
        raise MemoryError

    for watch, times in ((True, 4), (False, 0)):
        agreed.clear()
        attempt = Attempt([], watch=watch)
        attempt.run(work)
        attempt.agree()
        assert len(agreed) == times
        with pytest.raises(ShortageError if watch else MemoryError):
            Attempt([], watch=watch, waits=lambda: agreed.append(0)).run(fail)
        assert agreed[times:] == ([0, 1] if watch else [])  # marked before the other ranks are asked


@pytest.mark.usefixtures("one_rank")
def test_a_shortage_inside_a_collective_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks are inside the same collective and cannot agree on anything."""
    agreement = Agreement(torch.distributed.group.WORLD)
    monkeypatch.setattr(memory, "agreement_of_ranks", lambda: agreement)

    def fail() -> None:
        raise torch.distributed.DistBackendError("NCCL error: Failed to CUDA calloc async 608 bytes")

    with pytest.raises(torch.distributed.DistBackendError):
        Attempt([]).run(fail)
