"""Settings of a run, composed of sections that belong to the packages that use them."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from agentrl.cluster.settings import ClusterSettings
from agentrl.evaluation.settings import EvaluationSettings
from agentrl.models.settings import ModelSettings
from agentrl.problems.settings import DataSettings
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl.rollout.settings import RewardSettings, RolloutSettings
from agentrl.telemetry.settings import TelemetrySettings
from agentrl.training.settings import (
    AlgorithmSettings,
    CheckpointSettings,
    ColdstartSettings,
    CorrectionSettings,
    CriticSettings,
    KLSettings,
    OptimizerSettings,
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
        description=f"environment: {', '.join(ENVIRONMENTS.own)}, a registered or installed name, module:Class, "
        "trl:module:Class, reasoning_gym:NAME, textarena:GAME, openenv:URL; agent:module:function, agent:COMMAND or "
        "worker:COMMAND for an agent program that uses the OpenAI API, or verifiers:TASKSET",
    )
    plugins: tuple[str, ...] = Field(
        default=(),
        description="modules or files (ending in .py) that every command and process loads first. Other settings can "
        "name what they register, such as environments, tools, rewards, estimators and losses. Plug-ins of config "
        "files and of the command line are concatenated",
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


class SimpleTIRRun(Settings):
    """Settings whose ``environment`` section is validated for SimpleTIR."""

    environment: SimpleTIRSettings = SimpleTIRSettings()


class ReasoningRun(Settings):
    """Settings whose ``environment`` section is validated for reasoning without tools."""

    environment: ReasoningSettings = ReasoningSettings()


class OtherRun(Settings):
    """Settings whose ``environment`` section accepts any options."""

    environment: EnvironmentOptions = EnvironmentOptions()


def settings_model(env: str) -> type[Settings]:
    """Return the model that validates a run in the environment ``env``."""
    models: dict[str, type[Settings]] = {SIMPLETIR: SimpleTIRRun, REASONING: ReasoningRun}
    return models.get(env, OtherRun)
