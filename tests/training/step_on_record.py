"""One training step on recorded trajectories, for as many ranks as the environment says: ``OUTPUT NAME...``.

Run by test_one_step.py in processes of its own. Every case runs with its own ZeRO stage; rank 0 writes what came out.
"""

from __future__ import annotations

import random
import sys
from array import array
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from training.teacher_server import TeacherServer, serve_teacher

from agentrl.kernels import Backend, reason_triton_unavailable
from agentrl.kernels.attention import SequenceParallelGroup
from agentrl.models.loading import enable_gradient_checkpointing
from agentrl.models.lora import add_adapters, disabled_adapters, is_adapter_factor
from agentrl.models.policy import PolicyModel, ValueModel
from agentrl.models.settings import LoRASettings
from agentrl.rollout.settings import RewardSettings
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import write_tokens
from agentrl.training.engine.deepspeed_engine import TrainingEngine, build_frozen_forward, start_distributed
from agentrl.training.engine.groups import get_rank_groups
from agentrl.training.run.outputs import token_file_metadata
from agentrl.training.settings import (
    AlgorithmSettings,
    CorrectionSettings,
    CriticSettings,
    KLSettings,
    OptimizerSettings,
    TeacherSettings,
    TrainingSettings,
)
from agentrl.training.step.batching import plan_step
from agentrl.training.step.diagnostics import FidelityError, TokenStatisticsRecorder, fidelity_bound
from agentrl.training.step.objective_settings import ObjectiveSettings
from agentrl.training.step.reference_and_critic import Critic, FrozenPolicy, TeachersBySource
from agentrl.training.step.served_teacher import ServedTeacher
from agentrl.training.step.trainer import Trainer
from agentrl.trajectory import Group, Segment, Trajectory, assign_path_weights
from agentrl.weights.sources import full_parameters
from agentrl_envs.types import Ended, Problem

GROUPS = 5
GROUP_SIZE = 4
VOCABULARY = 64
EXPERTS = 6


@dataclass(frozen=True, kw_only=True)
class Case:
    """What differs between two steps on the same record."""

    algorithm: dict[str, Any] = field(default_factory=dict)
    reward: dict[str, Any] = field(default_factory=dict)
    kl: dict[str, Any] = field(default_factory=dict)
    teacher: dict[str, Any] = field(default_factory=dict)
    correction: dict[str, Any] = field(default_factory=dict)
    near: bool = False  # the engine's log-probabilities are near the trainer's
    zero_stage: int = 0
    sequence_parallel: int = 1
    budget: int = 1_000_000
    tied: bool = True
    gradient_checkpointing: bool = False
    backend: Backend = "auto"
    void: bool = False
    forked: bool = False  # the last rollout of each group is a tree
    adapted: bool = False  # the policy has adapters, and is its own teacher without them
    experts: bool = False  # a mixture of experts, on tokens with recorded routes and supports
    dtype: torch.dtype = torch.float32
    learning_rate: float = 3.0
    statistics_pass: bool = False  # also where one forward would serve

    def settings(self) -> ObjectiveSettings:
        return ObjectiveSettings(
            algorithm=AlgorithmSettings(**{"fidelity_bound": 1e9, "aggregation": "token_mean", **self.algorithm}),
            reward=RewardSettings(**self.reward),
            kl=KLSettings(**self.kl),
            teacher=TeacherSettings(**self.teacher),
            correction=CorrectionSettings(**self.correction),
            response_tokens=20,
        )

    def training(self) -> TrainingSettings:
        # ZeRO-3 shards every parameter, which it would keep whole as small as these are.
        return TrainingSettings(
            zero_stage=self.zero_stage, persistence_threshold=0, sequence_parallel=self.sequence_parallel
        )

    def sequence(self) -> SequenceParallelGroup | None:
        return get_rank_groups(self.training()).sequence


