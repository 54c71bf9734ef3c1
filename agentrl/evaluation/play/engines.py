"""Engines for evaluation: an endpoint, or the engine in the settings with a local model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

from agentrl.errors import SettingsError
from agentrl.evaluation.play.players import Player, TokenPlayer
from agentrl.evaluation.play.verified import open_verified
from agentrl.models.loading import read_config, read_model
from agentrl.models.settings import ModelSettings
from agentrl.models.tokenizer import TextCodec, read_tokenizer
from agentrl.rollout.engines.base import Engine, EngineRequest, engine_facts, engine_plugin
from agentrl.rollout.environment import build_codec, build_environment, chat_format, needs_chat_format
from agentrl.rollout.settings import longest_request
from agentrl_envs.episode import Environment

if TYPE_CHECKING:
    from agentrl.evaluation.settings import EvaluationSections


ProblemKey = tuple[str, str]
"""Name of a benchmark, and id of a problem in it."""


class OpenedEngine(Protocol):
    """An engine that is ready to sample, from tokens or from text."""

    @property
    def concurrency(self) -> int:
        """Maximum number of conversations in flight."""
        ...

    def model(self) -> Mapping[str, object]:
        """The record that identifies the model in results."""
        ...

    def sampler(self) -> Mapping[str, object]:
        """The record that identifies the engine in results."""
        ...

    def player(self, environment: Environment) -> Player: ...

    def without_room(self, prompts: Mapping[ProblemKey, str]) -> Mapping[ProblemKey, int]:
        """Return the problems whose prompts leave no room for a complete response, with the prompts' token counts.

        Raises SettingsError if this holds for all prompts, and if a length exceeds the limit of a setting.
        """
        ...

    async def close(self) -> None: ...


async def open_engine(settings: EvaluationSections, folder: Path) -> OpenedEngine:
    """Open ``rollout.engine`` with the model in ``model.path``. Raises SettingsError or WorldError.

    ``settings`` contain the limits of evaluation. Logs of servers are written to the evaluation's ``folder``.
    """
    path = str(settings.model.path)
    tokenizer = read_tokenizer(path)
    codec = build_codec(tokenizer, path, chat_format(settings, tokenizer, path))
    in_process = engine_facts(settings.rollout).in_process
    managed = engine_plugin(settings.rollout).managed(
        EngineRequest(
            rollout=settings.rollout,
            policy=settings.model,
            policy_path=path,
            codec=codec,
            longest=longest_request(settings.rollout, None),
            folder=folder,
            model=_read_model(settings.model, path) if in_process else None,
            trained=False,
        )
    )
    fingerprint = managed.engine.fingerprint() if in_process else await open_verified(managed, settings, codec)
    return OpenedModel(
        engine=managed.engine,
        codec=codec,
        settings=settings,
        fingerprint=fingerprint,
        record=managed.record(),
        positions=_positions(read_config(settings.model)),
    )


def _read_model(settings: ModelSettings, path: str) -> Any:
    return read_model(path, settings).to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _positions(config: Any | None) -> int | None:
    """Maximum sequence length of a model with ``config``, or None if ``config`` does not contain it."""
    return None if config is None else getattr(config.get_text_config(), "max_position_embeddings", None)


def environment_of(settings: EvaluationSections) -> Environment:
    """Build the environment of an evaluation without opening it.

    Prompts get a chat format only if the protocol needs one and no endpoint applies its own template.
    """
    path = settings.model.path
    if path is None or settings.evaluation.endpoint.url is not None or not needs_chat_format(settings):
        return build_environment(settings)
    return build_environment(settings, chat_format(settings, read_tokenizer(path), path))


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A token engine with a local model. ``positions`` is the maximum sequence length of the model."""

    engine: Engine
    codec: TextCodec
    settings: EvaluationSections
    fingerprint: str
    record: Mapping[str, object]
    positions: int | None = None

    @property
    def concurrency(self) -> int:
        return self.settings.rollout.concurrency

    def model(self) -> Mapping[str, object]:
        return {"name": self.settings.model.path, "fingerprint": self.fingerprint}

    def sampler(self) -> Mapping[str, object]:
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

    def without_room(self, prompts: Mapping[ProblemKey, str]) -> Mapping[ProblemKey, int]:
        rollout = self.settings.rollout
        tokens = {problem: len(self.codec.encode_prompt(prompt)) for problem, prompt in prompts.items()}
        most = None if self.positions is None else self.positions - rollout.max_response_tokens
        unfit = {problem: count for problem, count in tokens.items() if most is not None and count > most}
        if len(unfit) == len(tokens):
            shortest = min(tokens, key=tokens.__getitem__)
            self._refuse(shortest, tokens[shortest], "the positions of the model", self.positions or 0)
        problem = max(tokens.keys() - unfit.keys(), key=tokens.__getitem__)
        longest = tokens[problem]
        facts = engine_facts(rollout)
        if facts.kv_slots is not None and longest + rollout.max_response_tokens > facts.kv_slots:
            self._refuse(problem, longest, "rollout.kv_cache_tokens", facts.kv_slots)
        if facts.prompt_limit is not None and longest > facts.prompt_limit:
            raise SettingsError(
                f"{_named(problem)}: its prompt has {longest} tokens, but the servers are started for prompts of "
                f"rollout.max_prompt_tokens={rollout.max_prompt_tokens}; set it to at least {longest}"
            )
        return unfit

    def _refuse(self, problem: ProblemKey, prompt: int, name: str, limit: int) -> NoReturn:
        """Raise SettingsError because prompt and response exceed the limit ``limit`` of ``name``."""
        more = self.settings.rollout.max_response_tokens
        valid = [f"{name} of at least {prompt + more}"] if "." in name else []
        if limit > prompt:
            valid.append(f"evaluation.max_response_tokens of at most {limit - prompt}")
        raise SettingsError(
            f"{_named(problem)}: its prompt has {prompt} tokens and evaluation.max_response_tokens (or, without it, "
            f"rollout.max_response_tokens) allows {more} more, which exceeds {name}, {limit}; valid: "
            + (", or ".join(valid) or "shorter prompts")
        )

    async def close(self) -> None:
        await self.engine.close()


def _named(problem: ProblemKey) -> str:
    benchmark, name = problem
    return f"problem {name} of {benchmark}"
