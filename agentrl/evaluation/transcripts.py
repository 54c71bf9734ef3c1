"""Transcripts: records of the rollouts of an evaluation, and the file that contains them.

A transcript contains a conversation as text, its ending, and the grader's verdict:

>>> turns = (Turn(origin="model", text="So \\boxed{5}.", tokens=6),)
>>> one = Transcript(benchmark="toy", problem="toy-0", sample=0, turns=turns, ended=Ended.ANSWERED,
...                  verdict=Verdict.CORRECT, answer="5", reward=1.0, prompt_tokens=9)
>>> one.correct, one.is_excluded, one.model_turns, one.tokens
(True, False, 1, 6)
>>> Transcript.from_record(one.to_record()) == one
True

In the file, every rollout is a separate zstd frame with a checksum, written by one system call when the rollout ends.
SIGKILL loses only the rollouts in flight. A power failure may also lose rollouts of the last few seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import zstandard

from agentrl.errors import WorldError
from agentrl.evaluation.formats import JSONObject
from agentrl.telemetry.files import encode_json_line, os_errors_as_world_errors
from agentrl_envs.types import Ended, Problem, ToolCall, Verdict

if TYPE_CHECKING:
    from agentrl.trajectory import Trajectory


_LOWEST_BYTE, _HIGHEST_BYTE = 0xDC80, 0xDCFF  # Python's "surrogateescape" codes for bytes that are not UTF-8


def replace_lone_surrogates(text: str) -> str:
    """Join surrogate pairs in ``text`` and replace lone surrogates, so that UTF-8 can encode the result.

    A JSON escape may be half a character (``\\\\ud83d``) whose other half arrives in the next piece or never. A UTF-8
    byte that is alone in its piece must be decoded with ``surrogateescape``.

    >>> replace_lone_surrogates("\\ud83d" + "\\ude00"), replace_lone_surrogates("a\\ud83d b")
    ('😀', 'a\ufffd b')
    >>> halves = [part.decode(errors="surrogateescape") for part in ("é".encode()[:1], "é".encode()[1:])]
    >>> replace_lone_surrogates("".join(halves))
    'é'
    """
    if text.isascii():
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    known = "".join(
        "\ufffd" if 0xD800 <= ord(one) <= 0xDFFF and not _LOWEST_BYTE <= ord(one) <= _HIGHEST_BYTE else one
        for one in joined
    )
    return known.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


RESULT_KINDS = {
    "correct": "correct",
    "incorrect": "incorrect",
    "no_answer": "no answer",
    "unreadable": "unreadable",
    "grader_timeout": "grader timeout",
    "refused": "refused",
    "truncated": "truncated",
    "void": "void turn",
    "excluded": "excluded",
}
"""Displayed names of the kinds, by stored name. All kinds except the first and the last count as wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One rollout to sample: the problem, the sample number, and the attempt (0 for the first)."""

    benchmark: str
    problem: Problem
    number: int
    attempt: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.benchmark, self.problem.id, self.number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of the model, or one observation. ``tokens`` is the engine's count.

    ``reasoning`` is the model's reasoning if an endpoint reports it separately. It is not added to the context.
    """

    origin: Literal["model", "observation"]
    text: str
    tokens: int
    reasoning: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transcript:
    """Record of one finished rollout.

    ``problem`` is the problem's id. Statements and reference answers are stored once per evaluation. ``refused`` is
    true if a content filter ended a turn or the model refused.
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
    def from_trajectory(cls, sample: Sample, trajectory: Trajectory, *, failure: str | None = None) -> Transcript:
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
        """True for a correct verdict. Without a verdict, true for a reward of at least 1."""
        return self.reward >= 1.0 if self.verdict is None else self.verdict is Verdict.CORRECT

    @property
    def is_excluded(self) -> bool:
        """True if the rollout failed for reasons outside the policy and is excluded from averages."""
        return self.ended.is_excluded or (self.verdict is not None and self.verdict.is_excluded)

    @property
    def result_kind(self) -> str:
        """Kind of the result, one of ``RESULT_KINDS``. A verdict takes precedence over the ending."""
        if self.is_excluded:
            return "excluded"
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
        """Number of tokens of the response, including observations."""
        return sum(turn.tokens for turn in self.turns)

    def to_record(self) -> JSONObject:
        return asdict(self)

    @classmethod
    def from_record(cls, record: JSONObject) -> Transcript:
        """Build a transcript from the result of :meth:`to_record`, even after a round trip through JSON.

        Raises KeyError, TypeError or ValueError for an invalid record.
        """
        return cls(
            **{
                **record,
                "turns": tuple(_turn_from_record(turn) for turn in record["turns"]),
                "answer": None if record["answer"] is None else replace_lone_surrogates(record["answer"]),
                "ended": Ended(record["ended"]),
                "verdict": None if record["verdict"] is None else Verdict(record["verdict"]),
                "tool_calls": tuple(ToolCall(**call) for call in record["tool_calls"]),
            }
        )


def _turn_from_record(record: JSONObject) -> Turn:
    whole: JSONObject = {
        name: replace_lone_surrogates(record[name]) for name in ("text", "reasoning") if name in record
    }
    return Turn(**(record | whole))


_CHUNK = 1 << 20
_SYNC_EVERY = 5.0  # seconds between two syncs to disk


class RolloutLog:
    """Appends rollouts to a file. The constructor removes an incomplete last frame.

    The directory's lock excludes other writers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repaired = remove_incomplete_frame(path)
        with os_errors_as_world_errors(path, "open"):
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._compressor = zstandard.ZstdCompressor(level=6, write_checksum=True)
        self._last_sync = time.monotonic()

    def append(self, transcript: Transcript) -> None:
        """Write one rollout. Raises WorldError if the write fails, after removing the incomplete frame."""
        frame = self._compressor.compress(encode_json_line(transcript.to_record()))
        with os_errors_as_world_errors(self.path, "append to"):
            end = os.fstat(self._file).st_size
            try:
                written = os.write(self._file, frame)
                if written < len(frame):
                    raise OSError(f"only {written} of {len(frame)} bytes were written: the disk is full")
            except OSError:
                os.ftruncate(self._file, end)
                raise
            if time.monotonic() - self._last_sync > _SYNC_EVERY:
                self._sync()

    def close(self) -> None:
        """Sync the file to disk and close it. May be called more than once."""
        if self._file >= 0:
            with os_errors_as_world_errors(self.path, "close"):
                self._sync()
                os.close(self._file)
            self._file = -1

    def _sync(self) -> None:
        os.fsync(self._file)
        self._last_sync = time.monotonic()

    def __enter__(self) -> RolloutLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_rollouts(path: Path) -> Iterator[Transcript]:
    """Yield the rollouts in the order written. Holds one rollout in memory and omits an incomplete last frame.

    Raises WorldError with the file and position if any other frame is damaged.
    """
    if not path.exists():
        return
    for position, _, frame in _decompress_complete_frames(path):
        try:
            yield Transcript.from_record(json.loads(frame))
        except (ValueError, KeyError, TypeError) as error:
            raise WorldError(f"{path} is damaged at byte {position}: not a rollout ({error})") from error


def remove_incomplete_frame(path: Path) -> int:
    """Remove an incomplete last frame. Returns the number of removed bytes."""
    if not path.exists():
        return 0
    with os_errors_as_world_errors(path, "repair"):
        end = max((end for _, end, _ in _decompress_complete_frames(path)), default=0)
        size = path.stat().st_size
        if end < size:
            with path.open("rb+") as file:
                file.truncate(end)
                os.fsync(file.fileno())
        return size - end


def _decompress_complete_frames(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield the start, end and content of each complete frame."""
    unpacker = zstandard.ZstdDecompressor()
    with os_errors_as_world_errors(path, "read"), path.open("rb") as file:
        begin = position = 0
        pending = b""
        frame, parts = unpacker.decompressobj(), list[bytes]()
        while True:
            data = pending or file.read(_CHUNK)
            if not data:
                return
            try:
                parts.append(frame.decompress(data))
            except zstandard.ZstdError as error:
                raise WorldError(f"{path} is damaged at byte {begin}: {error}") from error
            pending = frame.unused_data if frame.eof else b""
            position += len(data) - len(pending)
            if frame.eof:
                yield begin, position, b"".join(parts)
                begin, frame, parts = position, unpacker.decompressobj(), []
