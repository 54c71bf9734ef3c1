"""The JSON objects that an evaluation writes: ``provenance.json``, ``results.json`` and ``regraded.json``."""

from __future__ import annotations

from typing import Any, TypedDict

JSONObject = dict[str, Any]
"""An object whose keys depend on the settings, the engine or the environment."""


class SetRecord(TypedDict):
    """What identifies a set of problems."""

    revision: str
    sha256: str
    problems: int


class Provenance(TypedDict):
    """What results came from: ``agentrl.evaluation.records.provenance`` makes it."""

    model: JSONObject
    engine: JSONObject
    benchmarks: dict[str, SetRecord]
    protocol: JSONObject
    sampling: JSONObject
    limits: JSONObject
    sandbox: JSONObject
    grader: JSONObject
    environment: dict[str, str]
    packages: dict[str, str]
    seed: int


class Bounds(TypedDict):
    """A 95 % interval."""

    low: float
    high: float


class ScoreRecord(TypedDict):
    """avg@n: `agentrl.evaluation.results.scores.Score`."""

    mean: float
    this_benchmark: Bounds
    problems_like_these: Bounds
    problems: int
    samples: int
    problems_without_samples: int


class PassRecord(TypedDict):
    """pass@k over the ``problems`` that have k samples."""

    value: float
    problems: int


class ToolCallsRecord(TypedDict):
    """Tool calls of a rollout on average, and how often each outcome came."""

    mean: float
    outcomes: dict[str, int]


class TokensRecord(TypedDict):
    """Tokens of a rollout on average, and those of the model in all rollouts."""

    prompt_mean: float
    model_mean: float
    response_mean: float
    model_total: int


class Conduct(TypedDict):
    """How the rollouts that hold data went."""

    ended: dict[str, int]
    verdicts: dict[str, int]
    turns: float
    tool_calls: ToolCallsRecord
    truncated: dict[str, float]
    void_share: float
    tokens: TokensRecord


class SecondsRecord(TypedDict):
    """How long rollouts took."""

    mean: float
    max: float


class ProblemCounts(TypedDict):
    """Samples of a problem that hold data, and how many of them are correct."""

    samples: int
    correct: int


_Pass = TypedDict("_Pass", {"pass": dict[str, PassRecord | None]})  # ``pass`` is a keyword


class BenchmarkResults(SetRecord, Conduct, _Pass):
    """One benchmark's part of ``results.json``."""

    avg: ScoreRecord
    maj: float
    families: dict[str, float]
    kinds: dict[str, int]
    no_data: dict[str, int]
    rollouts: int
    seconds: SecondsRecord
    per_problem: dict[str, ProblemCounts]


class Results(TypedDict):
    """``results.json``."""

    format: int
    agentrl: str
    provenance: Provenance
    benchmarks: dict[str, BenchmarkResults]


class Change(TypedDict):
    """A rollout whose answer or verdict is another one after regrading."""

    benchmark: str
    problem: str
    sample: int
    answer_before: str | None
    answer: str | None
    gold: str
    before: str
    after: str


class Regraded(Results):
    """``regraded.json``."""

    changed: list[Change]
    changed_answers: list[Change]
    extracted: bool
    grader: JSONObject | str


class ProblemRow(TypedDict):
    """A line of ``problems.jsonl``."""

    benchmark: str
    falsified: bool
    id: str
    statement: str
    answer: str
    source: str
    family: str
    setup: str
    prompt: str
