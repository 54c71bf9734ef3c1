"""Linux system calls that Python lacks. They raise OSError with the kernel's errno."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
from collections.abc import Iterator

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
MOUNT_ATTR_NODEV = 4

_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_SYS_MOUNT_SETATTR = 442
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_MADV_COLLAPSE = 25  # Linux 6.1
_HUGE_PAGE_BYTES = 2 << 20
_USER_CAPABILITIES = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 7
_CAP_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_machine = platform.machine()
for _name in ("mount", "umount2", "prctl", "setns", "syscall", "unshare"):
    getattr(_libc, _name)  # look up the symbol once, and not in every child


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def system_call(number: int, *arguments: object) -> int:
    """Make a system call by number. Returns -1 if it fails."""
    return int(_libc.syscall(ctypes.c_long(number), *arguments))


def system_call_or_raise(name: str, number: int, *arguments: object) -> int:
    """Make a system call by number. Raises OSError if it fails."""
    return _call("syscall", name, ctypes.c_long(number), *arguments)


def unshare(flags: int) -> None:
    """Move this process into new namespaces. A new PID namespace applies to its future children."""
    _call("unshare", "unshare", ctypes.c_int(flags))


def setns(descriptor: int, kind: int) -> None:
    """Join the namespace of a descriptor."""
    _call("setns", "setns", ctypes.c_int(descriptor), ctypes.c_int(kind))


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    of_kind, with_data = (text.encode() if text else None for text in (kind, data))
    where = source.encode(), target.encode()
    _call("mount", f"mount {source} on {target}", *where, of_kind, ctypes.c_ulong(flags), with_data)


def unmount_lazily(target: str) -> None:
    _call("umount2", f"umount {target}", target.encode(), ctypes.c_int(MNT_DETACH))


def add_mount_attributes(target: str, attributes: int, *, recursive: bool) -> None:
    """Add restrictions to a mount (Linux 5.12 or later)."""
    attr = _MountAttr(attr_set=attributes)
    where = ctypes.c_int(_AT_FDCWD), target.encode(), ctypes.c_uint(_AT_RECURSIVE if recursive else 0)
    what = ctypes.byref(attr), ctypes.c_size_t(ctypes.sizeof(attr))
    system_call_or_raise(f"mount_setattr {target}", _SYS_MOUNT_SETATTR, *where, *what)


def make_current_directory_root() -> None:
    """Make the current directory the root and detach the old root. The directory must be a mount point."""
    system_call_or_raise("pivot_root", _system_call_number_here(_SYS_PIVOT_ROOT), b".", b".")
    unmount_lazily(".")
    os.chdir("/")


def collapse_to_huge_pages(begin: int, end: int) -> None:
    """Merge the pages of an address range into huge pages. No effect if the kernel does not support it."""
    first = -(-begin // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    for address in range(first, end // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES, _HUGE_PAGE_BYTES):
        advice = ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_PAGE_BYTES), ctypes.c_int(_MADV_COLLAPSE)
        _libc.madvise(*advice)


def die_with_parent(signal_number: int) -> None:
    """Send this process a signal when the thread that created it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def adopt_orphans(*, needed: bool) -> None:
    """Become the parent of every orphaned descendant.

    Old versions of gVisor do not support adoption. Raises OSError in this case only if ``needed``.
    """
    try:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    except OSError as error:
        if needed or error.errno != errno.EINVAL:
            raise


def set_dumpable() -> None:
    """Restore the user's ownership of this process's /proc entries after a change of user."""
    _prctl(_PR_SET_DUMPABLE, 1)


def forbid_tracing() -> None:
    """Deny other processes of the same user access to this process's memory and /proc entries."""
    _prctl(_PR_SET_DUMPABLE, 0)


def no_new_privileges() -> None:
    """Prevent this process and its children from gaining privileges by exec."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Drop all capabilities, also across exec."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) == 0:
        capability += 1
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    system_call_or_raise("capset", _system_call_number_here(_SYS_CAPSET), ctypes.byref(header), ctypes.byref(data))


def can_change_user() -> bool:
    """Return True if this process may become another user, change the owner of files and kill the user's processes.

    This requires CAP_CHOWN, CAP_KILL, CAP_SETGID and CAP_SETUID.
    """
    with open("/proc/self/status", encoding="ascii") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))
    return effective & _USER_CAPABILITIES == _USER_CAPABILITIES


def switch_user(user: int) -> None:
    """Switch to a user and to the group with the same id, and drop all other groups."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


@contextlib.contextmanager
def file_access_as(user: int | None) -> Iterator[None]:
    """Access files and /proc with a user's rights (None: unchanged), without becoming a target of the user's signals.

    A change of the file system user resets ``die_with_parent``. The setting is restored at the end.
    """
    if user is None:
        yield
        return
    before = os.geteuid(), os.getegid()
    at_parents_end = ctypes.c_int()
    _call("prctl", "prctl", _PR_GET_PDEATHSIG, ctypes.byref(at_parents_end), 0, 0, 0)
    _libc.setfsgid(ctypes.c_uint(user))
    _libc.setfsuid(ctypes.c_uint(user))
    try:
        yield
    finally:
        _libc.setfsuid(ctypes.c_uint(before[0]))
        _libc.setfsgid(ctypes.c_uint(before[1]))
        die_with_parent(at_parents_end.value)


def prefer_for_oom_kill() -> None:
    """Make this process and its children the first targets of the out-of-memory killer."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def _prctl(option: int, argument: int) -> None:
    _call("prctl", f"prctl {option}", ctypes.c_int(option), ctypes.c_ulong(argument), 0, 0, 0)


def _call(function: str, what: str, *arguments: object) -> int:
    result = int(getattr(_libc, function)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _system_call_number_here(table: dict[str, int]) -> int:
    if _machine not in table:
        raise OSError(0, f"the system call numbers of {_machine} are unknown; supported: {', '.join(table)}")
    return table[_machine]
