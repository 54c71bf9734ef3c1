"""Tests of the plug-in with Daytona's SDK against a local fake of the HTTP API."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("daytona", reason="daytona is not installed: pip install ./examples/daytona")

from agentrl_daytona import open_daytona
from fake_daytona import FakeDaytona

from agentrl_sandbox.client import ClosedError, Outcome, RefusedError, SandboxSettings


def test_programs_run_in_sandboxes_that_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(_programs(monkeypatch))


async def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDaytona()
    await fake.start()
    monkeypatch.setenv("DAYTONA_API_KEY", "key")
    monkeypatch.setenv("DAYTONA_API_URL", f"{fake.url}/api")
    # model_construct skips validation, which accepts the scheme only if the package is installed.
    defaults = {name: field.default for name, field in SandboxSettings.model_fields.items()}
    sandbox = await open_daytona(SandboxSettings.model_construct(**defaults | {"url": "daytona://small", "workers": 2}))
    program = "import sys; print(open('a.txt').read(), input()); open('b.txt', 'w').write('x'); sys.stderr.write('e')"
    calls = [
        sandbox.execute(program, stdin="in", files={"a.txt": b"A"}, fetch_files=["b.txt", "c.txt"], request_id="1")
        for _ in range(2)
    ]
    first, second = await asyncio.gather(*calls)
    assert (first.outcome, first.stdout, first.stderr, first.files) == (Outcome.OK, "A in\n", "e", {"b.txt": b"x"})
    assert second == first
    assert fake.created == 1  # equal calls share a run
    assert (await sandbox.execute("while True: pass", timeout=1)).outcome is Outcome.TIMEOUT
    left = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print('x')"
    assert (await sandbox.execute(left, timeout=10)).outcome is Outcome.OK
    failed = await sandbox.execute("1 / 0")
    assert (failed.outcome, failed.exit_code) == (Outcome.ERROR, 1)
    assert "ZeroDivisionError" in failed.stderr
    fake.fails = True
    broken = await sandbox.execute("1")
    assert broken.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert "no capacity" in broken.stderr
    assert not fake.alive
    with pytest.raises(RefusedError, match="no sessions"):
        await sandbox.open_session()
    fake.fails = False
    abandoned = asyncio.create_task(sandbox.execute("import time; time.sleep(1)"))
    await asyncio.sleep(0.5)
    abandoned.cancel()
    await sandbox.close()
    await sandbox.close()
    assert not fake.alive
    with pytest.raises(ClosedError):
        await sandbox.execute("1")
    await fake.stop()
