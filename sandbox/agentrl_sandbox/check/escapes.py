"""Attacks on resources that programs must not access: network, host files and processes, kernel, other programs."""

from __future__ import annotations

from agentrl_sandbox.check.case import Case, attack_case, expect_any_end, expect_blocked_attack, expect_outcome
from agentrl_sandbox.types import Execution, Outcome

_NETWORK = attack_case(
    "no_network",
    "sockets of every kind",
    """
    socket.create_connection(("1.1.1.1", 53), timeout=2)
    socket.create_connection(("169.254.169.254", 80), timeout=2)
    socket.create_connection(("2606:4700:4700::1111", 53), timeout=2)
    socket.getaddrinfo("example.com", 80)
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53))
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    [socket.socket(socket.AF_UNIX).connect(path) for path in sockets()]
    """,
    prologue="""
def sockets():
    listed = [line.split()[-1] for line in open("/proc/net/unix").read().splitlines()[1:] if len(line.split()) > 7]
    found = ["\\0" + name[1:] if name.startswith("@") else name for name in listed]
    found += ["/var/run/docker.sock", "/run/docker.sock"]
    found = [name for name in found if name.startswith("\\0") or os.path.exists(name)]
    if not found: raise OSError("none")
    return found
""",
)

_READS = attack_case(
    "no_foreign_reads",
    "secrets of the host",
    """
    open("/etc/shadow").read()
    secrets("/root")
    secrets("/home")
    any_of(lambda pid: open(f"/proc/{pid}/environ", "rb").read(1) or refuse())
    any_of(lambda pid: os.listdir(f"/proc/{pid}/fd"))
    any_of(lambda pid: os.listdir(f"/proc/{pid}/root/root"))
    open("/dev/mem", "rb")
    open("/dev/sda", "rb")
    open("/proc/kcore", "rb").read(1)
    """,
    prologue="""
def secrets(folder):
    names = [name for name in os.listdir(folder) if not sys.prefix.startswith(os.path.join(folder, name))]
    names = [name for name in names if not sys.base_prefix.startswith(os.path.join(folder, name))]
    if not names: raise AttackFailedError("nothing but the way to the interpreter")
    return names
""",
)

_WRITES = attack_case(
    "scratch_only_writes",
    "files outside scratch",
    """
    open("/planted", "w")
    open("/usr/planted", "w")
    open("/etc/planted", "w")
    open("/var/tmp/planted", "w")
    open("/root/planted", "w")
    open(os.path.dirname(os.__file__) + "/planted.py", "w")
    open(os.__file__, "a")
    open(sys.executable, "ab")
    open("/proc/sys/kernel/hostname", "w").write("planted")
    open("/proc/sysrq-trigger", "w").write("x")
    os.link("/etc/passwd", "linked") or open("linked", "a")
    os.symlink("/etc/planted", "pointed") or open("pointed", "w")
    os.mknod("device", 0o60666, os.makedev(8, 0))
    """,
)

_TRACING = attack_case(
    "no_tracing",
    "tracing others",
    """
    any_of(lambda pid: system("ptrace", 0x4206, pid, 0, 0))
    any_of(lambda pid: system("process_vm_readv", pid, vector, 1, mapped(pid), 1, 0))
    any_of(lambda pid: system("kcmp", pid, os.getpid(), 0, 0, 0))
    any_of(lambda pid: system("pidfd_getfd", os.pidfd_open(pid), 0, 0))
    any_of(lambda pid: open(f"/proc/{pid}/mem", "rb"))
    any_of(lambda pid: os.readlink(f"/proc/{pid}/exe"))
    """,
    prologue="""
memory = ctypes.create_string_buffer(8)
vector = struct.pack("PN", ctypes.addressof(memory), 8)
def mapped(pid):
    first = open(f"/proc/{pid}/maps").readline().split("-")[0]
    if not first: raise AttackFailedError("the target maps no memory")
    return struct.pack("PN", int(first, 16), 8)
""",
)

_SIGNALS = attack_case(
    "no_foreign_signals",
    "killing others",
    """
    os.kill(os.getppid() or 999_999, 0)
    any_of(lambda pid: os.kill(pid, 0))
    """,
)

_KERNEL = attack_case(
    "no_privileged_calls",
    "system calls for administrators",
    """
    call("mount", b"x", b"/usr", b"tmpfs", 0, None)
    call("umount2", b"/proc", 2)
    call("chroot", b"/usr")
    call("unshare", 0x20000)
    call("unshare", 0x10000000)
    call("unshare", 0x40000000)
    call("sethostname", b"x", 1)
    system("setns", 0, 0)
    system("pivot_root", b".", b".")
    system("fsopen", b"tmpfs", 0)
    system("open_tree", -100, b"/", 1)
    system("keyctl", 0, -3, 1)
    system("add_key", b"user", b"left", b"x", 1, -3)
    system("bpf", 0, 0, 0)
    system("io_uring_setup", 8, ctypes.create_string_buffer(256))
    system("userfaultfd", 0)
    system("perf_event_open", ctypes.create_string_buffer(struct.pack("II", 1, 128) + bytes(120)), 0, -1, -1, 0)
    system("open_by_handle_at", -100, 0, 0)
    system("kexec_load", 0, 0, 0, 0)
    system("init_module", 0, 0, b"")
    system("swapon", b"x", 0)
    system("reboot", 0xfee1dead, 672274793, 0x1234567, 0)
    system("acct", b"x")
    system("syslog", 3, ctypes.create_string_buffer(16), 16)
    system("clock_settime", 0, ctypes.create_string_buffer(struct.pack("qq", 0, 0)))
    """,
)

