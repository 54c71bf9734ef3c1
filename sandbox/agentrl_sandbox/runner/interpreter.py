"""Execution of a program as ``__main__`` in this process, with the exit status that Python would return.

Also contains the memory file through which a child receives its program, and the reseeding of random generators.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import linecache
import os
import random
import resource
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

from agentrl_sandbox.call import Call
from agentrl_sandbox.runner.files import write_files

# The memory file in which a child receives one program.
#
# It contains the length of a header (8 bytes), the header, the program, the files, and the program's
# stdin. The child reads up to stdin and passes the rest of the file to the program as descriptor 0.

_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # forbid further seals, shrinking, growing and writing


def create_task_file(call: Call) -> int:
    """Create a memory file for the child, positioned at its start. It is sealed against writes by the program."""
    _, (source, stdin, *contents) = call.frame()
    header = {
        "source": len(source),
        "files": [(name, len(content)) for name, content in call.files.items()],
        "fetch": call.fetch_files,
    }
    text = json.dumps(header).encode()
    file = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as whole:
        for part in (len(text).to_bytes(8, "big"), text, source, *contents, stdin):
            whole.write(part)
    fcntl.fcntl(file, _F_ADD_SEALS, _SEALS)
    os.lseek(file, 0, os.SEEK_SET)
    return file


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildTask:
    """The child's record of its run. The contents of files stay in the memory file."""

    source: bytes
    files: tuple[tuple[str, int], ...]  # names and sizes
    fetch: tuple[str, ...]


def read_task_file(descriptor: int) -> ChildTask:
    """Read a memory file up to the contents of the files."""
    header = json.loads(_read_exactly(descriptor, int.from_bytes(_read_exactly(descriptor, 8), "big")))
    return ChildTask(
        source=_read_exactly(descriptor, header["source"]),
        files=tuple((name, size) for name, size in header["files"]),
        fetch=tuple(header["fetch"]),
    )


def _read_exactly(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(descriptor, size - len(data))
    return data


# Reseeds the random generators of a warm interpreter. Otherwise all its children would draw the same numbers.
#
# Only ``random`` reseeds itself after a fork. Libraries create generators when they are imported (SymPy three, NumPy
# one). They are located once, in the warm interpreter, and reseeded in each child.

_SEED_BYTES = 32
_KEY_BYTES = 624 * 4


def make_random_seeders() -> tuple[Callable[[], None], ...]:
    """Return, for each random generator in memory, a function that seeds it from the kernel's randomness.

    Slow work is done once, in this function, because a call into NumPy costs a fresh child almost a millisecond. Call
    it before ``gc.freeze``, which hides objects.
    """
    things = gc.get_objects()
    reseeded_after_fork = random.seed.__self__  # type: ignore[attr-defined]
    seeders = [
        _python_seeder(item) for item in things if isinstance(item, random.Random) and item is not reseeded_after_fork
    ]
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return tuple(seeders)
    for item in things:
        if isinstance(item, numpy.random.RandomState):  # it may contain a cached normal variate
            item.set_state({**item.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})
    return (*seeders, *(_numpy_seeder(item) for item in things if isinstance(item, numpy.random.BitGenerator)))


def _python_seeder(generator: random.Random) -> Callable[[], None]:
    generator.gauss_next = None  # type: ignore[attr-defined]  # also a cached variate
    seed = super(random.Random, generator).seed
    return lambda: seed(int.from_bytes(os.urandom(_SEED_BYTES), "big"))


def _numpy_seeder(generator: Any) -> Callable[[], None]:
    """Return a function that reseeds a NumPy bit generator, including the seeds of generators that it spawns."""

    def replace_state() -> None:
        generator.__setstate__(type(generator)().__getstate__())

    address = generator.ctypes.state_address
    if type(generator).__name__ != "MT19937" or not _has_known_numpy_layout(address, generator.state["state"]):
        return replace_state
    generator._legacy_seeding(None)  # afterwards it cannot spawn generators
    return lambda: _overwrite_mersenne_twister_key(address)


def _has_known_numpy_layout(address: int, state: dict[str, Any]) -> bool:
    """Return True if the Mersenne Twister's key and position have the memory layout of known NumPy versions."""
    key, position = ctypes.string_at(address, _KEY_BYTES), ctypes.c_int.from_address(address + _KEY_BYTES).value
    return (key, position) == (state["key"].tobytes(), state["pos"])


def _overwrite_mersenne_twister_key(address: int) -> None:
    """Write a random key and mark its numbers as used, so that the next draw generates new ones."""
    ctypes.memmove(address, os.urandom(_KEY_BYTES), _KEY_BYTES)
    ctypes.c_int.from_address(address + _KEY_BYTES).value = _KEY_BYTES // 4


UNCAUGHT = 1
"""Exit status of a program that ended with an uncaught exception."""


def install_main_module() -> ModuleType:
    """Install a fresh ``__main__``."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"])
    sys.modules["__main__"] = main
    return main


def receive_task(scratch: str, on_out_of_memory: Callable[[], None]) -> ChildTask | None:
    """Read the task from descriptor 0 and write its files. On failure, prints the reason and returns None.

    The caller, often a policy, chooses the number, names and sizes of the files, so exceeding a limit is an error of
    the program.
    """
    try:
        task = read_task_file(0)
        write_files(scratch, 0, task.files)
    except OSError as error:
        print(f"cannot write the files: {error}", file=sys.stderr, flush=True)
        return None
    except MemoryError:
        print("MemoryError: the program and its files need more than memory_mb", file=sys.stderr, flush=True)
        on_out_of_memory()
        return None
    return task


def run_program(task: ChildTask, name: str, main: ModuleType, on_out_of_memory: Callable[[], None]) -> int:
    """Run the program in ``main``, as ``name`` in tracebacks. Prints an uncaught exception. Returns the exit status."""
    try:
        _execute(task, name, main)
    except SystemExit as exit_request:
        return _exit_status(exit_request.code)
    except BaseException as error:  # noqa: BLE001 - a program may raise anything; that is its outcome
        _print_exception(error, on_out_of_memory)
        return UNCAUGHT
    return 0


def finish_program(exit_code: int, on_out_of_memory: Callable[[], None], *, run_exit_functions: bool) -> int:
    """Join non-daemon threads and flush streams.

    ``run_exit_functions``: also run exit functions. Returns the exit status.
    """
    threading = sys.modules.get("threading")
    try:
        if run_exit_functions:
            if threading is not None:
                threading._shutdown()
            atexit._run_exitfuncs()
        elif threading is not None:
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
        flush_streams()
    except BaseException as error:  # noqa: BLE001 - these run code of the program
        _print_exception(error, on_out_of_memory)
        return exit_code or 120
    return exit_code


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def _execute(task: ChildTask, name: str, main: ModuleType) -> None:
    text = task.source.decode("utf-8", "surrogatepass")
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    main.__dict__["__file__"] = name
    exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _print_exception(error: BaseException, on_out_of_memory: Callable[[], None]) -> None:
    """Print the traceback in Python's format, starting at the program's first frame."""
    if isinstance(error, MemoryError):
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        on_out_of_memory()
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
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
