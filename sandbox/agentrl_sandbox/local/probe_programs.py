"""The programs that the probes run: templates for ``str.format``, or texts to run unchanged."""

GOT_THROUGH = 3
"""The exit status of a program that got through."""

AHEAD = 1 << 20
"""Bytes that a program may write before they are counted."""

NETWORK = """
import socket
for kind, port in ((socket.SOCK_DGRAM, {udp}), (socket.SOCK_STREAM, {tcp})):
    try:
        probe = socket.socket(socket.AF_INET, kind)
        probe.settimeout(1)
        probe.connect(("127.0.0.1", port))
        probe.send(b"{word}")
    except OSError:
        continue
    if kind == socket.SOCK_STREAM:
        print("sent")
"""

WRITES = """
import os
for directory in {directories!r}:
    try:
        open(directory + "/" + {name!r}, "w").close()
    except OSError:
        pass
for change in (
    lambda: open({untouched!r}, "w").close(),
    lambda: os.close(os.open({untouched!r}, os.O_RDONLY | os.O_TRUNC)),
    lambda: os.truncate({untouched!r}, 0),
    lambda: os.unlink({untouched!r}),
    lambda: os.chmod({untouched!r}, 0o600),
):
    try:
        change()
    except OSError:
        pass
open({name!r}, "w").close()
"""

NEIGHBOUR = """
import os, time
os.umask(0)
open("secret", "w").write({secret!r})
begin = time.monotonic()
time.sleep({seconds})
print(begin, time.monotonic())
"""

# It prints little, to fit in the smallest output_limit.
READS = """
import os, time

def names(directory):
    try:
        return os.listdir(directory)
    except OSError:
        return []

end = time.monotonic() + {seconds}
while (begin := time.monotonic()) < end:
    beside = ["../" + name for name in names("..") + [str(slot) for slot in range(16)]]
    for process in names("/proc"):
        beside += ["/proc/" + process + "/cwd", "/proc/" + process + "/root/scratch"]
    for place in {places!r} + [directory + "/secret" for directory in beside]:
        try:
            text = open(place, "rb").read()
        except OSError:
            continue
        if {start!r}.encode() in text:
            print(text[text.index({start!r}.encode()):][:32].decode())
            raise SystemExit
    print(f"{{begin:.6f}} {{time.monotonic():.6f}}")
    time.sleep({seconds} / 4)
"""

SHADOW = """
import os
try:
    open("/etc/shadow").read()
except OSError:
    os._exit(0)
os._exit(3)
"""

MEMORY = "data = bytearray({size})\nprint(len(data))"

PROCESSES = """
import os, time
made = 0
try:
    while made < {most}:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except OSError:
    os._exit(0)
time.sleep(10)
os._exit(3)
"""

TIME = """
import signal
for number in set(range(1, 32)) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
print("spins", flush=True)
while True:
    pass
"""

OUTPUT = "import os\nsize = {size}\nwhile size > 0:\n    size -= os.write(1, b'x' * 65536)"

TRACING = """
import ctypes, os
libc = ctypes.CDLL(None)
if libc.ptrace(16, {pid}, None, None) == 0:
    os._exit(3)
try:
    lines = open("/proc/{pid}/maps").read().splitlines()
    begin, end = next(line.split()[0].split("-") for line in lines if "[stack]" in line)
    with open("/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(int(begin, 16))
        text = memory.read(int(end, 16) - int(begin, 16))
        print(text[text.index(b"{start}"):][:32].decode())
except (OSError, ValueError, StopIteration):
    pass
"""

SIGNALS = """
import os, signal
try:
    os.kill({pid}, signal.SIGKILL)
except OSError:
    os._exit(0)
os._exit(3)
"""
