"""Programs to run and their results: records, argument checks, and frames between client, gateway and runner.

A frame consists of lengths, a JSON header, and binary blobs.

>>> frames = FrameBuffer[dict[str, object]]()
>>> frames.feed(pack_frame({"id": 1}, b"abc", b""))
[({'id': 1}, [b'abc', b''])]

Names of files in a scratch directory are relative paths inside it.

>>> check_file_names(["data/points.csv", "notes"])
>>> check_file_names(["../secret"])
Traceback (most recent call last):
ValueError: invalid file name '../secret': a component is '..'; a name is a relative path such as 'data/points.csv'
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar

from agentrl_sandbox.types import Execution, Outcome, Sandbox

_FRAME_HEAD = struct.Struct("!II")  # number of bytes after this head, and of bytes in the JSON header
_MAX_FRAME = 1 << 30

_Header = TypeVar("_Header", bound=Mapping[str, object])

Frame = tuple[_Header, list[bytes]]


class FrameError(ValueError):
    """The received bytes are not valid frames."""


def pack_frame(header: Mapping[str, object], *blobs: bytes) -> bytes:
    full_header = {**header, "blobs": [len(blob) for blob in blobs]} if blobs else header
    # Do not escape non-ASCII characters: escapes could triple the size of file names and exceed the message limits.
    text = json.dumps(full_header, ensure_ascii=False).encode("utf-8", "surrogatepass")
    size = len(text) + sum(len(blob) for blob in blobs)
    if size > _MAX_FRAME:
        raise FrameError(f"a frame of {size} bytes exceeds the maximum of {_MAX_FRAME} bytes")
    return b"".join((_FRAME_HEAD.pack(size, len(text)), text, *blobs))


class FrameBuffer(Generic[_Header]):
    """Splits a stream of bytes into frames of at most ``limit`` bytes."""

    def __init__(self, limit: int = _MAX_FRAME) -> None:
        self._limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame[_Header]]:
        """Add received bytes and return the completed frames. Raises FrameError for invalid frames."""
        self._data += data
        frames: list[Frame[_Header]] = []
        position = 0
        while len(self._data) - position >= _FRAME_HEAD.size:
            size, header_size = _FRAME_HEAD.unpack_from(self._data, position)
            if size > self._limit or header_size > size:
                raise FrameError(f"invalid frame of {size} bytes with a header of {header_size} bytes")
            end = position + _FRAME_HEAD.size + size
            if len(self._data) < end:
                break
            frames.append(_unpack_body(bytes(self._data[position + _FRAME_HEAD.size : end]), header_size))
            position = end
        del self._data[:position]
        return frames


def _unpack_body(body: bytes, header_size: int) -> tuple[Any, list[bytes]]:
    try:
        header = json.loads(body[:header_size])
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame's header is not JSON: {error}") from error
    sizes = header.pop("blobs", []) if isinstance(header, dict) else None
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise FrameError("a frame's header is not an object with valid blob sizes")
    if sum(sizes) != len(body) - header_size:
        raise FrameError("a frame's blob sizes do not add up to its length")
    blobs: list[bytes] = []
    position = header_size
    for size in sizes:
        blobs.append(body[position : position + size])
        position += size
    return header, blobs


def fail_futures(futures: Iterable[asyncio.Future[Any]], error: Exception) -> None:
    """Set an exception on all pending futures, without warnings if nothing awaits them."""
    for future in futures:
        if not future.done():
            future.set_exception(error)
            future.exception()


MAX_FILES = 1024
_MAX_COMPONENTS = 32
_MAX_COMPONENT_BYTES = 255
MAX_NAME_LENGTH = 4096
"""Maximum length of a complete name in characters."""
_PAGE_BYTES = 4096


def check_file_names(names: Iterable[str]) -> None:
    """Raise ValueError if a name is not a relative path inside the directory, or if there are too many names."""
    count = 0
    for name in names:
        count += 1
        why = _why_name_is_invalid(name)
        if why:
            raise ValueError(f"invalid file name {name!r}: {why}; a name is a relative path such as 'data/points.csv'")
    if count > MAX_FILES:
        raise ValueError(f"the call names {count} files; at most {MAX_FILES} are allowed")


def check_files(files: Mapping[str, bytes], max_bytes: int) -> None:
    """Raise ValueError for invalid or conflicting names, or if the files exceed ``max_bytes`` bytes."""
    check_file_names(files)
    for name in files:
        parts = name.split("/")
        for end in range(1, len(parts)):
            if "/".join(parts[:end]) in files:
                raise ValueError(f"invalid file name {name!r}: {'/'.join(parts[:end])!r} is a file, not a directory")
    needed = sum(-(-len(content) // _PAGE_BYTES) * _PAGE_BYTES for content in files.values())
    if needed > max_bytes:
        raise ValueError(f"the files take {needed} bytes, but the scratch directory has {max_bytes}: raise scratch_mb")


def _why_name_is_invalid(name: str) -> str:
    if not name:
        return "it is empty"
    if "\0" in name:
        return "it contains a NUL"
    if name.startswith("/"):
        return "it is absolute"
    if len(name) > MAX_NAME_LENGTH:
        return f"it is longer than {MAX_NAME_LENGTH} characters"
    parts = name.split("/")
    if len(parts) > _MAX_COMPONENTS:
        return f"it has more than {_MAX_COMPONENTS} components"
    for part in parts:
        if part in ("", ".", ".."):
            return f"a component is {part!r}"
        try:
            size = len(part.encode())
        except UnicodeEncodeError:
            return "it is not Unicode text"
        if size > _MAX_COMPONENT_BYTES:
            return f"a component is longer than {_MAX_COMPONENT_BYTES} bytes"
    return ""


class InvalidCallError(ValueError):
    """A call's arguments are invalid: the timeout, the path of a file, or the size of the call."""


