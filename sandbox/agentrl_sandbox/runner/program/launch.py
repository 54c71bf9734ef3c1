"""Prepares what a program needs before it is forked: its memory file, its pipes, the file to fetch into."""

from __future__ import annotations

import os
import time

from agentrl_sandbox.runner.config import RunnerConfig
from agentrl_sandbox.runner.program import fetched
from agentrl_sandbox.runner.program.capture import Capture
from agentrl_sandbox.runner.program.order import Order
from agentrl_sandbox.runner.program.program import Program

_STATUS_LIMIT = 4096


def launch(order: Order, config: RunnerConfig, kind: str, slot: int) -> tuple[Program, list[int]]:
    """The program, its deadline running, and the descriptors for the child, which the caller closes.

    They are the memory file, stdout, stderr, outside sessions the status pipe, and the file to fetch into if any.
    """
    files = [order.to_memory_file()]
    limits = [config.output_limit, config.output_limit] + ([] if order.session is not None else [_STATUS_LIMIT])
    captures = []
    for limit in limits:
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        captures.append(Capture(read, limit))
        files.append(write)
    fetched_file = -1
    if order.fetch:
        fetched_file = fetched.create(config.fetch_limit, order.fetch)
        files.append(os.dup(fetched_file))
    now = time.monotonic()
    program = Program(
        identifier=order.identifier,
        slot=slot,
        zygote=kind,
        session=order.session,
        started=now,
        deadline=now + order.timeout,
        cpu_limit=int(order.timeout) + 1,
        stdout=captures[0],
        stderr=captures[1],
        status=captures[2] if len(captures) > 2 else None,
        fetch=order.fetch,
        fetched_file=fetched_file,
    )
    return program, files
