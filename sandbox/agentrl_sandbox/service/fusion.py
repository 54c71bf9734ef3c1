"""The two endpoints of SandboxFusion's HTTP interface, with its fields and values.

All outcomes of programs and failures of the sandbox (``SandboxError``) return HTTP status 200. Overload returns 429
or 503, as on the other endpoints. ``python`` is the only language. ``memory_limit_MB`` and ``compile_timeout`` are
accepted but have no effect: the runner's own memory limit applies, and Python is not compiled beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentrl_sandbox.call import Call, InvalidCallError, to_base64
from agentrl_sandbox.service.bodies import Base64Error, Path, Text, from_base64
from agentrl_sandbox.types import Execution, Outcome

Run = Callable[[Call], Awaitable[Execution]]

_CELLS, _RESULTS = ".agentrl-cells.json", ".agentrl-results.json"  # as in notebook.py


class _FusionRequest(BaseModel):
    memory_limit_MB: int = Field(-1, description="ignored: the runner's limit applies")
    files: dict[Path, str | None] = Field({}, description="base64 contents by path")
    fetch_files: list[Path] = []

    def contents(self) -> dict[str, bytes]:
        """Decode the files to write. Raises Base64Error if a content is invalid."""
        return {path: from_base64(content) for path, content in self.files.items() if content is not None}


class RunCodeRequest(_FusionRequest):
    """A program to run."""

    code: Text
    language: Literal["python"]
    compile_timeout: float = Field(10, description="ignored for Python")
    run_timeout: float = Field(10, gt=0, le=3600, description="seconds")
    stdin: Text | None = None


class RunJupyterRequest(_FusionRequest):
    """The cells of a notebook to run."""

    cells: list[Text]
    cell_timeout: float = Field(0, ge=0, le=3600, description="seconds for each cell; 0: only total_timeout applies")
    total_timeout: float = Field(45, gt=0, le=3600, description="seconds for all cells")
    kernel: Literal["python3"] = "python3"


class CommandRunResult(BaseModel):
    """Result of a process."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class CellRunResult(BaseModel):
    """Output of a cell. Untrusted, because the program itself writes it."""

    model_config = ConfigDict(extra="forbid")

    stdout: str
    stderr: str
    display: list[dict[str, object]]
    error: list[dict[str, object]]


Status = Literal["Success", "Failed", "SandboxError"]


class _FusionResponse(BaseModel):
    status: Status
    message: str = ""
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


class RunCodeResponse(_FusionResponse):
    """The result of a program."""

    compile_result: None = None
    run_result: CommandRunResult | None = None


class RunJupyterResponse(_FusionResponse):
    """The result of a notebook."""

    driver: CommandRunResult | None = None
    cells: list[CellRunResult] = []


_CELL_RESULTS = TypeAdapter(list[CellRunResult])


async def run_code(request: RunCodeRequest, run: Run) -> RunCodeResponse:
    """Run a program. Raises BusyError if no runner has capacity."""
    try:
        call = Call(
            program=request.code,
            timeout=request.run_timeout,
            stdin=request.stdin or "",
            files=request.contents(),
            fetch_files=tuple(request.fetch_files),
        )
        execution = await run(call)
    except (Base64Error, InvalidCallError) as error:
        return RunCodeResponse(status="SandboxError", message=str(error))
    result = _result(execution)
    return RunCodeResponse(
        status=_status(result),
        message=execution.stderr if result.status == "Error" else "",
        run_result=result,
        files=to_base64(execution.files),
    )


async def run_jupyter(request: RunJupyterRequest, run: Run) -> RunJupyterResponse:
    """Run cells one at a time in one namespace. Raises BusyError if no runner has capacity."""
    task = {"cells": request.cells, "cell_timeout": request.cell_timeout}
    try:
        call = Call(
            program=resources.files(__package__).joinpath("notebook.py").read_text("utf-8"),
            timeout=request.total_timeout,
            files={**request.contents(), _CELLS: json.dumps(task).encode()},
            fetch_files=(*request.fetch_files, _RESULTS),
        )
        execution = await run(call)
    except (Base64Error, InvalidCallError) as error:
        return RunJupyterResponse(status="SandboxError", message=str(error))
    files = dict(execution.files)
    results = files.pop(_RESULTS, None)
    driver = _result(execution)
    if driver.status == "Error":
        return RunJupyterResponse(status="SandboxError", message=execution.stderr, driver=driver)
    if driver.status != "Finished" or results is None:
        return RunJupyterResponse(status="Failed", driver=driver)
    try:
        cells = _CELL_RESULTS.validate_json(results)
    except ValidationError:
        return RunJupyterResponse(status="Failed", message="a cell tampered with the results", driver=driver)
    return RunJupyterResponse(status="Success", driver=driver, cells=cells, files=to_base64(files))


def _result(execution: Execution) -> CommandRunResult:
    if execution.outcome is Outcome.INFRASTRUCTURE_FAILURE:
        return CommandRunResult(status="Error", stderr=execution.stderr)
    late = execution.outcome is Outcome.TIMEOUT
    return CommandRunResult(
        status="TimeLimitExceeded" if late else "Finished",
        execution_time=execution.seconds,
        return_code=None if late else execution.exit_code,
        stdout=execution.stdout,
        stderr=execution.stderr,
    )


def _status(result: CommandRunResult) -> Status:
    if result.status == "Error":
        return "SandboxError"
    return "Success" if result.status == "Finished" and result.return_code == 0 else "Failed"
