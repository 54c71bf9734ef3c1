"""Training with DeepSpeed: optimizer, schedule, ZeRO and reductions. Only this module trains with DeepSpeed."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from agentrl.kernels import TokenStatistics
from agentrl.models.exactness import choose_attention_backend
from agentrl.models.loading import read_model
from agentrl.models.lora import add_adapters
from agentrl.models.policy import PolicyModel
from agentrl.models.settings import LoRASettings, ModelSettings
from agentrl.planning.memory import REDUCE_BUCKET
from agentrl.training.engine.groups import get_rank_groups
from agentrl.training.engine.parts import RankState, copy_rank_state, restore_rank_state
from agentrl.training.settings import OptimizerSettings, TrainingSettings
from agentrl.weights.sources import load_sharded_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Stopwatch:
    """Adds up the seconds of named sections on one device.

    >>> watch = Stopwatch(torch.device("cpu"))
    >>> with watch.time_section("forward"):
    ...     pass
    >>> list(watch.read_and_reset_seconds()), watch.read_and_reset_seconds()
    (['forward'], {})
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured: list[tuple[str, Any, Any]] = []  # name, start and end: seconds, or CUDA events

    @contextmanager
    def time_section(self, name: str) -> Iterator[None]:
        """Add the duration of the block to ``name``, even if the block raises."""
        began = self._now()
        try:
            yield
        finally:
            self._measured.append((name, began, self._now()))

    def read_and_reset_seconds(self) -> dict[str, float]:
        """Return the seconds spent in each section since the last call. Waits for the GPU."""
        cuda = self._device.type == "cuda"
        if cuda and self._measured:
            torch.cuda.synchronize(self._device)
        totals: dict[str, float] = {}
        for name, began, ended in self._measured:
            totals[name] = totals.get(name, 0.0) + (began.elapsed_time(ended) / 1000 if cuda else ended - began)
        self._measured.clear()
        return totals

    def _now(self) -> Any:
        """Return the time or, on a GPU, an event that is recorded once the GPU reaches this point of the stream."""
        if self._device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_Module_co = TypeVar("_Module_co", bound=nn.Module, covariant=True)


