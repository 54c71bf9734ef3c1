"""Parts of the sandbox: frames, captured output, choice of the interpreter, settings, kernel memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl_sandbox.call import FrameBuffer, FrameError, pack_frame
from agentrl_sandbox.client import SandboxSettings
from agentrl_sandbox.runner.config import needs_science_interpreter
from agentrl_sandbox.runner.program import OutputCapture
from agentrl_sandbox.runner.usage import ProgramMemoryQuota
from agentrl_sandbox.types import PROPERTIES, Isolation


@given(
    frames=st.lists(st.tuples(st.dictionaries(st.sampled_from("abc"), st.text()), st.lists(st.binary()))),
    cut=st.integers(1, 7),
)
def test_frames_survive_any_cutting(frames, cut):
    stream = b"".join(pack_frame(header, *blobs) for header, blobs in frames)
    buffer = FrameBuffer()
    seen = [frame for i in range(0, len(stream), cut) for frame in buffer.feed(stream[i : i + cut])]
    assert seen == frames


def test_an_invalid_frame_is_refused():
    with pytest.raises(FrameError):
        FrameBuffer().feed(b"\xff" * 8)


@given(pieces=st.lists(st.binary(max_size=40), max_size=12), half=st.integers(1, 20))
def test_a_capture_keeps_head_and_tail(pieces, half):
    read, write = os.pipe()
    os.set_blocking(read, False)
    capture = OutputCapture(read, 2 * half)
    for piece in pieces:
        os.write(write, piece)
        assert capture.read_and_check_open(1000)
    os.close(write)
    assert not capture.read_and_check_open(1000)
    capture.close()
    whole = b"".join(pieces)
    assert capture.total == len(whole)
    assert capture.truncated == (len(whole) > 2 * half)
    if capture.truncated:
        note = f"\n... [{len(whole) - 2 * half} bytes left out] ...\n".encode()
        assert capture.head_and_tail() == whole[:half] + note + whole[-half:]
    else:
        assert capture.head_and_tail() == whole


@pytest.mark.parametrize(
    ("program", "science"),
    [
        ("print(1)", False),
        ("x = 'an important thing'", False),
        ("import math", False),
        ("import math as m, random\nfrom fractions import Fraction", False),
        ("from itertools import (\n  chain,\n  count)", False),
        ("import os.path; import sys", False),
        ("import sympy", True),
        ("import math, numpy as np", True),
        ("from sympy import symbols, solve", True),
        ("from scipy.special import gamma", True),
        ("x = 1; import networkx", True),
        ("if True: import sympy", True),
        ("import", True),
        ("eval('__imp' + 'ort__')", True),
        ("importlib.import_module(name)", True),
    ],
)
def test_the_interpreter_is_chosen_by_imports(program, science):
    assert needs_science_interpreter(program) is science


def test_isolation_says_what_holds_and_what_does_not():
    layers = dict.fromkeys(PROPERTIES, "x")
    assert "MISSING" not in Isolation(layers=layers, mode="root").describe()
    partial = Isolation(layers={**layers, "no_network": None}, mode="none")
    assert partial.missing == ("no_network",)
    assert partial.describe().endswith("(no namespaces); MISSING: no_network")


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"memory_mb": 1}, {"workers": 0}, {"tiemout": 3}, {"url": "x"}])
def test_bad_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        SandboxSettings(**wrong)


def test_mapped_ranges_count_where_several_processes_can_hold_them():
    # Adjacent pages with different protection are separate ranges. The kernel's record of a range takes 256 bytes.
    ranges = 2000
    program = (
        "import ctypes, mmap, sys\n"
        f"memory = mmap.mmap(-1, {ranges} * mmap.PAGESIZE)\n"
        "start = ctypes.addressof(ctypes.c_char.from_buffer(memory))\n"
        f"for page in range(0, {ranges} if len(sys.argv) > 1 else 0, 2):\n"
        "    ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page * mmap.PAGESIZE), mmap.PAGESIZE, 0)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )

    def bytes_counted(*arguments: str, processes: int) -> int:
        command = [sys.executable, "-c", program, *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held:
            held.stdout.readline()
            counted = ProgramMemoryQuota(bytes_left=1 << 30, socket_bytes=0)
            counted.add([held.pid] * processes)
            held.stdin.close()
        return (1 << 30) - counted.bytes_left

    few, many = bytes_counted(processes=2), bytes_counted("split", processes=2)
    assert abs(many - few - 2 * 256 * ranges) <= 2 * 256 * 20  # the loader's own mappings may vary
    assert bytes_counted(processes=1) == bytes_counted("split", processes=1)
