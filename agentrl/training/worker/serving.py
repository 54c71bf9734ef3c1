"""``agentrl serve-policy``: a vLLM server that training elsewhere can use."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.rollout.engines.managed import changeable_policy, transfer_backend
from agentrl.rollout.engines.vllm.serve import serve
from agentrl.rollout.engines.vllm.servers import longest_request, policy_servers, vocabulary_of
from agentrl.telemetry.console import Console

if TYPE_CHECKING:
    from agentrl.config import Settings


def serve_command(settings: Settings, model: str, *, host: str, port: int | None) -> None:
    """Serve the policy in ``model`` until a signal to stop. A run that names the server may change its weights."""
    console = Console(settings.telemetry)
    with tempfile.TemporaryDirectory(prefix="agentrl-policy-") as folder:
        served = changeable_policy(model, Path(folder))
        (plan,) = policy_servers(
            settings.rollout,
            settings.model,
            model,
            served=served,
            longest=longest_request(settings.rollout, settings.evaluation.max_response_tokens),
            training_gpus=0,
            backend=transfer_backend(settings.rollout.vllm),
            host=host,
            port=port,
        )
        console.note(f"starting vLLM for {model}; this takes minutes")
        asyncio.run(serve(settings.rollout, plan, vocabulary=vocabulary_of(model), say=console.note))