_SUICIDE = """
import os, signal
for target in (os.getppid(), 1, -1, 0):
    try:
        os.kill(target, signal.SIGKILL)
    except OSError:
        pass
print("alive")
"""
_DAEMON = """
import os, sys, time
if os.fork() == 0:
    try:
        os.setsid()
    except OSError:
        pass
    if os.fork() == 0:
        os.execv(sys.executable or "/bin/sh", ["agentrl-left-behind", "-c", "import time; time.sleep(120)"])
    os._exit(0)
time.sleep(0.5)
"""
_NO_DAEMON = """
import os
seen = b""
try:
    listed = os.listdir("/proc")
except PermissionError:
    listed = []  # not even a neighbour would be seen
for pid in listed:
    if pid.isdigit():
        try:
            seen += open(f"/proc/{pid}/cmdline", "rb").read()
        except OSError:
            pass
print("dirty" if b"agentrl-left" + b"-behind" in seen else "clean")
"""
_SHARED = """
import ctypes, mmap, os
libc = ctypes.CDLL(None)
libc.shmget(4242, 4096, 0o1666); libc.semget(4242, 1, 0o1666); libc.msgget(4242, 0o1666)
for path in ("/dev/shm/agentrl-left", "/tmp/agentrl-left", "/var/tmp/agentrl-left"):
    try:
        open(path, "w").close()
    except OSError:
        pass
"""
# Without namespaces, files in shared directories are removed shortly after the program's result is sent.
_NOT_SHARED = """
import ctypes, os, time
libc = ctypes.CDLL(None)
paths = ("/dev/shm/agentrl-left", "/tmp/agentrl-left", "/var/tmp/agentrl-left")
end = time.monotonic() + 5
while any(os.path.exists(path) for path in paths) and time.monotonic() < end:
    time.sleep(0.02)
seen = [libc.shmget(4242, 4096, 0), libc.semget(4242, 1, 0), libc.msgget(4242, 0)] != [-1, -1, -1]
seen |= any(os.path.exists(path) for path in paths)
print("dirty" if seen else "clean")
"""
_TREE = """
import os
for depth in range(300):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
open("new\\nline", "w").close()
os.chmod(".", 0)
"""
_POISON = """
import atexit, builtins, gc, math, os, random, sys, json
builtins.print = builtins.len = None
math.pi = 3
sys.modules["json"] = None
sys.path.clear()
os.environ["AGENTRL_LEFT"] = "1"
random.seed(1)
sys.setrecursionlimit(50)
gc.disable()
atexit.register(os.abort)
for name in ("numpy", "sympy"):
    if name in sys.modules:
        sys.modules[name].__dict__.clear()
os._exit(0)
"""
_NOT_POISONED = """
import json, math, os, sys
import sympy
good = len("ab") == 2 and math.pi > 3.1 and "AGENTRL_LEFT" not in os.environ and sys.getrecursionlimit() > 100
print("clean" if good and sympy.Integer(4) == 4 else "dirty")
"""
_ROOT = """
import os
try:
    os.setuid(0)
    open("/etc/shadow")
    print("reached")
except OSError:
    print("tried")
"""


def _ran_or_was_killed(run: Execution) -> bool:
    return run.outcome in (Outcome.OK, Outcome.KILLED)


_PRIORITY = "import os\ntry:\n    os.nice(-20)\n    print('reached')\nexcept OSError:\n    print('tried')"
_DESCRIPTORS = "import os\nkept = []\nwhile True:\n    kept.append(os.pipe())"
_EMPTY = "import os\nprint('dirty' if os.listdir('.') else 'clean')"
ESCAPES = (
    *(_NETWORK, _READS, _WRITES, _TRACING, _SIGNALS, _KERNEL),
    Case("killing the parent, PID 1 and all processes", _SUICIDE, _ran_or_was_killed, "no_foreign_signals"),
    Case("daemon that outlives its program", _DAEMON, expect_any_end, "nothing_left_behind", after=_NO_DAEMON),
    Case("shared memory, semaphores and queues", _SHARED, expect_any_end, "nothing_left_behind", after=_NOT_SHARED),
    Case("deep tree with odd names", _TREE, expect_any_end, "nothing_left_behind", after=_EMPTY),
    Case("poisoned interpreter", _POISON, expect_any_end, "nothing_left_behind", after=_NOT_POISONED),
    Case("raised priority", _PRIORITY, expect_blocked_attack, "no_privileged_calls"),
    Case("becoming root", _ROOT, expect_blocked_attack, "no_privileged_calls"),
    Case("exhausting descriptors", _DESCRIPTORS, expect_outcome(Outcome.ERROR), "robust"),
)
"""Attacks by property. After each attack, ``suite`` checks that the sandbox still works."""
