"""Gradient noise of forked and independent rollouts at equal numbers of sampled tokens.

    python benchmarks/variance_forks.py --config horizon_4 --model runs/NAME/policy [--output FILE.json] [KEY=VALUE ...]
    python benchmarks/variance_forks.py --table FILE.json [FILE.json ...]

A step consists of groups of rollouts of ``--batch`` problems, as in training. The gradient of ``--steps`` independent
steps on the same problems is computed exactly, for ``--batches`` batches of problems. *Noise* is the variance of a
step's gradient, summed over parameters, times the sampled tokens of a step, divided by the square of the estimator's
scale. It is proportional to the variance of an unbiased gradient from a fixed number of tokens. The scale is the
length of the mean gradient along the true gradient, relative to the true gradient, which `rloo` estimates on other
rollouts. Ratios have 95 % bootstrap intervals over batches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms import ESTIMATORS, AdvantageInputs, compute_advantages
from agentrl.batch import Batch, MicroBatch, scatter_tokens
from agentrl.config import load_settings
from agentrl.lab.rollouts import load_lab_problems
from agentrl.lab.settings import LabSettings, parse_estimator_choices
from agentrl.models.exactness import choose_attention_backend
from agentrl.models.loading import read_model
from agentrl.models.policy import PolicyModel
from agentrl.models.tokenizer import read_tokenizer
from agentrl.rollout.driver import Driver
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.environment import build_environment_and_codec
from agentrl.trajectory import Group, Trajectory
from agentrl_envs.types import Problem

REFERENCE = "reference"
PLAIN = ("rloo", "tir_otb", "ogb", "ogb_pooled")
FORKED = ("rloo", "tir_otb", "tir_otb:siblings=only", "tir_otb:siblings=pooled", "ogb:siblings=pooled", "tree_grpo")


def measured_arms(forks: Sequence[str]) -> dict[str, tuple[tuple[int, ...], int, Sequence[str]]]:
    """Return arms by name: (turns after which rollouts fork in two, number of rollouts per group, estimators)."""
    turns = [tuple(map(int, places.split(","))) for places in forks]
    return {
        REFERENCE: ((), 8, ("rloo",)),
        "independent": ((), 4, PLAIN),
        **{f"forks after {', '.join(map(str, places))}": (places, 2, FORKED) for places in turns},
    }


class Laboratory:
    """A policy, its environment, and its gradients."""

    def __init__(self, options: argparse.Namespace, overrides: Sequence[str]) -> None:
        given = [*overrides, f"model.path={options.model}", "coldstart.demonstrations=null"]
        self.settings = load_settings("simpletir", options.config, given, command="variance")
        self._options = options
        self._model = read_model(options.model, self.settings.model).eval()
        self._policy = PolicyModel(
            self._model, attention=choose_attention_backend(self.settings.model, self._model.config)
        )
        self._parameters = [item for item in self._policy.parameters() if item.requires_grad]
        tokenizer = read_tokenizer(options.model)
        self._environment, self._codec = build_environment_and_codec(self.settings, tokenizer, options.model)

    async def measure(self, problems: Sequence[Problem]) -> dict[str, list[dict[str, float]]]:
        """Measure all arms on batches of ``problems``. Returns the moments of each batch by arm and estimator."""
        result: dict[str, list[dict[str, float]]] = {}
        await self._environment.open()
        for number in range(self._options.batches):
            batch = problems[number * self._options.batch :][: self._options.batch]
            true: tuple[Tensor, float] | None = None  # the mean gradient, and its squared norm without bias
            for arm, (turns, size, names) in measured_arms(self._options.forks).items():
                steps = await self._sample(batch, turns, size)
                tokens = np.mean([sum(item.model_tokens for item in step) for step in steps])
                by_step = [self._gradients(step, names, size * len(batch)) for step in steps]
                for name, of_name in zip(names, zip(*by_step, strict=True), strict=True):
                    gradients = torch.stack(of_name).double()
                    mean, variance = gradients.mean(0), float(gradients.var(0).sum())
                    if true is None:
                        true = mean, float(mean.square().sum()) - variance / len(steps)
                        continue
                    moments = {"variance": variance, "tokens": float(tokens), "true": true[1]}
                    moments["along"] = float(mean @ true[0])
                    result.setdefault(f"{arm}: {name}", []).append(moments)
            print(f"{number + 1} of {self._options.batches} batches", flush=True)
        await self._environment.close()
        return result

    async def _sample(self, problems: Sequence[Problem], turns: tuple[int, ...], size: int) -> list[list[Trajectory]]:
        """Sample ``--steps`` steps. Each has ``size`` rollouts of every problem, or their branches."""
        branching = self.settings.rollout.branching.model_copy(
            update={"width": 2 if turns else 1, "where": turns or (1,), "leaves": 4}
        )
        engine = TransformersEngine(self._model, self._codec, self.settings.rollout)
        driver = Driver(
            environment=self._environment,
            engine=engine,
            codec=self._codec,
            settings=self.settings.rollout.model_copy(update={"branching": branching}),
            seed=self.settings.seed,
            trained=True,  # otherwise rollouts do not fork
        )
        steps: list[list[Trajectory]] = [[] for _ in range(self._options.steps)]
        requests = [Group(index=index, problem=problem) for index, problem in enumerate(problems)]
        # Arms draw different random numbers, so that they are independent of the reference.
        async for group in driver.play_groups(
            requests, step=max(turns, default=0) * 100 + size, group_size=size * len(steps)
        ):
            for item in group.trajectories:
                if not item.is_excluded:
                    steps[item.sample // size].append(item)
        await engine.close()
        return steps

    def _gradients(self, step: Sequence[Trajectory], names: Sequence[str], rollouts: int) -> list[Tensor]:
        """Compute the gradient of each estimator. Estimators that keep the same trajectories share a forward pass."""
        rewards: dict[int, set[float]] = {}
        for item in step:
            if item.receives_reward:
                rewards.setdefault(item.group, set()).add(item.reward)
        mixed = [item for item in step if len(rewards[item.group]) > 1]
        inputs_by_count: dict[int, tuple[AdvantageInputs, Tensor]] = {}
        gradients = []
        for name in names:
            (choice,) = parse_estimator_choices([name])
            kept = step if ESTIMATORS[choice.name].equal_groups else mixed
            if not kept:
                gradients.append(torch.zeros(sum(item.numel() for item in self._parameters)))
                continue
            if len(kept) not in inputs_by_count:
                inputs_by_count[len(kept)] = self._forward(kept)
            inputs, log_probs = inputs_by_count[len(kept)]
            advantages = compute_advantages(choice.name, inputs, **choice.options).advantages
            weights = (advantages * inputs.path_weights[:, None])[inputs.response_mask].to(log_probs.dtype) / rollouts
            parts = torch.autograd.grad(log_probs, self._parameters, weights, retain_graph=True)
            gradients.append(torch.cat([part.flatten() for part in parts]))
        return gradients

    def _forward(self, kept: Sequence[Trajectory]) -> tuple[AdvantageInputs, Tensor]:
        """Compute the estimators' inputs, and the log-probabilities of the sampled tokens [T]."""
        batch = Batch.from_micro_batch(MicroBatch.from_trajectories(kept))
        statistics, _ = self._policy(batch.row, batch.rows, batch.columns, self.settings.rollout.temperature, False)
        by_token = {
            field: scatter_tokens(getattr(statistics, source).detach().float(), batch.response_mask)
            for field, source in (
                ("log_probs", "log_probs"), ("sum_pi_squared", "sum_pi_squared"), ("token_energy", "energy"),
                ("hidden_norm_squared", "hidden_norm_squared"),
            )
        }  # fmt: skip
        rollout = {field: getattr(batch, field) for field in ("groups", "samples", "branches", "parents", "forks")}
        inputs = AdvantageInputs(
            rewards=batch.rewards.double(), response_mask=batch.response_mask, path_weights=batch.path_weights,
            **by_token, **rollout,
        )  # fmt: skip
        return inputs, statistics.log_probs


