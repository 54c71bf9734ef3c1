"""The two endpoints of SandboxFusion's HTTP interface, with its fields and values.

A program that ran gets status 200, whatever its outcome; so does a failure of the sandbox (``SandboxError``). Overload
gets 429 and 503, as elsewhere. ``python`` is the only language. ``memory_limit_MB`` and ``compile_timeout`` are
accepted but have no effect: the runner's own memory limit applies, and Python is not compiled beforehand.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Literal, TextIO

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentrl_sandbox.call import Call, ImpossibleCallError, to_base64
from agentrl_sandbox.service.gateway.bodies import Base64Error, Path, Text, from_base64
from agentrl_sandbox.types import Execution, Outcome

# A program that runs cells like a notebook: in one namespace, with separate output and result of each.
#
# It is sent to a runner as text with the file ``CELLS`` and writes the file ``RESULTS``. Nothing imports it.

CELLS, RESULTS = ".agentrl-cells.json", ".agentrl-results.json"


class CellTimeoutError(BaseException):
    """A cell exceeded its time limit."""


def main() -> None:
    with open(CELLS, encoding="utf-8") as file:
        task = json.load(file)
    os.unlink(CELLS)
    directory = os.getcwd()
    namespace = {"__name__": "__main__", "__builtins__": __builtins__}
    results = [run_cell(number, cell, task["cell_timeout"], namespace) for number, cell in enumerate(task["cells"], 1)]
    with open(os.path.join(directory, RESULTS), "w", encoding="utf-8") as file:
        json.dump(results, file)


def run_cell(number: int, source: str, seconds: float, namespace: dict[str, object]) -> dict[str, object]:
    """Run one cell. Returns its output, the value of its last expression, and its error."""
    result: dict[str, object] = {"stdout": "", "stderr": "", "display": [], "error": []}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        kept = [(stream, os.dup(stream)) for stream in (1, 2)]
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        try:
            result["display"] = execute(number, source, seconds, namespace)
        except BaseException as error:  # noqa: BLE001 - a cell may raise anything, and the next one still runs
            result["error"] = [describe(error)]
        for stream, before in kept:
            flush(sys.stdout if stream == 1 else sys.stderr)
            os.dup2(before, stream)
            os.close(before)
        for name, file in (("stdout", stdout), ("stderr", stderr)):
            file.seek(0)
            result[name] = file.read().decode("utf-8", "replace")
    return result


def execute(number: int, source: str, seconds: float, namespace: dict[str, object]) -> list[dict[str, str]]:
    """Run the statements, then the last expression; return its value unless it is None."""
    name = f"<cell {number}>"
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    signal.signal(signal.SIGALRM, stop_cell)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        exec(compile(tree, name, "exec"), namespace)
        if not isinstance(last, ast.Expr):
            return []
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        return [] if value is None else [{"text/plain": repr(value)}]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def stop_cell(number: int, frame: object) -> None:
    raise CellTimeoutError("the cell took too long")


def describe(error: BaseException) -> dict[str, object]:
    """The error in a Jupyter kernel's form."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    return {"ename": type(error).__name__, "evalue": str(error), "traceback": [line.rstrip("\n") for line in lines]}


def flush(stream: TextIO | None) -> None:
    """A cell may have closed the stream."""
    if stream is not None and not stream.closed:
        stream.flush()


if __name__ == "__main__":
    main()


Run = Callable[[Call], Awaitable[Execution]]

_CELLS, _RESULTS = ".agentrl-cells.json", ".agentrl-results.json"  # as in notebook.py


class _FusionRequest(BaseModel):
    memory_limit_MB: int = Field(-1, description="the runner's own limit applies")
    files: dict[Path, str | None] = Field({}, description="base64 by path")
    fetch_files: list[Path] = []

    def contents(self) -> dict[str, bytes]:
        """The files to write. Raises Base64Error."""
        return {path: from_base64(content) for path, content in self.files.items() if content is not None}


class RunCodeRequest(_FusionRequest):
    """A program."""

    code: Text
    language: Literal["python"]
    compile_timeout: float = Field(10, description="no effect on Python")
    run_timeout: float = Field(10, gt=0, le=3600, description="seconds")
    stdin: Text | None = None


class RunJupyterRequest(_FusionRequest):
    """The cells of a notebook."""

    cells: list[Text]
    cell_timeout: float = Field(0, ge=0, le=3600, description="seconds for each cell; 0: only the total limit applies")
    total_timeout: float = Field(45, gt=0, le=3600, description="seconds for all of them")
    kernel: Literal["python3"] = "python3"


class CommandRunResult(BaseModel):
    """How a process ended."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class CellRunResult(BaseModel):
    """The output of a cell. It comes from the program itself and is untrusted."""

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
    """Run a program. Raises BusyError."""
    try:
        call = Call(
            program=request.code,
            timeout=request.run_timeout,
            stdin=request.stdin or "",
            files=request.contents(),
            fetch_files=tuple(request.fetch_files),
        )
        execution = await run(call)
    except (Base64Error, ImpossibleCallError) as error:
        return RunCodeResponse(status="SandboxError", message=str(error))
    result = _result(execution)
    return RunCodeResponse(
        status=_status(result),
        message=execution.stderr if result.status == "Error" else "",
        run_result=result,
        files=to_base64(execution.files),
    )


async def run_jupyter(request: RunJupyterRequest, run: Run) -> RunJupyterResponse:
    """Run cells one after the other in one namespace. Raises BusyError."""
    task = {"cells": request.cells, "cell_timeout": request.cell_timeout}
    try:
        call = Call(
            program=resources.files(__package__).joinpath("notebook.py").read_text("utf-8"),
            timeout=request.total_timeout,
            files={**request.contents(), _CELLS: json.dumps(task).encode()},
            fetch_files=(*request.fetch_files, _RESULTS),
        )
        execution = await run(call)
    except (Base64Error, ImpossibleCallError) as error:
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