_TWO_PASSES = {"estimator": "ogb", "normalize": "whiten"}
_PPO = {"estimator": "grpo", "loss": "ppo", "updates_per_step": 2}
_SELECTED = {"covariance_fraction": 0.2, "covariance_low": 0.0, "covariance_high": 100.0}
CASES = {
    "token_mean": Case(zero_stage=1, algorithm={"head_exact_every": 1}),
    "token_sum": Case(zero_stage=0, algorithm={"aggregation": "token_sum"}),
    "seq_mean_token_mean": Case(zero_stage=2, algorithm={"aggregation": "seq_mean_token_mean"}),
    "seq_mean_token_sum": Case(
        zero_stage=3, algorithm={"aggregation": "seq_mean_token_sum", "entropy_coefficient": 0.3, "head_exact_every": 1}
    ),
    "seq_mean_token_sum_norm": Case(
        zero_stage=3,
        tied=False,
        gradient_checkpointing=True,
        algorithm={"aggregation": "seq_mean_token_sum_norm", "norm_length": 9},
    ),
    "checkpointed_tied": Case(zero_stage=3, gradient_checkpointing=True),
    "untied": Case(zero_stage=3, tied=False),
    "zero3": Case(zero_stage=3),
    "whitened": Case(zero_stage=2, algorithm=_TWO_PASSES),
    "whitened_zero3": Case(zero_stage=3, algorithm=_TWO_PASSES),
    "two_updates": Case(zero_stage=1, learning_rate=0.5, algorithm=_PPO),
    "void_rows": Case(zero_stage=2, void=True, algorithm={"void_turns": "mask"}),
    "void_rows_two_passes": Case(zero_stage=3, void=True, algorithm={"void_turns": "mask", **_TWO_PASSES}),
    "kl_loss": Case(zero_stage=2, kl={"coefficient": 0.5, "estimator": "k2"}),
    "kl_loss_two_updates": Case(zero_stage=0, learning_rate=0.5, kl={"coefficient": 0.5}, algorithm=_PPO),
    "kl_full": Case(zero_stage=3, kl={"coefficient": 0.5, "estimator": "full"}),
    "kl_full_two_updates": Case(
        zero_stage=0, learning_rate=0.5, kl={"coefficient": 0.5, "estimator": "full+"}, algorithm=_PPO
    ),
    "kl_full_reward": Case(
        zero_stage=1, kl={"coefficient": 0.1, "placement": "reward", "estimator": "full"}, algorithm=_TWO_PASSES
    ),
    "kl_reward": Case(
        zero_stage=3, kl={"coefficient": 0.1, "placement": "reward", "controller": "adaptive", "horizon": 100}
    ),
    "teacher": Case(zero_stage=3, teacher={"objective": "jsd", "temperature": 1.1}, algorithm={"estimator": "none"}),
    "teachers": Case(zero_stage=3, teacher={"by_source": {"even": {"path": "a"}}}, algorithm={"estimator": "none"}),
    "teachers_one_served": Case(
        zero_stage=3,
        forked=True,
        teacher={"by_source": {"even": {"path": "a", "url": "of step"}}, "objective": "forward_kl"},
        algorithm={"estimator": "none"},
    ),
    "teacher_hint": Case(
        zero_stage=3, teacher={"hint": "{answer}", "objective": "forward_kl"}, algorithm={"estimator": "none"}
    ),
    "teacher_hint_adapters": Case(
        zero_stage=3, adapted=True, teacher={"hint": "{answer}", "objective": "jsd"}, algorithm={"estimator": "none"}
    ),
    "teacher_hint_sampled": Case(
        zero_stage=3,
        adapted=True,
        teacher={"hint": "{answer}", "objective": "sampled"},
        algorithm={"estimator": "none"},
    ),
    "teacher_sampled": Case(
        zero_stage=0,
        learning_rate=0.5,
        kl={"coefficient": 0.5, "estimator": "full"},
        teacher={"objective": "sampled", "coefficient": 0.5},
        algorithm=_PPO,
    ),
    "routes": Case(zero_stage=3, gradient_checkpointing=True, experts=True, correction={"route_replay": "rollout"}),
    "routes_trees": Case(zero_stage=3, experts=True, forked=True, correction={"route_replay": "rollout"}),
    "routes_of_trainer": Case(
        zero_stage=3,
        learning_rate=0.5,
        gradient_checkpointing=True,
        experts=True,
        correction={"route_replay": "trainer"},
        algorithm=_PPO,
    ),
    "token_weights": Case(zero_stage=1, near=True, correction={"weights": "token", "weight_high": 1.1}),
    "icepop_void": Case(
        zero_stage=0,
        near=True,
        void=True,
        algorithm={"void_turns": "mask"},
        correction={"weights": "geometric", "weight_bound": "icepop", "weight_low": 0.9, "weight_high": 1.1},
    ),
    "normalized_weights": Case(zero_stage=2, near=True, correction={"weights": "sequence", "self_normalize": True}),
    "masks": Case(
        zero_stage=1,
        near=True,
        algorithm={"aggregation": "seq_mean_token_mean"},
        correction={"ratio_mask": "token", "ratio_low": 0.8, "ratio_high": 1.2, "divergence_mask": "k3"}
        | {"divergence_level": "sequence_max", "weights": "token"},
    ),
    "summed_masks": Case(
        zero_stage=2, near=True, algorithm={"aggregation": "token_sum"}, correction={"ratio_mask": "token"}
    ),
    "weighted_remax": Case(
        zero_stage=1,
        near=True,
        algorithm={"estimator": "remax", "normalize": "whiten"},
        correction={"weights": "token", "weight_high": 1.1},
    ),
    "gspo": Case(zero_stage=0, learning_rate=0.5, algorithm={**_PPO, "loss": "gspo", "aggregation": None}),
    "gmpo": Case(zero_stage=0, algorithm={"loss": "gmpo", "aggregation": None}),
    "clip_cov": Case(
        zero_stage=2, learning_rate=0.5, algorithm={**_PPO, "loss": "clip_cov", "loss_options": _SELECTED}
    ),
    "kl_cov": Case(
        zero_stage=0,
        learning_rate=0.5,
        algorithm={**_PPO, "loss": "kl_cov", "loss_options": {"covariance_fraction": 0.1}},
    ),
    "gpg": Case(zero_stage=1, algorithm={"estimator": "gpg"}),
    "pooled": Case(zero_stage=2, algorithm={"estimator": "ogb_pooled"}),
    "reinforce_pp": Case(zero_stage=0, algorithm={"estimator": "reinforce_pp"}),
    "dr_grpo": Case(zero_stage=0, algorithm={"estimator": "dr_grpo", "aggregation": None}),
    "remax": Case(zero_stage=0, algorithm={"estimator": "remax"}),
    "eob": Case(
        zero_stage=3,
        near=True,
        algorithm={"estimator": "eob"},
        correction={"weights": "token", "self_normalize": True},
    ),
    "overlong": Case(zero_stage=0, reward={"overlong_buffer": 6, "overlong_limit": 10}),
    "trees": Case(zero_stage=3, forked=True, algorithm=_TWO_PASSES, kl={"coefficient": 0.1, "placement": "reward"}),
    "trees_critic": Case(zero_stage=3, forked=True, algorithm={"estimator": "gae", "lam": 0.9}),
    "critic": Case(zero_stage=2, algorithm={"estimator": "gae", "lam": 0.9, "gamma": 0.9}),
    "critic_zero3": Case(
        zero_stage=3,
        learning_rate=0.5,
        kl={"coefficient": 0.1, "placement": "reward"},
        algorithm={"estimator": "gae", "loss": "ppo", "updates_per_step": 2},
    ),
}
"""Each is trained whole (one rank, one micro-batch, ZeRO 0) and in parts, and must come out the same."""

