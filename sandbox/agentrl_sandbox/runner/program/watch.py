"""Enforces limits that the kernel does not: the memory of a program's processes, and files without their own mount.

A program decides how much there is to check, so expensive checks take at most a tenth of the server's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from agentrl_sandbox.runner import kernel
from agentrl_sandbox.runner.cleanup.scratch import SHARED_MEMORY
from agentrl_sandbox.runner.config import RunnerConfig
from agentrl_sandbox.runner.isolation.lockdown import has_own_users
from agentrl_sandbox.runner.isolation.memory_use import KernelMemory, Usage, proportional_bytes, tree
from agentrl_sandbox.runner.isolation.scratch_use import INODES, ScratchUse
from agentrl_sandbox.runner.program.program import Program

_PERIOD = 10.0  # time between checks, as a multiple of a check's duration
_SOCKET_BYTES = "/proc/sys/net/core/wmem_default"
_USUAL_SOCKET_BYTES = 212_992  # default if the network namespace does not show it


class Watch:
    """Checks whether a program exceeds a limit. ``scratch`` holds the slots' directories, without namespaces."""

    def __init__(self, config: RunnerConfig, scratch: str = "") -> None:
        self._memory = config.memory_mb << 20
        self._scratch = scratch
        try:
            self._socket_bytes = int(Path(_SOCKET_BYTES).read_text("ascii"))
        except OSError:
            self._socket_bytes = _USUAL_SOCKET_BYTES
        self._scratch_bytes = config.scratch_mb << 20
        self._first_user = config.first_user if has_own_users(config) else None

    def memory_is_over(self, program: Program, used: Usage, beyond: int) -> bool:
        """Whether it uses more than ``memory_mb``, counting pages that its processes share once."""
        unshared = used.tables + (used.resident if len(used.processes) == 1 else 0)
        if unshared > self._memory:
            return True
        return self._seldom(program, "memory", lambda: self._memory_left(used, beyond) < 0)

    def _memory_left(self, used: Usage, beyond: int) -> int:
        resident = used.resident
        if resident + used.tables > self._memory:
            resident = proportional_bytes(used.processes, beyond)
        kernels = KernelMemory(room=self._memory - used.tables - resident, socket_bytes=self._socket_bytes)
        kernels.add(used.processes)
        return kernels.room

    def scratch_is_over(self, program: Program) -> bool:
        """Whether its files exceed ``scratch_mb`` or are too many. With namespaces its mount enforces that."""
        return bool(self._scratch) and self._seldom(program, "scratch", lambda: self._count(program).is_over)

    def _seldom(self, program: Program, what: str, look: Callable[[], bool]) -> bool:
        """Look with the rights of the program's user, if that is due again."""
        started = time.monotonic()
        if started < program.due.get(what, 0.0):
            return False
        with kernel.files_of(self._user(program)):
            over = look()
        program.due[what] = started + _PERIOD * (time.monotonic() - started)
        return over

    def _count(self, program: Program) -> ScratchUse:
        use = ScratchUse(bytes_left=self._scratch_bytes, inodes_left=INODES)
        use.add_tree(f"{self._scratch}/{program.slot}")
        if (user := self._user(program)) is not None:
            use.add_files_of(user, SHARED_MEMORY)
        if program.pid:
            use.add_unlinked(tree(program.pid))
        return use

    def _user(self, program: Program) -> int | None:
        return None if self._first_user is None else self._first_user + program.slot
