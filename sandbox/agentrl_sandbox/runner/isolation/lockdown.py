"""The layers that need no namespaces, applied as a child's last step before its program runs."""

from __future__ import annotations

import platform

from agentrl_sandbox.runner import kernel
from agentrl_sandbox.runner.config import RunnerConfig
from agentrl_sandbox.runner.isolation import landlock, rootfs, seccomp

_SYSTEM_STATE = (
    "/proc/cpuinfo",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/version",
    "/proc/sys/vm/overcommit_memory",
    "/sys/devices/system/cpu",
)
_SHARED_MEMORY = "/dev/shm"


class Lockdown:
    """Prepared once in the zygote; ``close`` restricts a child."""

    def __init__(self, config: RunnerConfig) -> None:
        namespaces = config.isolate != "none"
        own_user = has_own_users(config)
        version = landlock.abi()
        self._filter: seccomp.Filter | None = None
        if seccomp.available():
            self._filter = seccomp.Filter(seccomp.build(platform.machine(), own_user=own_user or namespaces))
        self._processes = "/proc" if namespaces else "/proc/self"
        self._rules: landlock.Rules | None = None
        if version:
            files, devices = rootfs.visible(config.readable)
            rights = [(path, landlock.READ) for path in files] + [(path, landlock.DEVICE) for path in devices]
            if not namespaces:
                rights += [(path, landlock.LOOK) for path in _SYSTEM_STATE]
                rights += [(_SHARED_MEMORY, landlock.OWN_SHARED_MEMORY)] if own_user else []
            self._rules = landlock.Rules(version, rights)

    def close(self, scratch: str) -> None:
        """Restrict this process permanently: it can write only to ``scratch``. Raises OSError."""
        if self._rules is not None:
            self._rules.enforce(((scratch, landlock.SCRATCH), (self._processes, landlock.LOOK)))
        if self._filter is not None:
            self._filter.install()


def has_own_users(config: RunnerConfig) -> bool:
    """Whether every slot has its own user."""
    return config.isolate != "user" and kernel.may_change_user()


def reaches_session_init(config: RunnerConfig) -> bool:
    """Whether programs can signal other processes of their user, and so kill the init process of their session."""
    return config.isolate == "none" and landlock.abi() < landlock.SCOPES_SINCE


def layers(config: RunnerConfig) -> dict[str, int]:
    """The layers available here: Landlock's version, and 1 or 0 for the others."""
    return {
        "landlock": landlock.abi(),
        "seccomp": int(seccomp.available()),
        "own_users": int(has_own_users(config)),
    }
