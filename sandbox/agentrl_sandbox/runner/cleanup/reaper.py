"""Without namespaces: a process above the server that outlives it and cleans up after it.

The kernel kills the processes of a PID namespace. Without one, this process adopts orphans and kills them itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import tempfile
from typing import NoReturn

from agentrl_sandbox.runner import kernel
from agentrl_sandbox.runner.cleanup import processes, scratch
from agentrl_sandbox.runner.config import SCRATCH_VARIABLE, RunnerConfig
from agentrl_sandbox.runner.isolation.lockdown import has_own_users

_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}
_LOOK_SECONDS = 1.0


def fork_server(config: RunnerConfig, descriptor: int) -> None:
    """Create the scratch directories and fork the server; only the server returns. ``descriptor`` is its socket.

    Raises PermissionError if the programs' users cannot access the interpreter.
    """
    if has_own_users(config):
        _check_reach(config)
    directory = _make_scratch(config)
    os.environ[SCRATCH_VARIABLE] = directory
    kernel.adopt_orphans(needed=not has_own_users(config))
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    this = os.getpid()
    server = os.fork()
    if server != 0:
        os.close(descriptor)
        _wait_and_clean_up(server, config, directory)
    kernel.adopt_orphans(needed=not has_own_users(config))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # so that the server cleans up after itself
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    kernel.die_with_parent(signal.SIGTERM)
    if os.getppid() != this:
        sys.exit(0)


def clean_up(config: RunnerConfig, directory: str) -> None:
    """Kill every process below this one and remove the scratch directories of all slots."""
    processes.kill_strays(())
    own_users = has_own_users(config)
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(directory):
            slot, user = f"{directory}/{name}", config.first_user + int(name) if own_users else None
            if not scratch.is_clean(slot, user):
                processes.run_helper(user, functools.partial(scratch.clean, slot, user))
            os.rmdir(slot)
        os.rmdir(directory)


def _check_reach(config: RunnerConfig) -> None:
    """Without namespaces other users must be able to enter the interpreter's directories."""
    closed = [path for path in dict.fromkeys(config.readable) if not _can_list(config.first_user, path)]
    if closed:
        raise PermissionError(
            f"programs run as separate users, who cannot enter {', '.join(closed)}: make these directories and their "
            "parents accessible to others (chmod o+rx), or install Python elsewhere"
        )


def _can_list(user: int, path: str) -> bool:
    try:
        processes.run_helper(user, lambda: os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY)))
    except OSError:
        return False
    return True


def _make_scratch(config: RunnerConfig) -> str:
    """Create one directory per slot. Its user may write to it through its group but not change its permissions."""
    directory = tempfile.mkdtemp(prefix="agentrl-sandbox-")
    own_users = has_own_users(config)
    os.chmod(directory, 0o711 if own_users else 0o700)
    for slot in range(config.slots):
        os.mkdir(f"{directory}/{slot}", 0o700)
        if own_users:
            os.chown(f"{directory}/{slot}", -1, config.first_user + slot)
            os.chmod(f"{directory}/{slot}", 0o770)
    return directory


def _wait_and_clean_up(server: int, config: RunnerConfig, directory: str) -> NoReturn:
    """Wait until the server ends, the client is gone or SIGTERM arrives, then clean up."""
    while os.getppid() == config.client_pid:
        told = signal.sigtimedwait(_SIGNALS, _LOOK_SECONDS)
        if told is not None and (told.si_signo == signal.SIGTERM or os.waitpid(server, os.WNOHANG)[0] == server):
            break
    clean_up(config, directory)
    os._exit(0)
