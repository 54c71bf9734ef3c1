"""Which conversations are written in a model's chat template, by the settings, the environment and the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rollout.families import LLAMA, MISTRAL, family_tokenizer
from rollout.templates import QWEN, chat_tokenizer

from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.rollout import environment as rooms
from agentrl.rollout.environment import build_chat_setup, build_codec, build_environment, uses_chat_template
from agentrl.rollout.gateway.environment import RerenderedEnvironment
from agentrl_envs.types import Problem

CLASSES = '''
class Shop:
    def reset(self, **columns):
        return "In kg."

    def query(self, sql: str) -> str:
        """Runs a query.

        Args:
            sql: one SQL statement
        """
        return "3"


class Guess:
    def reset(self, **columns):
        return None

    def look(self) -> str:
        """Looks."""
        return "dark"

    def step(self, text):
        return "No."


class Silent:
    def reset(self, **columns):
        return None

    def step(self, text):
        return None
'''
PROBLEM = Problem(
    id="p",
    statement="a\n\nb",
    answer="5",
    source="toy",
    messages=[{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
)


@pytest.fixture
def classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "chat_classes.py").write_text(CLASSES, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rooms, "read_end_token_ids", lambda name: ())  # there is no model, only its tokenizer
    return "chat_classes"


def settings(env: str = "simpletir", *overrides: str) -> Any:
    model = ["model.path=a/model", "data.train.0.path=builtin:arithmetic"]
    return load_settings(env, overrides=[*model, *overrides])


@pytest.mark.parametrize(
    ("env", "overrides", "templated"),
    [
        ("simpletir", [], False),
        ("simpletir", ["environment.chat=always"], True),
        ("simpletir", ["environment.protocol=torl", "environment.chat=always"], True),
        ("simpletir", ["environment.protocol=hermes"], True),
        ("simpletir", ["environment.protocol=hermes", "environment.chat=never"], False),
        ("reasoning", [], False),
        ("reasoning", ["environment.chat=always"], True),
    ],
)
def test_protocols(env: str, overrides: list[str], templated: bool) -> None:
    made = settings(env, *overrides)
    chat = build_chat_setup(made, chat_tokenizer(QWEN), "m")
    assert uses_chat_template(made) is templated
    assert (chat is not None) is templated
    assert build_environment(made, chat).describe is not None


@pytest.mark.parametrize(
    ("name", "overrides", "templated"),
    [
        ("Shop", [], True),
        ("Shop", ["environment.chat=never"], False),
        ("Silent", [], False),  # no tools: nothing needs the template
        ("Silent", ["environment.chat=always"], True),
    ],
)
async def test_environments_that_are_classes(classes: str, name: str, overrides: list[str], templated: bool) -> None:
    made = settings(f"{classes}:{name}", *overrides)
    chat = build_chat_setup(made, chat_tokenizer(QWEN), "m")
    assert uses_chat_template(made) is templated
    assert (chat is not None) is templated
    environment = build_environment(made, chat)
    await environment.open()
    episode = environment.episode(PROBLEM)
    prompt = await episode.start()
    assert ("<|im_start|>system\na<|im_end|>" in prompt) is templated  # a role of its own, where there are roles
    assert ("a\n\nb" in prompt) is not templated
    assert ("b\n\nIn kg." in prompt) is (name == "Shop")
    await episode.close()
    await environment.close()
    assert build_chat_setup(settings(f"{classes}:{name}"), chat_tokenizer(None), "m") is None


async def test_tools_that_are_known_are_not_listed(classes: str) -> None:
    made = settings(f"{classes}:Shop", "environment.list_tools=false")
    environment = build_environment(made, build_chat_setup(made, chat_tokenizer(None), "m"))
    await environment.open()
    episode = environment.episode(PROBLEM)
    assert await episode.start() == "a\n\nb\n\nIn kg.\n"
    await episode.close()
    await environment.close()
    with pytest.raises(SettingsError, match=r"list_tools=false, but the chat template of m lists the tools"):
        build_chat_setup(made, chat_tokenizer(QWEN), "m")


def test_a_history_of_the_template_needs_a_template(classes: str) -> None:
    made = settings(f"{classes}:Shop", "environment.history=template")
    chat = build_chat_setup(made, chat_tokenizer(QWEN), "m")
    assert chat is not None
    assert chat.renderer is not None
    assert [tool["function"]["name"] for tool in chat.tools] == ["query"]  # type: ignore[index]
    assert isinstance(build_environment(made, chat), RerenderedEnvironment)
    assert build_codec(chat_tokenizer(QWEN), "m", chat) is chat.renderer.codec
    with pytest.raises(SettingsError, match=r"environment.history=template .* uses m in plain text"):
        build_chat_setup(made, chat_tokenizer(None), "m")


@pytest.mark.parametrize(
    ("env", "overrides", "template", "message"),
    [
        ("simpletir", ["environment.chat=always"], None, "environment.chat=always, but the tokenizer of m has no chat"),
        (
            "simpletir",
            ["environment.protocol=torl", "environment.chat=always", "environment.system_prompt=x"],
            MISTRAL,
            "changes earlier messages when a second user message follows, which environment.protocol=torl may",
        ),
        ("Guess", [], MISTRAL, "which step\\(\\) of chat_classes:Guess may send: set environment.chat=never"),
        ("Silent", ["environment.chat=always"], None, "env=chat_classes:Silent, but the tokenizer of m has no chat"),
    ],
)
def test_models_that_cannot(classes: str, env: str, overrides: list[str], template: str | None, message: str) -> None:
    made = settings(env if env == "simpletir" else f"{classes}:{env}", *overrides)
    tokenizer = chat_tokenizer(None) if template is None else family_tokenizer(template)
    with pytest.raises(SettingsError, match=message):
        build_chat_setup(made, tokenizer, "m")


def test_the_codec_shows_the_tokens_of_calls(classes: str) -> None:
    made = settings(f"{classes}:Shop")
    tokenizer = family_tokenizer(LLAMA)
    chat = build_chat_setup(made, tokenizer, "m")
    codec = build_codec(tokenizer, "m", chat)
    tag, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|python_tag|>", "<|eot|>"))
    assert codec.decode([tag]) == "<|python_tag|>"
    assert codec.decode([end]) == ""
    assert end in codec.end_ids
