"""Cleanup without namespaces: leftover processes and files of programs, and the supervisor of the server.

The kernel kills the processes of a PID namespace. Without a namespace, the parent process of the server outlives the
server, adopts orphans and kills them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from typing import NoReturn

from agentrl_sandbox.runner import kernel
from agentrl_sandbox.runner.child import has_separate_users
from agentrl_sandbox.runner.config import SCRATCH_VARIABLE, RunnerConfig
from agentrl_sandbox.runner.usage import child_pids, user_files

# Kills the processes that a program left behind.

_KILL_SECONDS = 10.0  # seconds to wait for processes to end after SIGKILL
_PAUSE_SECONDS = 0.001


def kill_leftover_processes(keep: Collection[int], user: int | None = None) -> None:
    """Kill and reap every child of this process except ``keep``, with all descendants.

    This process must adopt orphans, so that all leftover processes are its children. If a slot has a separate ``user``,
    all processes of the user are killed at once, so that none can escape by forking. Raises TimeoutError if a process
    does not end.
    """
    deadline = time.monotonic() + _KILL_SECONDS
    while leftovers := [pid for pid in child_pids(os.getpid()) if pid not in keep]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(leftovers)} processes of a program did not end within {_KILL_SECONDS:g} s")
        if user is not None:
            run_as_and_wait(user, lambda: os.kill(-1, signal.SIGKILL))
        _kill_trees(leftovers)
        gone = [os.waitpid(pid, os.WNOHANG)[0] for pid in leftovers]
        if not any(gone):
            time.sleep(_PAUSE_SECONDS)


def fork_as(user: int | None, action: Callable[[], None]) -> int:
    """Run ``action`` in a forked process as ``user`` (None: unchanged). Returns its PID; the caller reaps it."""
    pid = os.fork()
    if pid != 0:
        return pid
    status = 1
    try:
        if user is not None:
            kernel.switch_user(user)
        with contextlib.suppress(ProcessLookupError):
            action()
        status = 0
    finally:
        os._exit(status)


def run_as_and_wait(user: int | None, action: Callable[[], None]) -> None:
    """Run ``action`` as ``user`` in a forked process and wait. Raises OSError if ``action`` fails."""
    _, status = os.waitpid(fork_as(user, action), 0)
    if status != 0:
        raise OSError(f"a helper process exited with status {os.waitstatus_to_exitcode(status)}")


def _kill_trees(roots: Collection[int]) -> None:
    """Kill these processes and all their descendants.

    Signals are sent to complete process groups, atomically between forks. All processes are stopped before any is
    killed. Stopped processes still count against RLIMIT_NPROC, so a fork bomb in other groups runs out of processes.
    """
    own_group, stopped = os.getpgid(0), set[int]()
    while found := _stop_trees([*roots, *stopped], stopped, own_group):
        stopped |= found
    for pid in stopped:
        _signal_group_or_process(pid, signal.SIGKILL, own_group)


def _stop_trees(roots: list[int], stopped: set[int], own_group: int) -> set[int]:
    """Stop ``roots`` and all their descendants, each before its children are listed. Returns the newly stopped PIDs."""
    found: set[int] = set()
    waiting, seen = roots, set[int]()
    while waiting:
        pid = waiting.pop()
        if pid in seen:
            continue
        seen.add(pid)
        if pid not in stopped:
            _signal_group_or_process(pid, signal.SIGSTOP, own_group)
            found.add(pid)
        waiting += child_pids(pid)
    return found


def _signal_group_or_process(pid: int, number: int, own_group: int) -> None:
    """Send a signal to the process group of a process, or only to the process if the group is ``own_group``."""
    with contextlib.suppress(ProcessLookupError):
        group = os.getpgid(pid)
        if group == own_group:
            os.kill(pid, number)
        else:
            os.killpg(group, number)


# Removes the files that a program left in its scratch directory and in shared memory.

SHARED_MEMORY = "/dev/shm"
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def has_no_leftover_files(scratch: str, user: int | None) -> bool:
    """Return True if a program left no files in its scratch directory or, with a separate user, in shared memory."""
    with os.scandir(scratch) as entries:
        if any(entries):
            return False
    return user is None or next(user_files(user, SHARED_MEMORY), None) is None


def remove_program_files(scratch: str, user: int | None) -> None:
    """Remove all files of a program. Call it as the program's user, after its last process has ended."""
    empty_directory(scratch)
    if user is not None:
        for path, _ in list(user_files(user, SHARED_MEMORY)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def empty_directory(directory: str) -> None:
    """Remove everything in a directory, at any depth and with any permissions.

    The traversal moves one level at a time, so paths, open files and the stack do not grow with the depth.
    """
    here = os.open(directory, _DIRECTORY_FLAGS)
    way: list[str] = []  # names on the path from the directory to the current one
    waiting = [_unlink_files(here)]  # for each directory on the path, its remaining subdirectories
    while way or waiting[-1]:
        if waiting[-1]:
            name = waiting[-1].pop()
            os.chmod(name, 0o700, dir_fd=here)
            here = _open_relative(here, name)
            way.append(name)
            waiting.append(_unlink_files(here))
        else:
            here = _open_relative(here, "..")
            waiting.pop()
            os.rmdir(way.pop(), dir_fd=here)
    os.close(here)


def _open_relative(here: int, name: str) -> int:
    there = os.open(name, _DIRECTORY_FLAGS, dir_fd=here)
    os.close(here)
    return there


def _unlink_files(directory: int) -> list[str]:
    """Remove all entries except directories, and return the names of the directories."""
    directories: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                directories.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=directory)
    return directories


