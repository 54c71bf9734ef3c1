"""Which layers provide which property, by mode and kernel. The probes check that they do."""

from __future__ import annotations

from collections.abc import Mapping


def layers_of(mode: str, found: Mapping[str, int]) -> dict[str, str]:
    """For each property the layers that provide it here, the strongest first.

    >>> found = {"landlock": 4, "seccomp": 1, "own_users": 0}
    >>> layers_of("none", found)["no_network"]
    'seccomp, Landlock'
    >>> layers_of("none", found)["no_foreign_signals"]
    'nothing here'
    """
    spaces = mode != "none"
    own_user = bool(found["own_users"])
    version, filtered = found["landlock"], bool(found["seccomp"])
    user = ("a user for each slot", own_user)
    counted = ("a watch on processes and threads", not own_user)
    return {
        "no_network": _those(("network namespace", spaces), ("seccomp", filtered), ("Landlock", version >= 4)),
        "scratch_only_writes": _those(("mount namespace", spaces), user, ("Landlock", version >= 1)),
        "no_foreign_reads": _those(("mount namespace", spaces), user, ("Landlock", version >= 1)),
        "bounded_memory": "RLIMIT_AS, a watch on resident memory",
        "bounded_processes": _those(counted, ("RLIMIT_NPROC", True), user, ("user namespace", mode == "user")),
        "bounded_time": "the server's deadline, RLIMIT_CPU",
        "bounded_output": "the server's count",
        "no_foreign_signals": _those(("PID namespace", spaces), user, ("Landlock", version >= 6)),
        "no_tracing": _those(("PID namespace", spaces), user, ("seccomp", filtered), ("Landlock", version >= 1)),
    }


def _those(*layers: tuple[str, bool]) -> str:
    return ", ".join(name for name, there in layers if there) or "nothing here"
