"""What is known of engines before one is opened, and models that a CPU server cannot compute."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.rollout.engines.base import (
    ENGINES,
    EngineFacts,
    EnginePlugin,
    EngineSpecification,
    ManagedEngine,
    ServerSettings,
    engine_facts,
    register_engine,
)
from agentrl.rollout.engines.vllm.plan import CPU_HEAD_SIZES, require_cpu_attention_support
from agentrl.rollout.engines.vllm.plugin import VLLMSettings
from agentrl.rollout.settings import RolloutSettings
from agentrl_envs.registry import NameTakenError


def test_what_is_known_of_the_engine_in_this_process() -> None:
    facts = engine_facts(RolloutSettings(engine="transformers", kv_cache_tokens=640))
    assert (facts.in_process, facts.reproducible, facts.kv_slots, facts.prompt_limit) == (True, True, 640, None)
    assert (facts.shares_gpus, facts.servers, facts.start_seconds) == ("", 0, 0.0)


@pytest.mark.parametrize(
    ("vllm", "shares", "servers", "about"),
    [
        (
            VLLMSettings(placement="colocated", replicas=2),
            "rollout.vllm.placement=colocated",
            2,
            "vLLM, colocated: 2 servers of 1 GPUs",
        ),
        (VLLMSettings(tensor_parallel_size=2), "", 1, "vLLM, dedicated: 1 servers of 2 GPUs"),
        (
            VLLMSettings(placement="external", addresses=["http://a:1", "http://b:2"]),
            "",
            0,
            "vLLM servers at http://a:1, http://b:2",
        ),
    ],
)
def test_what_is_known_of_servers(vllm: VLLMSettings, shares: str, servers: int, about: str) -> None:
    facts = engine_facts(RolloutSettings(engine="vllm", vllm=vllm, max_prompt_tokens=70))
    assert (facts.in_process, facts.reproducible, facts.kv_slots, facts.prompt_limit) == (False, False, None, 70)
    assert (facts.shares_gpus, facts.servers, facts.about) == (shares, servers, about)
    assert facts.start_seconds == vllm.start_deadline


class Options(ServerSettings):
    color: Literal["red", "blue"] = "red"


class Colored(EnginePlugin):
    options_model = Options

    def facts(self, rollout: RolloutSettings) -> EngineFacts:
        return EngineFacts(about=self.options(rollout).color)

    def managed(self, request: EngineSpecification) -> ManagedEngine:
        raise NotImplementedError


def test_a_registered_engine_is_selected_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINES, "_entries", {})
    assert register_engine("colored")(Colored) is Colored
    settings = load_settings(None, None, ["rollout.engine=colored", "rollout.options.color=blue"])
    assert engine_facts(settings.rollout).about == "blue"
    with pytest.raises(NameTakenError, match="engine 'vllm' is already registered"):
        register_engine("vllm")(Colored)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.engine=colorde"], "rollout.engine=colorde: unknown engine 'colorde'; did you mean 'colored'?"),
        (
            ["rollout.engine=colored", "rollout.options.color=green", "rollout.options.colour=red"],
            "rollout.options.color: Input should be 'red' or 'blue' (valid options of rollout.engine=colored: "
            "addresses, replicas, ",
        ),
        (["rollout.engine=colored", "rollout.options.colour=red"], "rollout.options.colour: Extra inputs are not"),
        (["rollout.options.color=red"], "(valid options of rollout.engine=transformers: none)"),
    ],
)
def test_a_wrong_engine_or_option_ends_with_a_message(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    monkeypatch.setattr(ENGINES, "_entries", {"colored": Colored})
    with pytest.raises(SettingsError, match=re.escape(message)):
        load_settings(None, None, overrides)


def test_the_page_shows_the_engine_that_a_test_trains_on() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/engines.md").read_text()
    for file in sorted((Path(__file__).parent / "toy_engine").glob("*.py")):
        assert f"```python\n{file.read_text()}```" in page, f"docs/how-to/engines.md shows another {file.name}"


def test_asking_the_table_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'httpx'}"
    code = f"import sys, agentrl.rollout.engines.vllm.plugin; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_model_that_a_cpu_server_cannot_compute_is_refused_before_it_starts() -> None:
    message = (
        r"rollout\.engine=vllm on a CPU: the model's attention heads have head_dim=24, but vLLM's CPU attention "
        r"supports only 32, 64, .*\. Choose a different model .*model\.tiny\.heads.*rollout\.engine=transformers, "
        "or use a machine with a GPU"
    )
    with pytest.raises(SettingsError, match=message):
        require_cpu_attention_support(Qwen2Config(hidden_size=96, num_attention_heads=4))
    with pytest.raises(SettingsError, match="head_dim=48"):
        require_cpu_attention_support(Qwen3Config(hidden_size=128, num_attention_heads=2, head_dim=48))


@pytest.mark.parametrize(
    "config",
    [
        None,
        LlamaConfig(hidden_size=128, num_attention_heads=4),
        Qwen3Config(hidden_size=96, num_attention_heads=4, head_dim=128),
        Qwen2Config(hidden_size=160, num_attention_heads=2),
    ],
)
def test_models_that_a_cpu_server_computes(config: object) -> None:
    require_cpu_attention_support(config)


def test_the_head_sizes_are_those_of_the_vllm_that_is_installed() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    source = Path(spec.submodule_search_locations[0]) / "v1/attention/backends/cpu_attn.py"
    (sizes,) = [
        ast.literal_eval(node.body[-1].value)  # type: ignore[attr-defined]
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes"
    ]
    assert tuple(sizes) == CPU_HEAD_SIZES
