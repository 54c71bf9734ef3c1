"""A program that runs cells like a notebook: in one namespace, with a separate output and result for each cell.

The gateway sends the source of this module to a runner, with the file ``CELLS``. The program writes the file
``RESULTS``. No module imports this module.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import sys
import tempfile
import traceback
from typing import TextIO

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
            result["display"] = execute_source(number, source, seconds, namespace)
        except BaseException as error:  # noqa: BLE001 - a cell may raise anything, and the next one still runs
            result["error"] = [jupyter_error(error)]
        for stream, before in kept:
            flush_stream(sys.stdout if stream == 1 else sys.stderr)
            os.dup2(before, stream)
            os.close(before)
        for name, file in (("stdout", stdout), ("stderr", stderr)):
            file.seek(0)
            result[name] = file.read().decode("utf-8", "replace")
    return result


def execute_source(number: int, source: str, seconds: float, namespace: dict[str, object]) -> list[dict[str, str]]:
    """Run the statements, then the last expression. Returns the expression's value unless it is None."""
    name = f"<cell {number}>"
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    signal.signal(signal.SIGALRM, raise_cell_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        exec(compile(tree, name, "exec"), namespace)
        if not isinstance(last, ast.Expr):
            return []
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        return [] if value is None else [{"text/plain": repr(value)}]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def raise_cell_timeout(number: int, frame: object) -> None:
    raise CellTimeoutError("the cell took too long")


def jupyter_error(error: BaseException) -> dict[str, object]:
    """Describe an error in the format of a Jupyter kernel."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    return {"ename": type(error).__name__, "evalue": str(error), "traceback": [line.rstrip("\n") for line in lines]}


def flush_stream(stream: TextIO | None) -> None:
    """Flush a stream that a cell may have closed."""
    if stream is not None and not stream.closed:
        stream.flush()


if __name__ == "__main__":
    main()
