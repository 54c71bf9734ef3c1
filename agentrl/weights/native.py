"""vLLM's native weight transfer, from the training ranks directly into the servers' GPUs (NCCL or CUDA IPC).

docs/how-to/rollout.md lists where each path has run.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from agentrl.cluster.processes import free_port
from agentrl.errors import SettingsError, WorldError
from agentrl.weights.sources import GROUP_ELEMENTS, ParameterSource, TransferTarget
from agentrl_envs.registry import install_command

_Result = TypeVar("_Result")

# Timeout in seconds for a call to a server, including the transfer of all weights.
_CALL_SECONDS = 1800.0
# Minimum timeout in seconds for the servers to join a group. No parameter is sent before all of them have joined.
_SETUP_SECONDS = 300.0
# Seconds to wait for an aborted communicator to return from its broadcast.
_ABORT_SECONDS = 30.0
_SMALLEST_BUFFER = 4 * GROUP_ELEMENTS


class ServersClient:
    """A ``VLLMWeightSyncClient`` that sends each call to several vLLM servers at once.

    The workers join one NCCL group after the sender. The ranks of server ``i`` follow the ranks of earlier servers. The
    first failure ends all calls, because servers that still respond wait in NCCL for the failed server.
    """

    def __init__(self, clients: Sequence[Any], world_sizes: Sequence[int]) -> None:
        """Create a client. Each of ``clients`` has the interface of vLLM's ``HTTPVLLMWeightSyncClient``."""
        self._clients = tuple(clients)
        self._offsets = [sum(world_sizes[:index]) for index in range(len(self._clients))]
        self.failed: Future[None] = Future()
        """Holds the exception of the first call that failed; it never has a result."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        def with_offset(index: int) -> dict[str, Any]:
            if "rank_offset" not in init_info:
                return init_info
            return {**init_info, "rank_offset": init_info["rank_offset"] + self._offsets[index]}

        self._call_all(lambda index, client: client.init_weight_transfer_engine(with_offset(index)))

    def start_weight_update(self) -> None:
        self._call_all(lambda index, client: client.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        self._call_all(lambda index, client: client.update_weights(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call_all(lambda index, client: client.finish_weight_update(weight_version))

    def fail(self, error: BaseException) -> None:
        """Fail all calls with ``error``, unless a call has already failed."""
        with contextlib.suppress(InvalidStateError):
            self.failed.set_exception(error)

    def _call_all(self, call: Callable[[int, Any], None]) -> None:
        calls = [_in_thread(partial(call, index, client)) for index, client in enumerate(self._clients)]
        for one in calls:
            one.add_done_callback(self._record_failure)
        for one in calls:
            wait([one, self.failed], return_when=FIRST_COMPLETED)
            if self.failed.done():
                self.failed.result()

    def _record_failure(self, call: Future[None]) -> None:
        error = call.exception()
        if error is not None:
            self.fail(error)


def _in_thread(work: Callable[[], _Result]) -> Future[_Result]:
    """Run ``work`` on the caller's GPU in a daemon thread. The process can exit without waiting for it."""
    future: Future[_Result] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, daemon=True, name="weight-transfer").start()
    return future


def make_vllm_source(source: ParameterSource, sent: Callable[[], None] = lambda: None) -> Any:
    """Convert ``source`` to vLLM's ``WeightSource``: shapes without communication, then values in the same order.

    ``sent`` is called whenever vLLM requests the next value.
    """
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class _Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(item.name, item.dtype, item.shape) for item in source.shapes()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in source:
                sent()
                # Clone, because the sender packs tensors of several parameter groups into one buffer, and a gathered
                # tensor is valid only until the next group.
                yield name, tensor.clone()

    return _Source()


