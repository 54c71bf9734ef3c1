"""Opens a sandbox without some layers and executes requests, with one JSON object per line in both directions.

    world.py container SETTINGS NEEDED      root with the four capabilities that a runner's container leaves it
    world.py unprivileged SETTINGS NEEDED   a user like any other
    world.py powerless SETTINGS NEEDED      root without a single capability
    world.py user SETTINGS NEEDED           a user like any other, who may make user namespaces here alone

With ``-abi0`` behind its name a world has a kernel without Landlock, with ``-abi5`` one that knows its fifth version.

NEEDED are directories to show to everyone: an interpreter below a directory that only root may enter is not reached
by others.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import errno
import fcntl
import json
import os
import platform
import struct
import sys
import threading

from agentrl_sandbox.client import Execution, SandboxError, SandboxSettings, UnisolatedError
from agentrl_sandbox.local import LocalSandbox, open_local
from agentrl_sandbox.runner import kernel, seccomp

USER = 54_321
KEPT = (0, 5, 6, 7)  # CAP_CHOWN, CAP_KILL, CAP_SETGID, CAP_SETUID
PR_CAPBSET_DROP = 24
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LANDLOCK_CREATE_RULESET, ASKS_FOR_VERSION = 444, 1
TELL_THE_LISTENER, NEW_LISTENER = 0x7FC0_0000, 8  # SECCOMP_RET_USER_NOTIF, SECCOMP_FILTER_FLAG_NEW_LISTENER
RECEIVE, SEND = 0xC050_2100, 0xC018_2101  # SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND


def make_accessible(needed: list[str]) -> None:
    """Cover directories that only root may enter with empty ones, in which only the needed paths are mounted."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    descriptors = {path: os.open(path, os.O_PATH) for path in needed}
    closed = {above for path in needed for above in [path, *parents(path)] if not os.stat(above).st_mode & 1}
    for directory in sorted(closed):
        if not any(directory.startswith(other + "/") for other in closed):
            kernel.mount("none", directory, "tmpfs", 0, "mode=755")
    for path, descriptor in descriptors.items():
        if not os.path.exists(path):
            os.makedirs(path)
            kernel.mount(f"/proc/self/fd/{descriptor}", path, None, kernel.MS_BIND | kernel.MS_REC)
        os.close(descriptor)


def parents(path: str) -> list[str]:
    above = []
    while path != "/":
        path = os.path.dirname(path)
        above.append(path)
    return above


def keep_only(capabilities: tuple[int, ...]) -> None:
    """Drop all other capabilities permanently."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(64):
        if number not in capabilities:
            libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0)
    mask = sum(1 << number for number in capabilities)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)
    if libc.syscall(ctypes.c_long({"x86_64": 126, "aarch64": 91}[os.uname().machine]), header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def enter(world: str, needed: list[str]) -> None:
    make_accessible(needed)
    place, _, version = world.partition("-abi")
    if place in ("unprivileged", "user"):
        kernel.switch_user(USER)
        kernel.set_dumpable()
    else:
        keep_only(KEPT if place == "container" else ())
    if version:
        fake_landlock_version(int(version))


def fake_landlock_version(version: int) -> None:
    """Make the kernel report an older version of Landlock.

    A thread that is not filtered itself gives the answers (seccomp_unotify(2)).
    """
    told: list[int] = []
    filtered = threading.Event()
    threading.Thread(target=answer_for_landlock, args=(version, told, filtered), daemon=True).start()
    kernel.no_new_privileges()
    code = seccomp.branch_if_one_of(2, (ASKS_FOR_VERSION,), [(0x06, 0, 0, TELL_THE_LISTENER)], seccomp.allow_call())
    program = seccomp.assemble_seccomp_filter(
        ARCHITECTURES[platform.machine()], {LANDLOCK_CREATE_RULESET: code}, 444, seccomp.allow_call()
    )
    told.append(install_with_listener(program))
    filtered.set()


def install_with_listener(code: bytes) -> int:
    """Install a filter on this thread and its children. Returns the descriptor of its listener."""
    head = struct.pack("HxxxxxxP", len(code) // 8, ctypes.cast(code, ctypes.c_void_p).value)
    call = ctypes.c_long({"x86_64": 317, "aarch64": 277}[platform.machine()])
    return kernel.system_call_or_raise("seccomp", call.value, ctypes.c_uint(1), ctypes.c_uint(NEW_LISTENER), head)


def answer_for_landlock(version: int, told: list[int], filtered: threading.Event) -> None:
    filtered.wait()
    while True:
        question = bytearray(struct.calcsize("QIIiIQ6Q"))
        fcntl.ioctl(told[0], RECEIVE, question)
        (identifier,) = struct.unpack_from("Q", question)
        answer = (identifier, version, 0) if version else (identifier, 0, -errno.ENOSYS)
        fcntl.ioctl(told[0], SEND, struct.pack("QqiI", *answer, 0))


async def serve(settings: SandboxSettings, modes: tuple[str, ...]) -> None:
    try:
        sandbox = await open_local(settings, modes=modes)
    except UnisolatedError as error:
        print(json.dumps({"refused": str(error), "missing": error.missing}), flush=True)
        return
    print(json.dumps({"layers": dict(sandbox.isolation.layers), "mode": sandbox.isolation.mode}), flush=True)
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        task = asyncio.create_task(answer(sandbox, json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    await sandbox.close()
    await asyncio.gather(*running)


async def answer(sandbox: LocalSandbox, request: dict[str, object]) -> None:
    """Call the method named by ``call``. Bytes are encoded as Latin-1 text."""
    number, call = request.pop("number"), request.pop("call")
    if "files" in request:
        request["files"] = {name: text.encode("latin-1") for name, text in request["files"].items()}  # type: ignore
    try:
        result = await getattr(sandbox, str(call))(**request)
    except SandboxError as error:
        print(json.dumps({"number": number, "error": type(error).__name__, "message": str(error)}), flush=True)
        return
    if isinstance(result, Execution):
        files = {name: content.decode("latin-1") for name, content in result.files.items()}
        result = {**dataclasses.asdict(result), "files": files}
    print(json.dumps({"number": number, "result": result}), flush=True)


if __name__ == "__main__":
    enter(sys.argv[1], json.loads(sys.argv[3]))
    modes = ("user",) if sys.argv[1].startswith("user") else ()
    asyncio.run(serve(SandboxSettings.model_validate_json(sys.argv[2]), modes))
