"""Settings and presets of evaluation, and conversion of ``agentrl eval`` options. Imports no heavy library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.errors import SettingsError
from agentrl.problems.settings import DataSettings
from agentrl.rollout.settings import EngineRelatedSettings, EnvironmentRelatedSettings
from agentrl.telemetry.settings import TelemetrySettings
from agentrl_envs.episode import Environment
from agentrl_envs.registry import did_you_mean
from agentrl_envs.settings import SimpleTIRSettings

if TYPE_CHECKING:
    from agentrl.rollout.settings import RolloutSettings


REQUEST_FIELDS = ("system_prompt", "top_k", "min_p", "limit_field", "extra_body")
"""Settings that change requests to an endpoint, in addition to the sampling settings of every engine."""

_RESERVED_FIELDS = frozenset(
    {"model", "messages", "prompt", "stream", "stream_options", "n", "stop", "seed", "temperature", "top_p"}
    | {"top_k", "min_p", "max_tokens", "max_completion_tokens"}
)


class EndpointSettings(BaseModel):
    """Settings of an OpenAI-compatible endpoint. Its key is read from an environment variable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = Field(
        None,
        pattern=r"^https?://[^\s/?#@]+(/[^\s?#]*)?$",
        description="base URL, for example http://localhost:8000/v1; null: sample with rollout.engine instead",
    )
    model: str | None = Field(
        None, min_length=1, description="model name at the endpoint; null: the only model that it serves"
    )
    api: Literal["chat", "completions"] = Field(
        "chat",
        description="chat: turns and observations are sent as messages and the endpoint applies its chat template; "
        "completions: the conversation is sent as one growing text, as base models require",
    )
    key_variable: str = Field("OPENAI_API_KEY", min_length=1, description="environment variable that holds the API key")
    concurrency: int = Field(64, ge=1, description="maximum number of concurrent conversations")
    requests_per_minute: float | None = Field(None, gt=0, description="maximum request rate; null: unlimited")
    retry_deadline: float = Field(
        600.0, gt=0, description="seconds for which a request is retried while the endpoint is down or overloaded"
    )
    read_timeout: float = Field(300.0, gt=0, description="seconds without a token after which a request is retried")
    system_prompt: str | None = Field(
        None, min_length=1, description="system message sent first, with api=chat only; null: no system message"
    )
    top_k: int | None = Field(
        None, ge=1, description="number of most likely tokens to sample from; null: the endpoint's default"
    )
    min_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="minimum probability of a token, relative to the most likely one; null: the endpoint's default",
    )
    limit_field: Literal["max_tokens", "max_completion_tokens"] = Field(
        "max_tokens", description="request field for the token limit of a turn; some endpoints accept only one field"
    )
    extra_body: dict[str, object] = Field(
        {}, description="additional fields of every request, passed through unchanged"
    )

    @model_validator(mode="after")
    def _consistent(self) -> EndpointSettings:
        sent = {name for name in REQUEST_FIELDS if getattr(self, name) != type(self).model_fields[name].default}
        if self.url is None and sent:
            raise ValueError(f"{', '.join(sorted(sent))} requires an endpoint, but url is not set (--base-url)")
        if self.api == "completions" and sent & {"system_prompt", "limit_field"}:
            raise ValueError("system_prompt and limit_field=max_completion_tokens require api=chat")
        taken = sorted(_RESERVED_FIELDS & self.extra_body.keys())
        if taken:
            raise ValueError(f"extra_body must not contain {', '.join(taken)}: other settings or the protocol set them")
        return self


