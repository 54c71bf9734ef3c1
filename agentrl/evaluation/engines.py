"""What samples in an evaluation: an endpoint, or the engine of the settings over a model that lies here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from agentrl.errors import SettingsError
from agentrl.evaluation.chat_template import TemplatedCodec
from agentrl.evaluation.players import Player, TokenPlayer
from agentrl.evaluation.provenance import chosen_engine
from agentrl.evaluation.servers import open_servers
from agentrl.models.loading import read_model
from agentrl.models.tokenizer import TextCodec, read_generation_ends, read_tokenizer
from agentrl.rollout.engines.base import Engine
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.environment import build_codec, build_environment, chat_format, needs_chat_format
from agentrl_envs.episode import Environment

if TYPE_CHECKING:
    from agentrl.config import Settings


class OpenedEngine(Protocol):
    """An engine that is ready, whatever it speaks."""

    @property
    def concurrency(self) -> int:
        """Conversations in flight at most."""
        ...

    def model(self) -> Mapping[str, Any]:
        """What identifies the model in results."""
        ...

    def sampler(self) -> Mapping[str, Any]:
        """What identifies the engine in results."""
        ...

    def player(self, environment: Environment) -> Player: ...

    def check_lengths(self, prompts: Sequence[str]) -> None:
        """Raise SettingsError where the longest prompt and a whole response do not fit."""
        ...

    async def close(self) -> None: ...


async def open_engine(settings: Settings, folder: Path) -> OpenedEngine:
    """``rollout.engine`` over the model in ``model.path``, open. SettingsError and WorldError say what fails.

    ``settings`` have evaluation's limits. ``folder``: for the logs of vLLM servers that are started here.
    """
    path = str(settings.model.path)
    codec = _codec(settings, path)
    if settings.rollout.engine == "vllm":
        servers, fingerprint = await open_servers(settings, codec, folder)
        dtype = settings.model.dtype
        record = {"name": "vllm", "version": ", ".join(servers.releases()), "dtype": dtype}
        return OpenedModel(engine=servers, codec=codec, settings=settings, fingerprint=fingerprint, record=record)
    model = read_model(path, settings.model).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    engine = TransformersEngine(model, codec, settings.rollout)
    return OpenedModel(
        engine=engine,
        codec=codec,
        settings=settings,
        fingerprint=engine.fingerprint(),
        record=chosen_engine(settings),
        positions=model.config.max_position_embeddings,
    )


def _codec(settings: Settings, path: str) -> TextCodec:
    tokenizer = read_tokenizer(path)
    if settings.evaluation.chat_template:
        return TemplatedCodec(tokenizer, path, generation_ends=read_generation_ends(path))
    return build_codec(tokenizer, path, chat_format(settings, tokenizer, path))


def environment_of(settings: Settings) -> Environment:
    """The environment of an evaluation, not yet open. An endpoint's template is its own: no protocol writes in it."""
    path = settings.model.path
    if path is None or settings.evaluation.endpoint.url is not None or not needs_chat_format(settings):
        return build_environment(settings)
    return build_environment(settings, chat_format(settings, read_tokenizer(path), path))


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """An engine of tokens over a model that lies here; ``positions`` is the longest sequence that it can read.

    Servers say themselves at their start what their model cannot read: they have none.
    """

    engine: Engine
    codec: TextCodec
    settings: Settings
    fingerprint: str
    record: Mapping[str, Any]
    positions: int | None = None

    @property
    def concurrency(self) -> int:
        return self.settings.rollout.concurrency

    def model(self) -> Mapping[str, Any]:
        return {"name": self.settings.model.path, "fingerprint": self.fingerprint}

    def sampler(self) -> Mapping[str, Any]:
        return self.record

    def player(self, environment: Environment) -> Player:
        return TokenPlayer(
            environment=environment,
            engine=self.engine,
            codec=self.codec,
            settings=self.settings.rollout,
            top_p=self.settings.evaluation.top_p,
            seed=self.settings.seed,
        )

    def check_lengths(self, prompts: Sequence[str]) -> None:
        rollout = self.settings.rollout
        longest = max(len(self.codec.encode_prompt(prompt)) for prompt in prompts)
        if rollout.engine == "vllm":
            if longest > rollout.max_prompt_tokens:
                raise SettingsError(
                    f"the longest prompt has {longest} tokens, and vLLM's servers serve prompts of "
                    f"rollout.max_prompt_tokens={rollout.max_prompt_tokens}; valid: at least {longest}"
                )
            return
        whole = longest + rollout.max_response_tokens
        limits = [("rollout.kv_cache_tokens", rollout.kv_cache_tokens)]
        limits += [] if self.positions is None else [("the positions of the model", self.positions)]
        for name, limit in limits:
            if whole > limit:
                raise SettingsError(
                    f"the longest prompt has {longest} tokens and evaluation.max_response_tokens (or, without it, "
                    f"rollout.max_response_tokens) allows {rollout.max_response_tokens} more, which passes {name}, "
                    f"{limit}; valid: evaluation.max_response_tokens of at most {max(limit - longest, 1)}"
                )

    async def close(self) -> None:
        await self.engine.close()
