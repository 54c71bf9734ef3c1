"""One program to run, as it travels from the gateway to a runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl_sandbox.once import digest
from agentrl_sandbox.types import Execution, Sandbox


class ImpossibleCallError(ValueError):
    """A call's arguments cannot be: a timeout out of bounds, a path outside the scratch directory, a size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The arguments of ``Sandbox.execute`` without ``request_id``; what they mean is said there."""

    program: str
    timeout: float | None = None
    stdin: str = ""
    session: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch_files: tuple[str, ...] = ()
    echo: bool = False

    def digest(self) -> bytes:
        """What tells it from another call with the same ``request_id``."""
        header, blobs = self.frame()
        return digest(header, *blobs)

    async def run(self, sandbox: Sandbox) -> Execution:
        """Execute it. Raises as ``Sandbox.execute`` does."""
        return await sandbox.execute(
            self.program,
            timeout=self.timeout,
            stdin=self.stdin,
            session=self.session,
            files=self.files or None,
            fetch_files=self.fetch_files,
            echo=self.echo,
        )

    def frame(self) -> tuple[dict[str, Any], list[bytes]]:
        """Header and blobs of the frame that carries it."""
        header = {
            "timeout": self.timeout,
            "session": self.session,
            "files": list(self.files),
            "fetch_files": self.fetch_files,
            "echo": self.echo,
        }
        texts = [self.program.encode("utf-8", "surrogatepass"), self.stdin.encode("utf-8", "surrogatepass")]
        return header, [*texts, *self.files.values()]

    @classmethod
    def from_frame(cls, header: Mapping[str, Any], blobs: list[bytes]) -> Call:
        """The inverse of ``frame``."""
        program, stdin, *contents = blobs
        return cls(
            program=program.decode("utf-8", "surrogatepass"),
            timeout=header["timeout"],
            stdin=stdin.decode("utf-8", "surrogatepass"),
            session=header["session"],
            files=dict(zip(header["files"], contents, strict=True)),
            fetch_files=tuple(header["fetch_files"]),
            echo=header["echo"],
        )
