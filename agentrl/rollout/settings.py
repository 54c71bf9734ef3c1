"""Settings of rollouts: how many trajectories, how long, how sampled and by which engine."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class RolloutSettings(BaseModel):
    """One step's rollouts: ``problems_per_step`` groups of ``group_size`` trajectories."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["transformers"] = Field("transformers", description="what samples from the policy")
    problems_per_step: int = Field(128, ge=1, description="groups trained in a step")
    group_size: int = Field(16, ge=1, description="trajectories of one problem")
    oversampling: float = Field(1.0, ge=1.0, description="groups generated over groups trained, before filters")
    max_extra_rounds: int = Field(
        0,
        ge=0,
        description="dynamic sampling: further rounds of rollouts in a step while the filters leave fewer than "
        "problems_per_step groups",
    )
    temperature: float = Field(1.0, gt=0, description="of sampling, and of the log-probabilities that are trained")
    max_prompt_tokens: int = Field(2048, ge=1, description="problems with longer prompts are skipped and counted")
    max_turn_tokens: int = Field(8192, ge=1, description="model tokens in one turn")
    max_response_tokens: int = Field(8192, ge=1, description="model and observation tokens of a trajectory")
    concurrency: int = Field(1024, ge=1, description="trajectories in flight")
    trajectory_deadline: float = Field(1800.0, gt=0, description="seconds a trajectory may take")
    step_deadline: float = Field(
        7200.0, gt=0, description="seconds a step's rollouts may take before the run ends with an error"
    )
    retries: int = Field(2, ge=0, description="fresh starts of a trajectory that ended by an infrastructure failure")
    max_batch_tokens: int = Field(65536, ge=64, description="tokens of one forward of the transformers engine")
    kv_cache_tokens: int = Field(1_048_576, ge=64, description="token slots of the transformers engine's KV cache")
