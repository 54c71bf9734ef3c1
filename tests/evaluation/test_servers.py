"""Evaluations with vLLM servers: opening, verification of the weights, and the record in the results."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from evaluation.runs import problem_set, settings
from rollout.fake_vllm import FakeVLLM, fakes
from rollout.fakes import ScriptedEnvironment, ScriptedEpisode, byte_codec, byte_tokenizer, tiny_model

from agentrl.config import Settings
from agentrl.errors import SettingsError
from agentrl.evaluation.benchmarks import ProblemSet
from agentrl.evaluation.directory import EvaluationDirectory
from agentrl.evaluation.run import sample_rollouts_of_sets
from agentrl.evaluation.samplers import PROBE, ModelSampler, open_sampler
from agentrl.rollout.engines.server_pool import ServerEngine
from agentrl.telemetry.console import Console
from agentrl.weights.verify import checksums
from agentrl_envs.types import Ended, Step


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    return folder


@pytest.fixture
async def servers() -> AsyncIterator[list[FakeVLLM]]:
    """Start two servers that return the model's scores of the probe."""
    ids = torch.tensor([byte_codec().encode(PROBE)[:100]])
    with torch.inference_mode():
        log_probs = torch.log_softmax(tiny_model()(input_ids=ids).logits[0, :-1], dim=-1)
    expected = log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    async with fakes(byte_codec(), 2) as found:
        for one in found:
            one.vocabulary = 264
            one.scores = lambda version, place: expected[place] if place < len(expected) else -1.0
        yield found


def served(model: Path, servers: list[FakeVLLM], *overrides: str) -> Settings:
    addresses = ",".join(one.address for one in servers)
    return settings(
        f"model.path={model}",
        "model.dtype=float32",
        "rollout.engine=vllm",
        "rollout.vllm.placement=external",
        f"rollout.vllm.addresses=[{addresses}]",
        "rollout.max_prompt_tokens=100",
        "evaluation.max_response_tokens=50",
        *overrides,
    )


async def play(chosen: Settings, output: Path, sets: list[ProblemSet]) -> EvaluationDirectory:
    environment = ScriptedEnvironment(
        lambda problem, n: ScriptedEpisode(
            [Step(observation="", reward=0.0, ended=Ended.STOPPED)], prompt=f"Solve: {problem.statement}"
        )
    )
    console = Console(chosen.telemetry)
    return await sample_rollouts_of_sets(chosen, sets, output, console, environment=environment)


async def test_servers_sample_and_the_results_say_so(model: Path, servers: list[FakeVLLM], tmp_path: Path) -> None:
    directory = await play(served(model, servers), tmp_path / "out", [problem_set(8)])
    transcripts = list(directory.transcripts())
    assert len(transcripts) == sum(len(one.bodies) for one in servers) == 32
    assert all(one.bodies for one in servers)
    record = directory.provenance()
    assert record["engine"] == {"name": "vllm", "version": "0.32.0", "dtype": "float32"}
    parameters = servers[0].bodies[0]["sampling_params"]
    assert (parameters["temperature"], parameters["top_p"], parameters["max_tokens"]) == (1.0, 0.95, 50)
    assert parameters["stop_token_ids"] == [256, 258]  # generation_config's are among them
    opened = await open_sampler(settings(f"model.path={model}", "model.dtype=float32"), tmp_path)
    assert record["model"] == opened.model_record()  # read here, the same model has the same fingerprint
    assert opened.engine_record() == {"name": "transformers", "dtype": "float32"}
    await opened.close()


async def test_a_server_of_another_model_is_refused(model: Path, servers: list[FakeVLLM], tmp_path: Path) -> None:
    servers[1].scores = lambda version, place: -1.5
    with pytest.raises(SettingsError, match=rf"{servers[1].address}: .* a different model or dtype than model\.path"):
        await open_sampler(served(model, servers), tmp_path)


async def test_a_server_of_slightly_other_weights_is_refused_by_its_checksums(
    model: Path, servers: list[FakeVLLM], tmp_path: Path
) -> None:
    named = tiny_model().named_parameters()
    sums = {name: (one.values, one.total) for name, one in checksums(named).items()}
    servers[0].checksums = sums
    opened = await open_sampler(served(model, servers), tmp_path)
    await opened.close()
    name = "model.norm.weight"
    servers[0].checksums = sums | {name: (sums[name][0], sums[name][1] ^ 1)}
    with pytest.raises(
        SettingsError, match=rf"1 of \d+ parameters differ from the trainer's: {name}: the server serves a"
    ):
        await open_sampler(served(model, servers), tmp_path)


async def test_weights_of_an_earlier_run_are_taken_where_they_are_the_models(
    model: Path, servers: list[FakeVLLM], tmp_path: Path
) -> None:
    servers[0].version = "7"
    opened = await open_sampler(served(model, servers), tmp_path)
    assert isinstance(opened, ModelSampler)
    assert isinstance(opened.engine, ServerEngine)
    assert [one.version for one in servers] == ["0", "0"]
    assert opened.engine.has_initial_weights
    assert not [call for one in servers for call in one.controls_called() if call.startswith(("/pause", "/collective"))]
    await opened.close()


async def test_a_prompt_that_servers_do_not_take(model: Path, servers: list[FakeVLLM], tmp_path: Path) -> None:
    opened = await open_sampler(served(model, servers), tmp_path)
    assert opened.prompts_too_long({("toy", "a"): "p" * 100}) == {}
    with pytest.raises(
        SettingsError, match=r"problem a of toy: .*rollout\.max_prompt_tokens=100; set it to at least 101"
    ):
        opened.prompts_too_long({("toy", "a"): "p" * 101})
    await opened.close()


@pytest.mark.parametrize("override", ["training.deterministic=true", "training.zero_stage=3"])
def test_what_concerns_training_does_not_stop_an_evaluation(override: str) -> None:
    chosen = settings("rollout.engine=vllm", "rollout.vllm.placement=colocated", override)
    assert chosen.rollout.engine == "vllm"
