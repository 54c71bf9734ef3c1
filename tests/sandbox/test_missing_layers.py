"""Missing isolation layers: the remaining properties hold, and the missing properties are reported and refused."""

from __future__ import annotations

import asyncio
import os

import pytest

from agentrl_sandbox.client import Outcome, SandboxSettings, UnisolatedError, UnknownSessionError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a world without namespaces"),
]
MISSING = {
    "container-abi0": {"scratch_only_writes", "no_foreign_reads"},
    "unprivileged-abi0": {"scratch_only_writes", "no_foreign_reads", "no_foreign_signals", "no_tracing"},
    "powerless-abi0": {"scratch_only_writes", "no_foreign_reads", "no_foreign_signals", "no_tracing"},
    "container-abi1": {"scratch_only_writes"},
    "unprivileged-abi5": {"no_foreign_signals"},
}
GROUP_SIGNAL = (
    "import os, signal, time\ntime.sleep(0.2)\nfor target in (0, -os.getpgrp(), -1):\n"
    "    try:\n        os.kill(target, signal.SIGKILL)\n    except OSError:\n        pass\nprint('done')"
)
ALIVE = "import os, time\nopen('f', 'w').close()\ntime.sleep(1)\nprint('alive')"


@pytest.mark.parametrize("name", MISSING)
async def test_missing_properties_are_named_and_refused(world, name):
    with pytest.raises(UnisolatedError, match="Fix:") as refused:
        await world(name, SandboxSettings(workers=4))
    assert set(refused.value.missing) == MISSING[name]


async def test_without_isolation_but_allowed_the_limits_still_hold(world):
    sandbox = await world("powerless-abi0", SandboxSettings(workers=4, allow_unisolated=True))
    assert set(sandbox.isolation.missing) == MISSING["powerless-abi0"]
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


async def test_the_first_user_can_be_set(world):
    sandbox = await world("container", SandboxSettings(workers=2, first_user=70_000))
    done = await sandbox.execute("import os; print(os.getuid(), os.getgid(), os.getgroups())")
    assert done.stdout in ("70000 70000 []\n", "70001 70001 []\n")
    await sandbox.close()


@pytest.mark.parametrize("name", ["container-abi5", "user-abi0", "user-abi5"])
async def test_a_signal_to_its_group_reaches_the_program_alone(world, name):
    """Without Landlock: the server, its interpreters and other programs are not in the program's process group."""
    sandbox = await world(name, SandboxSettings(workers=4))
    neighbours = [asyncio.ensure_future(sandbox.execute(kind + ALIVE)) for kind in ("", "import sympy\n")]
    session = await sandbox.open_session()
    ran = [await sandbox.execute(kind + GROUP_SIGNAL) for kind in ("", "import sympy\n")]
    ran.append(await sandbox.execute(GROUP_SIGNAL, session=session))
    assert {done.outcome for done in ran} <= {Outcome.OK, Outcome.KILLED}, ran
    assert [(await neighbour).stdout for neighbour in neighbours] == ["alive\n"] * 2
    await sandbox.close()


async def test_a_program_that_kills_its_session_init_was_killed(world):
    """Both have the same user, and this version of Landlock does not block signals. Only the session ends."""
    sandbox = await world("container-abi5", SandboxSettings(workers=4))
    session = await sandbox.open_session()
    done = await sandbox.execute("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(60)", session=session)
    assert done.outcome is Outcome.KILLED
    with pytest.raises(UnknownSessionError):
        await sandbox.execute("1", session=session)
    await sandbox.close()
