"""Reseeds the random generators of a warm interpreter, since all its children would draw the same numbers.

Only ``random`` reseeds itself after a fork. Libraries may have created generators at import: SymPy has three, NumPy
one. They are found once, in the warm interpreter, and reseeded in each child.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
from collections.abc import Callable
from typing import Any

_SEED_BYTES = 32
_KEY_BYTES = 624 * 4


def find_generators() -> tuple[Callable[[], None], ...]:
    """For each generator known to the garbage collector, a function that seeds it from the kernel's randomness.

    The slow work is done here, once: a call into NumPy costs a fresh child most of a millisecond. Call this before
    ``gc.freeze``, which hides objects.
    """
    things = gc.get_objects()
    after_fork = random.seed.__self__  # type: ignore[attr-defined]
    own = [_python(thing) for thing in things if isinstance(thing, random.Random) and thing is not after_fork]
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return tuple(own)
    for thing in things:
        if isinstance(thing, numpy.random.RandomState):  # it may hold a cached normal number
            thing.set_state({**thing.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})
    return (*own, *(_bits(thing) for thing in things if isinstance(thing, numpy.random.BitGenerator)))


def _python(generator: random.Random) -> Callable[[], None]:
    generator.gauss_next = None  # type: ignore[attr-defined]  # also a cached number
    seed = super(random.Random, generator).seed
    return lambda: seed(int.from_bytes(os.urandom(_SEED_BYTES), "big"))


def _bits(generator: Any) -> Callable[[], None]:
    """Reseed a NumPy bit generator: its state, and the seeds of those it spawns."""

    def renew() -> None:
        generator.__setstate__(type(generator)().__getstate__())

    address = generator.ctypes.state_address
    if type(generator).__name__ != "MT19937" or not _lies_at(address, generator.state["state"]):
        return renew
    generator._legacy_seeding(None)  # from here on it cannot spawn
    return lambda: _write_key(address)


def _lies_at(address: int, state: dict[str, Any]) -> bool:
    """Whether the Mersenne Twister's key and position have the memory layout of all NumPy versions so far."""
    key, position = ctypes.string_at(address, _KEY_BYTES), ctypes.c_int.from_address(address + _KEY_BYTES).value
    return (key, position) == (state["key"].tobytes(), state["pos"])


def _write_key(address: int) -> None:
    """Write a random key whose numbers are all used up, so that the next draw generates new ones."""
    ctypes.memmove(address, os.urandom(_KEY_BYTES), _KEY_BYTES)
    ctypes.c_int.from_address(address + _KEY_BYTES).value = _KEY_BYTES // 4
