"""Opens a sandbox where there are no namespaces, and runs what comes in: one JSON object a line, in and out.

    world.py container SETTINGS NEEDED      root with the four capabilities that a runner's container leaves it
    world.py unprivileged SETTINGS NEEDED   a user like any other
    world.py powerless SETTINGS NEEDED      root without a single capability

With ``-old`` behind its name a world has a kernel without Landlock.

NEEDED are directories to show to everyone: an interpreter below a directory that only root may enter is not reached
by others.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import errno
import json
import os
import sys

from agentrl_sandbox.client import Execution, SandboxError, SandboxSettings, UnisolatedError
from agentrl_sandbox.local import LocalSandbox, open_local
from agentrl_sandbox.runner import bpf, kernel
from agentrl_sandbox.runner.seccomp import Filter

USER = 54_321
KEPT = (0, 5, 6, 7)  # CAP_CHOWN, CAP_KILL, CAP_SETGID, CAP_SETUID
PR_CAPBSET_DROP = 24


def reach(needed: list[str]) -> None:
    """Show directories through empty ones in the place of those that only root may enter."""
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
    """Drop every other capability, for good."""
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
    reach(needed)
    place, _, old = world.partition("-")
    if place == "unprivileged":
        kernel.become(USER)
        kernel.set_dumpable()
    else:
        keep_only(KEPT if place == "container" else ())
    if old:
        hide_landlock()


def hide_landlock() -> None:
    """Its first call is unknown from here on, as on a kernel that was built without it."""
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[os.uname().machine]
    kernel.no_new_privileges()
    Filter(bpf.decide(architecture, {444: bpf.fail(errno.ENOSYS)}, 444, bpf.allow())).install()


async def serve(settings: SandboxSettings) -> None:
    try:
        sandbox = await open_local(settings, modes=())
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
    """Call the method that ``call`` names; bytes travel as Latin-1 text."""
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
    asyncio.run(serve(SandboxSettings.model_validate_json(sys.argv[2])))
