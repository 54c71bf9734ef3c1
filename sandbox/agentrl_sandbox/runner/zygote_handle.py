"""The server's side of a zygote."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys

from agentrl_sandbox.runner import config as runner_config
from agentrl_sandbox.runner.config import ProcessMessage, RunnerConfig
from agentrl_sandbox.runner.usage import resident_bytes

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
        return self._process.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_ready(self) -> None:
        self.ready = True
        self.resident = resident_bytes(self._process.pid)

    def ask(self, message: ProcessMessage, descriptors: list[int]) -> None:
        """Ask for a child. Raises OSError when the zygote is gone."""
        socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)

    def tell(self, operation: str, identifier: int) -> None:
        """Ask about a child or a slot. The children of a zygote that is gone died with it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.send(json.dumps({"op": operation, "id": identifier}).encode())

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
