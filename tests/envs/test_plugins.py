"""Users' modules are loaded once, before the other settings are read, and one that fails is one message."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl_envs import registry as names
from agentrl_envs.registry import ENVIRONMENTS, PROTOCOLS, REWARDS, TOOLS, PluginError, import_attribute, load_plugins


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for registry in (ENVIRONMENTS, PROTOCOLS, REWARDS, TOOLS):
        monkeypatch.setattr(registry, "_entries", {})
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


REGISTERS = """
import agentrl_envs.registry as registry

@registry.register_environment("mine")
class Mine: pass

@registry.register_protocol("plain")
def plain(settings, chat, tools): ...
"""


def test_other_settings_name_what_a_file_registers(tmp_path: Path) -> None:
    path = write(tmp_path / "my_agents.py", REGISTERS)
    settings = load_settings("mine", overrides=[f"plugins=[{path}]"])
    assert (settings.env, settings.plugins) == ("mine", (path,))
    again = load_settings(overrides=[f"plugins=[{path}]", "environment.protocol=plain"])  # not loaded a second time
    assert again.environment.model_dump()["protocol"] == "plain"
    assert import_attribute("my_agents:Mine", "environment") is ENVIRONMENTS["mine"]


def test_plugins_of_files_and_of_the_command_line_add_up(tmp_path: Path) -> None:
    first, second, third = (write(tmp_path / f"plugin_{name}.py", "") for name in ("one", "two", "three"))
    base = write(tmp_path / "base.yaml", f"plugins: [{first}]\n")
    file = write(tmp_path / "mine.yaml", f"base: {base}\nplugins: [{second}, {first}]\n")
    assert load_settings(config_file=file).plugins == (first, second)
    assert load_settings(config_file=file, overrides=[f"plugins=[{third}]"]).plugins == (first, second, third)


def test_a_module_and_an_entry_point_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "my_package_plugin.py", REGISTERS)
    monkeypatch.syspath_prepend(tmp_path)
    points = {names.PLUGIN_GROUP: [EntryPoint("mine", "my_package_plugin", names.PLUGIN_GROUP)]}
    monkeypatch.setattr(names, "entry_points", lambda group: points.get(group, []))
    load_plugins(["mine", "my_package_plugin"])
    assert "mine" in ENVIRONMENTS.names()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import nowhere_to_be_found",
            r"importing it raised ModuleNotFoundError: No module named 'nowhere_to_be_found'",
        ),
        ("1 / 0", r"importing it raised ZeroDivisionError: division by zero \(.*broken_plugin.py:1\)"),
        ("raise SystemExit(3)", r"importing it raised SystemExit: 3"),
        ("def f(:", r"importing it raised SyntaxError"),
    ],
)
def test_a_file_that_fails_to_import_is_one_message(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "broken_plugin.py", text)
    with pytest.raises(PluginError, match=message) as caught:
        load_settings(overrides=[f"plugins=[{path}]"])
    assert "\n" not in str(caught.value)
    assert "broken_plugin" not in sys.modules


def test_what_is_not_there_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"plugins 'no_such_module': there is no module 'no_such_module' \(valid: "):
        load_plugins(["no_such_module"])
    with pytest.raises(PluginError, match=r"plugins 'none.py': there is no file .*none.py"):
        load_plugins(["none.py"])
    path = write(tmp_path / "json.py", "")
    with pytest.raises(PluginError, match=r"a module 'json' is already loaded from .*; rename the file"):
        load_plugins([path])
    with pytest.raises(SettingsError, match="plugins"):
        load_settings(overrides=["plugins=3"])