_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}
_POLL_SECONDS = 1.0


def fork_and_return_in_server(config: RunnerConfig, descriptor: int) -> None:
    """Create the scratch directories and fork the server. Only the server returns. ``descriptor`` is its socket.

    Raises PermissionError if the programs' users cannot access the interpreter.
    """
    if has_separate_users(config):
        _check_interpreter_access(config)
    directory = _make_scratch_directories(config)
    os.environ[SCRATCH_VARIABLE] = directory
    kernel.adopt_orphans(needed=not has_separate_users(config))
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    this = os.getpid()
    server = os.fork()
    if server != 0:
        os.close(descriptor)
        _wait_and_clean_up(server, config, directory)
    kernel.adopt_orphans(needed=not has_separate_users(config))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # so that the server cleans up after itself
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    kernel.die_with_parent(signal.SIGTERM)
    if os.getppid() != this:
        sys.exit(0)


def clean_up_server(config: RunnerConfig, directory: str) -> None:
    """Kill all descendants of this process and remove the scratch directories of all slots."""
    kill_leftover_processes(())
    separate_users = has_separate_users(config)
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory):
            slot, user = f"{directory}/{name}", config.first_user + int(name) if separate_users else None
            if not has_no_leftover_files(slot, user):
                run_as_and_wait(user, functools.partial(remove_program_files, slot, user))
            os.rmdir(slot)
        os.rmdir(directory)


def _check_interpreter_access(config: RunnerConfig) -> None:
    """Raise PermissionError if the programs' users cannot enter the interpreter's directories."""
    inaccessible = [path for path in dict.fromkeys(config.readable) if not _user_can_list(config.first_user, path)]
    if inaccessible:
        raise PermissionError(
            f"programs run as separate users, who cannot enter {', '.join(inaccessible)}: make these directories and "
            "their parents accessible to others (chmod o+rx), or install Python elsewhere"
        )


def _user_can_list(user: int, path: str) -> bool:
    try:
        run_as_and_wait(user, lambda: os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY)))
    except OSError:
        return False
    return True


def _make_scratch_directories(config: RunnerConfig) -> str:
    """Create one directory per slot. The slot's user may write (as its group) but not change the permissions."""
    directory = tempfile.mkdtemp(prefix="agentrl-sandbox-")
    separate_users = has_separate_users(config)
    os.chmod(directory, 0o711 if separate_users else 0o700)
    for slot in range(config.slots):
        os.mkdir(f"{directory}/{slot}", 0o700)
        if separate_users:
            os.chown(f"{directory}/{slot}", -1, config.first_user + slot)
            os.chmod(f"{directory}/{slot}", 0o770)
    return directory


def _wait_and_clean_up(server: int, config: RunnerConfig, directory: str) -> NoReturn:
    """Wait until the server exits, the client disconnects or SIGTERM arrives, then clean up."""
    while os.getppid() == config.client_pid:
        received = signal.sigtimedwait(_SIGNALS, _POLL_SECONDS)
        if received is not None and (
            received.si_signo == signal.SIGTERM or os.waitpid(server, os.WNOHANG)[0] == server
        ):
            break
    clean_up_server(config, directory)
    os._exit(0)
