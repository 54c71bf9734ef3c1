"""vLLM's own weight transfer, from the training ranks directly into the servers' GPUs (NCCL or CUDA IPC).

docs/rollout.md lists where each path has run.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from agentrl.errors import SettingsError, WorldError
from agentrl.weights.sources import GROUP_ELEMENTS, ParameterSource
from agentrl_envs.registry import install_extra

# Seconds one call to a server may take, including the transfer of all weights.
_CALL = 1800.0
_SMALLEST_BUFFER = 4 * GROUP_ELEMENTS


@dataclass(frozen=True, kw_only=True)
class TransferTarget:
    """The destination of weights and the way there: a directory that the engine reads (``file``), or servers and
    their GPU workers.

    ``form``: whether it takes all parameters, or of a policy with adapters the merged model or the adapters alone.
    ``kept``: how many versions before the newest one keep their files. ``starts``: how often each server was started;
    a restarted one has left the group of the transfer.
    """

    backend: Literal["file", "nccl", "ipc"]
    form: Literal["full", "merged", "adapter"] = "full"
    kept: int = 1
    addresses: tuple[str, ...] = ()
    world_sizes: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()


class ServersClient:
    """Several vLLM servers as one ``VLLMWeightSyncClient``: each call goes to all of them at once.

    Their workers join one NCCL group after the sender: the ranks of server ``i`` follow those of the servers before it.
    """

    def __init__(self, clients: Sequence[Any], world_sizes: Sequence[int]) -> None:
        """``clients`` have vLLM's four methods, such as its ``HTTPVLLMWeightSyncClient``."""
        self._clients = tuple(clients)
        self._offsets = [sum(world_sizes[:place]) for place in range(len(self._clients))]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        def shifted(place: int) -> dict[str, Any]:
            if "rank_offset" not in init_info:
                return init_info
            return {**init_info, "rank_offset": init_info["rank_offset"] + self._offsets[place]}

        self._all(lambda place, client: client.init_weight_transfer_engine(shifted(place)))

    def start_weight_update(self) -> None:
        self._all(lambda place, client: client.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        self._all(lambda place, client: client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all(lambda place, client: client.finish_weight_update(weight_version))

    def _all(self, call: Callable[[int, Any], None]) -> None:
        with ThreadPoolExecutor(max_workers=len(self._clients)) as threads:
            for future in [threads.submit(call, place, client) for place, client in enumerate(self._clients)]:
                future.result()


def vllm_source(source: ParameterSource) -> Any:
    """``source`` as vLLM's ``WeightSource``: shapes without communication, then whole values in the same order."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class _Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(item.name, item.dtype, item.shape) for item in source.shapes()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in source:
                # A sender packs tensors of several groups into one buffer, so they outlive their group.
                yield name, tensor.clone()

    return _Source()


class NativeTransfer:
    """One rank's side of the native transfer. All ranks create one and call :meth:`send` together."""

    def __init__(self, init_info: Any, client: Any, source: ParameterSource) -> None:
        """``init_info`` is one of vLLM's trainer init infos and selects the backend. See :func:`open_native`."""
        factory, _ = _vllm()
        self._engine = factory.trainer_init(init_info=init_info, client=client, source=vllm_source(source))

    def send(self) -> None:
        """Send every parameter to every server and wait for its arrival. Collective; the servers must be paused."""
        try:
            self._engine.send_weights()
        except (OSError, RuntimeError, ValueError) as error:
            raise WorldError(f"vLLM's weight transfer failed: {error}") from error

    def close(self) -> None:
        """Leave the servers' group."""
        self._engine.shutdown()


def open_native(target: TransferTarget, source: ParameterSource, *, rank: int, host: str) -> NativeTransfer:
    """Open the transfer to ``target``; all ranks call it. ``host``: the address at which the servers reach rank 0.

    Raises SettingsError if vLLM cannot be imported, WorldError if the servers do not join.
    """
    _, clients = _vllm()
    largest = max((item.bytes for item in source.shapes()), default=0)
    client = ServersClient([clients(address, timeout=_CALL) for address in target.addresses], target.world_sizes)
    init_info = _init_info(target, rank=rank, host=host, buffer=max(_SMALLEST_BUFFER, largest))
    try:
        return NativeTransfer(init_info, client, source)
    except (OSError, RuntimeError, ValueError) as error:
        raise WorldError(f"vLLM's weight transfer could not be set up: {error}") from error


def _init_info(target: TransferTarget, *, rank: int, host: str, buffer: int) -> Any:
    if target.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=buffer, rank=rank)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(
        master_address=host,
        master_port=_free_port(host) if rank == 0 else 0,
        world_size=1 + sum(target.world_sizes),
        packed=True,
        packed_buffer_size_bytes=buffer,
        rank=rank,
    )


def _vllm() -> tuple[Any, Any]:
    try:
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    except ImportError as error:
        raise SettingsError(
            f"rollout.vllm.transfer=nccl and ipc need vLLM where the policy trains: {error}. "
            f"Install the extra: {install_extra('vllm')}, or set rollout.vllm.transfer=file"
        ) from error
    return WeightTransferTrainerFactory, HTTPVLLMWeightSyncClient


def _free_port(host: str) -> int:
    with socket.socket() as free:
        free.bind((host, 0))
        port: int = free.getsockname()[1]
        return port


def default_backend(placement: str) -> Literal["file", "nccl", "ipc"]:
    """The fastest backend on this machine: CUDA IPC on the same GPUs, NCCL to other GPUs, files without GPUs."""
    if not torch.cuda.is_available():
        return "file"
    return "ipc" if placement == "colocated" else "nccl"