def table(measured: dict[str, dict[str, list[dict[str, float]]]], baseline: str = "independent: tir_otb") -> str:
    """Render the noise of every arm relative to ``baseline``, and its scale, with one column per measurement."""
    names = dict.fromkeys(name for arms in measured.values() for name in arms)
    columns = {title: _noise_and_scale(arms, baseline) for title, arms in measured.items()}
    lines = [f"| rollouts: estimator | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(cells.get(name, '') for cells in columns.values())} |" for name in names]
    return "\n".join(lines)


def _noise_and_scale(measured: dict[str, list[dict[str, float]]], baseline: str) -> dict[str, str]:
    """Return ``noise [interval]; scale [interval]`` by arm, ``-`` for a number whose denominator may be 0 or less."""
    count = len(measured[baseline])
    draws = np.random.default_rng(0).integers(count, size=(4000, count))
    chosen = np.concatenate([np.arange(count)[None], draws])  # first all batches, then bootstrap samples
    arms = {
        name: {key: np.array([item[key] for item in rows])[chosen].sum(1) for key in rows[0]}
        for name, rows in measured.items()
    }
    noise = {
        name: np.array([item["variance"] * item["tokens"] for item in rows])[chosen].sum(1)
        / np.square(arms[name]["along"])
        for name, rows in measured.items()
    }

    def shown(values: np.ndarray, *denominators: np.ndarray) -> str:
        if any(np.percentile(denominator, 2.5) <= 0 for denominator in denominators):
            return "-"
        low, high = np.percentile(values[1:], [2.5, 97.5])
        return f"{values[0]:.2f} [{low:.2f}, {high:.2f}]"

    base = arms[baseline]
    cells = {}
    for name, arm in arms.items():
        scale = shown(arm["along"] / arm["true"], arm["true"])
        cells[name] = f"{shown(noise[name] / noise[baseline], arm['along'], base['along'])}; {scale}"
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="horizon_4", help="as in agentrl train --config")
    parser.add_argument("--model", help="directory of the measured policy")
    parser.add_argument("--batches", type=int, default=12, help="batches of problems")
    parser.add_argument("--batch", type=int, default=4, help="number of problems per step")
    parser.add_argument("--steps", type=int, default=12, help="number of independent steps per batch")
    parser.add_argument("--forks", nargs="+", default=["1", "1,2"], help="turns after which rollouts fork, by variant")
    parser.add_argument("--table", type=Path, nargs="+", help="print a table of these files, without measuring")
    parser.add_argument("--output", type=Path, help="file for the moments of every batch")
    options, overrides = parser.parse_known_args()
    if options.table:
        print(table({path.stem: json.loads(path.read_text())["measured"] for path in options.table}))
        return
    laboratory = Laboratory(options, overrides)
    lab = LabSettings(problems=options.batch * options.batches)
    _, problems = load_lab_problems(laboratory.settings, lab, None)
    measured = asyncio.run(laboratory.measure(problems))
    if options.output:
        options.output.write_text(json.dumps({"options": vars(options), "measured": measured}, default=str) + "\n")
    print(table({"noise; scale": measured}))


if __name__ == "__main__":
    main()
