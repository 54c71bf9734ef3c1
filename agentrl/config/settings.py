"""Settings of a run, composed of sections that the packages define, and the settings that a resume may change."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field

from agentrl.cluster.settings import ClusterSettings
from agentrl.evaluation.settings import EvaluationSettings
from agentrl.models.settings import ModelSettings
from agentrl.problems.settings import DataSettings
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl.rollout.settings import RewardSettings, RolloutSettings
from agentrl.telemetry.records import dotted_keys
from agentrl.telemetry.settings import TelemetrySettings
from agentrl.training.settings import (
    AlgorithmSettings,
    CheckpointSettings,
    ColdstartSettings,
    CorrectionSettings,
    CriticSettings,
    KLSettings,
    OptimizerSettings,
    TeacherSettings,
    TrainingSettings,
)
from agentrl_envs.registry import ENVIRONMENTS
from agentrl_envs.settings import EnvironmentOptions, GraderSettings, ReasoningSettings, SimpleTIRSettings
from agentrl_sandbox.settings import SandboxSettings

SIMPLETIR = "simpletir"
REASONING = "reasoning"


class Settings(BaseModel):
    """Resolved settings of one run. The defaults are the published values for large models.

    ``environment`` is :class:`SimpleTIRSettings` if ``env`` is ``simpletir``, :class:`ReasoningSettings` if it is
    ``reasoning``, and arbitrary options otherwise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="name of the run's directory in runs_dir; null: generate a name",
    )
    env: str = Field(
        SIMPLETIR,
        description=f"environment: {', '.join(ENVIRONMENTS.builtin)}, a registered or installed name, module:Class, "
        "trl:module:Class, reasoning_gym:NAME, openenv:URL, harbor:DIRECTORY; agent:module:function, "
        "agent:COMMAND or worker:COMMAND for an agent program that uses the OpenAI API, harbor:DIRECTORY:COMMAND, or "
        "verifiers:TASKSET",
    )
    plugins: tuple[str, ...] = Field(
        default=(),
        description="modules or files (ending in .py) that every command and process imports at its start. Other "
        "settings can refer to the names that they register, such as environments, tools, rewards, "
        "estimators and losses. Plug-ins of config files and of the command line are combined",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="random seed of problems, sampling, cold start and evaluation")
    runs_dir: str = Field("runs", min_length=1, description="directory for run directories")
    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    environment: SimpleTIRSettings | ReasoningSettings | EnvironmentOptions = SimpleTIRSettings()
    sandbox: SandboxSettings = SandboxSettings()
    grader: GraderSettings = GraderSettings()
    rollout: RolloutSettings = RolloutSettings()
    gateway: AgentGatewaySettings = AgentGatewaySettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    reward: RewardSettings = RewardSettings()
    kl: KLSettings = KLSettings()
    teacher: TeacherSettings = TeacherSettings()
    correction: CorrectionSettings = CorrectionSettings()
    critic: CriticSettings = CriticSettings()
    training: TrainingSettings = TrainingSettings()
    cluster: ClusterSettings = ClusterSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    coldstart: ColdstartSettings = ColdstartSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @property
    def run_path(self) -> Path:
        """Path of the run directory."""
        return Path(self.runs_dir) / str(self.name)

    @property
    def models_on_training_ranks(self) -> list[ModelSettings]:
        """The models on the training ranks without repeats: the policy, then the reference, teachers and critic."""
        paths = {self.kl.reference, *self.teacher.local_paths, self.critic.path} - {None, self.model.path}
        return [self.model, *(self.model.model_copy(update={"path": path}) for path in sorted(map(str, paths)))]


class SimpleTIRRunSettings(Settings):
    """Settings whose ``environment`` section is validated for SimpleTIR."""

    environment: SimpleTIRSettings = SimpleTIRSettings()


class ReasoningEnvRunSettings(Settings):
    """Settings whose ``environment`` section is validated for reasoning without tools."""

    environment: ReasoningSettings = ReasoningSettings()


class AnyEnvironmentRunSettings(Settings):
    """Settings whose ``environment`` section accepts any options."""

    environment: EnvironmentOptions = EnvironmentOptions()


def settings_model(env: str) -> type[Settings]:
    """Return the model that validates a run in the environment ``env``."""
    models: dict[str, type[Settings]] = {SIMPLETIR: SimpleTIRRunSettings, REASONING: ReasoningEnvRunSettings}
    return models.get(env, AnyEnvironmentRunSettings)


_MAY_CHANGE = """
    name runs_dir model.gradient_checkpointing model.checkpoint_offload model.attention
    sandbox.url sandbox.workers sandbox.retry_deadline sandbox.service_deadline sandbox.first_user
    sandbox.allow_unisolated
    grader.workers grader.start_deadline grader.cache_size
    rollout.engine rollout.concurrency rollout.kv_high_watermark rollout.environment_deadline rollout.step_deadline
    rollout.retries rollout.max_batch_tokens rollout.kv_cache_tokens rollout.vllm. rollout.options reward.deadline
    training.steps training.micro_batch_tokens training.head_backend training.threads
    training.worker_timeout training.collective_deadline training.sequence_parallel
    training.num_processes training.zero_stage training.persistence_threshold training.offload
    teacher.url teacher.by_source.*.url cluster. checkpoint. evaluation. telemetry.
"""
RESUME_MAY_CHANGE = tuple(_MAY_CHANGE.split())
"""Keys that a resumed run may change. A final dot stands for all keys of a section, and * for any part of a key.

The keys affect duration, location and resources of a run, but not the problems, the sampling distribution or the
gradient.
"""


def dump_yaml(settings: Settings) -> str:
    """Format all resolved settings as YAML. Reading the YAML with ``--config`` gives equal settings."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def resume_conflicts(old: Settings, new: Settings) -> list[str]:
    """Return ``key: old -> new`` for every changed setting that a resumed run must not change."""
    before, after = (dotted_keys(one.model_dump(mode="json")) for one in (old, new))
    absent = "(absent)"
    return [
        f"{key}: {before.get(key, absent)!r} -> {after.get(key, absent)!r}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key, absent) != after.get(key, absent) and not may_change_on_resume(key)
    ]


def may_change_on_resume(key: str) -> bool:
    """Return True if a resumed run may change the dotted ``key``."""
    return any(fnmatchcase(key, allowed + "*" * allowed.endswith(".")) for allowed in RESUME_MAY_CHANGE)
