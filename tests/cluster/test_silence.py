"""A machine that has fallen silent is noticed, though no connection to it ends."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from agentrl.cluster.processes import PortReachabilityWatch, accepts_connections, set_tcp_timeout


def lost(address: tuple[str, int], deadline: float) -> str:
    watch = PortReachabilityWatch(address, deadline, poll_interval=0.01)
    while watch.lost is None:
        time.sleep(0.01)
    return watch.lost


def test_a_port_that_refuses_is_gone_at_once_and_a_silent_one_after_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        assert accepts_connections(address, 60.0)
        # Nobody has accepted that one: the system leaves further connections unanswered.
        assert lost(address, 0.3) == "has not responded for 0.3 s"
        assert not accepts_connections(address, 0.1)
    assert lost(address, 600.0) == "refuses connections"


def test_the_system_is_told_when_to_end_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as line:
            connection = Connection(line.detach())
        set_tcp_timeout(connection, 40.0)
        with socket.socket(fileno=connection.fileno()) as same:
            tcp = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
            assert [same.getsockopt(socket.IPPROTO_TCP, option) for option in tcp] == [20, 5, 4, 40_000]
            assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            same.detach()
        connection.close()


@pytest.mark.slow
def test_a_signal_is_ours_again_after_ray_was_not_found(tmp_path: Path) -> None:
    code = """
import signal
from agentrl.cluster.backends import open_cluster
from agentrl.cluster.settings import ClusterSettings
from agentrl.errors import SettingsError
from agentrl.training.run.signals import sigterm_as_ctrl_c
with sigterm_as_ctrl_c():
    try:
        open_cluster(ClusterSettings(kind="ray", address="host:port"), None)
    except SettingsError as error:
        print(error)
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        print("stopped")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "stopped"), done.stderr
    assert "no Ray cluster responds" in done.stdout
