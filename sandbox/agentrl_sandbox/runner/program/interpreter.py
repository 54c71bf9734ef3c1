"""Runs a program's text as ``__main__`` in this process and returns the exit status that Python would."""

from __future__ import annotations

import atexit
import linecache
import os
import resource
import sys
import traceback
from collections.abc import Callable
from types import ModuleType, TracebackType

from agentrl_sandbox.runner.program import echo
from agentrl_sandbox.runner.program.echo import compile_with_echo
from agentrl_sandbox.runner.program.files import write_files
from agentrl_sandbox.runner.program.order import Task, read_task

UNCAUGHT = 1
"""The exit status of a program that an exception ended."""

_OURS = (__file__, echo.__file__)


def make_main() -> ModuleType:
    """Install a fresh ``__main__``."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"])
    sys.modules["__main__"] = main
    return main


def take_task(scratch: str, on_out_of_memory: Callable[[], None]) -> Task | None:
    """Read the task from descriptor 0 and write its files. If that fails, print the reason and return None.

    The caller, often a policy, chooses number, names and sizes of the files, so exceeding a limit is its own error.
    """
    try:
        task = read_task(0)
        write_files(scratch, 0, task.files)
    except OSError as error:
        print(f"the files cannot be written: {error}", file=sys.stderr, flush=True)
        return None
    except MemoryError:
        print("MemoryError: the program and its files need more than memory_mb", file=sys.stderr, flush=True)
        on_out_of_memory()
        return None
    return task


def run(task: Task, name: str, main: ModuleType, on_out_of_memory: Callable[[], None]) -> int:
    """Run the program in ``main``, as ``name`` in tracebacks. Returns its exit status; reports an exception."""
    try:
        _execute(task, name, main)
    except SystemExit as leaving:
        return _exit_status(leaving.code)
    except BaseException as error:  # noqa: BLE001 - a program may raise anything; that is its outcome
        _report(error, on_out_of_memory)
        return UNCAUGHT
    return 0


def finish(exit_code: int, on_out_of_memory: Callable[[], None], *, leaves: bool) -> int:
    """Join non-daemon threads and flush streams; if the interpreter ``leaves``, as at exit. Returns the exit status."""
    threading = sys.modules.get("threading")
    try:
        if leaves:
            if threading is not None:
                threading._shutdown()
            atexit._run_exitfuncs()
        elif threading is not None:
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
        flush()
    except BaseException as error:  # noqa: BLE001 - these run code of the program
        _report(error, on_out_of_memory)
        return exit_code or 120
    return exit_code


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _execute(task: Task, name: str, main: ModuleType) -> None:
    text = task.source.decode("utf-8", "surrogatepass")
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    main.__dict__["__file__"] = name
    for code in compile_with_echo(text, name) if task.echo else [compile(text, name, "exec", dont_inherit=True)]:
        exec(code, main.__dict__)


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _report(error: BaseException, on_out_of_memory: Callable[[], None]) -> None:
    """Print the traceback as Python does, starting at the program's first frame."""
    if isinstance(error, MemoryError):
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        on_out_of_memory()
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OURS:
        frames = frames.tb_next
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, frames)
        return
    _print_traceback(error, frames)


def _print_traceback(error: BaseException, frames: TracebackType | None) -> None:
    try:
        traceback.print_exception(type(error), error, frames)
    except (MemoryError, RecursionError):
        os.write(2, f"{type(error).__name__}\n".encode())
