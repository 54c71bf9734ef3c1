"""The endpoint ``/run_code`` of SandboxFusion's HTTP interface, with its fields and values.

All outcomes of programs and failures of the sandbox (``SandboxError``) return HTTP status 200. Overload returns 429
or 503, as on the other endpoints. ``python`` is the only language. ``memory_limit_MB`` and ``compile_timeout`` are
accepted but have no effect: the runner's own memory limit applies, and Python is not compiled beforehand.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from pydantic import BaseModel, Field

from agentrl_sandbox.call import Call, InvalidCallError, to_base64
from agentrl_sandbox.service.bodies import Base64Error, Path, Text, from_base64
from agentrl_sandbox.types import Execution, Outcome

Run = Callable[[Call], Awaitable[Execution]]


class RunCodeRequest(BaseModel):
    """A program to run."""

    code: Text
    language: Literal["python"]
    compile_timeout: float = Field(10, description="ignored for Python")
    run_timeout: float = Field(10, gt=0, le=3600, description="seconds")
    memory_limit_MB: int = Field(-1, description="ignored: the runner's limit applies")
    stdin: Text | None = None
    files: dict[Path, str | None] = Field({}, description="base64 contents by path")
    fetch_files: list[Path] = []

    def to_call(self) -> Call:
        """Convert the request to a call. Raises Base64Error if the content of a file is invalid."""
        return Call(
            program=self.code,
            timeout=self.run_timeout,
            stdin=self.stdin or "",
            files={path: from_base64(content) for path, content in self.files.items() if content is not None},
            fetch_files=tuple(self.fetch_files),
        )


class CommandRunResult(BaseModel):
    """Result of a process."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(BaseModel):
    """Result of a program."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    executor_pod_name: str | None = None
    compile_result: None = None
    run_result: CommandRunResult | None = None
    files: dict[str, str] = {}


async def run_code(request: RunCodeRequest, run: Run) -> RunCodeResponse:
    """Run a program. Raises BusyError if no runner has capacity."""
    try:
        execution = await run(request.to_call())
    except (Base64Error, InvalidCallError) as error:
        return RunCodeResponse(status="SandboxError", message=str(error))
    if execution.outcome is Outcome.INFRASTRUCTURE_FAILURE:
        result = CommandRunResult(status="Error", stderr=execution.stderr)
        return RunCodeResponse(status="SandboxError", message=execution.stderr, run_result=result)
    timed_out = execution.outcome is Outcome.TIMEOUT
    result = CommandRunResult(
        status="TimeLimitExceeded" if timed_out else "Finished",
        execution_time=execution.seconds,
        return_code=None if timed_out else execution.exit_code,
        stdout=execution.stdout,
        stderr=execution.stderr,
    )
    return RunCodeResponse(
        status="Success" if result.return_code == 0 else "Failed",
        run_result=result,
        files=to_base64(execution.files),
    )
