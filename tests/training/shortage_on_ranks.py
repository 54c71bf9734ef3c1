"""Steps on recorded trajectories in which the second rank's memory runs out, at two ranks or as many: ``OUTPUT``.

Run by test_shortages.py in processes of its own; rank 0 writes what came out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from step_on_record import CASES, WHOLE_GROUPS, Case, _flat, critic_of, rollout_batch, tiny_model, trainer_of
from torch import Tensor, nn

from agentrl.errors import SettingsError, WorldError
from agentrl.models.policy import PolicyModel
from agentrl.training.engine.deepspeed_engine import TrainingEngine, start_distributed
from agentrl.training.engine.memory import MicroBatchBudget
from agentrl.training.engine.recovery import ShortageError
from agentrl.training.settings import OptimizerSettings
from agentrl.training.step.batching import plan_step


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A device that holds ``tokens`` in a forward, on the last rank alone, once there were ``updates``."""

    tokens: int
    updates: int = 0
    backward: bool = True
    in_update: bool = False  # once, where the norm of the gradients is taken
    at_change: bool = False  # where the weights would change
    error: Callable[[], BaseException] = lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")


@dataclass(frozen=True, kw_only=True)
class Run:
    case: Case
    memory: Memory | None = None
    of_critic: bool = False
    offload: str = "none"
    dropout: bool = False


BACKWARD, FORWARD = Memory(tokens=60), Memory(tokens=60, backward=False, error=MemoryError)
RUNS = {
    "alone in one forward": Run(case=replace(CASES["token_sum"], zero_stage=0), memory=BACKWARD),
    "one forward, zero 1": Run(case=CASES["token_mean"], memory=BACKWARD),
    "one forward, zero 2": Run(case=CASES["seq_mean_token_mean"], memory=BACKWARD),
    "in the forward": Run(case=CASES["seq_mean_token_mean"], memory=FORWARD),
    "offloaded": Run(case=CASES["kl_loss"], memory=BACKWARD, offload="optimizer"),
    "dropout": Run(case=CASES["void_rows"], memory=BACKWARD, dropout=True),
    "in the statistics pass": Run(case=CASES["whitened"], memory=FORWARD),
    "in the training pass": Run(case=CASES["whitened"], memory=BACKWARD),
    "in the first of two updates": Run(case=replace(CASES["two_updates"], zero_stage=2), memory=Memory(tokens=45)),
    "in the second update": Run(case=replace(CASES["two_updates"], zero_stage=2), memory=Memory(tokens=45, updates=1)),
    "in a selection": Run(case=replace(CASES["clip_cov"], zero_stage=2), memory=Memory(tokens=45, updates=1)),
    "in the critic": Run(case=CASES["critic"], memory=BACKWARD, of_critic=True),
    "zero 3": Run(case=CASES["zero3"], memory=BACKWARD),
    "zero 3, in the training pass": Run(case=CASES["whitened_zero3"], memory=BACKWARD),
    "before the weights change": Run(case=CASES["seq_mean_token_mean"], memory=Memory(tokens=0, in_update=True)),
}
ON_TWO = {
    "zero 3, with a reference": Run(case=CASES["kl_full"], memory=FORWARD),
    "zero 3, in the critic": Run(case=CASES["critic_zero3"], memory=Memory(tokens=45), of_critic=True),
    "zero 3, in exact energies": Run(case=CASES["eob"], memory=BACKWARD),
    "zero 3, in the forward": Run(case=CASES["checkpointed_tied"], memory=FORWARD),
    "zero 3, checkpointed": Run(case=CASES["checkpointed_tied"], memory=BACKWARD),
    "zero 3, offloaded": Run(case=CASES["zero3"], memory=BACKWARD, offload="all"),
    "before they change, zero 3": Run(case=CASES["zero3"], memory=Memory(tokens=0, in_update=True)),
    "shared rows": Run(
        case=replace(CASES["seq_mean_token_mean"], sequence_parallel=2), memory=replace(BACKWARD, tokens=80)
    ),
    "shared rows, in the forward": Run(
        case=replace(CASES["void_rows"], sequence_parallel=2), memory=replace(FORWARD, tokens=80)
    ),
    "shared rows, zero 3": Run(case=replace(CASES["zero3"], sequence_parallel=2), memory=replace(BACKWARD, tokens=80)),
    "shared rows, in the training pass": Run(
        case=replace(CASES["whitened"], sequence_parallel=2), memory=replace(BACKWARD, tokens=80)
    ),
}
HOPELESS = {
    "one trajectory": Run(case=CASES["whitened"], memory=Memory(tokens=20)),
    "one trajectory, zero 3": Run(case=CASES["whitened_zero3"], memory=Memory(tokens=20)),
    "while the weights change": Run(case=CASES["seq_mean_token_mean"], memory=Memory(tokens=0, at_change=True)),
    "while they change, zero 3": Run(case=CASES["zero3"], memory=Memory(tokens=0, at_change=True)),
}


