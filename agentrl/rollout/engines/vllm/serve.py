"""``agentrl serve-policy``: one vLLM server, configured as training requires, for ``placement: external``."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from agentrl.errors import WorldError
from agentrl.models.settings import ModelSettings
from agentrl.models.tokenizer import TextCodec, read_tokenizer
from agentrl.rollout.engines.managed_servers import vocabulary_of
from agentrl.rollout.engines.processes import ServerProcess
from agentrl.rollout.engines.vllm.engine import transfer_backend, vllm_engine
from agentrl.rollout.engines.vllm.plan import VLLMPlan, changeable_policy, policy_servers
from agentrl.rollout.settings import RolloutSettings


def serve_policy(
    rollout: RolloutSettings,
    policy: ModelSettings,
    *,
    longest: int,
    host: str,
    port: int | None,
    report: Callable[[str], None],
) -> None:
    """Serve the policy in ``policy.path`` until SIGTERM or Ctrl-C. A run that names the server may change its weights.

    ``longest``: tokens of the longest sequence. ``report`` prints a line.
    """
    model = str(policy.path)
    with tempfile.TemporaryDirectory(prefix="agentrl-policy-") as folder:
        (plan,) = policy_servers(
            rollout,
            policy,
            model,
            served=changeable_policy(model, Path(folder)),
            longest=longest,
            training_gpus=0,
            backend=transfer_backend(rollout.vllm),
            host=host,
            port=port,
        )
        report(f"starting vLLM for {model}; this takes minutes")
        asyncio.run(_serve(rollout, plan, Path(folder), report))


async def _serve(rollout: RolloutSettings, plan: VLLMPlan, folder: Path, report: Callable[[str], None]) -> None:
    """Start the server, check it as a run would, print its address, and serve until a signal to stop."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = ServerProcess(plan, folder)
    engine = vllm_engine(
        [server],
        TextCodec(read_tokenizer(plan.tokenizer)),
        rollout,
        vocabulary=vocabulary_of(plan.tokenizer),
        max_tokens=plan.max_tokens,
        label=False,
    )
    opening = asyncio.create_task(engine.open())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()
            report(f"serving {plan.tokenizer} at {plan.address}")
            while not stopping.done():
                await asyncio.wait({stopping}, timeout=1.0)
                if server.ended and not stopping.done():
                    raise WorldError(f"the vLLM server has ended; the end of its log:\n{server.last_words()}")
    finally:
        for task in (opening, stopping):
            task.cancel()
        await asyncio.gather(opening, stopping, return_exceptions=True)
        await engine.close()
