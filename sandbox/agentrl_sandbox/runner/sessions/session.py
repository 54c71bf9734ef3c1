"""The server's records of a session and its family."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from agentrl_sandbox.call import Frame
from agentrl_sandbox.runner.program import Program
from agentrl_sandbox.runner.usage import Usage, children, usage


class State(Enum):
    """Where a session stands."""

    OPENING = "opening"  # its PID is not known yet
    IDLE = "idle"  # stopped
    RUNNING = "running"  # a program runs in it
    FORKING = "forking"  # it is forking
    RESTING = "resting"  # done; the session init stops it and kills leftover processes
    ENDING = "ending"  # it was killed


@dataclass(kw_only=True, slots=True, eq=False)
class SessionFamily:
    """A session and its forks: one session init, one slot, one PID namespace."""

    identifier: int  # negative, since zygotes keep them among the programs
    slot: int
    init: socket.socket
    pid: int = 0
    given_up: bool = False  # the session init did not respond, so the server killed it
    sessions: dict[int, ServerSession] = field(default_factory=dict)

    def tell(self, operation: str, session: int, descriptors: tuple[int, ...] = ()) -> None:
        """Send the session init a message. If it is gone, its zygote reports that."""
        try:
            socket.send_fds(self.init, [json.dumps({"op": operation, "id": session}).encode()], descriptors)
        except OSError:
            return

    def usage(self, beyond: int) -> tuple[dict[int, Usage], Usage]:
        """The usage of each session, and that of stray processes."""
        by_pid = {session.pid: session.identifier for session in self.sessions.values()}
        known: dict[int, Usage] = {}
        stray = Usage()
        for pid in children(self.pid):
            used = usage(pid, beyond)
            session = by_pid.get(_inner_pid(pid))
            if session is None:
                stray = stray.add(used)
            else:
                known[session] = used
        return known, stray


@dataclass(kw_only=True, slots=True, eq=False)
class Fork:
    """A requested fork. The session init reports on the new process, the origin on itself."""

    request: int
    child: ServerSession
    error: int | None = None  # the session init's report; 0: the new process exists
    origin_error: int | None = None

    @property
    def concluded(self) -> bool:
        return bool(self.origin_error) or (self.origin_error is not None and self.error is not None)


@dataclass(kw_only=True, slots=True, eq=False)
class ServerSession:
    """One interpreter."""

    identifier: int
    family: SessionFamily
    control: socket.socket
    state: State = State.OPENING
    due: float = math.inf  # deadline of its state
    request: int = 0  # the request that waits for it to open
    pid: int = 0  # in its own PID namespace
    serial: int = 0  # of the request that the interpreter must answer
    program: Program | None = None
    fork: Fork | None = None
    answer: Frame[Mapping[str, object]] | None = None  # sent to the client once the session is idle
    why: str = ""  # why it ends, if it does
    closers: list[int] = field(default_factory=list)  # requests to close it

    def enter(self, state: State, seconds: float) -> None:
        """Begin a state that may last for ``seconds``."""
        self.state, self.due = state, time.monotonic() + seconds


def _inner_pid(pid: int) -> int:
    """The PID of a process in its own PID namespace; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("NSpid:"):
                    return int(line.split()[-1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0