def learning_rate_factor(step: int, settings: OptimizerSettings, total: int) -> float:
    """Return the learning rate of update ``step`` (from 0) divided by the peak learning rate.

    The factor rises linearly during warm-up. Afterwards it is constant or follows a cosine.

    >>> settings = OptimizerSettings(warmup_steps=2, schedule="cosine", final_fraction=0.1)
    >>> [round(learning_rate_factor(step, settings, 6), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - settings.warmup_steps) / max(1, total - settings.warmup_steps))
    return settings.final_fraction + (1 - settings.final_fraction) * 0.5 * (1 + math.cos(math.pi * progress))


def policy_optimizer_settings(settings: OptimizerSettings, lora: LoRASettings) -> OptimizerSettings:
    """Return the optimizer settings of the policy, with the learning rate scaled for adapters."""
    if lora.rank == 0:
        return settings
    return settings.model_copy(update={"learning_rate": settings.learning_rate * lora.learning_rate_factor})


def deepspeed_config(
    training: TrainingSettings,
    *,
    bfloat16: bool,
    gradient_clip: float = 0.0,
    world_size: int = 1,
    trained_parameters: int = REDUCE_BUCKET,
    leaf_classes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a DeepSpeed configuration that allows any number of micro-batches to be accumulated before ``step()``.

    The number of ``trained_parameters`` bounds the reduction bucket, because DeepSpeed allocates the whole bucket.
    ``leaf_classes`` are classes of modules whose parameters ZeRO-3 gathers together (:func:`moe_block_class_names`).

    Gradients are accumulated in float32 over micro-batches and ranks for any dtype of the weights. In bfloat16, adding
    1 to a sum of 256 would not change the sum.
    """
    zero: dict[str, Any] = {
        "stage": training.effective_zero_stage(bfloat16=bfloat16),
        "overlap_comm": False,
        "reduce_bucket_size": min(REDUCE_BUCKET, trained_parameters),
        "stage3_param_persistence_threshold": training.persistence_threshold,
    }
    on_the_host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if leaf_classes:
        zero["leaf_module"] = {"classes": list(leaf_classes)}
    if training.offload != "none":
        zero["offload_optimizer"] = on_the_host
    if training.offload == "all":
        zero["offload_param"] = on_the_host
    return {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": world_size,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": gradient_clip,
        "bf16": {"enabled": bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on CPUs as it does on GPUs
        "zero_optimization": zero,
        "steps_per_print": 10**12,
    }


def moe_block_class_names(module: nn.Module) -> list[str]:
    """Return the full class names of ``module``'s mixture-of-experts blocks: modules with a list of ``experts``.

    ZeRO-3 gathers a module's weights in its forward pass, on all ranks together. Ranks whose tokens are routed to
    different experts would gather different weights, and would hang or mix up the weights. Therefore the weights of a
    block are gathered together. This is unnecessary if the experts share one parameter, because every rank gathers
    the shared parameter.
    """
    lists = (nn.ModuleList, nn.ModuleDict)
    blocks = {type(block) for block in module.modules() if isinstance(block._modules.get("experts"), lists)}
    return sorted(f"{block.__module__}.{block.__qualname__}" for block in blocks)


def start_distributed(*, deadline: float) -> tuple[int, int]:
    """Join the launcher's process group, or create a group of size 1 without a launcher. Returns (rank, size).

    ``deadline``: seconds until a collective fails.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it found no accelerator
    # DeepSpeed's autotuner, which is not used here, imports MLflow and pandas (70 MB) if MLflow is installed.
    with block_import("mlflow"):
        import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that torch has deprecated.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # On CPUs, DeepSpeed compiles a shared-memory all-reduce at its first start, which requires a compiler and takes a
    # minute. DeepSpeed uses this all-reduce only for inference, so disable it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        os.environ.update(defaults)
    if not torch.distributed.is_initialized():
        # DeepSpeed uses an existing group. A group created by DeepSpeed is bound to a device and can hang together with
        # the groups that vLLM's weight transfer creates in this process.
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=deadline))
    deepspeed.init_distributed(verbose=False)
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


@contextmanager
def block_import(name: str) -> Iterator[None]:
    """Make ``import name`` fail inside the block, unless the module was imported before."""
    hidden = name not in sys.modules
    if hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[name]


def leave_distributed() -> None:
    """Leave the process group that :func:`start_distributed` joined, so that this process can join another group."""
    if torch.distributed.is_initialized():
        import deepspeed

        deepspeed.comm.destroy_process_group()  # also drops DeepSpeed's references to its subgroups
        _clear_caches_of_zero_3()


def _clear_caches_of_zero_3() -> None:
    """Clear a list and a cached method of DeepSpeed that otherwise keep every module alive under ZeRO-3."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK, PartitionedParameterCoordinator

    FWD_MODULE_STACK.clear()
    cached = vars(PartitionedParameterCoordinator).get("_PartitionedParameterCoordinator__params_to_release")
    for cell in getattr(cached, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


class TrainingEngine(Generic[_Module_co]):
    """A module trained by DeepSpeed. ``backward`` accumulates gradients; ``step`` clips, applies and clears them.

    DeepSpeed averages gradients over ranks, so multiply a loss that is normalized over all ranks by :attr:`world_size`.
    Sequence-parallel ranks compute the same loss, and each rank computes the gradient through its slice. The sum of
    these gradients is the gradient of one loss. Sums over rows are all-reduced over ranks with different rows
    (:attr:`groups.peers`).
    """

    def __init__(
        self,
        module: _Module_co,
        *,
        optimizer: OptimizerSettings,
        training: TrainingSettings,
        bfloat16: bool,
        updates: int,
    ) -> None:
        import deepspeed

        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.groups = get_rank_groups(training)
        trained = [item for item in module.parameters() if item.requires_grad]
        decayed = [item for item in trained if _count_dimensions(item) >= 2]
        others = [item for item in trained if _count_dimensions(item) < 2]
        groups = [(decayed, optimizer.weight_decay), (others, 0.0)]
        adamw = torch.optim.AdamW(
            [{"params": group, "weight_decay": decay} for group, decay in groups if group],
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.epsilon,
            fused=True,
        )
        # Without ZeRO, DeepSpeed clips but does not return the norm, so clip here instead.
        self._stage = training.effective_zero_stage(bfloat16=bfloat16)
        self._clips_here = self._stage == 0
        self._norm = math.nan
        if self._clips_here:
            adamw.register_step_pre_hook(self._clipping_hook(decayed + others, optimizer.gradient_clip))
        config = deepspeed_config(
            training,
            bfloat16=bfloat16,
            gradient_clip=0.0 if self._clips_here else optimizer.gradient_clip,
            world_size=self.world_size,
            trained_parameters=sum(getattr(item, "ds_numel", item.numel()) for item in trained),
            leaf_classes=moe_block_class_names(module),
        )
        with _head_output_as_dict_for_hooks(module):
            self._engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=adamw,
                lr_scheduler=lambda wrapped: torch.optim.lr_scheduler.LambdaLR(
                    wrapped, lambda step: learning_rate_factor(step, optimizer, updates)
                ),
                config=config,
            )
        for group in distributed_c10d._world.pg_map:  # DeepSpeed creates groups with torch's default timeout
            distributed_c10d._set_pg_timeout(timedelta(seconds=training.collective_deadline), group)
        self.module = module
        self.device = self._engine.device
        self.stopwatch = Stopwatch(self.device)
        self._schedule: torch.optim.lr_scheduler.LambdaLR = self._engine.lr_scheduler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.stopwatch.time_section("time/forward_s"):
            return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` to the accumulated gradients."""
        with self.stopwatch.time_section("time/backward_s"):
            self._engine.backward(loss, scale_wrt_gas=False)

    def step(self) -> float:
        """Clip, apply and clear the gradients, and advance the schedule. Returns the gradient norm before clipping."""
        with self.stopwatch.time_section("time/update_s"):
            self._engine.step()
        return self._norm if self._clips_here else float(self._engine.get_global_grad_norm())

    def _clipping_hook(self, parameters: list[nn.Parameter], maximum: float) -> Callable[..., None]:
        """Return a hook that clips the gradients before the optimizer's step, after they are reduced over ranks."""

        def clip(*_: object) -> None:
            self._norm = float(torch.nn.utils.clip_grad_norm_(parameters, maximum))

        return clip

    @property
    def learning_rate(self) -> float:
        return float(self._engine.get_lr()[0])

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """Sum ``values`` in place over ranks with different rows, and return the sum."""
        if self.groups.replicas > 1:
            torch.distributed.all_reduce(values, group=self.groups.peers)
        return values

    @property
    def participant_index(self) -> int:
        """Index of this rank among ranks with different rows."""
        return self.groups.replica

    def all_gather(self, values: Tensor) -> Tensor:
        """Gather ``values`` from all ranks with different rows as [ranks, ...]. Shapes must be equal. Collective."""
        if self.groups.replicas == 1:
            return values.unsqueeze(0)
        found = [torch.empty_like(values) for _ in range(self.groups.replicas)]
        torch.distributed.all_gather(found, values.contiguous(), group=self.groups.peers)
        return torch.stack(found)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Compute the elementwise maximum of ``values`` in place over ranks with different rows, and return it."""
        if self.groups.replicas > 1:
            torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX, group=self.groups.peers)
        return values

    def offload_to_cpu(self) -> None:
        """Move optimizer state and gradients to the CPU. Parameters stay on the GPU for the transfer to an engine."""
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

        moved = [State.optim_states, State.hp_params, State.lp_grads, State.contiguous_grad_buffer]
        self._engine.offload_states(include=moved)

    def reload_to_gpu(self) -> None:
        """Move the state back to the GPU after :meth:`offload_to_cpu`."""
        self._engine.reload_states()

    def close(self) -> None:
        """Free the model and the optimizer's state once nothing else refers to them. The engine cannot train any more.

        Without this call, DeepSpeed's gradient hooks keep the model and the state alive, and each run in a program adds
        another copy.
        """
        self._engine.destroy()

    def copy_rank_state(self) -> RankState:
        """Copy this rank's part of parameters, optimizer, schedule and random state, for a checkpoint."""
        return copy_rank_state(self.module, self._engine.optimizer, updates=self._schedule.last_epoch, rank=self.rank)

    def load_checkpoint(self, folder: Path) -> None:
        """Restore a checkpoint of this model, written by any number of ranks at any ZeRO stage. Collective."""
        updates = restore_rank_state(folder, self.module, self._engine.optimizer, rank=self.rank)
        rates = [rate * self._schedule.lr_lambdas[0](updates) for rate in self._schedule.base_lrs]
        self._schedule.load_state_dict(
            self._schedule.state_dict() | {"last_epoch": updates, "_step_count": updates + 1, "_last_lr": rates}
        )
        for group, rate in zip(self._schedule.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def read_model_for_training(path: str | Path, model: ModelSettings, training: TrainingSettings) -> PreTrainedModel:
    """Read a causal language model for this rank. At ZeRO-3, the rank keeps only its shard, and the call is collective.

    With ``model.lora.rank``, adapters are added and the weights of the model are frozen.
    """
    world_size = torch.distributed.get_world_size()
    if training.zero_stage < 3 or world_size == 1:
        return add_adapters(read_model(path, model), model.lora)
    config = deepspeed_config(training, bfloat16=model.dtype == "bfloat16", world_size=world_size)
    return add_adapters(load_sharded_model(path, model, config), model.lora)


def read_policy(path: str | Path, model: ModelSettings, training: TrainingSettings) -> PolicyModel:
    """Read a policy for this rank with :func:`read_model_for_training`."""
    causal_lm = read_model_for_training(path, model, training)
    attention = choose_attention_backend(model, causal_lm.config)
    sequence = get_rank_groups(training).sequence
    return PolicyModel(causal_lm, backend=training.head_backend, attention=attention, sequence=sequence)


def _count_dimensions(parameter: nn.Parameter) -> int:
    """Return the number of dimensions of the whole parameter, even if this rank holds a shard with one dimension."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def build_frozen_forward(module: nn.Module, training: TrainingSettings, *, bfloat16: bool) -> Callable[..., Any]:
    """Return the forward function of a frozen module on this rank's device. ZeRO-3 shards the parameters."""
    import deepspeed

    module.requires_grad_(False).eval()
    if training.zero_stage < 3:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        return module.to(device)
    world_size = torch.distributed.get_world_size()
    config = deepspeed_config(
        training, bfloat16=bfloat16, world_size=world_size, leaf_classes=moe_block_class_names(module)
    )
    with _head_output_as_dict_for_hooks(module):
        engine, *_ = deepspeed.initialize(model=module, config=config)
    engine.eval()
    return cast(Callable[..., Any], engine)


@contextmanager
def _head_output_as_dict_for_hooks(module: nn.Module) -> Iterator[None]:
    """Present the head's output as a dictionary to DeepSpeed's hooks.

    Hooks registered before and after DeepSpeed's hooks convert the output to a dictionary and back. DeepSpeed's hooks
    that gather a sharded weight for the backward pass find tensors only in tuples and dictionaries.
    """
    if isinstance(module, PolicyModel):
        module.head.register_forward_hook(_statistics_as_dictionary)
    yield
    if isinstance(module, PolicyModel):
        module.head.register_forward_hook(_statistics_from_dictionary)


def _statistics_as_dictionary(head: nn.Module, inputs: object, output: Any) -> Any:
    return dict(vars(output)) if isinstance(output, TokenStatistics) else output


def _statistics_from_dictionary(head: nn.Module, inputs: object, output: Any) -> Any:
    return TokenStatistics(**output) if isinstance(output, dict) else output
