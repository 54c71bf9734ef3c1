"""vLLM's weight transfer from two training ranks, without GPUs: the source and the calls are real, the wire is not.

NCCL and CUDA IPC themselves need GPUs and are not run here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import free_port
from torch import nn
from warm import WarmPopen

from agentrl.errors import WorldError
from agentrl.weights.native import NativeTransfer, ServersClient
from agentrl.weights.sources import ParameterSource

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("record_transfer.py")
GROUP = 40_000


def two_ranks(stage: int, folder: Path) -> list[dict[str, Any]]:
    """What each of two gloo ranks wrote down."""
    port = free_port()
    processes = [
        WarmPopen(
            [sys.executable, str(SCRIPT), str(stage), str(folder)],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            | {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.usefixtures("vllm_here")
@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_send_every_parameter_whole_and_once(stage: int, tmp_path: Path) -> None:
    first, second = two_ranks(stage, tmp_path)
    expected = first["expected"]
    assert len(expected) > 30
    described = [{key: item[key] for key in ("name", "shape", "dtype")} for item in expected]
    assert first["shapes"] == second["shapes"] == described  # also where this rank's shard is empty
    assert first["sent"] == 2 * expected
    assert second["sent"] == []
    assert first["probe"] == second["probe"]
    assert len(first["probe"]) == 63

    names, shapes = [item["name"] for item in expected], [item["shape"] for item in expected]
    update = {"names": names, "dtype_names": ["float32"] * len(names), "shapes": shapes}
    for server, offset in ((0, 1), (1, 3)):  # the first server's two workers are ranks 1 and 2
        once = [["start"], ["update", update], ["finish", None]]
        assert first["servers"][server] == [["init", {"rank_offset": offset}], *once, *once]
    assert second["servers"] == [[], []]

    if stage < 3:
        assert first["gathered"] == second["gathered"] == []
        return
    assert first["held_after"] == 0  # every group was given back
    assert first["gathered"] == second["gathered"]
    assert max(first["gathered"]) <= GROUP
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    assert sum(first["gathered"]) == 2 * elements
    assert len(first["gathered"]) < len(expected)  # in groups, not one by one
    assert first["deepest"] == second["deepest"] == 1


def test_a_source_describes_what_it_gives_and_gives_it_again() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False)).to(torch.bfloat16)
    source = ParameterSource(module)
    shapes = source.shapes()
    assert [(item.name, item.shape, item.bytes) for item in shapes] == [
        ("0.weight", (3, 2), 12),
        ("0.bias", (3,), 6),
        ("1.weight", (1, 3), 6),
    ]
    for _ in range(2):
        given = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in source]
        assert given == [(item.name, item.shape, item.dtype) for item in shapes]


class Server:
    def __init__(self, barrier: threading.Barrier, *, fails: bool = False) -> None:
        self._barrier = barrier
        self._fails = fails

    def start_weight_update(self) -> None:
        if self._fails:
            raise OSError("refused")

    def update_weights(self, update_info: Any) -> None:
        self._barrier.wait(30)


def test_servers_receive_at_the_same_time() -> None:
    # Each waits in a collective for the others: one after the other would never end.
    barrier = threading.Barrier(3)
    ServersClient([Server(barrier) for _ in range(3)], [1, 1, 1]).update_weights({})


def test_one_servers_refusal_is_the_transfers() -> None:
    barrier = threading.Barrier(1)
    client = ServersClient([Server(barrier), Server(barrier, fails=True)], [1, 1])
    with pytest.raises(OSError, match="refused"):
        client.start_weight_update()


class BlockingCommunicator:
    """Records broadcasts. The second one blocks until the communicator is aborted, as NCCL does without its peer."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.blocked, self._aborted = threading.Event(), threading.Event()

    def broadcast(self, tensor: torch.Tensor, *, src: int, stream: object) -> None:
        if self._aborted.is_set():
            return
        self.calls.append(f"broadcast {tensor.numel()}")
        if len(self.calls) == 2:
            self.blocked.set()
            assert self._aborted.wait(60)

    def destroy(self) -> None:
        self.calls.append("abort")
        self._aborted.set()


@pytest.mark.usefixtures("vllm_here")
@pytest.mark.parametrize(
    ("dies", "deadline", "message"),
    [
        (False, 0.3, r"failed: no parameter was sent for 0.3 s \(rollout.vllm.stall_deadline\)"),
        (True, 600.0, "failed: connection reset"),
    ],
)
def test_a_server_lost_in_the_middle_aborts_the_communicator(
    monkeypatch: pytest.MonkeyPatch, dies: bool, deadline: float, message: str
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    communicator, received = BlockingCommunicator(), threading.Event()

    class Lost(Server):
        """A server that answers no request for weights, or whose connection breaks."""

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            """Join."""

        def update_weights(self, update_info: Any) -> None:
            if dies:
                assert communicator.blocked.wait(60)
                raise ConnectionResetError("connection reset")
            received.wait(60)

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda init_info: communicator)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    init_info = nccl_engine.NCCLTrainerInitInfo(
        master_address="127.0.0.1", master_port=1, world_size=2, packed=False, rank=0
    )
    client = ServersClient([Lost(threading.Barrier(1))], [1])
    source = ParameterSource(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    transfer = NativeTransfer(init_info, client, source, deadline=deadline)
    with pytest.raises(WorldError, match=message):
        transfer.send()
    assert communicator.calls == ["broadcast 6", "broadcast 3", "abort"]
    transfer.close()
    received.set()
