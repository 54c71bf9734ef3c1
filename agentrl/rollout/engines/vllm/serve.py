"""``agentrl serve-policy``: one vLLM server, configured as training requires, for ``placement: external``."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from agentrl.errors import WorldError
from agentrl.models.tokenizer import TextCodec, read_tokenizer
from agentrl.rollout.engines.vllm.engine import VLLMEngine
from agentrl.rollout.engines.vllm.server import ServerPlan, ServerProcess
from agentrl.rollout.settings import RolloutSettings


async def serve(rollout: RolloutSettings, plan: ServerPlan, *, vocabulary: int, say: Callable[[str], None]) -> None:
    """Start the server, check it as a run would, print its address, and serve until SIGTERM or Ctrl-C."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    with tempfile.TemporaryDirectory(prefix="agentrl-serve-") as folder:
        server = ServerProcess(plan, Path(folder))
        codec = TextCodec(read_tokenizer(plan.tokenizer))
        engine = VLLMEngine([server], codec, rollout, vocabulary=vocabulary, max_tokens=plan.max_tokens, label=False)
        opening = asyncio.create_task(engine.open())
        stopping = asyncio.create_task(asked.wait())
        try:
            await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                opening.result()
                say(f"serving {plan.tokenizer} at {plan.address}")
                await _until(asked, server)
        finally:
            for task in (opening, stopping):
                task.cancel()
            await asyncio.gather(opening, stopping, return_exceptions=True)
            await engine.close()


async def _until(asked: asyncio.Event, server: ServerProcess) -> None:
    while not asked.is_set():
        try:
            async with asyncio.timeout(1.0):
                await asked.wait()
        except TimeoutError:
            if server.ended:
                raise WorldError(f"the vLLM server has ended; the end of its log:\n{server.last_words()}") from None
