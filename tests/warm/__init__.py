"""Processes whose libraries are loaded already. Use :class:`WarmPopen` where a test starts Python many times.

A command that imports torch, transformers and DeepSpeed computes for six seconds before it begins. A server, one a
test process, imports them once and forks for each command. Everything else is as in a process of its own: arguments,
environment, folder, streams, session, signals, exit code, and who its parent is. What must be seen through the
real start of Python (how long it takes, what it imports, variables that libraries read as they load) is no case for it.
"""

from warm.client import LIBRARIES, WarmPopen, run_warm

__all__ = ["LIBRARIES", "WarmPopen", "run_warm"]