ALONE = ("token_mean", "seq_mean_token_sum", "whitened", "void_rows", "two_updates", "trees", "critic_zero3")
"""Those that one rank also trains in parts: every ZeRO stage, one pass and two, one update and two."""

FEW_GROUPS = ("token_mean", "reinforce_pp", "zero3", "seq_mean_token_sum_norm", "whitened_zero3")
"""Those that are also trained on a single group, and on none."""

ONE_FORWARD = ("token_weights", "summed_masks", "weighted_remax", "gpg")
"""Those that a statistics pass must not change."""

SEQUENCE = (
    "token_mean",
    "seq_mean_token_sum",
    "checkpointed_tied",
    "whitened_zero3",
    "two_updates",
    "kl_full_two_updates",
    "teacher",
    "teachers",
    "teachers_one_served",
    "teacher_hint",
    "teacher_hint_adapters",
    "teacher_hint_sampled",
    "teacher_sampled",
    "routes",
    "routes_trees",
    "routes_of_trainer",
    "normalized_weights",
    "masks",
    "clip_cov",
    "eob",
    "trees",
    "critic_zero3",
)
"""Those that two ranks also train sharing every row."""

FOUR = ("seq_mean_token_sum", "clip_cov", "critic_zero3")
"""Those that four ranks train, sharing every row or in pairs with rows of their own."""

