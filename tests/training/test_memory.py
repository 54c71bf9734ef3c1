"""Memory that runs out ends the process with one message, and the next one has smaller micro-batches."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from agentrl.errors import OutOfMemoryError, SettingsError
from agentrl.training.engine.memory import MicroBatchBudget, convert_memory_errors
from agentrl.training.run.session import TrainingSession


def run_out(folder: Path, lengths: list[int], *, configured: int = 1000, step: int = 7) -> str:
    """Run out of memory in a micro-batch of trajectories of these ``lengths``, or outside; returns the message."""
    where = convert_memory_errors(tokens=sum(lengths), trajectories=len(lengths)) if lengths else nullcontext()
    with (
        pytest.raises(OutOfMemoryError) as error,
        MicroBatchBudget(configured, folder, rank=1).shrink_on_out_of_memory(step),
        where,
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")
    return str(error.value)


def tokens(folder: Path, *, configured: int = 1000) -> int:
    return MicroBatchBudget(configured, folder, rank=0).tokens


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
@pytest.mark.parametrize("inside", [True, False])
def test_errors_of_libraries_are_recognized(error: Exception, inside: bool, tmp_path: Path) -> None:
    where = convert_memory_errors(tokens=700, trajectories=2) if inside else nullcontext()
    with pytest.raises(OutOfMemoryError), MicroBatchBudget(1000, tmp_path, rank=0).shrink_on_out_of_memory(1), where:
        raise error
    assert tokens(tmp_path) == 500


@pytest.mark.parametrize("text", ["shape mismatch", NCCL + "Cuda failure 700 'an illegal memory access'"])
def test_another_error_stays_what_it_is(text: str, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"shape|unhandled"),
        MicroBatchBudget(1000, tmp_path, rank=0).shrink_on_out_of_memory(1),
        convert_memory_errors(tokens=3, trajectories=2),
    ):
        raise RuntimeError(text)
    assert not list(tmp_path.iterdir())


def test_the_message_names_the_micro_batch_and_remedies(tmp_path: Path) -> None:
    assert run_out(tmp_path, [500, 400]).startswith(
        "rank 1 ran out of memory while training step 7, in a micro-batch of 900 tokens (2 trajectories): "
        "CUDA out of memory. Tried to allocate 2 GiB.\n"
        "the run continues from its last checkpoint with micro-batches of 500 tokens instead of 1000: "
        "automatically up to cluster.restarts times, otherwise with --resume. If this is not enough, "
        "set one of: model.gradient_checkpointing=true, "
    )


@pytest.mark.parametrize(("size", "left"), [(5000, 500), (1000, 500), (999, 500), (500, 250), (100, 62), (2, 1)])
def test_the_micro_batch_that_failed_does_not_fit_again(size: int, left: int, tmp_path: Path) -> None:
    run_out(tmp_path, [size - 1, 1])
    assert tokens(tmp_path) == left


def test_each_failure_halves_again(tmp_path: Path) -> None:
    run_out(tmp_path, [500, 500])
    run_out(tmp_path, [250, 250])
    assert tokens(tmp_path) == 250
    said: list[str] = []
    MicroBatchBudget(1000, tmp_path, rank=0).warn_if_reduced(said.append)
    assert said == [
        "training: micro-batches have 250 tokens, because memory ran out with training.micro_batch_tokens=1000: "
        "change this setting to override the limit"
    ]


def test_a_changed_setting_counts_more_than_the_record(tmp_path: Path) -> None:
    run_out(tmp_path, [500, 500])
    assert tokens(tmp_path, configured=800) == 800
    run_out(tmp_path, [], configured=800)
    assert tokens(tmp_path, configured=800) == 400
    assert tokens(tmp_path) == 1000


def test_without_a_record_nothing_is_reported(tmp_path: Path) -> None:
    said: list[str] = []
    MicroBatchBudget(1000, tmp_path, rank=0).warn_if_reduced(said.append)
    assert said == []


def test_one_trajectory_cannot_be_halved(tmp_path: Path) -> None:
    expected = r"rank 3 .* step 2, in a micro-batch of one trajectory \(900 tokens\).*\n.*--resume.*checkpoint_offload"
    with (
        pytest.raises(SettingsError, match=expected),
        MicroBatchBudget(1000, tmp_path, rank=3).shrink_on_out_of_memory(2),
        convert_memory_errors(tokens=900, trajectories=1),
    ):
        raise MemoryError
    assert not list(tmp_path.iterdir())


def test_smaller_micro_batches_are_tried_once_after_a_failure_outside_them(tmp_path: Path) -> None:
    assert "outside micro-batches: CUDA out of memory" in run_out(tmp_path, [])
    assert tokens(tmp_path) == 500
    run_out(tmp_path, [200, 300])  # the failure outside is not forgotten
    expected = re.escape("outside micro-batches for the second time: MemoryError")
    with (
        pytest.raises(SettingsError, match=expected),
        MicroBatchBudget(1000, tmp_path, rank=0).shrink_on_out_of_memory(9),
    ):
        raise MemoryError
    assert tokens(tmp_path) == 250


def test_a_record_without_the_newest_field_is_read(tmp_path: Path) -> None:
    (tmp_path / "micro_batch_tokens.json").write_text(json.dumps({"configured": 1000, "tokens": 125}))
    assert tokens(tmp_path) == 125


def test_a_critic_makes_room_for_servers_too() -> None:
    calls: list[str] = []

    class Engine:
        def __init__(self, name: str) -> None:
            self._name = name

        def offload_to_cpu(self) -> None:
            calls.append(self._name)

    session = TrainingSession.__new__(TrainingSession)
    session.__dict__ |= {"_moves_state": True, "_engines": {name: Engine(name) for name in ("engine", "critic")}}
    session._offload_state()
    assert calls == ["engine", "critic"]
