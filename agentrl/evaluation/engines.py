"""What samples in an evaluation: the engine of the settings over a model that is read here, or an endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.errors import SettingsError
from agentrl.evaluation.chat_template import TemplatedCodec
from agentrl.evaluation.players import Player, TextPlayer, TokenPlayer
from agentrl.evaluation.text_engine import TextEngine
from agentrl.models.loading import read_model
from agentrl.models.tokenizer import TextCodec, read_tokenizer
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

    def player(self, environment: Environment) -> Player: ...

    def check_lengths(self, prompts: Sequence[str]) -> None:
        """Raise SettingsError where the longest prompt and a whole response do not fit."""
        ...

    async def close(self) -> None: ...


async def open_engine(settings: Settings) -> OpenedEngine:
    """The engine that ``settings`` (with evaluation's limits) name, open. SettingsError and WorldError say what fails.

    The endpoint where ``evaluation.endpoint.url`` is set; else ``rollout.engine`` over the model in ``model.path``.
    """
    if settings.evaluation.endpoint.url is not None:
        engine = TextEngine(settings.evaluation.endpoint)
        try:
            await engine.open()
        except BaseException:
            await engine.close()
            raise
        return OpenedEndpoint(engine=engine, settings=settings)
    path = str(settings.model.path)
    tokenizer = read_tokenizer(path)
    if settings.evaluation.chat_template:
        codec: TextCodec = TemplatedCodec(tokenizer, path)
    else:
        codec = build_codec(tokenizer, chat_format(settings, tokenizer, path))
    model = read_model(path, settings.model).eval()
    return OpenedModel(
        engine=TransformersEngine(model, codec, settings.rollout, eos_ids=_eos_ids(model)),
        codec=codec,
        settings=settings,
        positions=model.config.max_position_embeddings,
    )


def environment_of(settings: Settings) -> Environment:
    """The environment of an evaluation, not yet open. An endpoint's template is its own: no protocol writes in it."""
    path = settings.model.path
    if path is None or settings.evaluation.endpoint.url is not None or not needs_chat_format(settings):
        return build_environment(settings)
    return build_environment(settings, chat_format(settings, read_tokenizer(path), path))


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """An engine of tokens in this process; ``positions`` is the longest sequence that its model can read."""

    engine: Engine
    codec: TextCodec
    settings: Settings
    positions: int | None

    @property
    def concurrency(self) -> int:
        return self.settings.rollout.concurrency

    def model(self) -> Mapping[str, Any]:
        return {"name": self.settings.model.path, "fingerprint": self.engine.fingerprint()}

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


@dataclass(frozen=True, kw_only=True)
class OpenedEndpoint:
    """An endpoint that has answered."""

    engine: TextEngine
    settings: Settings

    @property
    def concurrency(self) -> int:
        return self.settings.evaluation.endpoint.concurrency

    def model(self) -> Mapping[str, Any]:
        return {"name": self.engine.model, "fingerprint": self.engine.fingerprint()}

    def player(self, environment: Environment) -> Player:
        return TextPlayer(
            environment=environment,
            engine=self.engine,
            settings=self.settings.rollout,
            top_p=self.settings.evaluation.top_p,
            seed=self.settings.seed,
            concurrency=self.concurrency,
        )

    def check_lengths(self, prompts: Sequence[str]) -> None:
        """The endpoint says itself what it cannot read."""

    async def close(self) -> None:
        await self.engine.close()


def _eos_ids(model: Any) -> tuple[int, ...]:
    """The ends of sequence that the model's own generation knows beside the tokenizer's (``<|im_end|>`` and such)."""
    config = getattr(model, "generation_config", None)
    found = None if config is None else config.eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
