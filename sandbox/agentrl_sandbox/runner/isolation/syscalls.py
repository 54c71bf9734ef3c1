"""The numbers of the filtered system calls on x86-64 and 64-bit ARM; None where a call does not exist."""

from __future__ import annotations

LAST_KNOWN = 462
"""The newest call considered (mseal, Linux 6.10). From 424 on numbers are the same on all machines."""

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
"""  # name, number on x86-64, number on 64-bit ARM; - where the machine has no such call
_ROWS = [entry.split() for entry in _TABLE.split(",")]
_NUMBERS = {name: tuple(None if text == "-" else int(text) for text in numbers) for name, *numbers in _ROWS}
_COLUMN = {"x86_64": 0, "aarch64": 1}

MACHINES = tuple(_COLUMN)
"""The machines with known numbers."""


def number(name: str, machine: str) -> int | None:
    """The number of a call; None if the machine does not have it.

    >>> number("ptrace", "x86_64"), number("ptrace", "aarch64"), number("iopl", "aarch64")
    (101, 117, None)
    """
    return _NUMBERS[name][_COLUMN[machine]]
