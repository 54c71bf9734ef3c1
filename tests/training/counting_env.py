"""A gymnasium text environment of two turns that any policy plays: it rewards short turns and counts its steps."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import gymnasium

from agentrl.algorithms import Advantages, EstimatorInputs, ScalarOptions, register_estimator
from agentrl.algorithms.estimators.classic import rloo
from agentrl_envs.gym import UnicodeText


@register_estimator("doubled", options=ScalarOptions)
def doubled(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages:
    """RLOO's advantages twice over: an estimator that only this module knows."""
    estimate = rloo(inputs, options)
    return dataclasses.replace(estimate, advantages=2 * estimate.advantages)


class CountingEnv(gymnasium.Env[str, str]):
    """Each step appends a byte to ``tally`` and takes ``seconds``.

    A turn that ends while the tally holds as many bytes as ``right`` says, its end left out, is worth 1. ``graded``:
    a last turn of even length is called correct, whatever it is worth. ``letters``: a turn is worth its share of them.
    """

    metadata = {"render_modes": [], "stop": ("\n",)}  # noqa: RUF012
    action_space = UnicodeText(1000)
    observation_space = UnicodeText(1000)

    def __init__(
        self,
        tally: str = "",
        seconds: float = 0.0,
        right: tuple[int, int] = (0, 0),
        *,
        graded: bool = False,
        letters: bool = False,
    ) -> None:
        self._tally = tally
        self._right = range(*right)
        self._seconds = seconds
        self._graded = graded
        self._letters = letters
        self._turn = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        assert options is not None
        self._turn = 0
        return options["problem"].statement + "\n", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._tally:
            with Path(self._tally).open("ab") as tally:
                tally.write(b".")
        time.sleep(self._seconds)
        self._turn += 1
        lucky = bool(self._right) and Path(self._tally).stat().st_size in self._right
        reward = 1.0 if lucky else 0.5 / (1 + len(action))
        if self._letters:
            reward = sum(character.isalpha() for character in action) / max(1, len(action))
        verdict = {"verdict": "incorrect" if len(action) % 2 else "correct"} if self._graded else {}
        return "go on\n", reward, self._turn == 2, False, verdict
