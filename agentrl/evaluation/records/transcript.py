"""Record of a rollout in an evaluation: the conversation as text, how it ended, and the grader's verdict.

>>> turns = (Turn(origin="model", text="So \\\\boxed{5}.", tokens=6),)
>>> one = Transcript(benchmark="toy", problem="toy-0", sample=0, turns=turns, ended=Ended.ANSWERED,
...                  verdict=Verdict.CORRECT, answer="5", reward=1.0, prompt_tokens=9)
>>> one.correct, one.no_data, one.model_turns, one.tokens
(True, False, 1, 6)
>>> Transcript.from_record(one.to_record()) == one
True
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from agentrl.evaluation.formats import JSONObject
from agentrl.evaluation.records.characters import whole_characters
from agentrl_envs.types import Ended, Problem, ToolCall, Verdict

if TYPE_CHECKING:
    from agentrl.trajectory import Trajectory

KINDS = {
    "correct": "correct",
    "incorrect": "incorrect",
    "no_answer": "no answer",
    "unreadable": "unreadable",
    "grader_timeout": "grader timeout",
    "refused": "refused",
    "truncated": "truncated",
    "void": "void turn",
    "no_data": "excluded",
}
"""Stored name -> displayed name. All kinds except the first and the last count as wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One rollout to sample: number ``number`` of a problem of a benchmark. ``attempt`` counts retries from 0."""

    benchmark: str
    problem: Problem
    number: int
    attempt: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.benchmark, self.problem.id, self.number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of the model, or one text that was added to its context. ``tokens`` are counted by the engine.

    ``reasoning`` is the model's reasoning if an endpoint reports it separately. It is not added to the context.
    """

    origin: Literal["model", "observation"]
    text: str
    tokens: int
    reasoning: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """One finished rollout. ``problem`` is the problem's id; statements and reference answers are stored once per run.

    ``refused``: the endpoint's content filter ended a turn, or the model refused in words.
    """

    benchmark: str
    problem: str
    sample: int
    turns: tuple[Turn, ...]
    ended: Ended
    prompt_tokens: int
    attempt: int = 0
    verdict: Verdict | None = None
    answer: str | None = None
    reward: float = 0.0
    tool_calls: tuple[ToolCall, ...] = ()
    seconds: float = 0.0
    failure: str | None = None
    refused: bool = False

    @classmethod
    def of(cls, sample: Sample, trajectory: Trajectory, *, failure: str | None = None) -> Transcript:
        """Build the transcript of a token trajectory."""
        return cls(
            benchmark=sample.benchmark,
            problem=sample.problem.id,
            sample=sample.number,
            attempt=sample.attempt,
            turns=tuple(
                Turn(origin=part.origin, text=part.text, tokens=len(part.token_ids)) for part in trajectory.segments
            ),
            ended=trajectory.ended,
            prompt_tokens=len(trajectory.prompt_ids),
            verdict=trajectory.verdict,
            answer=trajectory.answer,
            reward=trajectory.reward,
            tool_calls=trajectory.tool_calls,
            seconds=trajectory.seconds,
            failure=failure,
        )

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.benchmark, self.problem, self.sample)

    @property
    def correct(self) -> bool:
        """True for a correct verdict or, if the environment does not grade answers, for a reward of at least 1."""
        return self.reward >= 1.0 if self.verdict is None else self.verdict is Verdict.CORRECT

    @property
    def no_data(self) -> bool:
        """True if it failed for reasons outside the policy. Such rollouts are counted and excluded from averages."""
        return self.ended.is_no_data or (self.verdict is not None and self.verdict.is_no_data)

    @property
    def kind(self) -> str:
        """The most informative of ``KINDS``. A verdict takes precedence over how the conversation ended."""
        if self.no_data:
            return "no_data"
        if self.correct:
            return "correct"
        if self.verdict is Verdict.ANSWER_TIMEOUT:
            return "grader_timeout"
        if self.verdict is Verdict.UNPARSABLE_ANSWER:
            return "unreadable"
        if self.refused:
            return "refused"
        if self.ended.is_truncation:
            return "truncated"
        if self.ended is Ended.VOID_TURN:
            return "void"
        ended_it = self.ended is Ended.ANSWERED and self.verdict is not Verdict.NO_ANSWER
        return "incorrect" if self.answer is not None or ended_it else "no_answer"

    @property
    def outcomes(self) -> tuple[str, ...]:
        return tuple(call.outcome for call in self.tool_calls)

    @property
    def model_turns(self) -> int:
        return sum(turn.origin == "model" for turn in self.turns)

    @property
    def model_tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns if turn.origin == "model")

    @property
    def tokens(self) -> int:
        """Tokens of the whole response, including observations."""
        return sum(turn.tokens for turn in self.turns)

    def to_record(self) -> JSONObject:
        return asdict(self)

    @classmethod
    def from_record(cls, record: JSONObject) -> Transcript:
        """Invert :meth:`to_record`, also after JSON. Raises KeyError, TypeError or ValueError for an invalid record."""
        return cls(
            **{
                **record,
                "turns": tuple(_turn(turn) for turn in record["turns"]),
                "answer": None if record["answer"] is None else whole_characters(record["answer"]),
                "ended": Ended(record["ended"]),
                "verdict": None if record["verdict"] is None else Verdict(record["verdict"]),
                "tool_calls": tuple(ToolCall(**call) for call in record["tool_calls"]),
            }
        )


def _turn(record: JSONObject) -> Turn:
    whole: JSONObject = {name: whole_characters(record[name]) for name in ("text", "reasoning") if name in record}
    return Turn(**(record | whole))
