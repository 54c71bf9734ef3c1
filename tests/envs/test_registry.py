"""One table for each thing that users add by name."""

from __future__ import annotations

import pytest

import agentrl
from agentrl_envs.adapters.environments import resolve_environment
from agentrl_envs.grading import GraderSettings
from agentrl_envs.protocols.base import make_protocol
from agentrl_envs.protocols.torl import ToRLProtocol
from agentrl_envs.registry import (
    ENVIRONMENTS,
    PROTOCOLS,
    REWARDS,
    TOOLS,
    NameTakenError,
    PluginError,
    Registry,
    UnknownNameError,
)
from agentrl_envs.rewards import TimedRewardFunction
from agentrl_envs.settings import GymnasiumSettings, SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREnvironment
from agentrl_envs.tools import load_tools
from agentrl_sandbox.client import SandboxSettings


@pytest.fixture(autouse=True)
def _own_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (ENVIRONMENTS, PROTOCOLS, REWARDS, TOOLS):
        monkeypatch.setattr(registry, "_entries", {})


def test_what_a_user_registers_is_found_by_its_name() -> None:
    @agentrl.register_environment("mine")
    class Mine(SimpleTIREnvironment):
        def __init__(self, settings: GymnasiumSettings) -> None:
            super().__init__()
            self.own = settings

    @agentrl.register_protocol("plain")
    def plain(settings: SimpleTIRSettings, chat: object, tools: object) -> ToRLProtocol:
        return ToRLProtocol(instruction=settings.effective_instruction, observation_limit=7)

    @agentrl.register_tool("six")
    class Six:
        name, description, parameters = "six", "Always six.", {"type": "object"}

        async def call(self, arguments: object) -> str:
            return "6"

    @agentrl.register_reward("zero")
    def zero(problem: object, conversation: object, verdict: object) -> float:
        return 0.0

    made = resolve_environment("mine")(GymnasiumSettings(threads=3), SandboxSettings(), GraderSettings(), None)
    assert isinstance(made, Mine)
    assert made.own == GymnasiumSettings(threads=3)
    assert make_protocol(SimpleTIRSettings(protocol="plain")) == ToRLProtocol(instruction="", observation_limit=7)
    assert [schema.name for schema in load_tools(("python", "six")).schemas] == ["python", "six"]
    assert TimedRewardFunction("zero", deadline=1.0)._function is zero


def test_our_names_and_the_registered_ones_are_listed_together() -> None:
    assert PROTOCOLS.names() == ("hermes", "retool", "simpletir", "torl")
    agentrl.register_protocol("again")(object)
    assert PROTOCOLS.names() == ("again", "hermes", "retool", "simpletir", "torl")


@pytest.mark.parametrize("name", ["simpletir", "new"])
def test_a_name_is_given_once(name: str) -> None:
    registry = Registry[object]("thing", builtin={"simpletir": "json:loads"})
    registry.add("new", 5)
    with pytest.raises(NameTakenError, match=f"thing '{name}' is already registered"):
        registry.add(name, 6)


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    registry = Registry[object]("thing", builtin={"loads": "json:loads"})
    with pytest.raises(UnknownNameError, match=r"^unknown thing 'lods'; did you mean 'loads'\? \(valid: loads\)$"):
        registry["lods"]
    with pytest.raises(UnknownNameError, match=r"^unknown thing 'json:dumps' \(valid: loads\)$"):
        registry["json:dumps"]


def test_a_removed_name_is_answered_with_its_replacement_until_a_package_registers_it() -> None:
    registry = Registry[object]("thing", paths=True, removed={"json": "use toml"})
    for name in ("json", "json:dumps"):
        with pytest.raises(PluginError, match=f"^thing '{name}' was removed: use toml$"):
            registry[name]
    registry.add("json", 5)
    assert registry["json"] == 5


def test_a_path_is_imported_where_paths_are_names() -> None:
    import json

    registry = Registry[object]("thing", paths=True)
    assert registry["json:dumps"] is json.dumps
    with pytest.raises(PluginError, match="thing 'json:' is not of the form module:attribute"):
        registry["json:"]


def test_the_face_of_the_package_registers_estimators_and_losses() -> None:
    from agentrl.algorithms import register_estimator, register_loss

    assert agentrl.register_estimator is register_estimator
    assert agentrl.register_loss is register_loss
    assert set(dir(agentrl)) >= {f"register_{kind}" for kind in ("environment", "protocol", "tool", "reward")}
    with pytest.raises(AttributeError, match="no attribute 'register_nothing'"):
        agentrl.register_nothing  # noqa: B018
