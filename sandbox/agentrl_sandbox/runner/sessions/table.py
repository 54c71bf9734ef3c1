"""The table of a server's sessions, and how they end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from typing import Protocol

from agentrl_sandbox.call import ExecutionHeader, Frame
from agentrl_sandbox.runner.program import Ending, Program, judge_exit
from agentrl_sandbox.runner.sessions.session import ServerSession, SessionFamily, State
from agentrl_sandbox.runner.zygote_handle import ZygoteHandle
from agentrl_sandbox.types import Outcome

KIND = "science"
"""The interpreter that sessions are forked from, since a session's imports are not known when it opens."""

END_SECONDS = 5.0
"""The time that the session init has to stop or kill a process before it is killed itself."""


class ServerCallbacks(Protocol):
    """The operations of the server that sessions use."""

    def listen(self, descriptor: int, handler: Callable[[], None]) -> None: ...
    def ignore(self, descriptor: int) -> None: ...
    def reply(self, header: Mapping[str, object], *blobs: bytes) -> None: ...
    def add(self, program: Program) -> None: ...
    def drain(self, program: Program) -> None: ...
    def report(self, program: Program, ending: Ending) -> Frame[ExecutionHeader]: ...
    def kill(self, program: Program, reason: Outcome) -> None: ...
    def zygote(self, kind: str) -> ZygoteHandle: ...
    def release(self, slot: int, kind: str) -> None: ...


class SessionTable:
    """The live sessions and families, and the messages to the client when one ends."""

    def __init__(self, server: ServerCallbacks) -> None:
        self._server = server
        self.sessions: dict[int, ServerSession] = {}
        self.families: dict[int, SessionFamily] = {}

    def drop(self, child: ServerSession, origin: ServerSession) -> None:
        origin.family.tell("forget", child.identifier)
        if child.pid:
            origin.family.tell("kill", child.identifier)
        self.leave(child)

    def kill(self, number: int) -> None:
        """Kill an interpreter; the rest follows from its exit."""
        session = self.sessions[number]
        if session.program is not None and session.program.reason is not None and not session.why:
            session.why = f"its program was killed: {session.program.reason.value}"
        if session.pid == 0:
            return  # it is killed once it is born
        session.enter(State.ENDING, END_SECONDS)
        session.family.tell("kill", number)

    def end(self, session: ServerSession, why: str) -> None:
        """Kill a session and its program. The first reason counts."""
        if session.why:
            return
        session.why = why
        if session.program is not None:
            self._server.kill(session.program, Outcome.KILLED)
        else:
            self.kill(session.identifier)

    def end_family(self, family: SessionFamily, why: str, *, killed: bool = False) -> None:
        """Handle the end of a session init and its processes. ``killed``: by its own programs."""
        self.end_processes(family, why, killed=killed)
        if self.families.pop(family.identifier, None) is not None:
            self._server.ignore(family.init.fileno())
            family.init.close()
            self._server.release(family.slot, KIND)

    def end_processes(self, family: SessionFamily, why: str, *, killed: bool = False) -> None:
        for session in list(family.sessions.values()):
            if session.program is not None:
                if session.program.reason is None and not killed:
                    ending = Ending(outcome=Outcome.INFRASTRUCTURE_FAILURE, exit_code=None, why=why)
                else:
                    ending = judge_exit(session.program, -signal.SIGKILL, out_of_memory=False)
                session.answer = self._server.report(session.program, ending)
            self.gone(session, session.why or why)

    def gone(self, session: ServerSession, why: str) -> None:
        """A session's process has ended: answer all waiting requests and forget it."""
        if session.fork is not None:
            fork, session.fork = session.fork, None
            self.drop(fork.child, session)
            self._server.reply({"op": "refused", "id": fork.request, "kind": "unknown", "why": why})
        if session.request:
            self._server.reply({"op": "refused", "id": session.request, "kind": "start", "why": why})
        session.program = None
        self._server.reply({"op": "ended", "number": session.identifier, "why": why})
        if session.answer is not None:  # the answer of the program that ended the session
            header, blobs = session.answer
            session.answer = {**header, "session_ended": True}, blobs
        self.answer(session)
        self.leave(session)

    def answer(self, session: ServerSession) -> None:
        """Send the client the answer that was held until the session was idle."""
        if session.answer is not None:
            header, blobs = session.answer
            session.answer = None
            self._server.reply(header, *blobs)

    def enter(self, session: ServerSession, on_word: Callable[[ServerSession], None]) -> None:
        """Add a session. ``on_word`` is called when its interpreter sends a message."""
        self.sessions[session.identifier] = session
        session.family.sessions[session.identifier] = session
        self._server.listen(session.control.fileno(), lambda: on_word(session))

    def leave(self, session: ServerSession) -> None:
        if self.sessions.pop(session.identifier, None) is not None:
            del session.family.sessions[session.identifier]
            self._server.ignore(session.control.fileno())
            session.control.close()
            for request in session.closers:
                self._server.reply({"op": "closed", "id": request})