class NativeTransfer:
    """One rank's side of the native transfer. Every rank creates one, and all ranks call :meth:`send` together.

    If a server exits during a transfer, the sender waits in NCCL, which has no time limit. Therefore the sender runs in
    a thread. If a server's response fails or no parameter is sent for ``deadline`` seconds, the communicator is aborted
    and the transfer raises WorldError. The transfer cannot be used again, because the other servers also wait in NCCL.
    """

    def __init__(
        self, init_info: Any, client: ServersClient, source: ParameterSource, *, deadline: float = _CALL_SECONDS
    ) -> None:
        """Set up the transfer. ``init_info``, one of vLLM's trainer init infos, selects the backend.

        See :func:`open_native_transfer`.
        """
        factory, _ = _import_vllm_transfer()
        self._client = client
        self._deadline = deadline
        self._sender = init_info.is_sender
        self._last_progress = 0.0
        self._engine: Any = None
        vllm_source = make_vllm_source(source, self._record_progress)
        start = partial(factory.trainer_init, init_info=init_info, client=client, source=vllm_source)
        self._engine = self._run("could not be set up", start, max(deadline, _SETUP_SECONDS))

    def send(self) -> None:
        """Send every parameter to every server and wait for its arrival. Collective; the servers must be paused."""
        self._run("failed", self._engine.send_weights, self._deadline)

    def close(self) -> None:
        """Leave the servers' group."""
        self._engine.shutdown()

    def _record_progress(self) -> None:
        self._last_progress = time.monotonic()

    def _run(self, failed: str, work: Callable[[], _Result], deadline: float) -> _Result:
        """Return the result of ``work``. The sender aborts ``work`` after ``deadline`` seconds without progress.

        ``failed`` is the verb of the error message.
        """
        try:
            if not self._sender:
                return work()
            self._record_progress()
            done = _in_thread(work)
            futures: list[Future[Any]] = [done, self._client.failed]
            while not (done.done() or self._client.failed.done()):
                left = self._last_progress + deadline - time.monotonic()
                if left <= 0:
                    reason = f"no parameter was sent for {deadline:g} s (rollout.vllm.stall_deadline)"
                    self._client.fail(TimeoutError(f"{reason}; a server has exited or hangs"))
                wait(futures, timeout=left, return_when=FIRST_COMPLETED)
            if self._client.failed.done():
                if self._engine is not None:
                    self._engine.shutdown()  # aborts the communicator, so that its broadcast returns
                wait([done], timeout=_ABORT_SECONDS)
                self._client.failed.result()
            return done.result()
        except (OSError, RuntimeError, ValueError) as error:
            raise WorldError(f"vLLM's weight transfer {failed}: {error}") from error


def open_native_transfer(target: TransferTarget, source: ParameterSource, *, rank: int, host: str) -> NativeTransfer:
    """Open the transfer to ``target``. Collective. ``host`` is the address at which the servers reach rank 0.

    Raises SettingsError if vLLM cannot be imported, WorldError if the servers do not join.
    """
    _, http_client = _import_vllm_transfer()
    largest = max((item.bytes for item in source.shapes()), default=0)
    clients = [http_client(address, timeout=_CALL_SECONDS) for address in target.addresses]
    client = ServersClient(clients, target.world_sizes)
    init_info = _init_info(target, rank=rank, host=host, buffer=max(_SMALLEST_BUFFER, largest))
    return NativeTransfer(init_info, client, source, deadline=target.deadline)


def _init_info(target: TransferTarget, *, rank: int, host: str, buffer: int) -> Any:
    if target.backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=buffer, rank=rank)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(
        master_address=host,
        master_port=free_port(host) if rank == 0 else 0,
        world_size=1 + sum(target.world_sizes),
        packed=True,
        packed_buffer_size_bytes=buffer,
        rank=rank,
    )


def _import_vllm_transfer() -> tuple[Any, Any]:
    """Return vLLM's weight-transfer factory and HTTP client. Raises SettingsError if vLLM cannot be imported."""
    try:
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    except ImportError as error:
        raise SettingsError(
            f"rollout.vllm.transfer=nccl and ipc require vLLM on the training ranks: {error}. "
            f"Install the extra: {install_command('vllm')}, or set rollout.vllm.transfer=file"
        ) from error
    return WeightTransferTrainerFactory, HTTPVLLMWeightSyncClient
