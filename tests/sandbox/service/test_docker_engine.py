"""``docker://`` with a fake engine that fails."""

from __future__ import annotations

from typing import Any

import pytest
from docker.errors import DockerException

from agentrl_sandbox.client import SandboxSettings, StartError
from agentrl_sandbox.docker import DockerSandbox

pytestmark = pytest.mark.slow


class Engine:
    """Creates containers that cannot be started. ``left`` contains the containers that were not removed."""

    def __init__(self) -> None:
        self.containers = self
        self.left: list[Container] = []

    def create(self, *arguments: Any, **options: Any) -> Container:
        self.left.append(Container(self))
        return self.left[-1]

    def close(self) -> None:
        pass


class Container:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def start(self) -> None:
        raise DockerException("no space left on device")

    def remove(self, *, force: bool) -> None:
        self._engine.left.remove(self)


async def test_a_container_that_cannot_be_started_is_removed():
    engine = Engine()
    sandbox = DockerSandbox(SandboxSettings(url="docker://image"), engine)  # type: ignore[arg-type]
    with pytest.raises(StartError, match="did not start 'image': no space left on device"):
        await sandbox.start()
    assert engine.left == []
    await sandbox.close()
