"""Runs on the first of two hosts: a sandbox service on each, and programs without end. Prints what became of them.

python sandboxes_on_hosts.py ADDRESS-OF-RAY FOLDER
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path

from agentrl.cluster.processes import Bundle
from agentrl.cluster.ray_nodes import RayCluster
from agentrl.cluster.sandboxes import SandboxServices
from agentrl.cluster.settings import ClusterSettings
from agentrl_sandbox.client import SandboxSettings, open_sandbox

AT_ONCE = 8


def say(text: str) -> None:
    print(text, flush=True)


async def use(services: SandboxServices, lost: asyncio.Event) -> Counter[str]:
    """Run programs until a service is lost and some time after."""
    settings = SandboxSettings(
        url=",".join(services.addresses),
        token=services.client_variables["SANDBOX_TOKEN"],
        allow_unisolated=True,
        service_deadline=2.0,
    )
    sandbox = await open_sandbox(settings)
    ended: Counter[str] = Counter()

    async def run(number: int) -> None:
        done = await sandbox.execute(f"import time; time.sleep(0.2); print({number})")
        ended["right" if done.stdout == f"{number}\n" else f"{done.outcome}: {done.stderr}"] += 1

    after = 3
    while after:
        after -= lost.is_set()
        await asyncio.gather(*map(run, range(AT_ONCE)))
        say(f"programs {ended.total()}")
    await sandbox.close()
    return ended


async def main() -> None:
    cluster = RayCluster(ClusterSettings(kind="ray", address=sys.argv[1], deadline=10.0))
    lost = asyncio.Event()
    loop = asyncio.get_running_loop()

    def note(text: str) -> None:
        say(text)
        if "was lost" in text:
            loop.call_soon_threadsafe(lost.set)

    bundle = Bundle(purpose="sandbox", cpus=1)
    own = ["workers=4", "timeout=60", "allow_unisolated=true"]
    services = await asyncio.to_thread(
        SandboxServices, cluster, cluster.nodes(), bundle, arguments=own, folder=Path(sys.argv[2]), notify=note
    )
    say(f"services {' '.join(services.addresses)}")
    try:
        say(f"ended {dict(await use(services, lost))}")
    finally:
        services.stop_restarting()
        await asyncio.to_thread(cluster.close)


if __name__ == "__main__":
    asyncio.run(main())
