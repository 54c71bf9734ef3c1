"""The filter's instructions, interpreted here as by the kernel, for all supported machines."""

from __future__ import annotations

import errno
import struct

import pytest

from agentrl_sandbox.runner import seccomp
from agentrl_sandbox.runner.seccomp import (
    DENIED,
    DENIED_WITHOUT_SEPARATE_USER,
    LAST_KNOWN,
    MACHINES,
    NOT_IMPLEMENTED,
    build_seccomp_filter,
    system_call_number,
)

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED_WITHOUT_ARGUMENTS = ("personality", "socketpair", "ioprio_set", "prctl")
PERMISSION, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


class Filter:
    """Interprets the filter for one system call."""

    def __init__(self, machine: str, *, separate_user: bool = True) -> None:
        self.architecture = ARCHITECTURES[machine]
        self.code = list(struct.iter_unpack("=HBBI", build_seccomp_filter(machine, separate_user=separate_user)))

    def __call__(self, call: int, *arguments: int, architecture: int | None = None) -> int:
        padded = (*arguments, *(0,) * (6 - len(arguments)))
        data = struct.pack("<IIQ6Q", call, architecture or self.architecture, 0, *padded)
        at, loaded = 0, 0
        while True:
            operation, true, false, constant = self.code[at]
            at += 1
            if operation == 0x06:  # return
                return constant
            if operation == 0x20:  # load
                (loaded,) = struct.unpack_from("<I", data, constant)
            elif operation == 0x54:  # and
                loaded &= constant
            elif operation == 0x05:  # jump
                at += constant
            else:
                met = {0x15: loaded == constant, 0x35: loaded >= constant, 0x45: loaded & constant != 0}[operation]
                at += true if met else false


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("separate_user", [True, False])
def test_only_listed_calls_are_denied(machine, separate_user):
    verdict = Filter(machine, separate_user=separate_user)
    groups = DENIED if separate_user else DENIED | DENIED_WITHOUT_SEPARATE_USER
    names = [name for group in groups.values() for name in group]
    refused = {system_call_number(name, machine): PERMISSION for name in (*names, *REFUSED_WITHOUT_ARGUMENTS)}
    refused |= {system_call_number(name, machine): UNKNOWN for name in NOT_IMPLEMENTED}
    verdicts = {call: verdict(call) for call in range(LAST_KNOWN + 1)}
    assert verdicts == {call: refused.get(call, seccomp.ALLOW) for call in range(LAST_KNOWN + 1)}
    assert verdict(LAST_KNOWN + 1) == UNKNOWN


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_machine_end_the_process(machine):
    verdict = Filter(machine)
    others = {0x4000_0003, 0x4000_0028, *ARCHITECTURES.values()} - {verdict.architecture}
    verdicts = {verdict(call, architecture=other) for other in others for call in range(LAST_KNOWN + 2)}
    assert verdicts == {seccomp.KILL_PROCESS}


def test_calls_with_the_bit_of_x32_end_the_process():
    assert {Filter("x86_64")(0x4000_0000 | call) for call in range(LAST_KNOWN + 2)} == {seccomp.KILL_PROCESS}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("sendto", (0, 0, 0, 0, 0), seccomp.ALLOW),
        ("sendto", (0, 0, 0, 0, 1), PERMISSION),
        ("sendto", (0, 0, 0, 0, 1 << 32), PERMISSION),
        ("socketpair", (1, 1), seccomp.ALLOW),
        ("socketpair", (1, 5 | 0o2000000), seccomp.ALLOW),
        ("socketpair", (1, 2), PERMISSION),
        ("socketpair", (2, 1), PERMISSION),
        ("clone", (0x3D0F00,), seccomp.ALLOW),
        ("clone", (0x10000000 | 17,), PERMISSION),
        ("clone", (0x10900,), PERMISSION),
        ("clone", (0x8000 | 17,), PERMISSION),
        ("prlimit64", (0, 7), seccomp.ALLOW),
        ("prlimit64", (1, 7), PERMISSION),
        ("setpriority", (0, 0, 5), seccomp.ALLOW),
        ("setpriority", (0, 9, 5), PERMISSION),
        ("setpriority", (2, 0, 5), PERMISSION),
        ("personality", (0xFFFFFFFF,), seccomp.ALLOW),
        ("mknodat", (0, 0, 0o010644), seccomp.ALLOW),
        ("mknodat", (0, 0, 0o060644), PERMISSION),
        ("ioctl", (0, 0x5401), seccomp.ALLOW),
        ("ioctl", (0, 0x5412), PERMISSION),
        ("ioctl", (0, 0x1_0000_5412), PERMISSION),
        ("prctl", (15,), seccomp.ALLOW),
        ("prctl", (1,), PERMISSION),
        ("prctl", (4,), PERMISSION),
        ("prctl", (78,), PERMISSION),
        ("fcntl", (0, 6), seccomp.ALLOW),
        ("fcntl", (0, 37), PERMISSION),
        ("fcntl", (0, 1031), PERMISSION),
        ("setsockopt", (0, 1, 2), seccomp.ALLOW),
        ("setsockopt", (0, 6, 7), seccomp.ALLOW),
        ("setsockopt", (0, 1, 7), PERMISSION),
        ("setsockopt", (0, 1, 33), PERMISSION),
        ("mmap", (0, 4096, 3, 0x22), seccomp.ALLOW),
        ("mmap", (0, 4096, 3, 0x01), seccomp.ALLOW),
        ("mmap", (0, 4096, 3, 0x21), PERMISSION),
        ("mmap", (0, 4096, 3, 0x8021), PERMISSION),
        ("mmap", (0, 4096, 3, 0x40022), PERMISSION),
    ],
)
def test_calls_are_filtered_by_their_arguments(machine, name, arguments, expected):
    assert Filter(machine)(system_call_number(name, machine), *arguments) == expected
