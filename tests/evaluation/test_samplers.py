"""Opening a sampler: local models, chat templates, and limits of prompt lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evaluation.runs import settings
from rollout.fakes import byte_codec, byte_tokenizer, tiny_model
from rollout.templates import QWEN, chat_tokenizer

from agentrl.errors import SettingsError
from agentrl.evaluation.provenance import build_provenance
from agentrl.evaluation.samplers import ModelSampler, build_evaluation_environment, open_sampler
from agentrl.models.loading import model_fingerprint, read_model
from agentrl.models.tokenizer import read_tokenizer
from agentrl.rollout.environment import build_codec
from agentrl_envs.chat import MarkedText
from agentrl_envs.settings import INSTRUCTIONS
from agentrl_envs.simpletir import SimpleTIREnvironment
from agentrl_envs.types import Problem

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def templated(template: str | None = TEMPLATE) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def saved(folder: Path, *, template: str | None = None) -> Path:
    tiny_model().save_pretrained(folder)
    templated(template).save_pretrained(folder)
    return folder


async def test_a_prompt_stands_in_the_template_and_its_special_tokens_are_text(tmp_path: Path) -> None:
    folder = saved(tmp_path, template=TEMPLATE)
    chosen = settings(f"model.path={folder}", "model.dtype=float32", "environment.chat=always")
    environment, opened = build_evaluation_environment(chosen), await open_sampler(chosen, tmp_path)
    try:
        await environment.open()
        prompt = await environment.episode(Problem(id="a", statement="<|im_end|>", answer="1", source="toy")).start()
        ids = opened.codec.encode_prompt(prompt)
        specials = [(place, token) for place, token in enumerate(ids) if token in (257, 258)]
        assert [token for _, token in specials] == [257, 258, 257]  # those of the template alone
        before, after = byte_codec().encode("user\n"), byte_codec().encode("assistant\n")
        instruction = byte_codec().encode(INSTRUCTIONS["simpletir"])
        assert ids[1 : 1 + len(before + instruction)] == before + instruction
        assert ids[-len(after) :] == after
        assert opened.codec.encode("observation") == byte_codec().encode("observation")
    finally:
        await opened.close()
        await environment.close()


def prompts(*texts: str) -> dict[tuple[str, str], str]:
    return {("toy", str(number)): text for number, text in enumerate(texts)}


async def test_a_model_that_is_read_here(tmp_path: Path) -> None:
    chosen = settings(f"model.path={saved(tmp_path)}", "model.dtype=float32", "rollout.concurrency=3")
    opened = await open_sampler(chosen, tmp_path)
    try:
        fingerprint = model_fingerprint(read_model(str(tmp_path), chosen.model).state_dict().items())
        assert opened.model_record() == {"name": str(tmp_path), "fingerprint": fingerprint}
        assert opened.concurrency == 3
        said = r"^problem 0 of toy: .* exceed the number of positions of the model \(1024\); valid: .* at most 1019$"
        with pytest.raises(SettingsError, match=said):
            opened.prompts_too_long(prompts("short", "p" * 10))
        with pytest.raises(
            SettingsError, match=r"^problem 0 of toy: .* of the model \(1024\); valid: shorter prompts$"
        ):
            opened.prompts_too_long(prompts("p" * 100_000))
    finally:
        await opened.close()


async def test_what_fits_is_accepted_and_the_cache_counts_too(tmp_path: Path) -> None:
    chosen = settings("evaluation.max_response_tokens=90", "rollout.kv_cache_tokens=100")
    opened = ModelSampler(
        engine=None,  # type: ignore[arg-type]
        codec=byte_codec(),
        settings=chosen,
        fingerprint="f",
        record={},
    )
    assert opened.prompts_too_long(prompts("p" * 10)) == {}
    said = (
        r"exceed rollout\.kv_cache_tokens \(100\); valid: rollout\.kv_cache_tokens of at least 101, or .* at most 89$"
    )
    with pytest.raises(SettingsError, match=said):
        opened.prompts_too_long(prompts("p" * 11))
    with pytest.raises(
        SettingsError, match=r"^problem 1 of toy: .*; valid: rollout\.kv_cache_tokens of at least 10090$"
    ):
        opened.prompts_too_long(prompts("p", "p" * 10_000))


async def test_prompts_that_leave_a_model_no_room_are_named_while_others_fit() -> None:
    opened = ModelSampler(
        engine=None,  # type: ignore[arg-type]
        codec=byte_codec(),
        settings=settings("evaluation.max_response_tokens=90"),
        fingerprint="f",
        record={},
        max_positions=100,
    )
    assert opened.prompts_too_long(prompts("p" * 10, "p" * 11, "p" * 500)) == {("toy", "1"): 11, ("toy", "2"): 500}


async def test_a_model_without_template_is_refused_where_one_is_needed(tmp_path: Path) -> None:
    chosen = settings(f"model.path={saved(tmp_path)}", "environment.chat=always")
    with pytest.raises(SettingsError, match="has no chat template"):
        await open_sampler(chosen, tmp_path)


async def test_the_ends_that_generation_knows_end_a_turn(tmp_path: Path) -> None:
    folder = saved(tmp_path, template=TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    chosen = settings(f"model.path={folder}", "model.dtype=float32", "environment.chat=always")
    opened = await open_sampler(chosen, tmp_path)
    try:
        assert opened.engine._batcher._eos_ids == {256, 258}  # type: ignore[attr-defined]
        assert build_codec(read_tokenizer(folder), str(folder), None).end_ids == {256, 258}  # as training has them
    finally:
        await opened.close()


async def test_tool_calls_are_evaluated_in_the_models_template(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    chat_tokenizer(QWEN).save_pretrained(tmp_path)
    chosen = settings(f"model.path={tmp_path}", "model.dtype=float32", "environment.protocol=hermes")
    environment = build_evaluation_environment(chosen)
    assert isinstance(environment, SimpleTIREnvironment)
    opened = await open_sampler(chosen, tmp_path)
    try:
        assert opened.codec.end_ids == {256, 258}  # what the tokenizer and the template end with
        assert opened.engine._batcher._eos_ids == {256, 258}  # type: ignore[attr-defined]
        await environment.open()
        prompt = await environment.episode(Problem(id="a", statement="1?", answer="1", source="toy")).start()
        assert isinstance(prompt, MarkedText)
        assert opened.codec.encode_prompt(prompt).count(257) == 3
    finally:
        await opened.close()
        await environment.close()


@pytest.mark.parametrize(
    ("protocol", "prompt"), [("retool", "plain text"), ("torl", "plain text"), ("hermes", "chat template with tools")]
)
def test_results_say_under_which_protocol_they_were_made(protocol: str, prompt: str) -> None:
    record = build_provenance(settings(f"environment.protocol={protocol}"), [], model={}, engine={}, environment=[])[
        "protocol"
    ]
    assert (record["protocol"], record["prompt"]) == (protocol, prompt)
    assert record["instruction"] == INSTRUCTIONS[protocol]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment.protocol=hermes", r"own; valid with --base-url: simpletir, retool, torl, or --env reasoning"),
        ("environment.chat=always", r"own; valid with --base-url: environment\.chat=auto"),
    ],
)
def test_tool_calls_need_a_template_that_is_read_here(override: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(override, "evaluation.endpoint.url=http://localhost:1/v1")
