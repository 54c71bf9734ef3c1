"""The server's side of a zygote."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys

from agentrl_sandbox.runner import config as runner_config
from agentrl_sandbox.runner.config import RunnerConfig
from agentrl_sandbox.runner.frames import ProcessMessage
from agentrl_sandbox.runner.isolation.memory_use import resident_bytes

_MAX_MESSAGE = 65_536


class ZygoteHandle:
    """Starts a warm interpreter, sends it programs and reads its reports."""

    def __init__(self, kind: str, config: RunnerConfig) -> None:
        self.kind = kind
        self.ready = False
        self.resident = 0  # bytes of the warm interpreter, which every child starts with
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin = os.memfd_create("stdin")
        command = runner_config.command(
            sys.executable,
            "agentrl_sandbox.runner.zygote",
            config.package_path,
            kind,
            config.to_json(),
            str(theirs.fileno()),
            str(os.getpid()),
        )
        with theirs:
            # The standard streams have the types that programs will have: a file and pipes.
            self._process = subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, pass_fds=(theirs.fileno(),), env=dict(os.environ)
            )
        os.close(stdin)

    @property
    def pid(self) -> int:
        """The interpreter's process."""
        return self._process.pid

    def fileno(self) -> int:
        """For epoll."""
        return self._socket.fileno()

    def set_ready(self) -> None:
        """Record that the interpreter is warm."""
        self.ready = True
        self.resident = resident_bytes(self._process.pid)

    def spawn(self, identifier: int, slot: int, cpu_seconds: int, descriptors: list[int]) -> None:
        """Ask for a child. Raises OSError when the zygote is gone."""
        message = {"op": "spawn", "id": identifier, "slot": slot, "cpu": cpu_seconds}
        socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)

    def start_session(self, identifier: int, slot: int, session: int, descriptors: list[int]) -> None:
        """Ask for a session init with one session. Raises OSError when the zygote is gone."""
        message = {"op": "init", "id": identifier, "slot": slot, "session": session}
        socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)

    def locate(self, identifier: int) -> None:
        """Ask for a child's PID."""
        self._tell({"op": "where", "id": identifier})

    def kill(self, identifier: int) -> None:
        """Ask to kill a child. The children of a zygote that is gone died with it."""
        self._tell({"op": "kill", "id": identifier})

    def clean(self, slot: int) -> None:
        """Ask for a slot's processes and files to be removed."""
        self._tell({"op": "clean", "slot": slot})

    def receive(self) -> ProcessMessage | None:
        """The next report; None when the zygote is gone."""
        try:
            data = self._socket.recv(_MAX_MESSAGE)
        except ConnectionResetError:
            return None
        if not data:
            return None
        message: ProcessMessage = json.loads(data)
        return message

    def close(self) -> int:
        """Kill the zygote and its children. Returns its exit status."""
        self._socket.close()
        self._process.kill()
        status = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return status

    def _tell(self, message: ProcessMessage) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.send(json.dumps(message).encode())
