"""JSON bodies of ``/v1``: validated requests, and answers."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from agentrl_sandbox.call import MAX_NAME_LENGTH, Call, to_base64
from agentrl_sandbox.types import Execution, Outcome


def _require_string_allowing_surrogates(value: object) -> str:
    """Return a JSON string unchanged. Lone surrogates are allowed, because the program's interpreter handles them."""
    if not isinstance(value, str):
        raise ValueError("expected a string")
    return value


class Base64Error(ValueError):
    """The content of a file is not base64 text."""


def from_base64(value: object) -> bytes:
    """Decode base64 text. Raises Base64Error if it is invalid."""
    if not isinstance(value, str):
        raise Base64Error("expected base64 text")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise Base64Error(f"not base64: {error}") from error


Text = Annotated[str, PlainValidator(_require_string_allowing_surrogates), WithJsonSchema({"type": "string"})]
Content = Annotated[
    bytes, BeforeValidator(from_base64), WithJsonSchema({"type": "string", "contentEncoding": "base64"})
]
Path = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]


class ProgramRequest(BaseModel):
    """A program to run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    program: Text = Field(description="Python source code")
    timeout: float | None = Field(
        None, gt=0, le=3600, description="seconds of wall-clock time; null: the runner's setting"
    )
    stdin: Text = Field("", description="standard input")
    request_id: str | None = Field(
        None, min_length=1, max_length=256, description="equal requests with the same id share one run"
    )
    files: dict[Path, Content] = Field(
        {}, max_length=1024, description="base64 contents by path in the scratch directory"
    )
    fetch_files: list[Path] = Field([], max_length=1024, description="paths to return after the program has ended")

    def to_call(self, session: str | None = None) -> Call:
        fields = {name: getattr(self, name) for name in ("program", "timeout", "stdin", "files")}
        return Call(**fields, session=session, fetch_files=tuple(self.fetch_files))


class ExecutionAnswer(BaseModel):
    """Result of a program."""

    outcome: Outcome
    stdout: str
    stderr: str
    exit_code: int | None = Field(
        description="exit status, or minus the signal number if a signal ended the program; null: the sandbox failed"
    )
    seconds: float
    truncated: bool = Field(description="true if the middle of an output stream was dropped")
    files: dict[str, str] = Field(description="base64 contents of the existing fetch_files")
    session_ended: bool = Field(description="true if the session ended with this program")


class SessionAnswer(BaseModel):
    """Name of a session."""

    session: str


class ErrorAnswer(BaseModel):
    """Reason for a rejected request."""

    detail: object
    error: str | None = Field(None, description="name of the Python exception class")


def execution_to_json(execution: Execution) -> dict[str, object]:
    """Convert an execution to the JSON of an ``ExecutionAnswer``."""
    fields = {name: getattr(execution, name) for name in ExecutionAnswer.model_fields}
    return {**fields, "files": to_base64(execution.files)}


def encode_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
