"""Two hosts on this machine: network namespaces that are joined by a pair of interfaces, and by nothing else."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_PORT = 6379


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    name: str
    address: str
    interface: str

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs ``arguments`` there."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def processes(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]

    def link(self, state: str) -> None:
        """Join the host with the other one (up) or cut it off (down)."""
        _ip("-n", self.name, "link", "set", self.interface, state)

    def kill(self) -> None:
        """End every process there at once, as a machine without power does."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def obstacle() -> str | None:
    """Why there can be no hosts on this machine."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs ip, of iproute2"
    tried = subprocess.run(["ip", "netns", "add", _name("t")], capture_output=True, text=True)
    if tried.returncode:
        return f"makes no network namespace here: {tried.stderr.strip()}"
    _ip("netns", "delete", _name("t"))
    return None


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other; at the end all their processes are killed."""
    subnet = f"10.213.{os.getpid() % 250}"
    hosts = tuple(
        Host(name=_name(letter), address=f"{subnet}.{number}", interface=_name(letter))
        for number, letter in enumerate("ab", start=1)
    )
    first, second = hosts
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        ends = [first.interface, "netns", first.name, "type", "veth", "peer", "name", second.interface]
        _ip("link", "add", *ends, "netns", second.name)
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.name, "link", "set", host.interface, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in hosts:
            with contextlib.suppress(subprocess.CalledProcessError):
                host.kill()
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True)


def ray_variables() -> dict[str, str]:
    """The environment variables for everything that speaks with one cluster, which admits nobody else."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def start_ray(head: Host, host: Host, folder: Path, variables: Mapping[str, str]) -> None:
    """Start Ray's processes on a host; ``folder`` must have a short name."""
    where = ["--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={folder}", "--disable-usage-stats"]
    if host != head:
        where = [f"--address={ray_address(head)}"]
    own = [f"--node-ip-address={host.address}", "--num-cpus=4", "--object-store-memory=100000000"]
    ray = str(Path(sys.executable).with_name("ray"))
    # Its processes keep what they inherit open: output goes to a file, not into a pipe that would never end.
    with (folder / f"start-{host.name}.log").open("w") as log:
        subprocess.run(
            host.command(ray, "start", *where, *own),
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=300,
            check=True,
        )


def ray_address(head: Host) -> str:
    return f"{head.address}:{_PORT}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _name(what: str) -> str:
    return f"agentrl{os.getpid() % 100000}{what}"
