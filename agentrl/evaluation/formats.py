"""Types of the JSON files of an evaluation: ``provenance.json``, ``results.json`` and ``regraded.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from agentrl.telemetry.records import ScoreRecord
from agentrl_envs.types import ChatMessage

JSONObject = dict[str, Any]
"""An object whose keys depend on the settings, the engine or the environment."""


class ProblemSetRecord(TypedDict):
    """Identity of a set of problems."""

    revision: str
    sha256: str
    problems: int


class Provenance(TypedDict):
    """Content of ``provenance.json``: everything needed to repeat the evaluation."""

    model: JSONObject
    engine: JSONObject
    benchmarks: dict[str, ProblemSetRecord]
    protocol: JSONObject
    sampling: JSONObject
    limits: JSONObject
    sandbox: JSONObject
    grader: JSONObject
    environment: dict[str, str]
    packages: dict[str, str]
    seed: int


class PassRecord(TypedDict):
    """pass@k over the ``problems`` that have at least k samples."""

    value: float
    problems: int


class ToolCallsRecord(TypedDict):
    """Average tool calls per rollout, and the number of calls with each outcome."""

    mean: float
    outcomes: dict[str, int]


class TokensRecord(TypedDict):
    """Average tokens per rollout, and the total number of model tokens."""

    prompt_mean: float
    model_mean: float
    response_mean: float
    model_total: int


class RolloutStatistics(TypedDict):
    """Statistics of the rollouts that are not excluded."""

    ended: dict[str, int]
    verdicts: dict[str, int]
    turns: float
    tool_calls: ToolCallsRecord
    truncated: dict[str, float]
    void_share: float
    tokens: TokensRecord


class SecondsRecord(TypedDict):
    """Durations of rollouts in seconds."""

    mean: float
    max: float


class ProblemCounts(TypedDict):
    """Number of a problem's samples that are not excluded, and number of correct samples."""

    samples: int
    correct: int


_Pass = TypedDict("_Pass", {"pass": dict[str, PassRecord | None]})  # ``pass`` is a keyword


class BenchmarkResults(ProblemSetRecord, RolloutStatistics, _Pass):
    """Results of one benchmark in ``results.json``."""

    avg: ScoreRecord
    maj: float | None
    families: dict[str, float]
    kinds: dict[str, int]
    excluded: dict[str, int]
    rollouts: int
    seconds: SecondsRecord
    per_problem: dict[str, ProblemCounts]


class Results(TypedDict):
    """Content of ``results.json``."""

    format: int
    agentrl: str
    provenance: Provenance
    benchmarks: dict[str, BenchmarkResults]


class RegradedRollout(TypedDict):
    """A rollout whose answer or verdict changed when it was regraded."""

    benchmark: str
    problem: str
    sample: int
    answer_before: str | None
    answer: str | None
    gold: str | None
    before: str
    after: str


class RegradedResults(Results):
    """Content of ``regraded.json``."""

    changed: list[RegradedRollout]
    changed_answers: list[RegradedRollout]
    extracted: bool
    grader: JSONObject | str


class ProblemRow(TypedDict):
    """A line of ``problems.jsonl``."""

    benchmark: str
    falsified: bool
    id: str
    statement: str
    answer: str | None
    source: str
    family: str
    setup: str
    info: Mapping[str, object]
    messages: Sequence[ChatMessage]
    prompt: str
