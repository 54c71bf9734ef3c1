"""Settings of the gateway that agent programs talk to."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

AGENT, WORKER, VERIFIERS = "agent:", "worker:", "verifiers:"
"""Before a function or a command for each rollout, a command for all of them, and a task set of verifiers."""

KEY_VARIABLE = "AGENTRL_GATEWAY_KEY"
"""Environment variable with the key of the gateway itself; without it the key is a new one for each run."""


def is_agent(env: str) -> bool:
    """Whether an environment's name stands for a program that plays through the gateway."""
    return env.startswith((AGENT, WORKER, VERIFIERS))


class AgentGatewaySettings(BaseModel):
    """The OpenAI-compatible server of agent programs and the limits of one rollout behind it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", min_length=1, description="address that the server listens on and agents are given")
    port: int = Field(0, ge=0, le=65535, description="port of the server; 0: a free one")
    model: str = Field("policy", min_length=1, description="name of the model that agents must ask for")
    history: Literal["keep", "template"] = Field(
        "keep",
        description="what the model sees of its own earlier replies. keep: the tokens it sampled; template: what the "
        "chat template makes of them, such as replies without thoughts, which starts a new sequence where they differ",
    )
    max_generations: int = Field(64, ge=1, description="most generations in one rollout, those of sub-agents included")
    deadline: float = Field(900.0, gt=0, description="seconds an agent may take for one problem")
    max_request_bytes: int = Field(4 * 2**20, ge=1024, description="longest body of a request, in bytes")
    chat_template: str | None = Field(
        None, min_length=1, description="file with a Jinja chat template; null: the model's own, or a plain one"
    )
    template_options: dict[str, object] = Field({}, description="variables of the chat template")
    threads: int = Field(256, ge=1, description="most agents that run at once as blocking functions")
