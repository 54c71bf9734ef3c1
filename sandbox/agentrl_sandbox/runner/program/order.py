"""One program to run: its frame on the client's socket, and the memory file in which a child receives it.

The memory file holds the length of a header (8 bytes), the header, the program, the files, and last the program's
stdin: the child reads up to there and passes the rest of the file to the program as descriptor 0.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_sandbox.runner.frames import ServerRequest
from agentrl_sandbox.wire import Frame

_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # no further seal, no shrinking, no growing, no writing


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A run, as client and server see it."""

    identifier: int
    timeout: float
    source: bytes
    stdin: bytes
    session: int | None = None
    echo: bool = False
    files: tuple[tuple[str, bytes], ...] = ()
    fetch: tuple[str, ...] = ()

    def to_frame(self) -> Frame[ServerRequest]:
        """Header and blobs of the message to the server."""
        header: ServerRequest = {
            "op": "run",
            "id": self.identifier,
            "timeout": self.timeout,
            "session": self.session,
            "echo": self.echo,
            "files": [name for name, _ in self.files],
            "fetch": self.fetch,
        }
        return header, [self.source, self.stdin, *(content for _, content in self.files)]

    @classmethod
    def from_frame(cls, header: ServerRequest, blobs: Sequence[bytes]) -> Order:
        """The inverse of ``to_frame``."""
        return cls(
            identifier=header["id"],
            timeout=header["timeout"],
            session=header["session"],
            echo=header["echo"],
            source=blobs[0],
            stdin=blobs[1],
            files=tuple(zip(header["files"], blobs[2:], strict=True)),
            fetch=tuple(header["fetch"]),
        )

    def to_memory_file(self) -> int:
        """A new memory file for the child, positioned at its start. The program cannot write to it."""
        header = {
            "source": len(self.source),
            "echo": self.echo,
            "files": [(name, len(content)) for name, content in self.files],
            "fetch": self.fetch,
        }
        text = json.dumps(header).encode()
        file = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        for part in (len(text).to_bytes(8, "big"), text, self.source, *(c for _, c in self.files), self.stdin):
            os.write(file, part)
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
