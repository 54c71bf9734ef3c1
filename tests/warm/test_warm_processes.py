"""What is forked behaves as if Python had been started for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from warm import WarmPopen, run_warm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA works in no forked process: none is forked"),
]

TELLING = """
import json, os, subprocess, sys
told = {"arguments": sys.argv, "name": __name__, "folder": os.getcwd(), "path": sys.path[0], "parent": os.getppid()}
told |= {"own": os.environ["OWN"], "leads": os.getsid(0) == os.getpid(), "loaded": "deepspeed" in sys.modules}
if len(sys.argv) > 1:
    told["child"] = json.loads(subprocess.run([sys.executable, sys.argv[0]], stdout=subprocess.PIPE).stdout)
    told["pid"] = os.getpid()
print(json.dumps(told))
"""


def written(folder: Path, text: str) -> str:
    script = folder / "script.py"
    script.write_text(text)
    return str(script)


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_it_has_its_arguments_environment_folder_and_parent_and_so_have_its_children(tmp_path: Path) -> None:
    script = written(tmp_path, TELLING)
    environment = {**os.environ, "OWN": "own"}
    done = run_warm(
        [sys.executable, script, "word"], cwd=tmp_path, env=environment, start_new_session=True, timeout=300
    )
    found = told(done)
    child = found.pop("child")
    assert child["parent"] == found.pop("pid")
    common = {"name": "__main__", "folder": str(tmp_path), "path": str(tmp_path), "own": "own", "loaded": True}
    assert found == common | {"arguments": [script, "word"], "parent": os.getpid(), "leads": True}
    assert child == common | {"arguments": [script], "parent": child["parent"], "leads": False}


def test_its_exit_code_and_both_streams_are_its_own(tmp_path: Path) -> None:
    script = written(tmp_path, "import sys\nprint('out')\nsys.exit('err')")
    done = run_warm([sys.executable, script], stderr=subprocess.PIPE, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (1, "out\n", "err\n")
    script = written(tmp_path, "raise ValueError('broken')")
    done = run_warm([sys.executable, script], timeout=300)
    assert done.returncode == 1
    assert done.stdout.endswith("ValueError: broken\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_ends_it_and_proc_shows_what_it_is(tmp_path: Path, number: signal.Signals) -> None:
    script = written(tmp_path, "import time\nprint('here', flush=True)\ntime.sleep(600)")
    command = [sys.executable, script]
    environment = {**os.environ, "RANK": "3"}
    with WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        shown = psutil.Process(process.pid)
        assert [part for part in shown.cmdline() if part] == command
        assert shown.environ()["RANK"] == "3"
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == -number
