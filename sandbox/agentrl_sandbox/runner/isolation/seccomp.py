"""The filter of system calls: built once, installed in every child before its program runs.

Denied calls fail as if a privilege were missing, or as if the kernel were older if libraries can handle that. Calls
newer than this list fail as unknown. A call for another architecture kills the process.
"""

from __future__ import annotations

import ctypes
import errno
import platform

from agentrl_sandbox.runner import kernel
from agentrl_sandbox.runner.isolation import bpf
from agentrl_sandbox.runner.isolation.bpf import Code
from agentrl_sandbox.runner.isolation.syscalls import LAST_KNOWN, MACHINES, number

_TEXT = """
sockets: socket connect bind listen accept accept4
tracing: ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd process_madvise process_mrelease
tracing: migrate_pages move_pages perf_event_open
mounts: mount umount2 move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr pivot_root chroot
mounts: statmount listmount
namespaces: unshare setns sethostname setdomainname
keyrings: keyctl add_key request_key
kernel: bpf userfaultfd kexec_load kexec_file_load create_module init_module finit_module delete_module reboot
kernel: swapon swapoff syslog acct quotactl quotactl_fd iopl ioperm vhangup modify_ldt lookup_dcookie nfsservctl
kernel: uselib ustat sysfs _sysctl vmsplice
clocks: settimeofday clock_settime adjtimex clock_adjtime
handles: name_to_handle_at open_by_handle_at
ipc: shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
ipc: mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
users: setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid setfsgid capset
watching: inotify_init inotify_init1 inotify_add_watch fanotify_init fanotify_mark
unwatched memory: memfd_create memfd_secret
filters: seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self
attributes: setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr
"""
_TEXT_WITHOUT_OWN_USER = """
rights: chmod fchmod fchmodat fchmodat2 chown lchown fchown fchownat
times: utime utimes futimesat utimensat
process groups: setpgid setsid
"""


def _groups(text: str) -> dict[str, tuple[str, ...]]:
    groups: dict[str, tuple[str, ...]] = {}
    for line in text.strip().splitlines():
        group, names = line.split(":")
        groups[group] = (*groups.get(group, ()), *names.split())
    return groups


DENIED = _groups(_TEXT)
"""Calls that fail with EPERM in every mode, by purpose."""

MISSING = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register", "flock")
"""Calls that fail with ENOSYS, so that libraries fall back to older calls. ``flock`` on a file of the interpreter would
lock it for all programs; ``lockf`` works."""

DENIED_WITHOUT_OWN_USER = _groups(_TEXT_WITHOUT_OWN_USER)
"""Also denied if programs share the server's user: changes of files that Landlock does not prevent, and leaving the
process group, by which a fork bomb is killed."""

_ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_NEW_NAMESPACES = 0x7E02_0000  # every CLONE_NEW* that clone(2) knows
_AS_SIBLING = 0x8000  # CLONE_PARENT would leave the watched process tree
_AS_THREAD, _SHARING_FILES = 0x10000, 0x400  # CLONE_THREAD, CLONE_FILES
# Allowed options: names, timer slack, huge pages, no_new_privs, vector lengths, and queries. New kernels add options,
# and some of them allocate kernel memory (PR_FUTEX_HASH took 256 MB in one call).
_PRCTL = (2, 3, 15, 16, 21, 23, 25, 27, 29, 30, 37, 38, 39, 40, 41, 42, 51, 56)
_FCNTL = (
    1024,  # F_SETLEASE
    1026,  # F_NOTIFY
    1031,  # F_SETPIPE_SZ: the watch counts pipes at the default size
    36,  # F_OFD_GETLK, F_OFD_SETLK and F_OFD_SETLKW: such locks persist while their files are in flight
    37,
    38,
)
_SOL_SOCKET = 1
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE
_SHARED_ANONYMOUS, _MAP_KIND = 0x21, 0x2F  # flags of mmap
_MAP_HUGETLB = 0x40000
_IOCTL = (
    0x5412,  # TIOCSTI: typing into a terminal
    0x541C,  # TIOCLINUX
    0x541D,  # TIOCCONS
    0x4008_6602,  # FS_IOC_SETFLAGS
    0x401C_5820,  # FS_IOC_FSSETXATTR
)
_QUERY_PERSONALITY = 0xFFFF_FFFF
_AF_UNIX, _SOCK_STREAM, _SOCK_SEQPACKET, _SOCK_KIND = 1, 1, 5, 0xF
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _GET_ACTION_AVAILABLE = 1, 2
_FLAG_SPECULATION_ALLOWED = 4  # without it older kernels slow down filtered processes


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


