"""The example in the sandbox's README runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import agentrl_sandbox


def test_the_example_runs():
    readme = Path(agentrl_sandbox.__file__).parents[1] / "README.md"
    (program,) = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert "ok {2: 3, 3: 2, 5: 1}" in ran.stdout