WHOLE_GROUPS, SINGLE_ROWS = 90, 40
"""Token budgets: the largest group with its prompt once is 57 tokens, the longest trajectory 27."""


def recorded_groups(
    *, void: bool = False, greedy: bool = False, groups: int = GROUPS, forked: bool = False
) -> tuple[Group, ...]:
    """A fixed step's rollouts: up to three turns of random tokens with observations between, rewards 0 and 1.

    Nobody is right in the fourth group; a limit ended the third trajectory of each.
    """
    draw = random.Random(7)
    prompts = [_tokens(draw, draw.randint(2, 10)) for _ in range(groups)]
    made = tuple(
        Group(
            problem=_problem(index),
            index=index,
            trajectories=tuple(_trajectory(draw, index, sample, prompt) for sample in range(GROUP_SIZE)),
            greedy=_trajectory(random.Random(index), index, 1 + index % 2, prompt) if greedy else None,
            masked=frozenset({(index % GROUP_SIZE, 0)}) if void and index % 2 == 0 else frozenset(),
        )
        for index, prompt in enumerate(prompts)
    )
    if forked:
        made = tuple(
            replace(one, trajectories=(*one.trajectories[:-1], *_tree(draw, one.trajectories[-1]))) for one in made
        )
    return made


def _tree(draw: random.Random, root: Trajectory) -> tuple[Trajectory, ...]:
    """The rollout as a tree of two forks with three leaves."""

    def branch(number: int, parent: Trajectory, ended: Ended, reward: float) -> Trajectory:
        one = _trajectory(draw, root.group, root.sample, (*parent.prompt_ids, *parent.response_ids))
        last = replace(one.segments[0], reward=reward)
        return replace(
            one,
            segments=(last,),
            ended=ended,
            branch=number,
            branches=5,
            parent=parent.branch,
            fork=parent.model_tokens,
        )

    segments = tuple(replace(segment, reward=0.0) for segment in root.segments)
    root = replace(root, segments=segments, ended=Ended.FORKED)
    inner = branch(1, root, Ended.FORKED, 0.0)
    leaves = [branch(2, root, Ended.ANSWERED, 1.0), branch(3, inner, Ended.ANSWERED, 0.0)]
    branches = [root, inner, *leaves, branch(4, inner, Ended.ANSWERED, 1.0)]
    return assign_path_weights([replace(item, branches=len(branches), path_weight=1.0) for item in branches])


def _problem(index: int) -> Problem:
    return Problem(id=f"recorded-{index}", statement="?", answer="1", source="odd" if index % 2 else "even")


