"""A program to run and its result, as records and as frames between client, gateway and runner."""

from __future__ import annotations

import base64
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from agentrl_sandbox.types import Execution, Outcome, Sandbox
from agentrl_sandbox.wire import Frame


class ImpossibleCallError(ValueError):
    """A call's arguments are invalid: the timeout, the path of a file, or the size."""


class CallHeader(TypedDict):
    """The header of the frame that carries a call."""

    timeout: float | None
    session: str | None
    files: Sequence[str]
    fetch_files: Sequence[str]
    echo: bool


class ExecutionHeader(TypedDict, total=False):
    """The header of the frame that carries an execution; its blobs are stdout, stderr and the files."""

    op: str
    id: int
    outcome: str
    exit_code: int | None
    seconds: float
    truncated: bool
    files: Sequence[str]
    session_ended: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The arguments of ``Sandbox.execute`` without ``request_id``, which describes them."""

    program: str
    timeout: float | None = None
    stdin: str = ""
    session: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch_files: tuple[str, ...] = ()
    echo: bool = False

    def digest(self) -> bytes:
        """A hash of all arguments, to tell apart calls with the same ``request_id``."""
        header, blobs = self.frame()
        result = hashlib.sha256()
        for part in (*blobs, json.dumps(header).encode()):
            result.update(len(part).to_bytes(8, "big") + part)
        return result.digest()

    def frame(self) -> Frame[CallHeader]:
        header: CallHeader = {
            "timeout": self.timeout,
            "session": self.session,
            "files": list(self.files),
            "fetch_files": self.fetch_files,
            "echo": self.echo,
        }
        texts = [self.program.encode("utf-8", "surrogatepass"), self.stdin.encode("utf-8", "surrogatepass")]
        return header, [*texts, *self.files.values()]

    @classmethod
    def from_frame(cls, header: CallHeader, blobs: list[bytes]) -> Call:
        """The inverse of ``frame``."""
        program, stdin, *contents = blobs
        return cls(
            program=program.decode("utf-8", "surrogatepass"),
            timeout=header["timeout"],
            stdin=stdin.decode("utf-8", "surrogatepass"),
            session=header["session"],
            files=dict(zip(header["files"], contents, strict=True)),
            fetch_files=tuple(header["fetch_files"]),
            echo=header["echo"],
        )


class CallSandbox(Sandbox, ABC):
    """The ``execute`` of ``Sandbox``, for sandboxes that take its arguments as one ``Call``."""

    async def execute(
        self,
        program: str,
        *,
        timeout: float | None = None,
        stdin: str = "",
        session: str | None = None,
        request_id: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
        echo: bool = False,
    ) -> Execution:
        call = Call(
            program=program,
            timeout=timeout,
            stdin=stdin,
            session=session,
            files=files or {},
            fetch_files=tuple(fetch_files),
            echo=echo,
        )
        return await self.run(call, request_id)

    @abstractmethod
    async def run(self, call: Call, request_id: str | None = None) -> Execution:
        """Run one program. Equal calls with one ``request_id`` share a run."""


def checked_timeout(seconds: float) -> float:
    """``seconds``, if a program may run for so long. Raises ValueError."""
    if not 0 < seconds <= 3600:
        raise ValueError(f"timeout must be above 0 and at most 3600 seconds, not {seconds}")
    return seconds


def execution_frame(operation: str, identifier: int, execution: Execution) -> Frame[ExecutionHeader]:
    """The frame that answers a request with an execution."""
    header: ExecutionHeader = {
        "op": operation,
        "id": identifier,
        "outcome": execution.outcome.value,
        "exit_code": execution.exit_code,
        "seconds": execution.seconds,
        "truncated": execution.truncated,
        "files": list(execution.files),
        "session_ended": execution.session_ended,
    }
    texts = (execution.stdout, execution.stderr)
    return header, [*(text.encode("utf-8", "replace") for text in texts), *execution.files.values()]


def read_execution(header: ExecutionHeader, blobs: Sequence[bytes]) -> Execution:
    """The inverse of ``execution_frame``."""
    stdout, stderr = (blob.decode("utf-8", "replace") for blob in blobs[:2])
    return Execution(
        outcome=Outcome(header["outcome"]),
        stdout=stdout,
        stderr=stderr,
        exit_code=header["exit_code"],
        seconds=header["seconds"],
        truncated=header["truncated"],
        files=dict(zip(header["files"], blobs[2:], strict=True)),
        session_ended=header["session_ended"],
    )


def to_base64(files: Mapping[str, bytes]) -> dict[str, str]:
    """The contents of files as JSON carries them."""
    return {name: base64.b64encode(content).decode("ascii") for name, content in files.items()}