class Filter:
    def __init__(self, code: bytes) -> None:
        self._program = _Program(len(code) // 8, code)
        self._call = _SYS_SECCOMP[platform.machine()]

    def install(self) -> None:
        """Install it permanently for this process and its children. Needs no_new_privileges. Raises OSError."""
        mode = ctypes.c_uint(_SET_MODE_FILTER), ctypes.c_uint(_FLAG_SPECULATION_ALLOWED)
        kernel.checked_call("seccomp", self._call, *mode, ctypes.byref(self._program))


def available() -> bool:
    """Whether the kernel supports seccomp and this machine's system call numbers are known."""
    if platform.machine() not in MACHINES:
        return False
    action = ctypes.c_uint32(bpf.KILL_PROCESS)
    query = ctypes.c_uint(_GET_ACTION_AVAILABLE), ctypes.c_uint(0), ctypes.byref(action)
    return kernel.system_call(_SYS_SECCOMP[platform.machine()], *query) == 0


def build(machine: str, *, own_user: bool) -> bytes:
    """The filter's instructions. ``own_user``: no process or file of anyone else belongs to the program's user."""
    groups = DENIED if own_user else DENIED | DENIED_WITHOUT_OWN_USER
    refused = [name for group in groups.values() for name in group]
    by_name: dict[str, Code] = {
        **dict.fromkeys(refused, bpf.fail(errno.EPERM)),
        **dict.fromkeys(MISSING, bpf.fail(errno.ENOSYS)),
        **_by_argument(),
    }
    numbered = {number(name, machine): code for name, code in by_name.items()}
    actions = {call: code for call, code in numbered.items() if call is not None}
    beyond = bpf.fail(errno.ENOSYS)
    if machine == "x86_64":
        beyond = [(0x35, 0, 1, 0x4000_0000), *bpf.kill(), *beyond]  # calls of x32 carry this bit
    return bpf.decide(_ARCHITECTURES[machine], actions, LAST_KNOWN, beyond)


def _by_argument() -> dict[str, Code]:
    """Calls that are denied only for some arguments."""
    refuse = bpf.fail(errno.EPERM)
    node = (0, 0o100000, 0o010000)  # files and pipes, no devices
    own_process = bpf.only_if_one_of(0, (0,), bpf.allow(), refuse)
    connected = bpf.only_if_one_of(1, (_SOCK_STREAM, _SOCK_SEQPACKET), bpf.allow(), refuse, mask=_SOCK_KIND)
    this_process = bpf.only_if_one_of(1, (0,), bpf.allow(), refuse)
    return {
        # The watch cannot count descriptors of a thread with a separate descriptor table.
        "clone": bpf.only_if_one_of(
            0,
            (_AS_THREAD,),
            refuse,
            bpf.unless_any_bit(0, _NEW_NAMESPACES | _AS_SIBLING, refuse),
            mask=_AS_THREAD | _SHARING_FILES,
        ),
        "mknod": bpf.only_if_one_of(1, node, bpf.allow(), refuse, mask=0o170000),
        "mknodat": bpf.only_if_one_of(2, node, bpf.allow(), refuse, mask=0o170000),
        "ioctl": bpf.unless_one_of(1, _IOCTL, refuse),
        "fcntl": bpf.unless_one_of(1, _FCNTL, refuse),
        # Shared memory without a file counts toward no limit. The zygote makes Python's mmap use files instead.
        "mmap": bpf.only_if_one_of(
            3, (_SHARED_ANONYMOUS,), refuse, bpf.unless_any_bit(3, _MAP_HUGETLB, refuse), mask=_MAP_KIND
        ),
        "personality": bpf.only_if_one_of(0, (_QUERY_PERSONALITY,), bpf.allow(), refuse),
        "prctl": bpf.only_if_one_of(0, _PRCTL, bpf.allow(), refuse),
        # A pair of datagram sockets could still send to a name, so only connected kinds are made.
        "socketpair": bpf.only_if_one_of(0, (_AF_UNIX,), connected, refuse),
        "setsockopt": bpf.only_if_one_of(1, (_SOL_SOCKET,), bpf.unless_one_of(2, _BUFFER_SIZES, refuse), bpf.allow()),
        "sendto": bpf.only_if_null(4, refuse),
        "setpriority": bpf.only_if_one_of(0, (0,), this_process, refuse),
        "ioprio_set": bpf.only_if_one_of(0, (1,), this_process, refuse),
        "prlimit64": own_process,
        "sched_setaffinity": own_process,
        "sched_setattr": own_process,
        "sched_setparam": own_process,
        "sched_setscheduler": own_process,
    }
