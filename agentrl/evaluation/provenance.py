"""Provenance of results: everything that can affect them, and the differences between two provenances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

import agentrl
from agentrl.evaluation.benchmarks import ProblemSet
from agentrl.evaluation.formats import JSONObject, Provenance
from agentrl.evaluation.settings import REQUEST_FIELDS, EvaluationSections
from agentrl.telemetry.records import dotted_keys
from agentrl_envs.settings import ChatSettings, ReasoningSettings, SimpleTIRSettings
from agentrl_sandbox.client import PROGRAM_LIMITS

COMPARED_SECTIONS = (
    "model.",
    "seed",
    "packages.",
    "sampling.n",
    "benchmarks.",
    "engine.",
    "environment.sandbox",
    "sandbox.url",
)
"""Keys, or prefixes of keys, in which two comparable runs may differ. All other keys form the protocol."""


def list_differences(
    first: Mapping[str, object], second: Mapping[str, object], *, ignored_keys: Sequence[str] = ()
) -> list[tuple[str, object, object]]:
    """List every difference as (dotted key, first value, second value). ``ignored_keys`` may be prefixes.

    Empty mappings are ignored: if only one side has content under a key, each key of this content is listed.
    """
    before, after = ({key: value for key, value in dotted_keys(one).items() if value != {}} for one in (first, second))
    return [
        (key, before.get(key, "(absent)"), after.get(key, "(absent)"))
        for key in dict.fromkeys([*before, *after])
        if before.get(key, "(absent)") != after.get(key, "(absent)")
        and not any(_matches_key(key, name) for name in ignored_keys)
    ]


def _matches_key(key: str, name: str) -> bool:
    return key == name or (name.endswith(".") and key.startswith(name))


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


def build_provenance(
    settings: EvaluationSections,
    sets: Sequence[ProblemSet],
    *,
    model: Mapping[str, object],
    engine: Mapping[str, object],
    environment: Sequence[str],
) -> Provenance:
    """Build the provenance of an evaluation. ``environment`` is the output of ``Environment.describe``.

    ``settings`` must contain the limits of evaluation. The record is JSON-serializable.
    """
    evaluation, section = settings.evaluation, settings.environment
    instruction = {}
    if isinstance(section, SimpleTIRSettings | ReasoningSettings):
        instruction = {"instruction": section.effective_instruction}
    return {
        "model": dict(model),
        "engine": dict(engine),
        "benchmarks": {one.name: one.record() for one in sets},
        "protocol": {
            "env": settings.env,
            **section.model_dump(mode="json"),
            **instruction,
            "prompt": _prompt_format(settings),
        },
        "sampling": {
            "n": evaluation.samples,
            "temperature": evaluation.temperature,
            "top_p": evaluation.top_p,
            # Defaults are left out, so that an evaluation can be continued after a new setting is introduced.
            **evaluation.endpoint.model_dump(mode="json", include=set(REQUEST_FIELDS), exclude_defaults=True),
        },
        "limits": {
            "max_turn_tokens": settings.rollout.max_turn_tokens,
            "max_response_tokens": settings.rollout.max_response_tokens,
            "program_seconds": settings.rollout.program_seconds,
        },
        "sandbox": {name: getattr(settings.sandbox, name) for name in ("url", "timeout", *PROGRAM_LIMITS)},
        "grader": build_grader_record(settings),
        "environment": {line.partition(":")[0]: line.partition(":")[2].strip() for line in environment},
        "packages": {"agentrl": agentrl.__version__} | {name: _version(name) for name in _PACKAGES},
        "seed": settings.seed,
    }


def build_grader_record(settings: EvaluationSections) -> JSONObject:
    """Return the grader's version and the settings that can change a verdict."""
    limits = settings.grader.model_dump(mode="json", include={"deadline", "memory_mb", "max_length", "max_depth"})
    return {"math_verify": _version("math-verify"), **limits}


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


def build_configured_engine_record(settings: EvaluationSections) -> JSONObject:
    """Return the part of the engine's record that ``settings`` determine."""
    endpoint = settings.evaluation.endpoint
    if endpoint.url is not None:
        return {"name": "endpoint", "url": endpoint.url, "api": endpoint.api}
    return {"name": settings.rollout.engine, "dtype": settings.model.dtype}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
