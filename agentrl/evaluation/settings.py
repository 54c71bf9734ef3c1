"""Settings of evaluation: how many samples, sampled how, under which limits, and from which endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.problems.settings import DataSettings
from agentrl.rollout.settings import EngineSections, EnvironmentSections
from agentrl.telemetry.settings import TelemetrySettings

REQUEST_FIELDS = ("system_prompt", "top_k", "min_p", "limit_field", "extra_body")
"""What changes an endpoint's requests beside the sampling that every engine knows."""

_OWN_FIELDS = frozenset(
    {"model", "messages", "prompt", "stream", "stream_options", "n", "stop", "seed", "temperature", "top_p"}
    | {"top_k", "min_p", "max_tokens", "max_completion_tokens"}
)


class EndpointSettings(BaseModel):
    """An OpenAI-compatible endpoint that serves the model; its key stands in an environment variable, never here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = Field(
        None,
        pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$",
        description="for example http://localhost:8000/v1; none: an engine of rollout.engine samples",
    )
    model: str | None = Field(None, min_length=1, description="its name there; none: the only model that is served")
    api: Literal["chat", "completions"] = Field(
        "chat",
        description="chat: turns and observations are messages, the endpoint applies its chat template; completions: "
        "one growing text, as for a base model",
    )
    key_variable: str = Field("OPENAI_API_KEY", min_length=1, description="environment variable that holds the key")
    concurrency: int = Field(64, ge=1, description="conversations in flight")
    requests_per_minute: float | None = Field(None, gt=0, description="at most so many requests; none: no limit here")
    retry_deadline: float = Field(
        600.0, gt=0, description="seconds for which a request is retried while the endpoint is down or overloaded"
    )
    read_timeout: float = Field(300.0, gt=0, description="seconds without a token after which a request is retried")
    system_prompt: str | None = Field(
        None, min_length=1, description="of api=chat: a first message of the role system; none: there is none"
    )
    top_k: int | None = Field(None, ge=1, description="sample from so many of the likeliest tokens; none: not sent")
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="sample from tokens with this share of the likeliest one's probability; none: not sent",
    )
    limit_field: Literal["max_tokens", "max_completion_tokens"] = Field(
        "max_tokens", description="field of a request that holds the token limit of a turn"
    )
    extra_body: dict[str, Any] = Field({}, description="further fields of every request, as the endpoint knows them")

    @model_validator(mode="after")
    def _consistent(self) -> EndpointSettings:
        sent = {name for name in REQUEST_FIELDS if getattr(self, name) != type(self).model_fields[name].default}
        if self.url is None and sent:
            raise ValueError(f"{', '.join(sorted(sent))}: for an endpoint alone, and there is no url (--base-url)")
        if self.api == "completions" and sent & {"system_prompt", "limit_field"}:
            raise ValueError("system_prompt and limit_field=max_completion_tokens are for api=chat")
        taken = sorted(_OWN_FIELDS & self.extra_body.keys())
        if taken:
            raise ValueError(f"extra_body holds {', '.join(taken)}, which other settings or the protocol decide")
        return self


class EvaluationSettings(BaseModel):
    """Evaluation by ``agentrl eval`` and before, during and after training. The defaults are the published ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int = Field(32, ge=1, description="n of avg@n: samples of each problem")
    problems: int = Field(128, ge=1, description="problems taken from each source of data.eval")
    every: int = Field(0, ge=0, description="training steps between evaluations; 0: before and after only")
    temperature: float = Field(1.0, ge=0, description="of sampling in evaluation; 0: always the likeliest token")
    top_p: float = Field(
        0.95, gt=0, le=1, description="sample from the likeliest tokens that together have this probability"
    )
    max_turns: int | None = Field(
        None, ge=1, description="turns of an episode with tools in evaluation; none: environment.max_turns"
    )
    max_turn_tokens: int | None = Field(
        None, ge=1, description="model tokens in one turn of an evaluation; none: rollout.max_turn_tokens"
    )
    max_response_tokens: int | None = Field(
        None, ge=1, description="model and observation tokens in evaluation; none: rollout.max_response_tokens"
    )
    chat_template: bool = Field(
        False, description="agentrl eval gives the prompt as a user's message in the model's chat template"
    )
    falsified: bool = Field(False, description="also evaluate the end with falsified observations")
    endpoint: EndpointSettings = EndpointSettings()

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationSettings:
        turn, whole = self.max_turn_tokens, self.max_response_tokens
        if turn is not None and whole is not None and turn > whole:
            raise ValueError(
                f"max_turn_tokens={turn} is above max_response_tokens={whole}: a turn cannot be longer than its "
                "conversation"
            )
        return self


PRESETS: Mapping[str, Mapping[str, str]] = {
    # SimpleTIR's published evaluation: ten turns, 12000 tokens a turn, 36000 in all, the whole distribution.
    "simpletir": {
        "evaluation.samples": "32",
        "evaluation.temperature": "1.0",
        "evaluation.top_p": "1.0",
        "evaluation.max_turns": "10",
        "evaluation.max_turn_tokens": "12000",
        "evaluation.max_response_tokens": "36000",
    },
    # The optimal-token-baseline paper's (section 6, appendix F.1): avg@32 at temperature 1 and top_p 0.95. It names
    # turns and tokens for training alone; the evaluation is taken to have the same.
    "otb-paper": {
        "evaluation.samples": "32",
        "evaluation.temperature": "1.0",
        "evaluation.top_p": "0.95",
        "evaluation.max_turns": "5",
        "evaluation.max_turn_tokens": "8192",
        "evaluation.max_response_tokens": "8192",
    },
}
"""``agentrl eval --preset NAME``: values under what else the command line says."""


class EvaluationSections(EnvironmentSections, EngineSections, Protocol):
    """The sections of a run's settings that an evaluation needs."""

    @property
    def data(self) -> DataSettings: ...
    @property
    def evaluation(self) -> EvaluationSettings: ...
    @property
    def telemetry(self) -> TelemetrySettings: ...
    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """The settings with other sections."""
