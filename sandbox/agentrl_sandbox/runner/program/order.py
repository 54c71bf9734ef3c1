"""One program to run, and the memory file in which a child receives it.

The memory file holds the length of a header (8 bytes), the header, the program, the files, and last the program's
stdin: the child reads up to there and passes the rest of the file to the program as descriptor 0.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass

from agentrl_sandbox.call import Call
from agentrl_sandbox.runner.frames import ServerRequest

_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # no further seal, no shrinking, no growing, no writing


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A run, as the server sees it. ``session`` is the server's number."""

    identifier: int
    session: int | None
    timeout: float
    call: Call

    @classmethod
    def from_frame(cls, header: ServerRequest, blobs: list[bytes]) -> Order:
        call = Call.from_frame(header, blobs)
        return cls(identifier=header["id"], session=header["number"], timeout=call.timeout or 0.0, call=call)


def to_memory_file(call: Call) -> int:
    """A new memory file for the child, positioned at its start. The program cannot write to it."""
    _, (source, stdin, *contents) = call.frame()
    header = {
        "source": len(source),
        "echo": call.echo,
        "files": [(name, len(content)) for name, content in call.files.items()],
        "fetch": call.fetch_files,
    }
    text = json.dumps(header).encode()
    file = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as whole:
        for part in (len(text).to_bytes(8, "big"), text, source, *contents, stdin):
            whole.write(part)
    fcntl.fcntl(file, _F_ADD_SEALS, _SEALS)
    os.lseek(file, 0, os.SEEK_SET)
    return file


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A run, as the child sees it; the contents of files stay in the memory file."""

    source: bytes
    echo: bool
    files: tuple[tuple[str, int], ...]  # names and sizes
    fetch: tuple[str, ...]


def read_task(descriptor: int) -> Task:
    """Read a memory file up to the files."""
    header = json.loads(_read(descriptor, int.from_bytes(_read(descriptor, 8), "big")))
    return Task(
        source=_read(descriptor, header["source"]),
        echo=header["echo"],
        files=tuple((name, size) for name, size in header["files"]),
        fetch=tuple(header["fetch"]),
    )


def _read(descriptor: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(descriptor, size - len(data))
    return data
