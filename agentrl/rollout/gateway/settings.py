"""Settings of the gateway for agent programs."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.problems.settings import HARBOR
from agentrl_envs.types import Problem

AGENT, WORKER, VERIFIERS = "agent:", "worker:", "verifiers:"
"""Prefixes of environments: a function or command for each rollout, a worker, and a task set of verifiers."""

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""Matches the name of a function, ``module:function``. Any other text after ``agent:`` is a command."""

KEY_VARIABLE = "AGENTRL_GATEWAY_KEY"
"""Environment variable with the gateway's key. If it is not set, each run generates a new key."""


def is_agent_program(env: str) -> bool:
    """Return True if an environment's name refers to a program that plays through the gateway.

    >>> is_agent_program("harbor:tasks"), is_agent_program("harbor:tasks:python agent.py")
    (False, True)
    """
    return env.startswith((AGENT, WORKER, VERIFIERS)) or (env.startswith(HARBOR) and env.count(":") > 1)


def runs_in_separate_process(env: str) -> bool:
    """Return True if an environment is a command or a worker, which runs outside the trainer's process."""
    return env.startswith(WORKER) or (env.startswith(AGENT) and not FUNCTION.fullmatch(env.removeprefix(AGENT).strip()))


class AgentGatewaySettings(BaseModel):
    """Server of OpenAI's and Anthropic's APIs for agent programs, and the limits of their rollouts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field(
        "127.0.0.1", min_length=1, description="address on which the server listens, and to which agents connect"
    )
    port: int = Field(0, ge=0, le=65535, description="port of the server; 0: any free port")
    model: str = Field("policy", min_length=1, description="model name that agents must request")
    history: Literal["keep", "template"] = Field(
        "keep",
        description="form in which the model sees its earlier replies. keep: as the sampled tokens; template: as "
        "rendered by the chat template, for example without reasoning. If the rendered tokens differ from the "
        "sampled tokens, a new sequence starts",
    )
    max_generations: int = Field(
        64, ge=1, description="maximum number of generations in one rollout, including those of sub-agents"
    )
    deadline: float = Field(900.0, gt=0, description="seconds that an agent may take for one problem")
    max_request_bytes: int = Field(4 * 2**20, ge=1024, description="maximum size of a request body in bytes")
    max_connections: int = Field(
        2048, ge=1, description="maximum number of open connections; further connections are closed"
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="file with a Jinja chat template; null: the model's chat template, or plain text if it has none",
    )
    template_options: dict[str, object] = Field({}, description="variables that are passed to the chat template")
    agent_columns: list[str] | None = Field(
        [],
        description="columns of a problem that commands and workers receive in addition to id, statement and "
        "messages, for example answer, or a column with the path of a database; null: all columns. Functions always "
        "receive the whole problem",
    )
    agent_rewards: bool = Field(
        False,
        description="true: commands and workers report the rewards of rollouts; false: reward.functions compute them "
        "in the trainer",
    )
    agent_environment: list[str] = Field(
        [],
        description="environment variables that commands and workers inherit in addition to common ones (PATH, HOME, "
        "LANG, PYTHONPATH and similar), for example the API key of a service",
    )
    threads: int = Field(256, ge=1, description="maximum number of blocking agent functions that run concurrently")

    def visible_columns(self, problem: Problem) -> dict[str, object]:
        """Return the part of a problem that programs outside the trainer receive.

        >>> problem = Problem(id="0", statement="2 + 3?", answer="5", source="toy", info={"db": "a.sqlite", "key": "5"})
        >>> AgentGatewaySettings(agent_columns=["db"]).visible_columns(problem)
        {'id': '0', 'statement': '2 + 3?', 'messages': [], 'info': {'db': 'a.sqlite'}}
        """
        whole = asdict(problem)
        if self.agent_columns is None:
            return whole
        fields = {name: whole[name] for name in whole if name in ("id", "statement", "messages", *self.agent_columns)}
        return {**fields, "info": {name: value for name, value in problem.info.items() if name in self.agent_columns}}
