"""Makes the objects of a warm interpreter immortal, so that forks share their memory for longer.

A child that merely reads an object counts the reference, which writes to the object's page and so copies it. From
CPython 3.12 on (PEP 683) the references of an immortal object are not counted.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import sysconfig
from types import CodeType


def freeze_refcounts() -> int:
    """Make all objects that the garbage collector reaches immortal; returns their number.

    Does nothing and returns 0 if the interpreter has no immortal objects or stores counts differently. Objects that
    exist now are never freed, so use this only in an interpreter that just forks.
    """
    count = _immortal_count()
    if count is None:
        return 0
    seen: set[int] = set()
    seen.add(id(seen))
    waiting: list[object] = gc.get_objects()
    while waiting:
        thing = waiting.pop()
        if id(thing) not in seen:
            seen.add(id(thing))
            waiting += gc.get_referents(thing)
            if isinstance(thing, CodeType):  # which the collector does not traverse
                waiting += (thing.co_consts, thing.co_names, thing.co_linetable, thing.co_exceptiontable, thing.co_name)
    seen.remove(id(seen))
    for address in seen:
        ctypes.c_uint32.from_address(address).value = count
    return len(seen)


def _immortal_count() -> int | None:
    """The low half of an immortal object's count: that of None, if it is one."""
    if sys.implementation.name != "cpython" or sys.version_info < (3, 12) or sys.maxsize < 1 << 32:
        return None
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    count: int = ctypes.c_uint32.from_address(id(None)).value
    return count if count == sys.getrefcount(None) >= 1 << 30 else None