class CallHeader(TypedDict):
    """Header of the frame that carries a call."""

    timeout: float | None
    session: str | None
    files: Sequence[str]
    fetch_files: Sequence[str]


class ExecutionHeader(TypedDict, total=False):
    """Header of the frame that carries an execution. The frame's blobs are stdout, stderr and the files."""

    op: str
    id: int
    outcome: str
    exit_code: int | None
    seconds: float
    truncated: bool
    files: Sequence[str]
    session_ended: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Arguments of ``Sandbox.execute`` except ``request_id``."""

    program: str
    timeout: float | None = None
    stdin: str = ""
    session: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch_files: tuple[str, ...] = ()

    def digest(self) -> bytes:
        """Return a hash of all arguments, to distinguish calls with the same ``request_id``."""
        header, blobs = self.frame()
        result = hashlib.sha256()
        for part in (*blobs, json.dumps(header).encode()):
            result.update(len(part).to_bytes(8, "big") + part)
        return result.digest()

    def frame(self) -> Frame[CallHeader]:
        header: CallHeader = {
            "timeout": self.timeout,
            "session": self.session,
            "files": list(self.files),
            "fetch_files": self.fetch_files,
        }
        texts = [self.program.encode("utf-8", "surrogatepass"), self.stdin.encode("utf-8", "surrogatepass")]
        return header, [*texts, *self.files.values()]

    @classmethod
    def from_frame(cls, header: CallHeader, blobs: list[bytes]) -> Call:
        """Parse a frame that ``frame`` built."""
        program, stdin, *contents = blobs
        return cls(
            program=program.decode("utf-8", "surrogatepass"),
            timeout=header["timeout"],
            stdin=stdin.decode("utf-8", "surrogatepass"),
            session=header["session"],
            files=dict(zip(header["files"], contents, strict=True)),
            fetch_files=tuple(header["fetch_files"]),
        )


class CallSandbox(Sandbox, ABC):
    """Base class of sandboxes that receive the arguments of ``execute`` as one ``Call``."""

    async def execute(
        self,
        program: str,
        *,
        timeout: float | None = None,
        stdin: str = "",
        session: str | None = None,
        request_id: str | None = None,
        files: Mapping[str, bytes] | None = None,
        fetch_files: Sequence[str] = (),
    ) -> Execution:
        call = Call(
            program=program,
            timeout=timeout,
            stdin=stdin,
            session=session,
            files=files or {},
            fetch_files=tuple(fetch_files),
        )
        return await self.run(call, request_id)

    @abstractmethod
    async def run(self, call: Call, request_id: str | None = None) -> Execution:
        """Run one program. Equal calls with the same ``request_id`` share one run."""


def validate_timeout(seconds: float) -> float:
    """Return ``seconds`` if it is a valid timeout. Raises ValueError otherwise."""
    if not 0 < seconds <= 3600:
        raise ValueError(f"timeout must be above 0 and at most 3600 seconds; got {seconds}")
    return seconds


def build_execution_frame(operation: str, identifier: int, execution: Execution) -> Frame[ExecutionHeader]:
    """Build the response frame for an execution."""
    header: ExecutionHeader = {
        "op": operation,
        "id": identifier,
        "outcome": execution.outcome.value,
        "exit_code": execution.exit_code,
        "seconds": execution.seconds,
        "truncated": execution.truncated,
        "files": list(execution.files),
        "session_ended": execution.session_ended,
    }
    texts = (execution.stdout, execution.stderr)
    return header, [*(text.encode("utf-8", "replace") for text in texts), *execution.files.values()]


def execution_from_frame(header: ExecutionHeader, blobs: Sequence[bytes]) -> Execution:
    """Parse a frame that ``build_execution_frame`` built."""
    stdout, stderr = (blob.decode("utf-8", "replace") for blob in blobs[:2])
    return Execution(
        outcome=Outcome(header["outcome"]),
        stdout=stdout,
        stderr=stderr,
        exit_code=header["exit_code"],
        seconds=header["seconds"],
        truncated=header["truncated"],
        files=dict(zip(header["files"], blobs[2:], strict=True)),
        session_ended=header["session_ended"],
    )


def to_base64(files: Mapping[str, bytes]) -> dict[str, str]:
    """Encode the contents of files for JSON."""
    return {name: base64.b64encode(content).decode("ascii") for name, content in files.items()}
