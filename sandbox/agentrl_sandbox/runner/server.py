"""The fork server: one thread, one loop. Reads programs from the client, has zygotes fork them, watches them.

It holds the programs' texts and outputs, and never forks: children come from zygotes, which hold neither.

    client -> server   {"op": "run", "id", "timeout"} program stdin · {"op": "cancel", "id"}
    server -> client   {"op": "hello", "why", "layers"} · {"op": "ready"}
                       {"op": "done", "id", "outcome", "exit_code", "seconds", "truncated", "why"} stdout stderr
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from typing import Any

from agentrl_sandbox.runner import kernel, remains, rootfs, undertaker
from agentrl_sandbox.runner.capture import Capture
from agentrl_sandbox.runner.config import SCRATCH_VARIABLE, RunnerConfig
from agentrl_sandbox.runner.lockdown import has_own_users, layers
from agentrl_sandbox.runner.memory import usage
from agentrl_sandbox.runner.program import Ending, Program, judge
from agentrl_sandbox.runner.routing import needs_science
from agentrl_sandbox.runner.zygote_handle import ZygoteHandle
from agentrl_sandbox.types import Outcome
from agentrl_sandbox.wire import FrameBuffer, pack

_TICK = 0.1  # seconds between two looks at memory and at the parent
_BURST = 1 << 20  # bytes drained from one stream before others get a turn
_KINDS = ("bare", "science")


def main() -> None:
    """Entry point: ``main CONFIG SOCKET_DESCRIPTOR``."""
    config = RunnerConfig.from_json(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    why = ""
    try:
        if config.isolate == "none":
            undertaker.fork_server(config, int(sys.argv[2]))
        else:
            if config.isolate == "user":
                _become_first_process(config, int(sys.argv[2]))
            rootfs.enter(config.readable)
    except OSError as error:
        why = str(error) or type(error).__name__
    client = socket.socket(fileno=int(sys.argv[2]))
    client.sendall(pack({"op": "hello", "why": why, "layers": layers(config)}))
    if why:
        return
    server = Server(config, client)
    try:
        server.serve()
    finally:
        server.close()


def _become_first_process(config: RunnerConfig, descriptor: int) -> None:
    """Go on as the first process of a user and a PID namespace of our own; return there only.

    Without root, a zygote may come back from a program's PID namespace only to one that belongs to us.
    """
    rootfs.become_namespace_root(also=kernel.CLONE_NEWPID)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        kernel.die_with_parent(signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        return
    os.close(descriptor)
    while os.getppid() == config.client_pid:
        if signal.sigtimedwait({signal.SIGCHLD}, 1.0) is not None:
            break
    os._exit(0)


class Server:
    """The loop and what it knows."""

    def __init__(self, config: RunnerConfig, client: socket.socket) -> None:
        self._config = config
        self._client = client
        self._client.setblocking(False)
        self._frames = FrameBuffer()
        self._outgoing = bytearray()
        self._epoll = select.epoll()
        self._epoll.register(client.fileno(), select.EPOLLIN)
        self._programs: dict[int, Program] = {}
        self._captures: dict[int, tuple[Program, Capture]] = {}
        self._slots = list(range(config.workers))
        self._unclean: dict[int, str] = {}  # slot -> the zygote that has it cleaned
        self._queues: dict[str, deque[tuple[dict[str, Any], list[bytes]]]] = {kind: deque() for kind in _KINDS}
        self._zygotes: dict[str, ZygoteHandle] = {}
        self._by_descriptor: dict[int, ZygoteHandle] = {}
        self._next_tick = time.monotonic() + _TICK
        self._parent_is_visible = os.getppid() == config.client_pid
        self._bare = config.isolate == "none"
        self._count_tasks = not has_own_users(config)
        for kind in _KINDS:
            self._start_zygote(kind)

    def serve(self) -> None:
        """Until the client is gone."""
        while True:
            for descriptor, events in self._epoll.poll(self._wait_seconds()):
                if descriptor == self._client.fileno():
                    if not self._on_client(events):
                        return
                elif descriptor in self._by_descriptor:
                    self._on_zygote(self._by_descriptor[descriptor])
                elif descriptor in self._captures:
                    self._on_output(*self._captures[descriptor])
            self._watch(time.monotonic())
            if self._parent_is_visible and os.getppid() != self._config.client_pid:
                return

    def close(self) -> None:
        """Kill everything."""
        for zygote in self._zygotes.values():
            zygote.close()
        if self._bare:
            undertaker.bury(self._config, os.environ[SCRATCH_VARIABLE])

    # The client.

    def _on_client(self, events: int) -> bool:
        if events & select.EPOLLOUT:
            self._flush()
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            try:
                data = self._client.recv(1 << 20)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if not data:
                return False
            for header, blobs in self._frames.feed(data):
                self._on_frame(header, blobs)
        return True

    def _on_frame(self, header: dict[str, Any], blobs: list[bytes]) -> None:
        if header["op"] == "run":
            kind = "science" if needs_science(blobs[0].decode("utf-8", "surrogatepass")) else "bare"
            self._queues[kind].append((header, blobs))
            self._start_queued()
            return
        program = self._programs.get(header["id"])
        if program is not None:
            self._kill(program, Outcome.KILLED)
        for kind, queue in self._queues.items():
            self._queues[kind] = deque(entry for entry in queue if entry[0]["id"] != header["id"])

    def _reply(self, header: dict[str, Any], *blobs: bytes) -> None:
        self._outgoing += pack(header, *blobs)
        self._flush()

    def _flush(self) -> None:
        try:
            sent = self._client.send(self._outgoing) if self._outgoing else 0
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            return  # the next read says that the client is gone
        del self._outgoing[:sent]
        self._epoll.modify(self._client.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._outgoing else 0))

    # Programs.

    def _start_queued(self) -> None:
        for kind, queue in self._queues.items():
            while queue and self._slots and self._zygotes[kind].ready:
                header, (source, stdin) = queue.popleft()
                self._start(header["id"], header["timeout"], kind, source, stdin)

    def _start(self, identifier: int, timeout: float, kind: str, source: bytes, stdin: bytes) -> None:
        file = os.memfd_create("program", os.MFD_CLOEXEC)
        os.write(file, len(source).to_bytes(8, "big") + source + stdin)
        os.lseek(file, 0, os.SEEK_SET)
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        limits = (self._config.output_limit, self._config.output_limit, 4096)
        captures = [Capture(read, limit) for (read, _), limit in zip(pipes, limits, strict=True)]
        now = time.monotonic()
        program = Program(
            identifier=identifier,
            slot=self._slots.pop(),
            zygote=kind,
            started=now,
            deadline=now + timeout,
            cpu_limit=int(timeout) + 1,
            stdout=captures[0],
            stderr=captures[1],
            status=captures[2],
        )
        self._programs[identifier] = program
        for capture in captures:
            os.set_blocking(capture.descriptor, False)
        for capture in captures[:2]:
            self._captures[capture.descriptor] = (program, capture)
            self._epoll.register(capture.descriptor, select.EPOLLIN)
        descriptors = [file, *(write for _, write in pipes)]
        try:
            self._zygotes[kind].spawn(identifier, program.slot, program.cpu_limit, descriptors)
        except OSError as error:
            self._finish(program, Ending(outcome=Outcome.INFRASTRUCTURE_FAILURE, exit_code=None, why=str(error)))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _finish(self, program: Program, ending: Ending, *, clean: bool = True) -> None:
        for capture in program.captures:
            if self._captures.pop(capture.descriptor, None) is not None and capture.open:
                self._epoll.unregister(capture.descriptor)
            capture.close()
        del self._programs[program.identifier]
        if clean:
            self._slots.append(program.slot)
        else:
            self._unclean[program.slot] = program.zygote
        header = {
            "op": "done",
            "id": program.identifier,
            "outcome": ending.outcome.value,
            "exit_code": ending.exit_code,
            "seconds": time.monotonic() - program.started,
            "truncated": program.stdout.truncated or program.stderr.truncated,
            "why": ending.why,
        }
        self._reply(header, program.stdout.text(), program.stderr.text())
        self._start_queued()

    def _kill(self, program: Program, reason: Outcome) -> None:
        if program.reason is None:
            program.reason = reason
            self._zygotes[program.zygote].kill(program.identifier)

    def _on_output(self, program: Program, capture: Capture) -> None:
        if not capture.drain(_BURST):
            self._epoll.unregister(capture.descriptor)
        if program.stdout.total + program.stderr.total > self._config.flood_limit:
            self._kill(program, Outcome.OUTPUT_LIMIT)

    # Zygotes.

    def _start_zygote(self, kind: str) -> None:
        zygote = ZygoteHandle(kind, self._config)
        self._zygotes[kind] = zygote
        self._by_descriptor[zygote.fileno()] = zygote
        self._epoll.register(zygote.fileno(), select.EPOLLIN)

    def _on_zygote(self, zygote: ZygoteHandle) -> None:
        message = zygote.receive()
        if message is None:
            self._replace(zygote)
        elif message["op"] == "ready":
            zygote.set_ready()
            self._reply({"op": "ready", "kind": zygote.kind})
            for slot, kind in self._unclean.items():
                if kind == zygote.kind:
                    zygote.clean(slot)
            self._start_queued()
        elif message["op"] == "clean":
            del self._unclean[message["slot"]]
            self._slots.append(message["slot"])
            self._start_queued()
        elif message["id"] in self._programs:
            self._on_report(self._programs[message["id"]], message)

    def _on_report(self, program: Program, message: dict[str, Any]) -> None:
        if message["op"] == "located":
            program.pid = message["pid"]
            return
        clean = message.get("clean", True)
        if message["op"] == "failed":
            ending = Ending(outcome=Outcome.INFRASTRUCTURE_FAILURE, exit_code=None, why=message["why"])
        else:
            for capture in program.captures[:2]:
                if capture.open and not capture.drain(self._config.flood_limit):
                    self._epoll.unregister(capture.descriptor)
            program.status.drain(_BURST)
            ending = judge(program, message["status"], message["cpu"])
        self._finish(program, ending, clean=clean)

    def _replace(self, zygote: ZygoteHandle) -> None:
        """A zygote died: its programs died with it. Raises RuntimeError when it never came up."""
        self._epoll.unregister(zygote.fileno())
        del self._by_descriptor[zygote.fileno()]
        status = zygote.close()
        why = f"the {zygote.kind} interpreter ended with status {status}"
        if not zygote.ready:
            raise RuntimeError(f"{why} before it was ready")
        if self._bare:
            remains.kill_strays([other.pid for other in self._zygotes.values() if other is not zygote])
        self._start_zygote(zygote.kind)
        for program in [program for program in self._programs.values() if program.zygote == zygote.kind]:
            self._finish(
                program, Ending(outcome=Outcome.INFRASTRUCTURE_FAILURE, exit_code=None, why=why), clean=not self._bare
            )

    # Limits.

    def _wait_seconds(self) -> float:
        now = time.monotonic()
        nearest = min((program.deadline for program in self._programs.values()), default=now + 1.0)
        if self._programs:
            nearest = min(nearest, self._next_tick)
        return max(0.0, nearest - now)

    def _watch(self, now: float) -> None:
        for program in list(self._programs.values()):
            if now >= program.deadline:
                self._kill(program, Outcome.TIMEOUT)
                program.deadline = now + 1.0  # asked to end; look again later
        if not self._programs or now < self._next_tick:
            return
        self._next_tick = now + _TICK
        for program in self._programs.values():
            if program.pid:
                self._watch_usage(program)
            elif now - program.started > _TICK:
                self._zygotes[program.zygote].locate(program.identifier)

    def _watch_usage(self, program: Program) -> None:
        used = usage(program.pid, self._zygotes[program.zygote].resident)
        if used.resident > self._config.memory_mb << 20:
            self._kill(program, Outcome.MEMORY_LIMIT)
        elif self._count_tasks and used.tasks > self._config.max_processes:
            self._kill(program, Outcome.KILLED)
