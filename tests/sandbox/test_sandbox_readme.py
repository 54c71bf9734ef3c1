"""The examples in the sandbox's README run unchanged, and compose.yaml passes all settings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl_sandbox
from agentrl_sandbox.client import SandboxSettings
from agentrl_sandbox.settings import GatewaySettings

ROOT = Path(agentrl_sandbox.__file__).parents[1]
SHOWN = ["ok {2: 3, 3: 2, 5: 1}", "42"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SHOWN)))
def test_the_examples_run(number):
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(programs) == len(SHOWN)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", programs[number]], capture_output=True, text=True, check=True, timeout=300
    )
    assert SHOWN[number] in ran.stdout


def test_compose_passes_every_setting_on():
    """A setting that is not passed would be accepted without effect."""
    text = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    passed = set(re.findall(r"^      (SANDBOX_\w+): \$\{\1:-\}", text, re.MULTILINE)) | {"SANDBOX_TOKEN_FILE"}
    gateway = set(GatewaySettings.model_fields) - {"host", "port"}  # fixed in the container, published by SANDBOX_BIND
    runner = set(SandboxSettings.model_fields) - {"url", "token", "retry_deadline", "service_deadline"}
    assert passed == {f"SANDBOX_{name.upper()}" for name in gateway | runner}
