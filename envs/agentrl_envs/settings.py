"""The settings of environments (light to import: pydantic alone)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

INSTRUCTION = (
    "Work through the problem below step by step. You may write Python to help you: every program is executed, and "
    'what it prints is shown to you after "Code execution result: ". Put a program into a fenced block,\n'
    "```python\nprint(1 + 1)\n```\n"
    "and print what you want to see. Each program starts in a fresh interpreter and knows nothing of earlier ones. "
    "When you know the answer, either call final_answer(...) inside a program or write it as \\boxed{...}."
)


class SimpleTIRSettings(BaseModel):
    """How a SimpleTIR episode runs. ``instruction`` stands before the problem, separated by an empty line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_turns: int = Field(default=10, ge=1, description="turns of the model in one episode")
    instruction: str = Field(default=INSTRUCTION, description='text before the problem; "" for none')
    execution_timeout: float = Field(default=10.0, gt=0, description="seconds one program may run")
    observation_limit: int = Field(default=512, ge=2, description="characters of a program's output the model is shown")
    sandbox_attempts: int = Field(default=4, ge=1, description="tries of one program when the sandbox itself fails")
    sandbox_deadline: float = Field(default=300.0, gt=0, description="seconds for all tries, waiting included")
    sandbox_retry_wait: float = Field(default=0.2, ge=0, description="seconds before the second try; grows, jittered")


class GymnasiumSettings(BaseModel):
    """How plain gymnasium text environments are run. ``kwargs`` go to the environment's constructor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kwargs: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    threads: int = Field(default=32, ge=1, description="blocking calls (reset, step, close) that may run at once")
    call_deadline: float = Field(default=300.0, gt=0, description="seconds one blocking call may take")
