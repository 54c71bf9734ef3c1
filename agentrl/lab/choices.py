"""Selection of the estimators to compare, division of trajectories into groups, and advantages of the groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.algorithms import (
    ESTIMATORS,
    AlgorithmError,
    MissingInputError,
    UnknownNameError,
    compute_advantages,
    estimator_needs,
)
from agentrl.errors import SettingsError
from agentrl.lab.sample import ProblemSample, inputs_of

_UNAVAILABLE = {"values": "it needs a critic that was trained for this policy"}
"""Inputs that rollouts of a policy alone do not have, with the reason that a message gives."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """An estimator with its options; ``label`` is the text that the user wrote."""

    label: str
    name: str
    options: dict[str, Any]


def read_choices(texts: Sequence[str]) -> tuple[Choice, ...]:
    """Parse estimators written as ``name`` or ``name:option=value:option=value``. Default: all that can be measured.

    Raises SettingsError with the nearest known name or option.

    >>> read_choices(["tir_otb:leave_one_out=true"])[0].options
    {'leave_one_out': True}
    """
    chosen = list(texts) or measurable()
    twice = sorted({text for text in chosen if chosen.count(text) > 1})
    if twice:
        raise SettingsError(f"--estimators: {', '.join(twice)} is listed twice")
    return tuple(_read(text) for text in chosen)


def measurable() -> list[str]:
    """Registered estimators whose inputs the rollouts of a policy have."""
    return [name for name in ESTIMATORS.names() if not ESTIMATORS[name].requires & _UNAVAILABLE.keys()]


def _read(text: str) -> Choice:
    name, *parts = text.split(":")
    options = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not equals:
            raise SettingsError(f"--estimators: {text}: options are written option=value, for example tail=carry")
        options[option] = _value(value)
    try:
        entry = ESTIMATORS[name]
        entry.make_options(f"estimator {name!r}", options)
    except (AlgorithmError, UnknownNameError, TypeError) as error:
        raise SettingsError(f"--estimators: {text}: {error}") from error
    for missing in sorted(entry.requires & _UNAVAILABLE.keys()):
        raise SettingsError(f"--estimators: {name} cannot be measured here: {_UNAVAILABLE[missing]}")
    return Choice(label=text, name=name, options=options)


def _value(text: str) -> Any:
    known = {"true": True, "false": False, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text


def draw_groups(samples: int, group_size: int, *, most: int, seed: int, problem: int, division: int) -> Tensor:
    """Draw disjoint groups [M, N] of trajectory indices below ``samples``, with M at most ``most``.

    Disjoint groups are independent draws, so the variance over them is an unbiased estimate.
    """
    # Each combination gets its own seed while division and group size are below 1,009, so groups do not depend on
    # which other problems and sizes are measured.
    key = ((seed * 1_000_003 + problem) * 1_009 + division) * 1_009 + group_size
    draw = torch.Generator().manual_seed(key % (1 << 63))
    groups = min(most, samples // group_size)
    return torch.randperm(samples, generator=draw)[: groups * group_size].reshape(groups, group_size)


def advantages_in(
    samples: Sequence[ProblemSample], rows: Sequence[Tensor], choice: Choice, *, drop_zero_variance: bool
) -> list[Tensor]:
    """Advantages [M, N, T_j] of each problem j with the groups ``rows[j]`` [M, N].

    For an estimator that spans the step (for example one that whitens), a step holds one group of each problem. As in
    training, ``drop_zero_variance`` removes groups with equal rewards from the step. Raises SettingsError if the
    estimator needs an input that rollouts alone do not provide.
    """
    groups, size = rows[0].shape
    needs = estimator_needs(choice.name, **choice.options)
    greedy = "greedy_returns" in needs.inputs
    dropped = torch.zeros(len(samples), groups, dtype=torch.bool)
    if drop_zero_variance and not ESTIMATORS[choice.name].equal_groups:
        dropped = torch.stack([_equal(sample, indices, greedy) for sample, indices in zip(samples, rows, strict=True)])
    result = [
        torch.zeros(groups, size, sample.batch.rewards.shape[1], dtype=torch.float64)  # as in inputs_of
        for sample in samples
    ]
    steps = [[index] for index in range(groups)] if needs.step_wide else [list(range(groups))]
    for step in steps:
        kept = [index for index in range(len(samples)) if not dropped[index, step].all()]
        if not kept:
            continue
        inputs = inputs_of([samples[index] for index in kept], [rows[index][step] for index in kept])
        try:
            advantages = compute_advantages(choice.name, inputs, **choice.options).advantages
        except MissingInputError as error:
            raise SettingsError(f"--estimators: {choice.label} cannot be measured here: {error}") from error
        for index, values in zip(kept, advantages.unflatten(0, (len(kept), len(step), size)), strict=True):
            result[index][step] = values[..., : result[index].shape[-1]]
    for values, equal in zip(result, dropped, strict=True):
        values[equal] = 0.0
    return result


def _equal(sample: ProblemSample, rows: Tensor, greedy: bool) -> Tensor:
    """Mask [M] of groups with equal rewards; ``greedy`` includes the reward of the greedy rollout."""
    returns = sample.returns[rows]  # [M, N]
    if greedy:
        returns = torch.nn.functional.pad(returns, (0, 1), value=sample.greedy_return)
    # The tolerance of the filter of groups in training.
    return returns.amax(-1) - returns.amin(-1) <= 1e-8