def _trajectory(draw: random.Random, group: int, sample: int, prompt: tuple[int, ...]) -> Trajectory:
    segments = []
    turns = draw.randint(1, 3)
    for turn in range(turns):
        reward = float(sample % 2) if turn == turns - 1 and group != 3 else 0.0
        tokens = _tokens(draw, draw.randint(1, 6))
        segments.append(
            Segment(
                origin="model",
                token_ids=tokens,
                text="",
                log_probs=tuple(-draw.random() for _ in tokens),
                version_spans=((0, len(tokens)),),
                reward=reward,
            )
        )
        if turn < turns - 1:
            segments.append(Segment(origin="observation", token_ids=_tokens(draw, draw.randint(1, 4)), text=""))
    return Trajectory(
        problem=_problem(group),
        step=1,
        group=group,
        sample=sample,
        prompt_ids=prompt,
        segments=tuple(segments),
        ended=Ended.TOKEN_LIMIT if sample == 2 else Ended.ANSWERED,
    )


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(VOCABULARY) for _ in range(count))


def tiny_model(*, tied: bool = True, gradient_checkpointing: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """A seeded Qwen2 of 20 thousand parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            initializer_range=0.2,
        )
    ).to(dtype)
    if gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


def tiny_experts(*, gradient_checkpointing: bool) -> Any:
    """A seeded Qwen3-MoE of two layers, in which two of six experts compute a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": EXPERTS}
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            num_experts_per_tok=2,
            max_position_embeddings=128,
            initializer_range=0.2,
            tie_word_embeddings=True,
            **sizes,
        )
    )
    if gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


def with_routes_and_supports(item: Trajectory, *, routes: bool) -> Trajectory:
    """The trajectory as a restricting engine returns it. A route depends on the tokens up to its own, as a real one."""
    ids, known, end, segments = item.prompt_ids + item.response_ids, 0, len(item.prompt_ids), []
    for number, segment in enumerate(item.segments):
        end += len(segment.token_ids)
        if segment.origin == "model":
            draws = [random.Random(repr(ids[: at + 1])) for at in range(known, end - 1)]
            experts = array("h", [one for draw in draws for _ in range(2) for one in draw.sample(range(EXPERTS), 2)])
            known = end - 1
            sets = [{token, *random.Random(token).sample(range(VOCABULARY), 9)} for token in segment.token_ids]
            sets = sets if (item.sample + number) % 3 else []  # others are sampled from the whole vocabulary
            segment = replace(
                segment,
                routes=experts.tobytes() if routes else b"",
                support_ids=tuple(token for chosen in sets for token in sorted(chosen)),
                support_sizes=tuple(map(len, sets)),
            )
        segments.append(segment)
    return replace(item, segments=tuple(segments))


