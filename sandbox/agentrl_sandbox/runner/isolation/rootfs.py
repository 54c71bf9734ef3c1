"""The file system that programs see: the interpreter and the system's libraries, read-only, and a scratch directory.

The server calls ``enter`` once, before it starts anything. A program's ``/scratch`` is mounted later, in the program's
own mount namespace.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from agentrl_sandbox.runner import kernel

SCRATCH = "/scratch"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
# Without /dev/zero, because nothing counts the memory of a shared mapping of it.
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_LINKS = {"/tmp": SCRATCH, "/dev/shm": SCRATCH, "/dev/fd": "/proc/self/fd"}
_BUILD_AT = "/tmp"  # hidden by the new root, in this mount namespace only


def enter(readable: Iterable[str]) -> None:
    """Move this process into new namespaces, with a root that contains only ``readable`` and the system.

    The only network is then an unconfigured loopback. Raises OSError if the kernel refuses.
    """
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)
    with contextlib.suppress(OSError):  # a kernel without cgroups has no cgroup namespace
        kernel.unshare(kernel.CLONE_NEWCGROUP)  # hides the host's paths in /proc/self/cgroup
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    sources = _open_sources(readable)
    kernel.mount("root", _BUILD_AT, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for path, (descriptor, is_directory) in sources.items():
        _bind(descriptor, path, is_directory=is_directory)
        os.close(descriptor)
    _add_links()
    for path in ("/proc", SCRATCH):
        os.mkdir(_BUILD_AT + path)
    kernel.mount("proc", _BUILD_AT + "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    os.chdir(_BUILD_AT)
    kernel.pivot_root_here()
    kernel.add_mount_attributes("/", kernel.MOUNT_ATTR_RDONLY, recursive=False)


def mount_proc(flags: int) -> None:
    """Mount /proc of this PID namespace, and hide the command line of the host's kernel."""
    kernel.mount("proc", "/proc", "proc", flags | kernel.MS_NOEXEC)
    kernel.mount("/dev/null", "/proc/cmdline", None, kernel.MS_BIND)


def become_namespace_root(also: int = 0) -> None:
    """Enter a new user namespace in which this process's user is root and the only user."""
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | also)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def visible(readable: Iterable[str]) -> tuple[list[str], list[str]]:
    """The files visible to programs: directories and files to read, none inside another, and devices."""
    wanted = [path for path in _SYSTEM if not os.path.islink(path)]
    for path in readable:
        wanted += [os.path.abspath(path), os.path.realpath(path)]
    chosen: list[str] = []
    for path in sorted(set(wanted)):
        if os.path.isdir(path) and not any(path.startswith(parent + "/") for parent in chosen):
            chosen.append(path)
    chosen += [path for path in _SYSTEM_FILES if os.path.exists(path)]
    return chosen, [path for path in _DEVICES if os.path.exists(path)]


def _open_sources(readable: Iterable[str]) -> dict[str, tuple[int, bool]]:
    """Path descriptors of everything to bind, so that the new root may be built over any of it."""
    files, devices = visible(readable)
    chosen = files + devices
    return {path: (os.open(path, os.O_PATH | os.O_CLOEXEC), os.path.isdir(path)) for path in chosen}


def _bind(descriptor: int, path: str, *, is_directory: bool) -> None:
    target = _BUILD_AT + path
    if is_directory:
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(f"/proc/self/fd/{descriptor}", target, None, kernel.MS_BIND | kernel.MS_REC)
    if path not in _DEVICES:
        attributes = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV
        kernel.add_mount_attributes(target, attributes, recursive=True)


def _add_links() -> None:
    for path in _SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), _BUILD_AT + path)
    for path, target in _LINKS.items():
        if os.path.isdir(_BUILD_AT + path):
            continue  # the interpreter is inside it, so it stays a read-only directory that shows only that
        os.makedirs(os.path.dirname(_BUILD_AT + path), exist_ok=True)
        os.symlink(target, _BUILD_AT + path)