def run_out(layers: nn.ModuleList, memory: Memory, engine: TrainingEngine[Any]) -> None:
    """Have a forward of too many tokens fail, or its backward half-way."""
    most = memory.tokens // (engine.world_size // engine.groups.replicas)

    def fail(gradient: Tensor) -> None:
        raise memory.error()

    def look(module: nn.Module, inputs: object, output: Tensor) -> None:
        if engine.rank != engine.world_size - 1 or output.shape[1] <= most:
            return
        if engine._schedule.last_epoch < memory.updates:
            return
        if not memory.backward:
            raise memory.error()
        if output.requires_grad:
            output.register_hook(fail)

    layers[0].mlp.register_forward_hook(look)


def run_out_in_update(engine: TrainingEngine[Any], memory: Memory) -> None:
    """Have the last rank's first update fail before it changes a weight."""
    optimizer = engine._engine.optimizer
    plain = optimizer.get_grad_norm_direct

    def fail(*args: object, **kwargs: object) -> object:
        optimizer.get_grad_norm_direct = plain
        raise memory.error()

    if engine.rank == engine.world_size - 1:
        optimizer.get_grad_norm_direct = fail


def run_out_at_change(engine: TrainingEngine[Any], memory: Memory) -> None:
    """Have the last rank's optimizer fail, when that of the other rank may be at work."""

    def fail(*_: object) -> None:
        raise memory.error()

    if engine.rank == engine.world_size - 1:
        engine._schedule.optimizer.register_step_pre_hook(fail)


def small_buckets(engine: TrainingEngine[Any]) -> None:
    """Have ranks reduce gradients in the middle of a backward, as they do with models above half a billion weights."""
    if hasattr(engine._engine.optimizer, "reduce_bucket_size"):
        engine._engine.optimizer.reduce_bucket_size = 4000


def step(run: Run, *, budget: int, short: bool) -> dict[str, Any]:
    """The step of a case as a session drives it."""
    torch.manual_seed(17)
    case, settings, model = run.case, run.case.settings(), tiny_model(tied=run.case.tied)
    if run.dropout:
        model.config.attention_dropout = 0.0
        model.model.layers[1].mlp.down_proj = nn.Sequential(model.model.layers[1].mlp.down_proj, nn.Dropout(0.5))
    before = _flat(model)
    engine = TrainingEngine(
        PolicyModel(model),
        optimizer=OptimizerSettings(learning_rate=case.learning_rate, epsilon=1.0, weight_decay=0.0, gradient_clip=1e9),
        training=case.training().model_copy(update={"offload": run.offload}),
        bfloat16=False,
        updates=10,
    )
    if run.offload == "none":
        small_buckets(engine)
    critic = critic_of(case) if settings.algorithm.estimator == "gae" else None
    if critic is not None:
        small_buckets(critic.engine)
    told: list[str] = []
    tokens = MicroBatchBudget(budget, None, told=told.append, writes=False)
    trainer = trainer_of(case, engine, settings, critic, budget=tokens)
    if run.memory is not None and run.memory.in_update and short:
        run_out_in_update(engine, run.memory)
    elif run.memory is not None and run.memory.at_change and short:
        run_out_at_change(engine, run.memory)
    elif run.memory is not None and short:
        module = critic.engine.module if run.of_critic and critic is not None else model
        run_out(next(item for item in module.modules() if isinstance(item, nn.ModuleList)), run.memory, engine)
    record = rollout_batch(void=case.void)
    while True:
        plan = plan_step(record, settings, budget=tokens.tokens, ranks=engine.groups.replicas)[engine.groups.replica]
        try:
            metrics = trainer.train(plan)
            break
        except ShortageError as error:
            tokens.halve(error.shortage, step=plan.step)
    return {
        "delta": _flat(model) - before,
        "metrics": metrics,
        "told": told,
        "tokens": tokens.tokens,
        "random": torch.rand(1),
    }


def main() -> None:
    torch.set_num_threads(1)
    rank, world = start_distributed(deadline=120.0)
    results: dict[str, dict[str, Any]] = {}
    for name, run in (RUNS | (ON_TWO if world == 2 else {})).items():
        found = {
            "short": step(run, budget=WHOLE_GROUPS, short=True),
            "unhalved": step(run, budget=WHOLE_GROUPS, short=False),
            "halved": step(run, budget=WHOLE_GROUPS // 2, short=False),
        }
        results[name] = found
    for name, hopeless in HOPELESS.items():
        try:
            step(hopeless, budget=WHOLE_GROUPS, short=True)
        except (SettingsError, WorldError) as error:
            results[name] = {"message": f"{type(error).__name__}: {error}"}
    if world == 1:
        try:
            step(replace(RUNS["in the forward"], memory=replace(FORWARD, error=ValueError)), budget=90, short=True)
        except ValueError:
            results["another error"] = {"message": "raised"}
    if rank == 0:
        torch.save(results, sys.argv[1])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
