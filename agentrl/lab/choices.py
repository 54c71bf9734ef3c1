"""Which estimators are compared, checked before anything is sampled; the groups, and the advantages in them."""

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

EXCLUDED = {"gae": "it needs a critic trained for this policy, which the laboratory does not have"}
"""Registered estimators that cannot be measured on rollouts of a policy alone, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One estimator with its options; ``label`` is what the user wrote."""

    label: str
    name: str
    options: dict[str, Any]


def read_choices(texts: Sequence[str]) -> tuple[Choice, ...]:
    """The estimators written as ``name`` or ``name:option=value:option=value``; all that can be measured if none is.

    Raises SettingsError that names the nearest known name or option.

    >>> read_choices(["tir_otb:leave_one_out=true"])[0].options
    {'leave_one_out': True}
    """
    chosen = list(texts) or [name for name in ESTIMATORS.names() if name not in EXCLUDED]
    twice = sorted({text for text in chosen if chosen.count(text) > 1})
    if twice:
        raise SettingsError(f"--estimators: {', '.join(twice)} is given twice")
    return tuple(_read(text) for text in chosen)


def _read(text: str) -> Choice:
    name, *parts = text.split(":")
    if name in EXCLUDED:
        raise SettingsError(f"--estimators: {name} cannot be measured here: {EXCLUDED[name]}")
    options = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not equals:
            raise SettingsError(f"--estimators: {text}: options are written option=value, for example tail=carry")
        options[option] = _value(value)
    try:
        ESTIMATORS[name].make_options(f"estimator {name!r}", options)
    except (AlgorithmError, UnknownNameError, TypeError) as error:
        raise SettingsError(f"--estimators: {text}: {error}") from error
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
    """Rows [M, N] of disjoint groups of a problem's ``samples`` trajectories, ``most`` groups at most.

    Disjoint groups are independent draws, so their variance is estimated without bias.
    """
    key = ((seed * 1_000_003 + problem) * 1_009 + division) * 1_009 + group_size
    draw = torch.Generator().manual_seed(key % (1 << 63))
    groups = min(most, samples // group_size)
    return torch.randperm(samples, generator=draw)[: groups * group_size].reshape(groups, group_size)


def advantages_in(
    samples: Sequence[ProblemSample], rows: Sequence[Tensor], choice: Choice, *, drop_zero_variance: bool
) -> list[Tensor]:
    """A [M, N, T_j] of every problem j, whose groups are ``rows[j]`` [M, N].

    An estimator that looks beyond a group (whitening and the like) sees a step with one group of every problem, as in
    training: with ``drop_zero_variance``, those with equal rewards have left it. Raises SettingsError for an estimator
    that asks for an input which rollouts of a policy do not have.
    """
    groups, size = rows[0].shape
    needs = estimator_needs(choice.name, **choice.options)
    greedy = "greedy_returns" in needs.inputs
    dropped = torch.zeros(len(samples), groups, dtype=torch.bool)
    if drop_zero_variance and not needs.equal_groups:
        dropped = torch.stack([_equal(sample, own, greedy) for sample, own in zip(samples, rows, strict=True)])
    result = [
        torch.zeros(groups, size, sample.batch.rewards.shape[1], dtype=torch.float64)  # as in inputs_of
        for sample in samples
    ]
    steps = [[place] for place in range(groups)] if needs.step_wide else [list(range(groups))]
    for step in steps:
        kept = [index for index in range(len(samples)) if not dropped[index, step].all()]
        if not kept:
            continue
        inputs = inputs_of([samples[index] for index in kept], [rows[index][step] for index in kept])
        try:
            found = compute_advantages(choice.name, inputs, **choice.options).advantages
        except MissingInputError as error:
            raise SettingsError(f"--estimators: {choice.label} cannot be measured here: {error}") from error
        for index, values in zip(kept, found.unflatten(0, (len(kept), len(step), size)), strict=True):
            result[index][step] = values[..., : result[index].shape[-1]]
    for own, equal in zip(result, dropped, strict=True):
        own[equal] = 0.0
    return result


def _equal(sample: ProblemSample, rows: Tensor, greedy: bool) -> Tensor:
    """[M] which groups have equal rewards, with that of the greedy rollout where it is part of the baseline."""
    returns = sample.returns[rows]  # [M, N]
    if greedy:
        returns = torch.nn.functional.pad(returns, (0, 1), value=sample.greedy_return)
    return returns.amax(-1) - returns.amin(-1) <= 1e-8
