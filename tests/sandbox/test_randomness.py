"""Random generators that libraries created at import are found and reseeded."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

MAKE = """
import random
import numpy as np
from agentrl_sandbox.runner.interpreter import make_random_seeders

class Dice(random.Random):
    pass

dice = Dice(1)
generator = np.random.default_rng(1)
old = np.random.RandomState(1)
rare = np.random.RandomState(np.random.PCG64(1))
kept = {"old": old.normal(), "rare": rare.normal()}  # each has a second normal number ready


def draw():
    return [
        dice.random(),
        dice.gauss(0, 1),
        generator.random(),
        generator.spawn(1)[0].random(),
        old.normal(),
        rare.normal(),
        np.random.normal(),
    ]


def after(seeds):
    for seed in seeds:
        seed()
    return draw()


if __name__ == "__main__":
    seeds = make_random_seeders()
    states = [dice.getstate(), generator.bit_generator.state, old.get_state(legacy=False), rare.get_state(legacy=False)]
    rounds = []
    for _ in range(3):
        dice.setstate(states[0])
        generator.bit_generator.state = states[1]
        old.set_state(states[2])
        rare.set_state(states[3])
        rounds.append(after(seeds))
    numbers = [number for drawn in rounds for number in drawn]
    assert len(set(numbers)) == len(numbers) == 21, rounds
"""


def test_generators_of_every_kind_are_seeded_anew():
    ran = subprocess.run([sys.executable, "-c", MAKE], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
