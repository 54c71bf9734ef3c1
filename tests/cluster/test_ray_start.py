"""How Ray starts without a cluster: attempts that are too slow are repeated, and a dead raylet's log is not printed."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from agentrl.cluster.settings import ClusterSettings
from agentrl.errors import WorldError

ray = pytest.importorskip("ray")

SLOW = "The current node timed out during startup"


class Ray:
    """``ray.init`` of a machine on which the first attempts fail. Like Ray's own, it takes SIGTERM's handler."""

    def __init__(self) -> None:
        self.attempts = 0
        self.failures: list[Exception] = []

    def init(self, **options: object) -> None:
        self.attempts += 1
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.failures:
            raise self.failures.pop(0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ray]:
    """A machine with a head that accepts connections. SIGTERM has its handler again at the end."""
    made, before = Ray(), signal.getsignal(signal.SIGTERM)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setattr(ray, "init", made.init)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
        monkeypatch.setattr("agentrl.cluster.ray_nodes._RETRY_INTERVAL", 0.0)  # seconds between two attempts
        yield made
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_start_that_is_too_slow_is_tried_again(machine: Ray, caplog: pytest.LogCaptureFixture) -> None:
    from agentrl.cluster.ray_nodes import RayCluster

    machine.failures = [RuntimeError("Failed to start the raylet\nits log"), Exception(SLOW)]
    with caplog.at_level(logging.WARNING):
        RayCluster(ClusterSettings(kind="ray")).close()
    assert machine.attempts == 3
    said = [record.getMessage().partition("; retrying for ")[0] for record in caplog.records]
    assert said == ["Ray did not start: Failed to start the raylet", f"Ray did not start: {SLOW}"]


def test_a_start_is_tried_again_for_a_while_only(machine: Ray) -> None:
    from agentrl.cluster.ray_nodes import RayCluster

    machine.failures = [Exception(SLOW)] * 9
    with pytest.raises(WorldError, match=f"Ray did not start: {SLOW}"):
        RayCluster(ClusterSettings(kind="ray", start_deadline=1e-9))
    assert machine.attempts == 1


def test_a_bug_is_no_slow_start(machine: Ray) -> None:
    from agentrl.cluster.ray_nodes import RayCluster

    machine.failures = [TypeError("init() got an unexpected keyword")]
    with pytest.raises(TypeError, match="unexpected keyword"):
        RayCluster(ClusterSettings(kind="ray"))
    assert machine.attempts == 1


@pytest.mark.slow  # it loads Ray anew
def test_a_dead_raylets_log_is_not_printed() -> None:
    # In a process of its own, because Ray reads the variable as it is imported. Ray prints each message as one "line".
    code = """
from agentrl.cluster.backends import open_cluster
from agentrl.cluster.settings import ClusterSettings
from agentrl.errors import SettingsError
try:
    open_cluster(ClusterSettings(kind="ray", address="no address"), None)
except SettingsError as error:
    assert "no Ray cluster responds" in str(error)
from ray._private.ray_logging import stderr_deduplicator, stdout_deduplicator
lines = ["Raylet is terminated. Its log:\\n    [state-dump] NodeManager:\\n    [state-dump] Node", "a worker died"]
for printed in (stdout_deduplicator, stderr_deduplicator):
    print([batch["lines"] for batch in printed.deduplicate({"lines": lines, "pid": "raylet", "ip": "", "job": ""})])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["[['a worker died']]"] * 2, done.stderr
