"""Posterior of each problem's success probability, from earlier rollouts. Old evidence decays as the policy changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict


class PosteriorState(TypedDict):
    """Posteriors in a checkpoint.

    ``known`` maps each key to its decayed number of successes and failures, its decayed sum of energies, and the step
    of the last update.
    """

    step: int
    known: dict[str, list[float]]


def reward_as_success_fraction(reward: float) -> float:
    """Return the reward clipped to [0, 1]. The result counts as a fraction of a success."""
    return min(max(reward, 0.0), 1.0)


class Posteriors:
    """Beta posteriors of success probabilities, with a uniform prior.

    After every training step, the evidence of all earlier rollouts counts ``decay`` times as much as before:
    ``alpha = 1 + decay * (alpha - 1) + successes``, and likewise for ``beta`` and failures. A rollout's energy is its
    expected squared gradient norm with respect to the logits (docs/reference/formulas.md 3).

    >>> posteriors = Posteriors(decay=0.5)
    >>> posteriors.add_training_step([("a", [1.0, 1.0, 0.0], [2.0, 2.0, 5.0])])
    >>> posteriors.beta_parameters("a"), posteriors.expected_success("a"), posteriors.expected_energy("a")
    ((3.0, 2.0), 0.6, 3.0)
    >>> posteriors.add_training_step([])
    >>> posteriors.beta_parameters("a"), posteriors.beta_parameters("b"), posteriors.expected_energy("b")
    ((2.0, 1.5), (1.0, 1.0), 3.0)
    """

    def __init__(self, *, decay: float) -> None:
        self.decay = decay
        self._step = 0
        self._known: dict[str, list[float]] = {}

    def add_training_step(self, groups: Iterable[tuple[str, Sequence[float], Sequence[float]]]) -> None:
        """Add the rollouts of one training step: for each group, its key and the reward and energy of each rollout.

        A group without rollouts adds nothing: its key remains unknown.
        """
        self._step += 1
        for key, rewards, energies in groups:
            if not rewards:
                continue
            successes = sum(map(reward_as_success_fraction, rewards))
            evidence = (successes, len(rewards) - successes, sum(energies))
            for name in (key, _ALL_PROBLEMS):
                before = self._decayed_evidence(name)
                self._known[name] = [*(old + new for old, new in zip(before, evidence, strict=True)), self._step]

    def beta_parameters(self, key: str) -> tuple[float, float]:
        """Return the parameters of the Beta posterior of ``key``."""
        successes, failures, _ = self._decayed_evidence(key)
        return 1 + successes, 1 + failures

    def expected_success(self, key: str) -> float:
        """Return the posterior mean of the success probability of ``key``."""
        alpha, beta = self.beta_parameters(key)
        return alpha / (alpha + beta)

    def expected_energy(self, key: str) -> float:
        """Return the mean energy of the rollouts of ``key``, or of all rollouts if ``key`` is unknown."""
        successes, failures, energy = self._decayed_evidence(key if key in self._known else _ALL_PROBLEMS)
        return energy / (successes + failures) if energy else 1.0

    def is_known(self, key: str) -> bool:
        """Return True if there are earlier rollouts of ``key``."""
        return key in self._known

    def state_dict(self) -> PosteriorState:
        """Return a JSON-serializable state, for `load_state_dict`."""
        return {"step": self._step, "known": {key: list(values) for key, values in self._known.items()}}

    def load_state_dict(self, state: PosteriorState) -> None:
        self._step = state["step"]
        self._known = {key: list(values) for key, values in state["known"].items()}

    def _decayed_evidence(self, key: str) -> tuple[float, float, float]:
        successes, failures, energy, step = self._known.get(key, _NO_EVIDENCE)
        left = self.decay ** (self._step - step)
        return successes * left, failures * left, energy * left


_ALL_PROBLEMS = ""  # key of the evidence from all problems together
_NO_EVIDENCE = (0.0, 0.0, 0.0, 0)
