"""Configuration of the fork server, its messages to client and zygotes, and the choice of a zygote."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict

from agentrl_sandbox.call import CallHeader, ExecutionHeader

# Headers of the messages between client, fork server, zygotes and session inits. ``op`` determines the other fields.
# The modules ``server``, ``zygote`` and ``session_process`` document the operations.


class ServerRequest(CallHeader, total=False):
    """Header of a message from the client to the fork server."""

    op: str
    id: int
    number: int | None
    fork: int


class ServerReply(ExecutionHeader, total=False):
    """Header of a message from the fork server to the client."""

    number: int
    kind: str
    why: str
    layers: dict[str, int]


class ProcessMessage(TypedDict, total=False):
    """Message between the fork server and a zygote or a session init."""

    op: str
    id: int
    slot: int
    session: int
    cpu: float
    pid: int
    status: int
    error: int
    why: str


# Chooses the interpreter from which a program is forked. A wrong choice costs time but does not change the result,
# because both interpreters can import all modules. The source is scanned with regular expressions, because parsing
# untrusted code could exhaust the server.

_BARE_MODULES = """
math cmath random itertools functools collections fractions decimal operator string re time heapq bisect copy numbers
statistics datetime json typing enum abc io contextlib dataclasses types
"""
BARE_MODULES = tuple(_BARE_MODULES.split())
"""Modules imported by the bare interpreter."""

_PRELOADED_MODULES = frozenset(BARE_MODULES) | {
    "sys",
    "os",
    "__future__",
    "signal",
    "gc",
    "errno",
    "resource",
    "ctypes",
}
_IMPORT_WORD = re.compile(r"\b(import|__import__|importlib|exec|eval|runpy|subprocess|multiprocessing|pickle)\b")
_FROM_IMPORT = re.compile(r"\bfrom[ \t]+([A-Za-z_]\w*)(?:\.\w+)*[ \t]+import\b")
_IMPORT = re.compile(r"\bimport[ \t]+([^\n;#]*)")


def needs_science_interpreter(program: str) -> bool:
    """Return True if the program imports a module that the bare interpreter has not loaded.

    >>> needs_science_interpreter("import math, itertools as it\\nprint(math.pi)")
    False
    >>> needs_science_interpreter("from collections.abc import Iterable")
    False
    >>> needs_science_interpreter("import math\\nimport numpy as np")
    True
    >>> needs_science_interpreter("m = __import__('sym' + 'py')")
    True
    """
    if _IMPORT_WORD.search(program) is None:
        return False
    rest = _FROM_IMPORT.sub(lambda match: "" if match[1] in _PRELOADED_MODULES else match[0], program)
    for match in _IMPORT.finditer(rest):
        if not all(_is_preloaded(clause) for clause in match[1].split(",")):
            return True
    return _IMPORT_WORD.search(_IMPORT.sub("", rest)) is not None


def _is_preloaded(clause: str) -> bool:
    words = clause.split()
    return bool(words) and words[0].split(".")[0] in _PRELOADED_MODULES


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerConfig:
    """Limits and paths, fixed for the lifetime of a server. ``isolate`` is ``root``, ``user`` or ``none``."""

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
    package_path: str  # the directory that contains this package
    readable: Sequence[str]  # directories that programs may read, beyond the system's
    client_pid: int
    first_user: int  # with root, the program in slot i runs as user and group ``first_user + i``

    @property
    def slots(self) -> int:
        """Number of users and scratch directories: one for each worker, then one for each session."""
        return self.workers + self.max_sessions

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunnerConfig:
        return cls(**json.loads(text))


SCRATCH_VARIABLE = "AGENTRL_SCRATCH"
"""Environment variable with the parent of the scratch directories, set for server and zygotes without namespaces."""


def python_command(executable: str, module: str, package_path: str, *arguments: str) -> list[str]:
    """Return the command line that runs ``module.main`` without site, user or working directory on ``sys.path``.

    ``-I`` would ignore PYTHONHASHSEED, which is fixed so that sets are printed in the same order in every run.
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
