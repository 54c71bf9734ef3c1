"""Where the kernel or the user lacks a layer: what is still held is held, what is not is named and refused."""

from __future__ import annotations

import asyncio
import os

import pytest

from agentrl_sandbox.client import Outcome, SandboxSettings, UnisolatedError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a world without namespaces")
MISSING = {
    "container-old": {"scratch_only_writes", "no_foreign_reads"},
    "unprivileged-old": {"scratch_only_writes", "no_foreign_reads", "no_foreign_signals", "no_tracing"},
    "powerless-old": {"scratch_only_writes", "no_foreign_reads", "no_foreign_signals", "no_tracing"},
}


@pytest.mark.parametrize("name", MISSING)
async def test_what_is_missing_is_named_and_refused(world, name):
    with pytest.raises(UnisolatedError, match="Fix:") as refused:
        await world(name, SandboxSettings(workers=4))
    assert set(refused.value.missing) == MISSING[name]


async def test_without_isolation_but_allowed_the_limits_still_hold(world):
    sandbox = await world("powerless-old", SandboxSettings(workers=4, allow_unisolated=True))
    assert set(sandbox.isolation.missing) == MISSING["powerless-old"]
    assert (await sandbox.execute("while True: pass", timeout=0.2)).outcome is Outcome.TIMEOUT
    assert (await sandbox.execute("b = bytearray(10**10)")).outcome is Outcome.MEMORY_LIMIT
    assert (await sandbox.execute("import os; print(os.getcwd() != '/', os.listdir())")).stdout == "True []\n"
    await sandbox.close()


async def test_root_without_any_capability_is_isolated_by_seccomp_and_landlock(world):
    sandbox = await world("powerless", SandboxSettings(workers=4))
    assert sandbox.isolation.missing == ()
    assert sandbox.isolation.layers["no_network"] == "seccomp, Landlock"
    assert sandbox.isolation.layers["no_foreign_signals"] == "Landlock"
    await sandbox.close()


async def test_two_runners_use_different_users(world):
    sandboxes = await asyncio.gather(*(world("container", SandboxSettings(workers=4)) for _ in range(2)))
    users = [(await sandbox.execute("import os; print(os.getuid())")).stdout for sandbox in sandboxes]
    assert users[0] != users[1]
    for sandbox in sandboxes:
        await sandbox.close()


async def test_the_first_user_can_be_chosen(world):
    sandbox = await world("container", SandboxSettings(workers=2, first_user=70_000))
    done = await sandbox.execute("import os; print(os.getuid(), os.getgid(), os.getgroups())")
    assert done.stdout in ("70000 70000 []\n", "70001 70001 []\n")
    await sandbox.close()
