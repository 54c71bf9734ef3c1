"""Messages between gateway and runners. The gateway validates all messages from runners with these models.

    gateway -> runner    {"op": "execute", "id", ...} program stdin contents...
                       {"op": "open_session", "id"} · {"op": "fork_session" | "close_session", "id", "session"}
                       {"op": "cancel", "id"}
    runner -> gateway    {"op": "hello", ...Hello}, once, first · {"op": "leaving"}: send nothing more
                       {"op": "execution", "id", ...} stdout stderr contents... · {"op": "session", "id", "session"}
                       {"op": "refused", "id", "kind", "why"}

Every request, including a cancelled request, is answered exactly once.
"""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentrl_sandbox.call import CallHeader, ExecutionHeader, Frame, FrameError, read_execution
from agentrl_sandbox.settings import LIMITS, SandboxSettings
from agentrl_sandbox.types import (
    Execution,
    Isolation,
    Outcome,
    SandboxError,
    SessionForkError,
    SessionLimitError,
    StartError,
    UnknownSessionError,
)

MAX_FRAME = 64 << 20
"""Maximum size of a frame in bytes, in both directions."""

MAX_ANSWER = MAX_FRAME // 2
"""Maximum number of bytes of output and files that a runner sends for one program."""

REFUSALS: dict[str, type[SandboxError]] = {
    "unknown_session": UnknownSessionError,
    "session_limit": SessionLimitError,
    "session_fork": SessionForkError,
}
"""Errors for the kinds of refusal that a caller can handle."""

_TOLD = ("timeout", *LIMITS)  # the settings that a runner announces
_LONGEST_ENCODING = 3  # bytes of U+FFFD, which replaces an invalid byte
_NOTES = 1024  # maximum bytes of notes about dropped output
_Identifier = Annotated[int, Field(ge=1)]
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Why = Annotated[str, Field(max_length=65_536)]


class RunnerRequest(CallHeader, total=False):
    """Header of a request to a runner."""

    op: str
    id: int


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Hello(_Message):
    """A runner's first message: its capacity, isolation and limits."""

    op: Literal["hello"]
    workers: Annotated[int, Field(ge=1, le=4096)]
    mode: Annotated[str, Field(max_length=64)]
    layers: Annotated[dict[_Name, _Why | None], Field(max_length=64)]
    limits: Annotated[dict[_Name, float], Field(max_length=64)]

    @property
    def isolation(self) -> Isolation:
        return Isolation(layers=self.layers, mode=self.mode)


class Leaving(_Message):
    """The runner is stopping: it finishes running requests and accepts no new requests."""

    op: Literal["leaving"]


class Ran(_Message):
    """Result of a program."""

    op: Literal["execution"]
    id: _Identifier
    outcome: Annotated[Outcome, Field(strict=False)]
    exit_code: Annotated[int, Field(ge=-64, le=255)] | None
    seconds: Annotated[float, Field(ge=0, le=1e6)]
    truncated: bool
    files: Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=4096)]
    session_ended: bool


class SessionMessage(_Message):
    """Name of a session that was opened, forked or closed."""

    op: Literal["session"]
    id: _Identifier
    session: _Name


class RefusedMessage(_Message):
    """Reason for a refused request."""

    op: Literal["refused"]
    id: _Identifier
    kind: Literal["unknown_session", "session_limit", "session_fork", "bad_call", "cancelled", "failed"]
    why: _Why


Answer = Execution | SessionMessage | RefusedMessage

RunnerMessage = Hello | Leaving | Ran | SessionMessage | RefusedMessage
_MESSAGE: TypeAdapter[RunnerMessage] = TypeAdapter(Annotated[RunnerMessage, Field(discriminator="op")])


def check_answers_fit(settings: SandboxSettings) -> None:
    """Check that every possible answer fits into a message. Larger answers would count as sandbox failures.

    Raises StartError if the limits allow larger answers.
    """
    largest = settings.fetch_limit + 2 * _LONGEST_ENCODING * settings.output_limit + _NOTES
    if largest > MAX_ANSWER:
        raise StartError(
            f"fetch_limit={settings.fetch_limit} and output_limit={settings.output_limit} allow answers of {largest} "
            f"bytes (an invalid byte expands to {_LONGEST_ENCODING} bytes), but the maximum is {MAX_ANSWER}: lower one "
            "of the limits"
        )


def hello(settings: SandboxSettings, isolation: Isolation) -> dict[str, object]:
    """Return the header of a runner's first frame."""
    return {
        "op": "hello",
        "workers": settings.concurrency,
        "mode": isolation.mode,
        "layers": dict(isolation.layers),
        "limits": {name: float(getattr(settings, name)) for name in _TOLD},
    }


def read(frame: Frame[dict[str, object]]) -> tuple[RunnerMessage, Execution | None]:
    """Parse a runner's message and its execution, or None. Raises FrameError if the message is invalid."""
    header, blobs = frame
    try:
        message = _MESSAGE.validate_python(header)
    except ValidationError as error:
        raise FrameError(f"an invalid message: {error.errors()[0]['msg']}") from error
    if isinstance(message, Ran):
        return message, _execution(message, blobs)
    if blobs:
        raise FrameError("unexpected bytes after a header")
    return message, None


def _execution(message: Ran, blobs: list[bytes]) -> Execution:
    if len(blobs) != 2 + len(message.files) or len(set(message.files)) != len(message.files):
        raise FrameError("the size of an execution's payload does not match its header")
    if (message.exit_code is None) != (message.outcome is Outcome.INFRASTRUCTURE_FAILURE):
        raise FrameError("an execution's exit code does not fit its outcome")
    return read_execution(cast(ExecutionHeader, message.model_dump()), blobs)
