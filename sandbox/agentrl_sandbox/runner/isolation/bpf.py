"""Classic BPF for seccomp: a decision by system call number as a binary tree, with checks of arguments at its leaves.

A code is a list of instructions in which every path returns, so codes can be concatenated.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import groupby

Instruction = tuple[int, int, int, int]  # operation, jump if true, jump if false, constant
Code = list[Instruction]

ALLOW = 0x7FFF_0000
KILL_PROCESS = 0x8000_0000
_ERRNO = 0x0005_0000

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x05, 0x15, 0x35, 0x45
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # offsets in struct seccomp_data, little endian


def allow() -> Code:
    return [(_RETURN, 0, 0, ALLOW)]


def kill() -> Code:
    return [(_RETURN, 0, 0, KILL_PROCESS)]


def fail(errno: int) -> Code:
    return [(_RETURN, 0, 0, _ERRNO | errno)]


def unless_any_bit(argument: int, bits: int, otherwise: Code) -> Code:
    """Allow where none of ``bits`` is set in the lower half of an argument."""
    return [_load(argument), (_IF_ANY_BIT, 1, 0, bits), *allow(), *otherwise]


def unless_one_of(argument: int, values: tuple[int, ...], otherwise: Code) -> Code:
    """Allow where the lower half of an argument is none of ``values``."""
    return [_load(argument), *_jump_over_if_equal(values, allow()), *otherwise]


def only_if_one_of(
    argument: int, values: tuple[int, ...], then: Code, otherwise: Code, mask: int = 0xFFFF_FFFF
) -> Code:
    """Go on with ``then`` where the lower half of an argument, under a mask, is one of ``values``."""
    masked = [] if mask == 0xFFFF_FFFF else [(_AND, 0, 0, mask)]
    return [_load(argument), *masked, *_jump_over_if_equal(values, otherwise), *then]


def only_if_null(argument: int, otherwise: Code) -> Code:
    """Allow where a whole argument, a pointer, is 0."""
    upper = [_load(argument, upper=True), *_jump_over_if_equal((0,), otherwise), *allow()]
    return [_load(argument), *_jump_over_if_equal((0,), otherwise), *upper]


def decide(architecture: int, actions: Mapping[int, Code], highest: int, beyond: Code) -> bytes:
    """The whole filter. Another architecture kills; an unlisted call passes; one above ``highest`` is ``beyond``."""
    numbered = [actions.get(number, allow()) for number in range(highest + 1)] + [beyond]
    starts: list[tuple[int, Code]] = []
    for code, run in groupby(enumerate(numbered), key=lambda entry: entry[1]):
        starts.append((next(run)[0], code))
    head: Code = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_IF_EQUAL, 1, 0, architecture), *kill(), (_LOAD, 0, 0, _NUMBER_AT)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in head + _tree(starts))


def _load(argument: int, *, upper: bool = False) -> Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument + 4 * upper)


def _jump_over_if_equal(values: tuple[int, ...], code: Code) -> Code:
    """Compare the loaded word with each value; on a match go on behind ``code``."""
    tests = [(_IF_EQUAL, len(values) - 1 - index + len(code), 0, value) for index, value in enumerate(values)]
    return [*tests, *code]


def _tree(starts: list[tuple[int, Code]]) -> Code:
    """Each code serves the numbers from its start up to the next start."""
    if len(starts) == 1:
        return starts[0][1]
    middle = len(starts) // 2
    lower, upper = _tree(starts[:middle]), _tree(starts[middle:])
    boundary = starts[middle][0]
    if len(lower) <= 255:
        return [(_IF_AT_LEAST, len(lower), 0, boundary), *lower, *upper]
    return [(_IF_AT_LEAST, 0, 1, boundary), (_JUMP, 0, 0, len(lower)), *lower, *upper]
