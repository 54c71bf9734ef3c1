"""Results of probes. A slow machine or a message from another process does not count as missing isolation."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from agentrl_sandbox.client import Execution, Outcome, Sandbox, SandboxSettings, open_sandbox
from agentrl_sandbox.probes import probe_isolation
from agentrl_sandbox.types import StartError

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
NOTHING = {"landlock": 0, "seccomp": 0, "separate_users": 1}
CUT_SHORT = {"stdout": "", "stderr": "", "exit_code": -9, "seconds": 20.0, "truncated": False}


class Runner:
    """Runs programs in a real sandbox. Subclasses disturb them."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.deadlines: list[float] = []

    async def execute(self, program: str, *, timeout: float) -> Execution:
        self.deadlines.append(timeout)
        return await self.sandbox.execute(program, timeout=timeout)


class SlowRunner(Runner):
    """Reports a timeout for the first ``times`` programs of each kind."""

    def __init__(self, sandbox: Sandbox, times: int) -> None:
        super().__init__(sandbox)
        self.times = times
        self.seen: Counter[str] = Counter()

    async def execute(self, program: str, *, timeout: float) -> Execution:
        kind = program.strip()[:18]
        self.seen[kind] += 1
        if self.seen[kind] <= self.times:
            return Execution(outcome=Outcome.TIMEOUT, **CUT_SHORT)
        return await super().execute(program, timeout=timeout)


class LeakyRunner(Runner):
    """Runs the network probe with a network and interrupts it."""

    async def execute(self, program: str, *, timeout: float) -> Execution:
        if "SOCK_DGRAM" not in program:
            return await super().execute(program, timeout=timeout)
        subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
        return Execution(outcome=Outcome.TIMEOUT, **CUT_SHORT)


class BusyPorts(Runner):
    """Sends unrelated messages to the ports of the network probe."""

    async def execute(self, program: str, *, timeout: float) -> Execution:
        if "SOCK_DGRAM" in program:
            udp, tcp = (int(port) for port in re.findall(r"SOCK_\w+, (\d+)", program))
            with socket.socket(type=socket.SOCK_DGRAM) as stranger, socket.create_connection(("127.0.0.1", tcp)):
                stranger.sendto(b"GET /health", ("127.0.0.1", udp))
        return await super().execute(program, timeout=timeout)


class EndedNeighbour(Runner):
    """Reports that the first neighbour ended before its files were searched."""

    looks = 0

    async def execute(self, program: str, *, timeout: float) -> Execution:
        ran = await super().execute(program, timeout=timeout)
        if "umask" in program:
            self.looks += 1
            return ran if self.looks > 1 else Execution(**{**vars_of(ran), "stdout": "0.0 0.1\n"})
        return ran


def vars_of(ran: Execution) -> dict[str, Any]:
    return {name: getattr(ran, name) for name in Execution.__dataclass_fields__}


async def missing(runner: Any, settings: SandboxSettings) -> tuple[str, ...]:
    return (await probe_isolation(runner, mode="root", layers=NOTHING, settings=settings)).missing


async def test_interrupted_probes_are_repeated_with_more_time(sandbox, settings):
    runner = SlowRunner(sandbox, times=1)
    assert await missing(runner, settings) == ()
    assert {round(seconds, 1) for seconds in runner.deadlines} - {180.0} == {60.0, 0.9}  # three times the first


async def test_a_sandbox_that_keeps_little_output_keeps_what_probes_say():
    settings = SandboxSettings(workers=4, output_limit=256)
    opened = await open_sandbox(settings)
    try:
        assert await missing(SlowRunner(opened, times=1), settings) == ()
    finally:
        await opened.close()


async def test_a_probe_that_never_finishes_is_not_missing_isolation(sandbox, settings):
    with pytest.raises(StartError, match="ended as timeout, then timeout, then timeout"):
        await missing(SlowRunner(sandbox, times=3), settings)


async def test_a_successful_attack_counts_even_if_its_program_is_interrupted(sandbox, settings):
    assert await missing(LeakyRunner(sandbox), settings) == ("no_network",)


async def test_messages_of_other_processes_do_not_count(sandbox, settings):
    assert await missing(BusyPorts(sandbox), settings) == ()


async def test_files_of_a_neighbour_are_looked_for_until_there_is_one(sandbox, settings):
    runner = EndedNeighbour(sandbox)
    assert await missing(runner, settings) == ()
    assert runner.looks >= 2


@contextlib.contextmanager
def busy_machine() -> Iterator[None]:
    """Run eight busy processes per core."""
    count = 8 * len(os.sched_getaffinity(0))
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


async def test_a_busy_machine_isolates():
    with busy_machine():
        opened = await open_sandbox(SandboxSettings(workers=4))
        try:
            assert opened.isolation.missing == ()
        finally:
            await opened.close()
