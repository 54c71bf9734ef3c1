"""The system call filter, built once and installed in every child before its program runs.

Denied calls fail with EPERM, or with ENOSYS if libraries have a fallback for older kernels. Calls newer than this list
fail with ENOSYS. A call for another architecture kills the process.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Mapping
from itertools import groupby

from agentrl_sandbox.runner import kernel

# The numbers of the filtered system calls on x86-64 and 64-bit ARM.

LAST_KNOWN = 462
"""Number of the newest known call (mseal, Linux 6.10). From 424 on, numbers are the same on all machines."""

_TABLE = """
_sysctl 156 -, accept 43 202, accept4 288 242, acct 163 89, add_key 248 217, adjtimex 159 171, bind 49 200,
bpf 321 280, capset 126 91, chmod 90 -, chown 92 -, chroot 161 51, clock_adjtime 305 266, clock_settime 227 112,
clone 56 220, clone3 435 435, connect 42 203, create_module 174 -, delete_module 176 106, fanotify_init 300 262,
fanotify_mark 301 263, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, fchown 93 55, fchownat 260 54, fcntl 72 25,
finit_module 313 273, flock 73 32, fremovexattr 199 16, fsconfig 431 431, fsetxattr 190 7, fsmount 432 432,
fsopen 430 430, fspick 433 433, futimesat 261 -, init_module 175 105, inotify_add_watch 254 27, inotify_init 253 -,
inotify_init1 294 26, io_uring_enter 426 426, io_uring_register 427 427, io_uring_setup 425 425, ioctl 16 29,
ioperm 173 -, iopl 172 -, ioprio_set 251 30, kcmp 312 272, kexec_file_load 320 294, kexec_load 246 104,
keyctl 250 219, landlock_add_rule 445 445, landlock_create_ruleset 444 444, landlock_restrict_self 446 446,
lchown 94 -, listen 50 201, listmount 458 458, lookup_dcookie 212 18, lremovexattr 198 15, lsetxattr 189 6,
memfd_create 319 279, memfd_secret 447 447, migrate_pages 256 238, mknod 133 -, mknodat 259 33, mmap 9 222,
modify_ldt 154 -, mount 165 40, mount_setattr 442 442, move_mount 429 429, move_pages 279 239, mq_getsetattr 245 185,
mq_notify 244 184, mq_open 240 180, mq_timedreceive 243 183, mq_timedsend 242 182, mq_unlink 241 181, msgctl 71 187,
msgget 68 186, msgrcv 70 188, msgsnd 69 189, name_to_handle_at 303 264, nfsservctl 180 42, open_by_handle_at 304 265,
open_tree 428 428, perf_event_open 298 241, personality 135 92, pidfd_getfd 438 438, pivot_root 155 41, prctl 157 167,
prlimit64 302 261, process_madvise 440 440, process_mrelease 448 448, process_vm_readv 310 270,
process_vm_writev 311 271, ptrace 101 117, quotactl 179 60, quotactl_fd 443 443, reboot 169 142, removexattr 197 14,
request_key 249 218, sched_setaffinity 203 122, sched_setattr 314 274, sched_setparam 142 118,
sched_setscheduler 144 119, seccomp 317 277, semctl 66 191, semget 64 190, semop 65 193, semtimedop 220 192,
sendto 44 206, setdomainname 171 162, setfsgid 123 152, setfsuid 122 151, setgid 106 144, setgroups 116 159,
sethostname 170 161, setns 308 268, setpgid 109 154, setpriority 141 140, setregid 114 143, setresgid 119 149,
setresuid 117 147, setreuid 113 145, setsid 112 157, setsockopt 54 208, settimeofday 164 170, setuid 105 146,
setxattr 188 5, shmat 30 196, shmctl 31 195, shmdt 67 197, shmget 29 194, socket 41 198, socketpair 53 199,
statmount 457 457, swapoff 168 225, swapon 167 224, sysfs 139 -, syslog 103 116, umount2 166 39, unshare 272 97,
uselib 134 -, userfaultfd 323 282, ustat 136 -, utime 132 -, utimensat 280 88, utimes 235 -, vhangup 153 58,
vmsplice 278 75
"""  # name, number on x86-64, number on 64-bit ARM; "-" if the machine has no such call
_TABLE_ROWS = [entry.split() for entry in _TABLE.split(",")]
_NUMBERS = {name: tuple(None if text == "-" else int(text) for text in numbers) for name, *numbers in _TABLE_ROWS}
_TABLE_COLUMNS = {"x86_64": 0, "aarch64": 1}

MACHINES = tuple(_TABLE_COLUMNS)
"""Machines with known system call numbers."""


def system_call_number(name: str, machine: str) -> int | None:
    """Return the number of a system call, or None if this machine does not have it.

    >>> calls = ("ptrace", "x86_64"), ("ptrace", "aarch64"), ("iopl", "aarch64")
    >>> tuple(system_call_number(*call) for call in calls)
    (101, 117, None)
    """
    return _NUMBERS[name][_TABLE_COLUMNS[machine]]


# Classic BPF for seccomp: a binary search by system call number, with checks of arguments at its leaves.
#
# Every path through a `Code` returns, so `Code` lists can be concatenated.

Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, constant
Code = list[Instruction]

ALLOW = 0x7FFF_0000
KILL_PROCESS = 0x8000_0000
_ERRNO = 0x0005_0000

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x05, 0x15, 0x35, 0x45
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # offsets in struct seccomp_data, little endian


def allow_call() -> Code:
    return [(_RETURN, 0, 0, ALLOW)]


def kill_process() -> Code:
    return [(_RETURN, 0, 0, KILL_PROCESS)]


def fail_with(errno: int) -> Code:
    return [(_RETURN, 0, 0, _ERRNO | errno)]


def allow_unless_any_bit(argument: int, bits: int, denial: Code) -> Code:
    """Continue with ``denial`` if any of ``bits`` is set in the lower half of an argument. Otherwise allow the call."""
    return [_load(argument), (_IF_ANY_BIT, 1, 0, bits), *allow_call(), *denial]


def allow_unless_one_of(argument: int, values: tuple[int, ...], denial: Code) -> Code:
    """Continue with ``denial`` if the lower half of an argument is one of ``values``. Otherwise allow the call."""
    return [_load(argument), *_jump_over_if_equal(values, allow_call()), *denial]


def branch_if_one_of(
    argument: int, values: tuple[int, ...], then: Code, otherwise: Code, mask: int = 0xFFFF_FFFF
) -> Code:
    """Continue with ``then`` if the masked lower half of an argument is one of ``values``, else with ``otherwise``."""
    masked = [] if mask == 0xFFFF_FFFF else [(_AND, 0, 0, mask)]
    return [_load(argument), *masked, *_jump_over_if_equal(values, otherwise), *then]


def allow_if_null(argument: int, denial: Code) -> Code:
    """Allow the call if a pointer argument is null. Otherwise continue with ``denial``."""
    upper = [_load(argument, upper=True), *_jump_over_if_equal((0,), denial), *allow_call()]
    return [_load(argument), *_jump_over_if_equal((0,), denial), *upper]


def assemble_seccomp_filter(architecture: int, actions: Mapping[int, Code], highest: int, newer_calls: Code) -> bytes:
    """Build a filter that kills the process on calls of other architectures and allows unlisted calls.

    ``actions`` lists calls up to number ``highest``. ``newer_calls`` is the code for numbers above ``highest``.
    """
    numbered = [actions.get(number, allow_call()) for number in range(highest + 1)] + [newer_calls]
    ranges: list[tuple[int, Code]] = []
    for code, run in groupby(enumerate(numbered), key=lambda entry: entry[1]):
        ranges.append((next(run)[0], code))
    head: Code = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_IF_EQUAL, 1, 0, architecture),
        *kill_process(),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in head + _build_search_tree(ranges))


def _load(argument: int, *, upper: bool = False) -> Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument + 4 * upper)


def _jump_over_if_equal(values: tuple[int, ...], code: Code) -> Code:
    """Compare the loaded word with each value and skip ``code`` on a match."""
    tests = [(_IF_EQUAL, len(values) - 1 - index + len(code), 0, value) for index, value in enumerate(values)]
    return [*tests, *code]


def _build_search_tree(ranges: list[tuple[int, Code]]) -> Code:
    """Build a binary search. Each code applies to the numbers from its start up to the next start."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    lower, upper = _build_search_tree(ranges[:middle]), _build_search_tree(ranges[middle:])
    boundary = ranges[middle][0]
    if len(lower) <= 255:
        return [(_IF_AT_LEAST, len(lower), 0, boundary), *lower, *upper]
    return [(_IF_AT_LEAST, 0, 1, boundary), (_JUMP, 0, 0, len(lower)), *lower, *upper]


