"""The examples in the sandbox's README run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import agentrl_sandbox

SHOWN = ["ok {2: 3, 3: 2, 5: 1}", "42"]


@pytest.mark.parametrize("number", range(len(SHOWN)))
def test_the_examples_run(number):
    readme = Path(agentrl_sandbox.__file__).parents[1] / "README.md"
    programs = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    assert len(programs) == len(SHOWN)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", programs[number]], capture_output=True, text=True, check=True, timeout=60
    )
    assert SHOWN[number] in ran.stdout
