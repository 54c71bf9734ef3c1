"""Restricts a process with Landlock to given files, without TCP ports, foreign processes or abstract sockets.

Paths are opened once, in the zygote; a child only adds the rules and enforces them. Every right that the kernel's
Landlock supports is denied unless a rule grants it; older kernels support fewer (``abi``).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from agentrl_sandbox.runner import kernel

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # the same on every machine
_VERSION = 1
_PATH_BENEATH = 1
_QUIET = 1  # denials do not fill the host's audit log (ABI 7)

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, REMOVE_FILE, _MAKE_DIR, MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_MAKE_PIPE, _MAKE_LINK = 1 << 10, 1 << 12
_REFER, TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15

READ = EXECUTE | READ_FILE | READ_DIR
LOOK = READ_FILE | READ_DIR
_EDIT = WRITE_FILE | TRUNCATE | _REMOVE_DIR | REMOVE_FILE | _MAKE_DIR | MAKE_FILE | _MAKE_PIPE | _MAKE_LINK | _REFER
SCRATCH = LOOK | _EDIT
DEVICE = READ_FILE | WRITE_FILE | TRUNCATE
OWN_SHARED_MEMORY = READ_FILE | WRITE_FILE | TRUNCATE | MAKE_FILE | REMOVE_FILE
_FOR_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | _IOCTL_DEVICE  # the rights a rule on a file may give

_FILES_BY_ABI = {1: (1 << 13) - 1, 2: _REFER, 3: TRUNCATE, 5: _IOCTL_DEVICE}
_TCP = 0b11  # bind and connect, ABI 4
_SCOPES = 0b11  # abstract Unix sockets and signals
SCOPES_SINCE = 6


class _RulesetAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("files", "network", "scopes")]


class _PathBeneath(ctypes.Structure):
    _fields_ = [("rights", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def abi() -> int:
    """The version of Landlock that this kernel offers; 0 where it offers none."""
    return max(0, kernel.system_call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION)))


class Rules:
    """The rules shared by all children: readable files, and devices. Holds a descriptor for each."""

    def __init__(self, version: int, rights: Iterable[tuple[str, int]]) -> None:
        self._files = sum(bits for since, bits in _FILES_BY_ABI.items() if since <= version)
        scoped = version >= SCOPES_SINCE
        self._attributes = _RulesetAttributes(self._files, _TCP if version >= 4 else 0, _SCOPES if scoped else 0)
        self._size = ctypes.sizeof(_RulesetAttributes) if scoped else 16 if version >= 4 else 8
        self._flags = _QUIET if version >= 7 else 0
        self._rules = [self._rule(path, bits) for path, bits in rights if os.path.exists(path)]

    def enforce(self, own: Iterable[tuple[str, int]]) -> None:
        """Restrict this process and its children permanently, with rules for its own paths added. Raises OSError."""
        arguments = ctypes.byref(self._attributes), ctypes.c_size_t(self._size), ctypes.c_uint(0)
        ruleset = kernel.checked_call("landlock_create_ruleset", _CREATE, *arguments)
        mine = [_PathBeneath(bits & self._files, os.open(path, os.O_PATH)) for path, bits in own]
        for rule in (*self._rules, *mine):
            where = ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint(0)
            kernel.checked_call("landlock_add_rule", _ADD_RULE, *where)
        kernel.checked_call("landlock_restrict_self", _RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(self._flags))
        for descriptor in (ruleset, *(rule.parent for rule in mine)):
            os.close(descriptor)

    def _rule(self, path: str, rights: int) -> _PathBeneath:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        known = self._files if os.path.isdir(path) else self._files & _FOR_FILES
        return _PathBeneath(rights & known, descriptor)
