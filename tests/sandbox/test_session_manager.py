"""SessionManager without a server, with messages in any order."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

from agentrl_sandbox.call import Call
from agentrl_sandbox.runner.config import RunnerConfig
from agentrl_sandbox.runner.program import RequestedRun
from agentrl_sandbox.runner.sessions import SessionFamily, SessionManager

CONFIG = RunnerConfig(
    isolate="none", memory_mb=64, max_processes=8, scratch_mb=8, output_limit=1000, flood_limit=1000, fetch_limit=1000,
    max_sessions=2, session_idle_timeout=60.0, workers=1, library_paths=(), package_path="/", readable=(),
    client_pid=1, first_user=1000,
)  # fmt: skip


class Zygote:
    """Keeps the session init's ends of the sockets."""

    def __init__(self):
        self.sockets = []

    def request_child(self, message, descriptors):
        self.sockets = [socket.socket(fileno=socket.dup(descriptor)) for descriptor in descriptors]

    def send_command(self, operation, identifier):
        assert operation == "locate"


class Server:
    """Records the calls of a session manager."""

    def __init__(self):
        self.zygotes = Zygote()
        self.handlers: dict[int, Callable[[], None]] = {}
        self.replies, self.programs = [], []

    def add_reader(self, descriptor, handler):
        self.handlers[descriptor] = handler

    def reply(self, header, *blobs):
        self.replies.append(header)

    def watch_program(self, program):
        self.programs.append(program)

    def zygote_of_kind(self, kind):
        return self.zygotes

    def user_of_slot(self, slot):
        return None


def test_a_program_that_began_before_its_session_init_was_located_gets_its_pid():
    server = Server()
    manager = SessionManager(CONFIG, server)
    manager.handle_request({"op": "open", "id": 1, "number": 7, "fork": 0})
    init, control = server.zygotes.sockets
    init.send(json.dumps({"op": "started", "id": 7, "pid": 2, "error": 0}).encode())
    for handler in list(server.handlers.values()):
        handler()
    assert server.replies == [{"op": "opened", "id": 1}]
    manager.run_in_session(RequestedRun(identifier=2, session=7, call=Call(program="1", timeout=5.0)))
    (program,) = server.programs
    assert program.pid == 0
    manager.handle_zygote_report({"op": "located", "id": -1, "pid": 4321})
    assert program.pid == 4321
    program.close()
    for end in (init, control):
        end.close()
    for session in manager._sessions.values():
        session.control.close()
        session.family.init.close()


def test_no_command_is_lost_while_the_session_init_is_busy():
    init, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    init.setblocking(False)
    with init, theirs:
        family = SessionFamily(identifier=-1, slot=0, init=init)
        for session in range(2_000):
            family.send_command("kill", session)
        assert family.unsent  # more than the socket's buffer holds
        received = []
        while len(received) < 2_000:
            received.append(json.loads(theirs.recv(1_000))["id"])
            family.send_queued_commands()
    assert received == list(range(2_000))
