"""Numbers for the users that programs run as.

A limit on processes counts all that a user has on a host, also in other containers, so two runners must not share
numbers.
"""

from __future__ import annotations

import random

_RANGE = range(1_879_048_192, 2_147_483_648)  # what systemd's table of users and groups leaves unused
_SMALL_RANGE = range(20_000, 60_000)  # for containers that know 65,536 users
_STEP = 2048  # the most workers and sessions that a runner has


def free_users() -> int:
    """The first of ``_STEP`` numbers that most likely no one else uses; drawn anew at each call."""
    numbers = _RANGE if _is_mapped(_RANGE.stop - 1) else _SMALL_RANGE
    return random.SystemRandom().randrange(numbers.start, numbers.stop - _STEP, _STEP)


def _is_mapped(user: int) -> bool:
    """Whether the user namespace of this process has such a user (and group: they are mapped alike in practice)."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        spans = [tuple(map(int, line.split())) for line in file]
    return any(first <= user < first + length for first, _, length in spans)
