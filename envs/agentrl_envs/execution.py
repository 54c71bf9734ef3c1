"""Run one program of an episode: retry what is the sandbox's fault, under one deadline."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable

import stamina

from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.types import ToolCall
from agentrl_sandbox.client import Execution, Outcome, Sandbox, SandboxError

PRINTED = 4096
"""Characters of a program's output that are kept beside the conversation."""

logger = logging.getLogger(__name__)


class _InfrastructureError(Exception):
    """The sandbox answered, but with its own failure."""

    def __init__(self, execution: Execution) -> None:
        super().__init__(execution.stderr.strip() or "the sandbox reports an infrastructure failure")
        self.execution = execution


async def run_program(sandbox: Sandbox, source: str, settings: SimpleTIRSettings) -> tuple[Execution | None, ToolCall]:
    """Run ``source``; the execution is None when the sandbox failed for good (said in the log and in the `ToolCall`).

    All tries of one program carry one request id, so a try that did arrive is not run twice.
    """
    request_id = uuid.uuid4().hex

    async def run() -> Execution:
        execution = await sandbox.execute(source, timeout=settings.execution_timeout, request_id=request_id)
        if execution.outcome is Outcome.INFRASTRUCTURE_FAILURE:
            raise _InfrastructureError(execution)
        return execution

    try:
        async with asyncio.timeout(settings.sandbox_deadline):
            execution = await _retried(run, settings)
    except TimeoutError:
        logger.warning("no result from the sandbox within sandbox_deadline=%g s", settings.sandbox_deadline)
        return None, _failed(settings.sandbox_deadline)
    except _InfrastructureError as failure:
        logger.warning("the sandbox failed %d times: %s", settings.sandbox_attempts, failure)
        return None, _failed(failure.execution.seconds)
    except SandboxError as error:
        logger.warning("the sandbox failed %d times: %s", settings.sandbox_attempts, error)
        return None, _failed(0.0)
    return execution, ToolCall(
        outcome=execution.outcome.value,
        seconds=execution.seconds,
        truncated=execution.truncated,
        printed=execution.stdout[-PRINTED:],
    )


async def _retried(run: Callable[[], Awaitable[Execution]], settings: SimpleTIRSettings) -> Execution:
    """The first result; only what fails pays for the retry's machinery (ten times the cost of the turn's own work)."""
    first: SandboxError | _InfrastructureError | None = None
    try:
        return await run()
    except (SandboxError, _InfrastructureError) as error:
        first = error
    async for attempt in stamina.retry_context(
        on=(SandboxError, _InfrastructureError),
        attempts=settings.sandbox_attempts,
        timeout=settings.sandbox_deadline,
        wait_initial=settings.sandbox_retry_wait,
        wait_jitter=settings.sandbox_retry_wait,
    ):
        with attempt:
            if attempt.num == 1:
                raise first
            return await run()
    raise first


def _failed(seconds: float) -> ToolCall:
    return ToolCall(outcome=Outcome.INFRASTRUCTURE_FAILURE.value, seconds=seconds)