_DENIED_CALLS = """
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
_DENIED_CALLS_WITHOUT_SEPARATE_USER = """
rights: chmod fchmod fchmodat fchmodat2 chown lchown fchown fchownat
times: utime utimes futimesat utimensat
process groups: setpgid setsid
"""


def _parse_system_call_groups(text: str) -> dict[str, tuple[str, ...]]:
    groups: dict[str, tuple[str, ...]] = {}
    for line in text.strip().splitlines():
        group, names = line.split(":")
        groups[group] = (*groups.get(group, ()), *names.split())
    return groups


DENIED = _parse_system_call_groups(_DENIED_CALLS)
"""Calls that fail with EPERM in all modes, by purpose."""

NOT_IMPLEMENTED = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register", "flock")
"""Calls that fail with ENOSYS, so that libraries fall back to older calls. ``flock`` on a file of the interpreter would
lock it for all programs; ``lockf`` works."""

DENIED_WITHOUT_SEPARATE_USER = _parse_system_call_groups(_DENIED_CALLS_WITHOUT_SEPARATE_USER)
"""Calls that are also denied if programs share the server's user: changes of files that Landlock does not prevent, and
leaving the process group, because fork bombs are killed by process group."""

_ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_NEW_NAMESPACES = 0x7E02_0000  # all CLONE_NEW* flags of clone(2)
_CLONE_PARENT = 0x8000  # a process created with this flag would leave the watched process tree
_CLONE_THREAD, _CLONE_FILES = 0x10000, 0x400
# Allowed options: names, timer slack, huge pages, no_new_privs, vector lengths, and queries. New kernels add options,
# and some of them allocate kernel memory (PR_FUTEX_HASH: 256 MB in one call).
_ALLOWED_PRCTL_OPTIONS = (2, 3, 15, 16, 21, 23, 25, 27, 29, 30, 37, 38, 39, 40, 41, 42, 51, 56)
_DENIED_FCNTL_COMMANDS = (
    1024,  # F_SETLEASE
    1026,  # F_NOTIFY
    1031,  # F_SETPIPE_SZ, because the server counts pipes at their default size
    36,  # F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW, whose locks persist while their files are in flight
    37,
    38,
)
_SOL_SOCKET = 1
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE, SO_RCVBUFFORCE
_SHARED_ANONYMOUS, _MAP_KIND = 0x21, 0x2F  # flags of mmap
_MAP_HUGETLB = 0x40000
_DENIED_IOCTL_REQUESTS = (
    0x5412,  # TIOCSTI: simulates terminal input
    0x541C,  # TIOCLINUX
    0x541D,  # TIOCCONS
    0x4008_6602,  # FS_IOC_SETFLAGS
    0x401C_5820,  # FS_IOC_FSSETXATTR
)
_QUERY_PERSONALITY = 0xFFFF_FFFF
_AF_UNIX, _SOCK_STREAM, _SOCK_SEQPACKET, _SOCK_KIND = 1, 1, 5, 0xF
_SECCOMP_CALL = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _GET_ACTION_AVAILABLE = 1, 2
_FLAG_SPECULATION_ALLOWED = 4  # without this flag, older kernels slow down filtered processes


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


class SeccompFilter:
    def __init__(self, code: bytes) -> None:
        self._program = _Program(len(code) // 8, code)
        self._call = _SECCOMP_CALL[platform.machine()]

    def install(self) -> None:
        """Install the filter permanently in this process and its children.

        Requires ``no_new_privileges``. Raises OSError if the kernel rejects the filter.
        """
        mode = ctypes.c_uint(_SET_MODE_FILTER), ctypes.c_uint(_FLAG_SPECULATION_ALLOWED)
        kernel.system_call_or_raise("seccomp", self._call, *mode, ctypes.byref(self._program))


def seccomp_available() -> bool:
    """Return True if the kernel supports seccomp and the system call numbers of this machine are known."""
    if platform.machine() not in MACHINES:
        return False
    action = ctypes.c_uint32(KILL_PROCESS)
    query = ctypes.c_uint(_GET_ACTION_AVAILABLE), ctypes.c_uint(0), ctypes.byref(action)
    return kernel.system_call(_SECCOMP_CALL[platform.machine()], *query) == 0


def build_seccomp_filter(machine: str, *, separate_user: bool) -> bytes:
    """Build the filter. ``separate_user`` is true if no process outside the program has its user id."""
    groups = DENIED if separate_user else DENIED | DENIED_WITHOUT_SEPARATE_USER
    refused = [name for group in groups.values() for name in group]
    rules_by_name: dict[str, Code] = {
        **dict.fromkeys(refused, fail_with(errno.EPERM)),
        **dict.fromkeys(NOT_IMPLEMENTED, fail_with(errno.ENOSYS)),
        **_argument_rules(),
    }
    numbered = {system_call_number(name, machine): code for name, code in rules_by_name.items()}
    actions = {call: code for call, code in numbered.items() if call is not None}
    newer_calls = fail_with(errno.ENOSYS)
    if machine == "x86_64":
        newer_calls = [(0x35, 0, 1, 0x4000_0000), *kill_process(), *newer_calls]  # this bit marks calls of x32
    return assemble_seccomp_filter(_ARCHITECTURES[machine], actions, LAST_KNOWN, newer_calls)


def _argument_rules() -> dict[str, Code]:
    """Return rules for calls that are denied only with some arguments."""
    refuse = fail_with(errno.EPERM)
    file_or_pipe = (0, 0o100000, 0o010000)  # files and pipes, no devices
    own_process = branch_if_one_of(0, (0,), allow_call(), refuse)
    connected = branch_if_one_of(1, (_SOCK_STREAM, _SOCK_SEQPACKET), allow_call(), refuse, mask=_SOCK_KIND)
    this_process = branch_if_one_of(1, (0,), allow_call(), refuse)
    return {
        # The server cannot count the descriptors of a thread with a separate descriptor table.
        "clone": branch_if_one_of(
            0,
            (_CLONE_THREAD,),
            refuse,
            allow_unless_any_bit(0, _NEW_NAMESPACES | _CLONE_PARENT, refuse),
            mask=_CLONE_THREAD | _CLONE_FILES,
        ),
        "mknod": branch_if_one_of(1, file_or_pipe, allow_call(), refuse, mask=0o170000),
        "mknodat": branch_if_one_of(2, file_or_pipe, allow_call(), refuse, mask=0o170000),
        "ioctl": allow_unless_one_of(1, _DENIED_IOCTL_REQUESTS, refuse),
        "fcntl": allow_unless_one_of(1, _DENIED_FCNTL_COMMANDS, refuse),
        # Shared memory without a file counts toward no limit. The zygote makes Python's mmap use files instead.
        "mmap": branch_if_one_of(
            3, (_SHARED_ANONYMOUS,), refuse, allow_unless_any_bit(3, _MAP_HUGETLB, refuse), mask=_MAP_KIND
        ),
        "personality": branch_if_one_of(0, (_QUERY_PERSONALITY,), allow_call(), refuse),
        "prctl": branch_if_one_of(0, _ALLOWED_PRCTL_OPTIONS, allow_call(), refuse),
        # Datagram socket pairs could still send to a name, so only connected types are allowed.
        "socketpair": branch_if_one_of(0, (_AF_UNIX,), connected, refuse),
        "setsockopt": branch_if_one_of(1, (_SOL_SOCKET,), allow_unless_one_of(2, _BUFFER_SIZES, refuse), allow_call()),
        "sendto": allow_if_null(4, refuse),
        "setpriority": branch_if_one_of(0, (0,), this_process, refuse),
        "ioprio_set": branch_if_one_of(0, (1,), this_process, refuse),
        "prlimit64": own_process,
        "sched_setaffinity": own_process,
        "sched_setattr": own_process,
        "sched_setparam": own_process,
        "sched_setscheduler": own_process,
    }
