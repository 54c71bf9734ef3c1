"""Measure the extra cost of the optimal token baseline over GRPO in a training step. Target: at most 3 %.

    python benchmarks/otb_overhead.py --repetitions 20

One rank trains the embedded tiny policy on random conversations of up to three turns, with the micro-batches of the
tiny preset. Steps of both estimators alternate on the same trajectories; a step is the forward, the advantages, the
backward pass and the update, without rollouts, which cost the same for both. Both get their statistics from the same
kernel and differ only in how advantages are computed. Compare by the median ratio of CPU time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import torch

from agentrl.models.loading import tiny_config
from agentrl.models.policy import PolicyModel
from agentrl.models.settings import TinyModelSettings
from agentrl.training.engine.deepspeed_engine import TrainingEngine, start_distributed
from agentrl.training.settings import AlgorithmSettings, OptimizerSettings, TrainingSettings
from agentrl.training.step.batching import RankPlan, plan_step
from agentrl.training.step.objective_settings import ObjectiveSettings
from agentrl.training.step.trainer import Trainer
from agentrl.trajectory import Group, Segment, Trajectory
from agentrl_envs.types import Ended, Problem

ESTIMATORS = ("grpo", "tir_otb")
MICRO_BATCH_TOKENS = 4096
VOCABULARY = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=20, help="pairs of steps, after two warm-up pairs")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start_distributed(deadline=600.0)
    record = recorded_groups(options.groups, options.group_size)
    sides = {name: side(name, record) for name in ESTIMATORS}
    pairs = [{name: timed(*sides[name]) for name in _order(turn)} for turn in range(options.repetitions + 2)][2:]
    for place, clock in enumerate(("CPU", "wall")):
        grpo, otb = ([pair[name][place] for pair in pairs] for name in ESTIMATORS)
        ratios = [one / other - 1 for one, other in zip(otb, grpo, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        print(
            f"{clock} seconds per step: grpo {statistics.median(grpo):.4f}, tir_otb {statistics.median(otb):.4f}; "
            f"extra time, median of {len(ratios)} pairs: {statistics.median(ratios):+.2%} "
            f"(quartiles {low:+.2%}, {high:+.2%})"
        )


def side(estimator: str, record: Sequence[Group]) -> tuple[Trainer, RankPlan]:
    """Return a trainer with ``estimator``, and its plan."""
    settings = ObjectiveSettings(
        algorithm=AlgorithmSettings(estimator=estimator, aggregation="token_mean", fidelity_bound=1e9),
        response_tokens=160,
    )
    engine = TrainingEngine(
        PolicyModel(tiny_model()),
        optimizer=OptimizerSettings(),
        training=TrainingSettings(),
        bfloat16=False,
        updates=10**6,
    )
    (plan,) = plan_step(record, settings, step=1, version=0, budget=MICRO_BATCH_TOKENS, ranks=1)
    return Trainer(engine, settings, temperature=1.0, fidelity_bound=1e9), plan


def timed(trainer: Trainer, plan: RankPlan) -> tuple[float, float]:
    """Return CPU and wall seconds of one step."""
    began, cpu = time.perf_counter(), time.process_time()
    trainer.train(plan)
    return time.process_time() - cpu, time.perf_counter() - began


def _order(turn: int) -> tuple[str, ...]:
    """Return the order of the sides, which alternates."""
    return ESTIMATORS if turn % 2 else ESTIMATORS[::-1]


def tiny_model() -> object:
    """Return the embedded policy, untrained."""
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(tiny_config(TinyModelSettings(vocabulary_size=VOCABULARY)))


def recorded_groups(groups: int, group_size: int) -> list[Group]:
    """Return random trajectories of 60 prompt tokens and 40 to 160 response tokens."""
    draw = random.Random(1)
    return [
        Group(
            problem=(problem := Problem(id=f"random-{index}", statement="?", answer="1", source="random")),
            index=index,
            trajectories=tuple(_trajectory(draw, problem, index, sample) for sample in range(group_size)),
        )
        for index in range(groups)
    ]


def _trajectory(draw: random.Random, problem: Problem, group: int, sample: int) -> Trajectory:
    segments = []
    turns = draw.randint(1, 3)
    for turn in range(turns):
        tokens = _tokens(draw, draw.randint(25, 48))
        segments.append(
            Segment(
                origin="model",
                token_ids=tokens,
                text="",
                log_probs=(-1.0,) * len(tokens),
                version_spans=((0, len(tokens)),),
                reward=float(draw.random() < 0.5) if turn == turns - 1 else 0.0,
            )
        )
        if turn < turns - 1:
            segments.append(Segment(origin="observation", token_ids=_tokens(draw, draw.randint(3, 8)), text=""))
    return Trajectory(
        problem=problem,
        step=1,
        group=group,
        sample=sample,
        prompt_ids=_tokens(draw, 60),
        segments=tuple(segments),
        ended=Ended.ANSWERED,
    )


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(VOCABULARY) for _ in range(count))


if __name__ == "__main__":
    main()