class EvaluationSettings(BaseModel):
    """Settings of ``agentrl eval`` and of evaluation during training. The defaults are the published values."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: int = Field(32, ge=1, description="samples per problem, the n of avg@n")
    problems: int = Field(128, ge=1, description="problems used from each source in data.eval")
    every: int = Field(0, ge=0, description="training steps between evaluations; 0: only before and after training")
    temperature: float = Field(1.0, ge=0, description="sampling temperature in evaluation; 0: greedy decoding")
    top_p: float = Field(
        0.95, gt=0, le=1, description="nucleus sampling: the cumulative probability of the tokens to sample from"
    )
    max_turns: int | None = Field(
        None, ge=1, description="maximum turns of an episode with tools in evaluation; null: environment.max_turns"
    )
    max_turn_tokens: int | None = Field(
        None, ge=1, description="maximum model tokens per turn in evaluation; null: rollout.max_turn_tokens"
    )
    max_response_tokens: int | None = Field(
        None, ge=1, description="maximum model and observation tokens in evaluation; null: rollout.max_response_tokens"
    )
    falsified: bool = Field(False, description="also run the final evaluation with falsified observations")
    endpoint: EndpointSettings = EndpointSettings()

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationSettings:
        turn, whole = self.max_turn_tokens, self.max_response_tokens
        if turn is not None and whole is not None and turn > whole:
            raise ValueError(
                f"max_turn_tokens={turn} exceeds max_response_tokens={whole}, but a turn cannot be longer than its "
                "conversation: lower max_turn_tokens"
            )
        return self


PRESETS: Mapping[str, Mapping[str, str]] = {
    # SimpleTIR's published evaluation: ten turns, 12000 tokens per turn, 36000 in total, top_p 1.
    "simpletir": {
        "evaluation.samples": "32",
        "evaluation.temperature": "1.0",
        "evaluation.top_p": "1.0",
        "evaluation.max_turns": "10",
        "evaluation.max_turn_tokens": "12000",
        "evaluation.max_response_tokens": "36000",
    },
    # The optimal-token-baseline paper (section 6, appendix F.1) reports avg@32 at temperature 1 and top_p 0.95. It
    # specifies turns and tokens for training only. The same limits are assumed for evaluation.
    "otb-paper": {
        "evaluation.samples": "32",
        "evaluation.temperature": "1.0",
        "evaluation.top_p": "0.95",
        "evaluation.max_turns": "5",
        "evaluation.max_turn_tokens": "8192",
        "evaluation.max_response_tokens": "8192",
    },
}
"""Settings of ``agentrl eval --preset NAME``. Other command-line options override them."""


class EvaluationSections(EnvironmentRelatedSettings, EngineRelatedSettings, Protocol):
    """Sections of a run's settings that an evaluation needs."""

    @property
    def data(self) -> DataSettings: ...
    @property
    def evaluation(self) -> EvaluationSettings: ...
    @property
    def telemetry(self) -> TelemetrySettings: ...
    def model_copy(self, *, update: Mapping[str, object] | None = None) -> Self:
        """Copy the settings with updated sections."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Command-line options that are not settings. Empty ``ks`` means 1, 2, 4 .. n."""

    benchmarks: tuple[str, ...] = ()
    data_dir: Path | None = None
    output: Path | None = None
    ks: tuple[int, ...] = ()


def overrides_from_options(
    *, model: str | None, base_url: str | None, preset: str | None, n: int | None, falsified: bool
) -> list[str]:
    """Convert options to ``key=value`` overrides in order of increasing precedence.

    Raises SettingsError for an unknown preset.

    >>> overrides_from_options(model="it's", base_url=None, preset=None, n=4, falsified=True)
    ["model.path='it''s'", 'evaluation.samples=4', 'evaluation.falsified=true']
    """
    overrides = []
    if preset is not None:
        if preset not in PRESETS:
            hint = did_you_mean(preset, PRESETS)
            raise SettingsError(f"unknown --preset {preset!r}; valid: {', '.join(PRESETS)}{hint}")
        overrides += [f"{key}={value}" for key, value in PRESETS[preset].items()]
    if base_url is not None:
        overrides.append(quoted_override("evaluation.endpoint.url", base_url))
    if model is not None:
        overrides.append(quoted_override("model.path" if base_url is None else "evaluation.endpoint.model", model))
    overrides += [] if n is None else [f"evaluation.samples={n}"]
    overrides += ["evaluation.falsified=true"] if falsified else []
    return overrides


def parse_integers(option: str, text: str) -> tuple[int, ...]:
    """Parse comma-separated positive integers into a sorted tuple without duplicates.

    Raises SettingsError, with the name of the ``option``, for any other text.

    >>> parse_integers("--k", "8, 1,8")
    (1, 8)
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise SettingsError(f"{option} must be positive whole numbers separated by commas; got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def quoted_override(key: str, text: str) -> str:
    """Format ``key=text`` with the text quoted for YAML."""
    escaped = text.replace("'", "''")
    return f"{key}='{escaped}'"


def evaluation_rollout_settings(settings: EvaluationSections) -> RolloutSettings:
    """Return ``settings.rollout`` with the token limits and sampling parameters of evaluation."""
    evaluation = settings.evaluation
    rollout = settings.rollout
    whole = rollout.max_response_tokens if evaluation.max_response_tokens is None else evaluation.max_response_tokens
    turn = rollout.max_turn_tokens if evaluation.max_turn_tokens is None else evaluation.max_turn_tokens
    return rollout.model_copy(
        update={
            "temperature": evaluation.temperature,
            "top_p": evaluation.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "max_response_tokens": whole,
            "max_turn_tokens": min(turn, whole),
        }
    )


def with_evaluation_limits(settings: EvaluationSections) -> EvaluationSections:
    """Return ``settings`` with the evaluation limits applied to the environment and the rollouts.

    ``evaluation.max_turns`` applies to episodes with tools. Other environments have a separate limit.
    """
    update: dict[str, object] = {"rollout": evaluation_rollout_settings(settings)}
    turns = settings.evaluation.max_turns
    if isinstance(settings.environment, SimpleTIRSettings) and turns is not None:
        update["environment"] = settings.environment.model_copy(update={"max_turns": turns})
    return settings.model_copy(update=update)


def with_evaluation_turn_limit(environment: Environment, settings: EvaluationSections) -> Environment:
    """Return an open ``environment`` with the turn limit of evaluation. The original must still be closed."""
    turns = settings.evaluation.max_turns
    return environment if turns is None else environment.with_turns(turns)
