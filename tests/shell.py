"""Runs the commands of a page in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from string import Template

import torch.utils.cpp_extension
from warm import run_warm

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

WARM = re.compile(r"agentrl (train|eval|coldstart|compare|regrade)\b(?!.*--dry-run)")
"""Commands that are forked from a process with loaded libraries: `make train` and the others show the real start."""


class Shell:
    """Runs commands in one folder with a cache of its own, so that cold starts really run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        cache = folder / "cache"
        cache.mkdir()
        compiled = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or torch.utils.cpp_extension.get_default_build_root())
        compiled.mkdir(parents=True, exist_ok=True)
        (cache / "torch_extensions").symlink_to(compiled)
        (folder / "Makefile").symlink_to(ROOT / "Makefile")
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(cache),
            "MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib")),
            "HF_HUB_OFFLINE": "1",
        }

    def run(self, command: str) -> str:
        """What the command said. It must succeed."""
        run, line = subprocess.run, ["bash", "-c", command]
        if WARM.match(command):
            words = shlex.split(Template(command).substitute(self.environment))
            run, line = run_warm, [sys.executable, "-m", "agentrl.cli", *words[1:]]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = run(line, cwd=self.folder, env=self.environment, timeout=600, **streams)
        assert done.returncode == 0, f"$ {command}\n{done.stdout}"
        return done.stdout
