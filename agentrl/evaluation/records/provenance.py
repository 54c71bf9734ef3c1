"""Provenance of results: everything that can change them, for the record and for comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import agentrl
from agentrl.evaluation.data.problem_sets import ProblemSet
from agentrl.evaluation.formats import JSONObject, Provenance
from agentrl.evaluation.settings import REQUEST_FIELDS, EndpointSettings
from agentrl_envs.settings import ChatSettings, ReasoningSettings, SimpleTIRSettings

if TYPE_CHECKING:
    from agentrl.evaluation.settings import EvaluationSections

_PACKAGES = (
    "agentrl-sandbox",
    "torch",
    "transformers",
    "tokenizers",
    "math-verify",
    "latex2sympy2_extended",
    "sympy",
    "httpx",
)
_SANDBOX = ("url", "timeout", "memory_mb", "max_processes", "scratch_mb", "output_limit", "flood_limit")


def provenance(
    settings: EvaluationSections,
    sets: Sequence[ProblemSet],
    *,
    model: Mapping[str, object],
    engine: Mapping[str, object],
    environment: Sequence[str],
) -> Provenance:
    """Build a JSON-serializable record. ``settings`` have evaluation's limits; ``environment`` is its description."""
    evaluation = settings.evaluation
    return {
        "model": dict(model),
        "engine": dict(engine),
        "benchmarks": {one.name: one.record() for one in sets},
        "protocol": {
            "env": settings.env,
            **settings.environment.model_dump(mode="json"),
            **_instruction(settings),
            "prompt": _prompt_format(settings),
        },
        "sampling": {
            "n": evaluation.samples,
            "temperature": evaluation.temperature,
            "top_p": evaluation.top_p,
            **_request(evaluation.endpoint),
        },
        "limits": {
            "max_turn_tokens": settings.rollout.max_turn_tokens,
            "max_response_tokens": settings.rollout.max_response_tokens,
            "program_seconds": settings.rollout.program_seconds,
        },
        "sandbox": {name: getattr(settings.sandbox, name) for name in _SANDBOX},
        "grader": grader_record(settings),
        "environment": {line.partition(":")[0]: line.partition(":")[2].strip() for line in environment},
        "packages": {"agentrl": agentrl.__version__} | {name: _version(name) for name in _PACKAGES},
        "seed": settings.seed,
    }


def grader_record(settings: EvaluationSections) -> JSONObject:
    """Return the grader's version and the settings that can change a verdict, without the number of processes."""
    limits = settings.grader.model_dump(mode="json", include={"deadline", "memory_mb", "max_length", "max_depth"})
    return {"math_verify": _version("math-verify"), **limits}


def _instruction(settings: EvaluationSections) -> dict[str, str]:
    """The instruction in the prompt, unless the protocol has none."""
    environment = settings.environment
    if isinstance(environment, SimpleTIRSettings | ReasoningSettings):
        return {"instruction": environment.shown_instruction}
    return {}


def _request(endpoint: EndpointSettings) -> JSONObject:
    """Request settings of the endpoint that differ from their defaults.

    Defaults are left out, so that evaluations that were started before a setting existed can be continued.
    """
    return endpoint.model_dump(mode="json", include=set(REQUEST_FIELDS), exclude_defaults=True)


def _prompt_format(settings: EvaluationSections) -> str:
    environment = settings.environment
    if isinstance(environment, SimpleTIRSettings) and environment.protocol == "hermes" and environment.chat != "never":
        return "chat template with tools"
    if isinstance(environment, ChatSettings) and environment.chat == "always":
        return "chat template"
    endpoint = settings.evaluation.endpoint
    if endpoint.url is not None:
        return "chat messages" if endpoint.api == "chat" else "plain text"
    return "plain text"


def chosen_engine(settings: EvaluationSections) -> JSONObject:
    """Return the engine in ``settings``, with everything that the settings determine."""
    endpoint = settings.evaluation.endpoint
    if endpoint.url is not None:
        return {"name": "endpoint", "url": endpoint.url, "api": endpoint.api}
    return {"name": settings.rollout.engine, "dtype": settings.model.dtype}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
