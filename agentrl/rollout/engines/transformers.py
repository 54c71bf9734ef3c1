"""The in-process engine: a `transformers` model with continuous batching, on CPU or GPU."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import SettingsError, is_out_of_memory
from agentrl.models.attention import use_agentrl_attention
from agentrl.models.loading import has_full_attention
from agentrl.models.model_parts import split_model
from agentrl.models.routes import install_route_hooks
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import CacheUse, Completion, EngineError, EngineSpecification, Sampling
from agentrl.rollout.engines.batcher import Batcher, TurnInProgress
from agentrl.rollout.settings import RolloutSettings
from agentrl.weights.exports import read_export
from agentrl.weights.sources import TransferTarget
from agentrl.weights.verify import Probe, Verifier, add_tied_head, checksums

logger = logging.getLogger(__name__)

# Maximum number of consecutive forward passes on the engine's thread before control returns to the event loop.
_MAX_FORWARD_PASSES = 64


_LARGE_MODEL = 1_000_000_000  # number of parameters
TOO_LARGE_MESSAGE = (
    "rollout.engine=transformers is intended for small models: for more than 1B parameters on a GPU, set "
    "rollout.engine=vllm (docs/how-to/rollout.md)"
)


def should_use_vllm(parameters: int, device: str) -> bool:
    """Return True if a model with ``parameters`` parameters on ``device`` (``cuda``, ``cpu``) should use vLLM.

    >>> should_use_vllm(7_000_000_000, "cuda"), should_use_vllm(7_000_000_000, "cpu")
    (True, False)
    """
    return device == "cuda" and parameters > _LARGE_MODEL


class TransformersEngine:
    """An :class:`~agentrl.rollout.engines.base.Engine` over ``model``, which may share its weights with training.

    Sampled tokens and log-probabilities are computed by this model's forward pass at the requested temperature. A
    trajectory's keys and values are kept between its turns. Forward passes run on a separate thread, so that the event
    loop stays responsive. The engine is not thread-safe: use it from one event loop only. In ``deterministic`` mode,
    requests wait until no request is running. They are then computed in the order of their ids from their full
    contexts, so that a batch depends only on its requests.
    """

    def __init__(self, model: Any, codec: TextCodec, settings: RolloutSettings, *, deterministic: bool = False) -> None:
        """Prepare ``model`` for sampling. Raises SettingsError if a layer does not have full attention."""
        if not has_full_attention(model.config):
            raise SettingsError(
                "rollout.engine=transformers supports only models with full attention in every layer: "
                "set rollout.engine=vllm"
            )
        use_agentrl_attention(model)
        if should_use_vllm(sum(item.numel() for item in model.parameters()), model.device.type):
            logger.warning(TOO_LARGE_MESSAGE)
        install_route_hooks(model)
        self._model, self._parts = model, split_model(model)
        self._version = 0
        self._deterministic = deterministic
        self._keep_running = settings.kv_on_update == "kept"
        self._gate = asyncio.Event()
        self._gate.set()
        self._batcher = Batcher(
            model,
            self._parts,
            eos_ids=codec.end_ids,
            token_bytes=codec.token_bytes,
            max_batch_tokens=settings.max_batch_tokens,
            kv_cache_tokens=settings.kv_cache_tokens,
            keep_prefixes=not deterministic,
        )
        self._futures: dict[TurnInProgress, asyncio.Future[Completion]] = {}
        self._arrived: deque[TurnInProgress] = deque()
        self._released: deque[str] = deque()
        self._wake: asyncio.Event | None = None
        self._serving: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._lock = threading.Lock()

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        trajectory_id: str,
        request_id: str,
        seed: int,
    ) -> Completion:
        """Sample one turn after ``token_ids``; see :class:`~agentrl.rollout.engines.base.Engine`."""
        request = TurnInProgress(
            token_ids=token_ids,
            sampling=sampling,
            trajectory_id=trajectory_id,
            request_id=request_id,
            seed=seed,
            stop=tuple(stop.encode() for stop in sampling.stop),
        )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._futures[request] = future
        self._arrived.append(request)
        self._start_serving().set()
        try:
            return await future
        finally:
            if not future.done() or future.cancelled():
                request.cancelled = True
            self._futures.pop(request, None)

    def release(self, trajectory_id: str) -> None:
        self._released.append(trajectory_id)

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Return the log-probabilities at temperature 1 of ``token_ids[1:]``, each given the preceding tokens."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._score, token_ids)

    def pause(self) -> None:
        """Pause all requests until :meth:`resume`. Later operations on the model wait for a running forward pass."""
        self._gate.clear()

    def resume(self) -> None:
        self._gate.set()

    async def wait_until_idle(self) -> None:
        """Wait until no forward pass runs. A pass for cancelled requests may outlast all other requests.

        Raises EngineError if a request is still running.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self._drop_cancelled)

    def _drop_cancelled(self) -> None:
        with self._lock:
            self._apply_arrivals_and_releases()
            self._batcher.drop_cancelled()
            if self._batcher.is_busy:
                raise EngineError("the engine cannot become idle while a request is running")

    async def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Install new weights (no tensors if the weights are shared) and drop all cached prefixes.

        Running requests continue from their current tokens; ``rollout.kv_on_update`` decides whether their keys and
        values are kept. Raises EngineError if a tensor does not fit the model.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self._install_tensors, tensors, version)

    def _install_tensors(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._lock, torch.no_grad():
            parameters = dict(self._model.state_dict(keep_vars=True))
            for name, tensor in tensors:
                if name not in parameters or parameters[name].shape != tensor.shape:
                    raise EngineError(f"the new weights do not fit the engine's model: {name} {tuple(tensor.shape)}")
                parameters[name].copy_(tensor)
            self._batcher.update_cache_after_weight_change(self._version, keep_running=self._keep_running)
            self._version = version

    @property
    def version(self) -> int:
        return self._version

    async def cache_use(self) -> CacheUse:
        """Return the usage of the cache. Each trajectory occupies a row from its first turn to its end."""
        return CacheUse(
            tokens=self._batcher.kv_cache_tokens, used=self._batcher.cache_usage, preemptions=self._batcher.evictions
        )

    async def health(self) -> str:
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        return f"transformers engine, {parameters / 1e6:.2f}M parameters, logits in float32, version {self._version}"

    async def close(self) -> None:
        """Stop the serving task and its thread, and cancel waiting requests."""
        for request, future in self._futures.items():
            request.cancelled = True
            future.cancel()
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._serving = None
        self._thread.shutdown(wait=True)

    # -- serving --------------------------------------------------------------------------------------------------

    def _start_serving(self) -> asyncio.Event:
        if self._serving is None or self._serving.done() or self._wake is None:
            self._wake = asyncio.Event()
            self._serving = asyncio.create_task(self._serve_requests(self._wake), name="transformers-engine")
            self._serving.add_done_callback(self._on_serving_end)
        return self._wake

    async def _serve_requests(self, wake: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await wake.wait()
            wake.clear()
            while self._arrived or self._batcher.is_busy:
                await self._gate.wait()
                for request in await loop.run_in_executor(self._thread, self._run_until_request_ends):
                    self._deliver_result(request)
                # Let trajectories with a finished turn run their programs before the next forward pass.
                await asyncio.sleep(0)

    def _deliver_result(self, request: TurnInProgress) -> None:
        future = self._futures.get(request)
        if future is None or future.done() or request.cancelled:
            return
        if request.failure is not None:
            future.set_exception(EngineError(request.failure))
        else:
            future.set_result(request.build_completion())

    def _on_serving_end(self, server: asyncio.Task[None]) -> None:
        """Handle a failed forward pass. Running out of memory becomes an EngineError; other errors are bugs.

        In both cases, all running requests raise the error, and the engine is emptied. After running out of memory, the
        engine also reduces its limits.
        """
        if server.cancelled():
            return
        error = server.exception()
        if error is not None and is_out_of_memory(error):
            batch, cache = self._batcher.halve_batch_size()
            logger.warning(
                "the engine ran out of memory: reducing rollout.max_batch_tokens to %d and rollout.kv_cache_tokens "
                "to %d for the rest of the run", batch, cache,
            )  # fmt: skip
            error = EngineError(f"the engine ran out of memory: {error}")
        for future in self._futures.values():
            if not future.done() and error is not None:
                future.set_exception(error)
        self._arrived.clear()
        self._batcher.drop_requests_and_prefixes()

    def _run_until_request_ends(self) -> list[TurnInProgress]:
        """Run forward passes on the engine's thread until a request ends, up to ``_MAX_FORWARD_PASSES``."""
        with self._lock:
            for _ in range(_MAX_FORWARD_PASSES):
                self._apply_arrivals_and_releases()
                ended = self._batcher.run_forward_pass()
                for request in ended:
                    request.record_version_span(self._version)
                if ended or not self._batcher.is_busy:
                    return ended
        return []

    def _apply_arrivals_and_releases(self) -> None:
        while self._released:
            self._batcher.release(self._released.popleft())
        if self._deterministic:
            if self._batcher.is_busy or not self._arrived:
                return
            arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
            self._batcher.drop_prefixes()
            for request in sorted(arrived, key=lambda item: item.request_id):
                self._batcher.add_request(request)
            return
        while self._arrived:
            self._batcher.add_request(self._arrived.popleft())

    @torch.inference_mode()
    def _score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        with self._lock:
            ids = torch.tensor([token_ids], device=next(self._model.parameters()).device)
            logits = self._parts.logits(self._parts.backbone(input_ids=ids, use_cache=False).last_hidden_state[0, :-1])
            log_probs = torch.log_softmax(logits, dim=-1)
            return tuple(log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist())


class ManagedTransformers:
    """The lifecycle of the transformers engine in the rollout worker."""

    def __init__(self, request: EngineSpecification) -> None:
        self.engine = TransformersEngine(
            request.model, request.codec, request.rollout, deterministic=request.deterministic
        )
        self._model: Any = request.model
        self._shared = request.shared
        self._policy = request.policy
        self.verifier = Verifier(request.policy.dtype)

    async def open(self) -> None:
        """Do nothing, because the model is already loaded."""

    def prepare_for_rollouts(self) -> None:
        self._model.eval()

    async def prepare_for_training(self) -> None:
        if self._shared:
            await self.engine.wait_until_idle()

    def transfer_target(self) -> TransferTarget | None:
        return None if self._shared else TransferTarget()

    async def verify(self, version: int, probe: Probe) -> str | None:
        return await self._compare_with_probe(probe)

    async def pause(self) -> None:
        self.engine.pause()

    async def install(self, directory: str | None, version: int, probe: Probe | None) -> str | None:
        await self.engine.update_weights(() if directory is None else read_export(Path(directory)), version)
        problem = None if probe is None else await self._compare_with_probe(probe)
        if problem is None:
            self.engine.resume()
        return problem

    def identity_fields(self) -> Mapping[str, str]:
        return {"name": "transformers", "dtype": self._policy.dtype}

    async def close(self) -> None:
        await self.engine.close()

    async def _compare_with_probe(self, probe: Probe) -> str | None:
        self._model.eval()
        own = (
            add_tied_head(await asyncio.to_thread(checksums, self._model.named_parameters())) if probe.checksums else {}
        )
        return self.verifier.find_problem(
            "the engine", probe, reported=own, scores=await self.engine.score(probe.token_ids)
        )
