"""The random generators that exist in a warm interpreter: without new seeds all its children would draw the same.

``random`` alone reseeds itself after a fork. Every library may have made generators of its own when it was imported:
SymPy has three, NumPy one. They are looked up once, in the warm interpreter, and seeded anew in each child.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable
from typing import Any

_SEED_BYTES = 32


def find_generators() -> tuple[Callable[[], None], ...]:
    """For each generator that the garbage collector knows, what seeds it from the kernel's randomness.

    To be called before ``gc.freeze``, which hides objects.
    """
    things = gc.get_objects()
    after_fork = random.seed.__self__  # type: ignore[attr-defined]
    own = [_python(thing) for thing in things if isinstance(thing, random.Random) and thing is not after_fork]
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return tuple(own)
    states = [thing for thing in things if isinstance(thing, numpy.random.RandomState)]
    of_states = {id(state._bit_generator) for state in states}
    bits = [thing for thing in things if isinstance(thing, numpy.random.BitGenerator) and id(thing) not in of_states]
    return (*own, *(_legacy(numpy, state) for state in states), *(_bits(thing) for thing in bits))


def _python(generator: random.Random) -> Callable[[], None]:
    return lambda: generator.seed(int.from_bytes(os.urandom(_SEED_BYTES), "big"))


def _legacy(numpy: Any, state: Any) -> Callable[[], None]:
    """Of a RandomState. Its own ``seed`` is five times as fast with bytes as without, and knows one algorithm."""
    if isinstance(state._bit_generator, numpy.random.MT19937):
        return lambda: state.seed(numpy.frombuffer(os.urandom(_SEED_BYTES), numpy.uint32))
    renew = _bits(state._bit_generator)

    def seed() -> None:
        renew()
        state.set_state({**state.get_state(legacy=False), "has_gauss": 0})  # a normal number may be kept for later

    return seed


def _bits(generator: Any) -> Callable[[], None]:
    """Of what stands below a Generator: its state, and the seeds of those it spawns."""
    return lambda: generator.__setstate__(type(generator)().__getstate__())
