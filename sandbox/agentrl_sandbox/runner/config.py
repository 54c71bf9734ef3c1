"""The configuration that the client passes to the server, and the server to its zygotes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerConfig:
    """Limits and paths, fixed for the lifetime of a server. ``isolate`` is one of ``root``, ``user``, ``none``."""

    isolate: str
    memory_mb: int
    max_processes: int
    scratch_mb: int
    output_limit: int
    flood_limit: int
    fetch_limit: int
    max_sessions: int
    session_idle_timeout: float
    workers: int
    library_paths: Sequence[str]  # directories on the programs' sys.path, beyond the standard library
    package_path: str  # the directory that holds this package
    readable: Sequence[str]  # directories that programs may read, beyond the system's
    client_pid: int
    first_user: int  # with root, the program in slot i runs as user and group ``first_user + i``

    @property
    def slots(self) -> int:
        """The number of users and scratch directories: one for each worker, then one for each session."""
        return self.workers + self.max_sessions

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunnerConfig:
        return cls(**json.loads(text))


SCRATCH_VARIABLE = "AGENTRL_SCRATCH"
"""Without namespaces: the variable that gives server and zygotes the directory of the scratch directories."""


def command(executable: str, module: str, package_path: str, *arguments: str) -> list[str]:
    """The command line that runs ``module.main`` without site, user or working directory on its path.

    ``-I`` would ignore PYTHONHASHSEED, which is fixed so that sets print alike from run to run.
    """
    start = f"import sys; sys.path.append({package_path!r}); from {module} import main; main()"
    return [executable, "-s", "-S", "-P", "-X", "utf8", "-c", start, *arguments]


ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/scratch",
    "USER": "program",
    "LOGNAME": "program",
    "TMPDIR": "/scratch",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""The complete environment of the server, the zygotes and the programs."""