def step(case: Case, *, groups: int = GROUPS, folder: Path | None = None) -> dict[str, Any]:
    """Train one step; the change of every parameter and the step's metrics. Its files go to ``folder``."""
    settings = case.settings()
    if case.experts:
        model = tiny_experts(gradient_checkpointing=case.gradient_checkpointing)
    else:
        model = tiny_model(tied=case.tied, gradient_checkpointing=case.gradient_checkpointing, dtype=case.dtype)
    if case.adapted:
        add_adapters(model, LoRASettings(rank=4))
        for name, item in model.named_parameters():
            if is_adapter_factor(name):  # those of a new adapter are 0
                torch.nn.init.normal_(item, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    before = _flat(model)
    greedy = settings.algorithm.estimator == "remax"
    record = recorded_groups(void=case.void, greedy=greedy, groups=groups, forked=case.forked)
    if case.experts:
        routed = partial(with_routes_and_supports, routes=settings.correction.route_replay == "rollout")
        record = tuple(replace(one, trajectories=tuple(map(routed, one.trajectories))) for one in record)
    if case.near:
        record = sampled_by(tiny_model(tied=case.tied), temperature=0.8, record=record, noise=0.4)
    policy = PolicyModel(model, backend=case.backend, sequence=case.sequence())
    engine = TrainingEngine(
        policy,
        # With epsilon 1 a step is nearly proportional to the gradient, so small differences stay small.
        optimizer=OptimizerSettings(learning_rate=case.learning_rate, epsilon=1.0, weight_decay=0.0, gradient_clip=1e9),
        training=case.training(),
        bfloat16=case.dtype == torch.bfloat16,
        updates=10,
    )
    plans = plan_step(
        record,
        settings,
        step=1,
        version=0,
        budget=case.budget,
        ranks=engine.groups.replicas,
        teacher_prompt=None if settings.teacher.hint is None else with_hint,
    )
    if case.statistics_pass:
        plans = [replace(plan, statistics_pass=True) for plan in plans]
    critic = critic_of(case) if settings.algorithm.estimator == "gae" else None
    if case.zero_stage == 3:
        assert not any(item.numel() for item in model.parameters()), "not sharded as meant"
    critic_before = _flat(critic.engine.module) if critic is not None else torch.zeros(())
    recorder = TokenStatisticsRecorder()
    plan = plans[engine.groups.replica]
    with serve_teacher(perturbed_model(case, scale=2.5)) as server:
        trainer = trainer_of(case, engine, settings, critic, server)
        metrics = trainer.train(plan, recorder=recorder)
    if folder is not None and engine.groups.is_first_in_group:
        run = RunDirectory(folder)
        run.tokens.mkdir(parents=True, exist_ok=True)
        facts = token_file_metadata(settings, plan, engine.groups)
        write_tokens(run.token_statistics_file(1, facts.rank), facts, recorder.rows)
        if engine.rank == 0:
            run.trajectories.mkdir()
            run.write_trajectories(1, [item.to_record() for group in record for item in group.trajectories])
    return {
        "delta": _flat(model) - before,
        "critic_delta": _flat(critic.engine.module) - critic_before if critic is not None else torch.zeros(()),
        "state": trainer.state_dict(),
        "metrics": metrics,
        "micro_batches": [sum(map(len, update)) for update in plans[0].updates],
        "one_forward": not plans[0].statistics_pass,
    }


def trainer_of(
    case: Case,
    engine: TrainingEngine[PolicyModel],
    settings: ObjectiveSettings,
    critic: Critic | None,
    server: TeacherServer,
) -> Trainer:
    return Trainer(
        engine,
        settings,
        temperature=0.8,
        fidelity_bound=1e9,
        reference=frozen_policy(case, needs_full_distribution=settings.kl.needs_full_distribution) if case.kl else None,
        teacher=teacher_of(case, engine, server) if case.teacher else None,
        critic=critic,
    )


def teacher_of(
    case: Case, engine: TrainingEngine[PolicyModel], server: TeacherServer
) -> FrozenPolicy | ServedTeacher | TeachersBySource:
    settings = case.settings().teacher
    options: dict[str, Any] = {
        "temperature": settings.temperature or 0.8,
        "needs_full_distribution": settings.needs_full_distribution,
        "beta": settings.resolved_beta,
        "hinted": settings.hint is not None,
    }
    if case.adapted:

        def forward_of_base_model(*args: Any, **kwargs: Any) -> Any:
            with disabled_adapters(engine.module.causal_lm):
                return engine(*args, **kwargs)

        return FrozenPolicy(engine.module, forward_of_base_model, **options)
    first = frozen_policy(case, scale=0.5, **options)
    if not settings.by_source:
        return first
    if settings.by_source["even"].url is None:
        return TeachersBySource({"even": frozen_policy(case, scale=2.5, **options), None: first})
    served = settings.model_copy(update={"url": server.url, "path": "teacher"})
    return TeachersBySource({"even": ServedTeacher(served, refused_ids={}), None: first})


def with_hint(item: Trajectory) -> tuple[int, ...]:
    """A prompt that is longer by another number of tokens in each group."""
    return (*range(40, 43 + 2 * item.group), *item.prompt_ids)


def perturbed_model(case: Case, *, scale: float) -> Any:
    """The model it starts from with one layer a little different."""
    model = tiny_model(tied=case.tied)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(scale)
    return model


def frozen_policy(case: Case, *, scale: float = 1.5, temperature: float = 0.8, **options: Any) -> FrozenPolicy:
    policy = PolicyModel(perturbed_model(case, scale=scale), sequence=case.sequence())
    forward = build_frozen_forward(policy, case.training(), bfloat16=False)
    return FrozenPolicy(policy, forward, temperature=temperature, **options)


def critic_of(case: Case) -> Critic:
    """A critic of the same transformer whose values are not all 0."""
    model = ValueModel(tiny_model(tied=case.tied), sequence=case.sequence())
    torch.nn.init.normal_(model.value_head.weight, std=0.3, generator=torch.Generator().manual_seed(5))
    engine = TrainingEngine(
        model,
        optimizer=OptimizerSettings(learning_rate=0.5, epsilon=1.0, weight_decay=0.0, gradient_clip=1e9),
        training=case.training(),
        bfloat16=False,
        updates=10,
    )
    return Critic(engine, CriticSettings(clip=0.3))


def critic_learns(*, updates: int = 30) -> list[dict[str, float]]:
    """Metrics of steps on the same record with a policy that hardly moves."""
    settings = Case(algorithm={"estimator": "gae"}).settings()
    engine, value_engine = (
        TrainingEngine(
            module,
            optimizer=OptimizerSettings(learning_rate=rate, weight_decay=0.0),
            training=TrainingSettings(zero_stage=0),
            bfloat16=False,
            updates=updates,
        )
        for module, rate in ((PolicyModel(tiny_model()), 1e-6), (ValueModel(tiny_model()), 3e-3))
    )
    trainer = Trainer(
        engine, settings, temperature=0.8, fidelity_bound=1e9, critic=Critic(value_engine, CriticSettings())
    )
    plan = plan_step(recorded_groups(), settings, step=1, version=0, budget=1_000_000, ranks=1)[0]
    return [trainer.train(plan) for _ in range(updates)]


def _flat(model: Any) -> torch.Tensor:
    return torch.cat([value.double().flatten().clone() for _, value in full_parameters(model)])


def sampled_by(
    model: Any, *, temperature: float, record: tuple[Group, ...] | None = None, noise: float = 0.0
) -> tuple[Group, ...]:
    """The record with the log-probabilities that ``model`` gives it, give or take some noise."""
    draw = random.Random(11)

    def told(item: Trajectory) -> Trajectory:
        ids = torch.tensor([item.prompt_ids + item.response_ids])
        with torch.no_grad():
            table = torch.log_softmax(model(ids).logits[0].double() / temperature, dim=-1)
        log_probs = table[:-1].gather(1, ids[0, 1:, None])[len(item.prompt_ids) - 1 :, 0].tolist()
        place = 0
        segments = []
        for segment in item.segments:
            count = len(segment.token_ids)
            own = tuple(min(0.0, value + draw.uniform(-noise, noise)) for value in log_probs[place : place + count])
            segments.append(replace(segment, log_probs=own) if segment.origin == "model" else segment)
            place += count
        return replace(item, segments=tuple(segments))

    made = record or recorded_groups()
    return tuple(replace(one, trajectories=tuple(map(told, one.trajectories))) for one in made)


def with_one_row_off(record: tuple[Group, ...], by: float, *, cut: bool) -> tuple[Group, ...]:
    """The first trajectory's log-probabilities moved ``by``; ``cut``: its turns are of two versions each."""

    def off(segment: Segment) -> Segment:
        if segment.origin == "observation":
            return segment
        parts = ((1, 1), (0, len(segment.token_ids) - 1))
        spans = tuple(part for part in parts if part[1]) if cut else segment.version_spans
        return replace(segment, log_probs=tuple(value - by for value in segment.log_probs), version_spans=spans)

    first, *others = record
    row, *rows = first.trajectories
    changed = replace(first, trajectories=(replace(row, segments=tuple(map(off, row.segments))), *rows))
    return (changed, *others)


def gate(
    *, temperature: float = 0.8, other_weights: bool = False, one_row: float = 0.0, cut: bool = False
) -> dict[str, Any]:
    """Train a step on what the policy sampled, at another temperature or with other weights than the trainer's.

    The log-probabilities of ``one_row`` are so far off; with ``cut`` its weights changed in the middle of a turn.
    """
    model = tiny_model()
    record = sampled_by(model, temperature=temperature)
    if other_weights:
        with torch.no_grad():
            model.model.norm.weight.mul_(1.1)
    if one_row:
        record = with_one_row_off(record, one_row, cut=cut)
    before = _flat(model)
    settings = ObjectiveSettings(response_tokens=20)
    engine = TrainingEngine(
        PolicyModel(model),
        optimizer=OptimizerSettings(learning_rate=1e-3),
        training=TrainingSettings(zero_stage=2),
        bfloat16=False,
        updates=10,
    )
    plan = plan_step(record, settings, step=1, version=0, budget=WHOLE_GROUPS, ranks=1)[0]
    trainer = Trainer(engine, settings, temperature=0.8, fidelity_bound=fidelity_bound("float32", 0.0))
    try:
        metrics = trainer.train(plan)
    except FidelityError as error:
        return {"error": str(error), "changed": float((_flat(model) - before).abs().max())}
    return {"error": None, "difference": metrics["policy/engine_abs_diff"]}


def shared_by(world: int) -> list[tuple[str, int]]:
    """The cases in which ranks share rows, and how many share one."""
    names, sizes = {1: ((), ()), 2: (SEQUENCE, (2,)), 4: (FOUR, (2, 4))}[world]
    return [(name, size) for name in names for size in sizes]


def main() -> None:
    torch.set_num_threads(1)
    rank, world = start_distributed(deadline=600.0)
    results = {}
    files = Path(sys.argv[1]).with_suffix("")
    for name, case in CASES.items() if world < 4 else ():
        groups, rows = replace(case, budget=WHOLE_GROUPS), replace(case, budget=SINGLE_ROWS)
        if world == 1:
            results[f"{name}/whole"] = step(replace(case, zero_stage=0), folder=files / name / "whole")
        if world == 2 or name in ALONE:
            results[f"{name}/groups"] = step(groups, folder=files / name / "groups")
        if (world == 2 or name in ALONE) and not case.settings().algorithm.head_exact_every:
            results[f"{name}/rows"] = step(rows, folder=files / name / "rows")
        if name in FEW_GROUPS:
            # One group for two ranks: one of them has dummies alone where groups stay whole.
            results[f"{name}/one_group"] = step(groups, groups=1)
            results[f"{name}/none"] = step(case, groups=0)
    for name, size in shared_by(world):
        shared = replace(CASES[name], sequence_parallel=size)
        results[f"{name}/{size}/groups"] = step(replace(shared, budget=WHOLE_GROUPS))
        if not shared.settings().algorithm.head_exact_every:
            results[f"{name}/{size}/rows"] = step(replace(shared, budget=SINGLE_ROWS))
    if world == 2:
        results["one_group/2"] = step(replace(CASES["zero3"], sequence_parallel=2, budget=WHOLE_GROUPS), groups=1)
    for stage in (0, 2) if world < 4 else ():
        results[f"bfloat16/{stage}"] = step(Case(zero_stage=stage, budget=WHOLE_GROUPS, dtype=torch.bfloat16))
    if world == 1:
        for name in ONE_FORWARD:
            results[f"{name}/two_passes"] = step(replace(CASES[name], zero_stage=0, statistics_pass=True))
        for tied in (True, False) if reason_triton_unavailable(torch.device("cpu")) is None else ():
            for backend in ("chunked", "triton"):
                results[f"{backend}/{tied}"] = step(Case(zero_stage=3, tied=tied, backend=backend), groups=2)
        results["critic_learns"] = {"first": (learned := critic_learns())[0], "last": learned[-1]}
        results["gate/same"] = gate()
        results["gate/temperature"] = gate(temperature=1.0)
        results["gate/weights"] = gate(other_weights=True)
        results["gate/one row"] = gate(one_row=4e-3)
        results["gate/weights changed under it"] = gate(one_row=4e-3, cut=True)
    if rank == 0:
        torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
