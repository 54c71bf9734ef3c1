"""`agentrl explain`: describe how the gradient of one token in a recorded step was computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from agentrl.algorithms import ESTIMATORS, LOSSES, compute_advantages, policy_loss
from agentrl.errors import SettingsError
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import RowKey, StoredStep, StoredTrajectory, TokenMetadata, TrajectoryTokens, read_step
from agentrl.viewer.run_files import load_run_plugins, read_run_tokenizer
from agentrl.viewer.what_if import build_stored_advantage_inputs, recompute_advantages, require_token_metadata
from agentrl_envs.registry import UnknownNameError

_CONTEXT_LENGTH = 40  # characters of the conversation to show before and after the token


@dataclass(frozen=True, kw_only=True)
class TokenExplanation:
    """One model token with the values from which its gradient was computed.

    ``position`` is the token's index in the response, and ``index`` its index among the model tokens. ``pieces`` are
    the texts of the response's tokens, or None if the run has no tokenizer.
    """

    step: StoredStep
    trajectory: StoredTrajectory
    position: int
    index: int
    pieces: list[str | None]

    @property
    def tokens(self) -> TrajectoryTokens:
        assert self.trajectory.tokens is not None
        return self.trajectory.tokens

    def lines(self) -> Iterator[str]:
        """Yield the lines of the explanation, from the reward to the gradient."""
        facts = require_token_metadata(self.step)
        yield from self._header_lines()
        yield from self._sampling_lines()
        yield from self._advantage_lines(facts)
        yield from self._loss_lines(facts)

    def value_at_token(self, values: np.ndarray) -> float:
        """Return the token's entry in ``values``, which has one entry per model token of the trajectory."""
        return float(values[self.index])

    def _header_lines(self) -> Iterator[str]:
        record, key, columns = self.trajectory.record, self.trajectory.key, self.trajectory.columns()
        branch = f", branch {key.branch}" if record.get("branches", 1) > 1 else ""
        number = self.trajectory.number
        yield f"step {self.step.step}, trajectory {number}: group {key.group}, sample {key.sample}{branch}"
        reward = record.get("reward_elsewhere", 0.0) + sum(item["reward"] for item in record["segments"])
        yield f"  ending {record['ended']}, reward {reward:.9g}"
        yield (
            f"token {self.position} of the response: model token {self.index} of {len(self.tokens)}, "
            f"turn {columns['turn'][self.index]}, id {columns['token_id'][self.index]}{self._token_in_context()}"
        )

    def _token_in_context(self) -> str:
        """Format the token with the text before and after it. Invisible characters are escaped."""
        piece = self.pieces[self.position]
        if piece is None:
            return ""
        before = "".join(text or "" for text in self.pieces[: self.position])[-_CONTEXT_LENGTH:]
        after = "".join(text or "" for text in self.pieces[self.position + 1 :])[:_CONTEXT_LENGTH]
        shown = repr(piece) if piece else "part of a character that a later token completes"
        return f", {shown}\n  after {before!r}, before {after!r}"

    def _sampling_lines(self) -> Iterator[str]:
        columns, tokens = self.trajectory.columns(), self.tokens
        engine, trainer = self.value_at_token(columns["engine_log_probs"]), self.value_at_token(tokens.log_probs)
        yield (
            f"log-probability: engine {engine:.9g} (policy version {columns['policy_version'][self.index]}), "
            f"trainer {trainer:.9g}, difference {trainer - engine:.3g}; "
            f"entropy {self.value_at_token(tokens.entropy):.5g}"
        )

    def _advantage_lines(self, facts: TokenMetadata) -> Iterator[str]:
        tokens, key = self.tokens, self.trajectory.key
        returned, baseline, advantage = (
            self.value_at_token(item) for item in (tokens.returns, tokens.baselines, tokens.advantages)
        )
        yield f"reward: {self.value_at_token(tokens.rewards):.9g} at this token; return G = {returned:.9g}"
        yield (
            f"energy: w = {self.value_at_token(tokens.energy):.9g}; "
            f"realized energy W = {self.value_at_token(self.step.realized_energies[key]):.9g}, the sum up to this token"
        )
        yield f"baseline: b = {baseline:.9g} by {facts.estimator}{_format_options(facts.estimator_options)}"
        yield from self._tail_baseline_lines(facts)
        weights = compute_baseline_weights(self.step, self.trajectory, self.index)
        if not ESTIMATORS[facts.estimator].group_based:
            yield "  no weights: b is not computed from the returns of the group"
        elif not weights:
            yield "  no weights: b is not a weighted mean of the group's returns"
        for sibling, weight in weights.items():
            other = next(item for item in self.step.trained_group(self.trajectory) if item.key == sibling)
            assert other.tokens is not None
            index = min(self.index, len(other.tokens) - 1)
            energy = self.step.realized_energies[sibling][index]
            yield (
                f"  weight {weight:.6f} on trajectory {other.number}, sample {sibling.sample}: "
                f"G = {other.tokens.returns[index]:.9g}, W = {energy:.9g}"
            )
        made = self.value_at_token(
            recompute_advantages(self.step, self.step.trained_group(self.trajectory))[key]["advantages"]
        )
        normalized = "" if np.isclose(advantage, returned - baseline, rtol=1e-5, atol=1e-7) else ", then normalized"
        yield f"advantage: A = {advantage:.9g} (G - b = {returned - baseline:.9g}{normalized})"
        same = "the same value" if made == advantage else f"{made:.9g}, a difference of {abs(made - advantage):.3g}"
        yield f"  compute_advantages on the stored statistics returns {same}"

    def _tail_baseline_lines(self, facts: TokenMetadata) -> Iterator[str]:
        """Explain the baseline of a token whose index no other trajectory of the group reaches."""
        entry = ESTIMATORS[facts.estimator]
        tail = getattr(entry.make_options(facts.estimator, facts.estimator_options), "tail", None)
        others = [item for item in self.step.trained_group(self.trajectory) if item.key != self.trajectory.key]
        if entry.by_column:
            alone = not any(item.model_mask[self.position : self.position + 1].any() for item in others)
        else:
            alone = not any(len(item.model_token_positions) > self.index for item in others)
        if tail is not None and alone:
            rule = {"zero": "b = 0", "self": "b = G", "carry": "b of the last index that another rollout reaches"}
            yield (
                f"  no other trajectory of the group has a model token {self.index}, so tail={tail} sets the baseline: "
                f"{rule[str(tail)]}"
            )

    def _loss_lines(self, facts: TokenMetadata) -> Iterator[str]:
        tokens = self.tokens
        kept = bool(tokens.loss_mask[self.index])
        weight = "none" if tokens.weights is None else f"weight {self.value_at_token(tokens.weights):.9g}"
        yield f"rollout correction: {weight}; " + ("in the loss" if kept else "rejected and not in the loss")
        ratio = self.value_at_token(tokens.update_probability_ratios)
        yield f"update {tokens.update}: ratio to the policy before the step {ratio:.9g}"
        factors = loss_log_prob_gradients(facts, tokens)
        if factors is None:
            yield f"loss: {facts.loss} selects tokens over the whole step, and this selection is not stored"
        else:
            factor = self.value_at_token(factors)
            clipped = (
                " (clipped: no gradient)" if kept and not factor and self.value_at_token(tokens.advantages) else ""
            )
            yield f"loss: {facts.loss}{_format_options(facts.loss_options)}: d loss / d log p = {factor:.9g}{clipped}"
        yield f"loss weight: {tokens.loss_weight:.9g} by {facts.aggregation}"
        power, total = self.value_at_token(tokens.gradient_power), self.step.total_gradient_power
        share = f"{power / total:.3g}" if total else "0"
        yield f"share of the step's gradient power: {share} (w (factor A)^2, without cross terms between tokens)"


def explain_token(run: RunDirectory, *, step: int, trajectory: int, token: int) -> TokenExplanation:
    """Explain the token at position ``token`` of the response. Raises SettingsError if its gradient is not stored."""
    stored = read_step(run, step)
    require_token_metadata(stored)
    if not 0 <= trajectory < len(stored.trajectories):
        raise SettingsError(f"step {step} has no trajectory {trajectory}; valid: 0 to {len(stored.trajectories) - 1}")
    chosen = stored.trajectories[trajectory]
    mask = chosen.model_mask
    if not 0 <= token < len(mask):
        raise SettingsError(f"trajectory {trajectory} has no token {token}; valid: 0 to {len(mask) - 1}")
    if not mask[token]:
        nearest = chosen.model_token_positions[np.abs(chosen.model_token_positions - token).argmin()]
        raise SettingsError(
            f"token {token} of trajectory {trajectory} belongs to an observation and has no gradient; the nearest "
            f"model token is {nearest}"
        )
    if chosen.tokens is None:
        reasons = "; ".join(stored.warnings) or "a filter removed it (see groups/... in metrics.jsonl)"
        raise SettingsError(f"step {step} did not train on trajectory {trajectory}: {reasons}")
    text = read_run_tokenizer(run)
    return TokenExplanation(
        step=stored,
        trajectory=chosen,
        position=token,
        index=int(np.searchsorted(chosen.model_token_positions, token)),
        pieces=[piece for segment in chosen.record["segments"] for piece in text.token_pieces(segment["token_ids"])],
    )


def explain_command(path: Path, *, step: int, trajectory: int, token: int) -> list[str]:
    """Return the lines of ``agentrl explain``, with the estimators and losses of the run's plug-ins."""
    if not (path / "config.yaml").is_file():
        raise SettingsError(f"{path} is not a run directory, because it has no config.yaml")
    run = RunDirectory(path)
    warnings = load_run_plugins(run)
    try:
        return list(explain_token(run, step=step, trajectory=trajectory, token=token).lines())
    except UnknownNameError as error:
        raise SettingsError("; ".join([str(error), *warnings])) from error


def compute_baseline_weights(step: StoredStep, trajectory: StoredTrajectory, index: int) -> dict[RowKey, float]:
    """Compute the weight of each rollout's return in a token's baseline, by the key of the rollout's last branch.

    A rollout's weight is the baseline for a return of 1 of this rollout and 0 of all others. Returns an empty mapping
    if the estimator uses no group baseline, or if the baseline is not a weighted sum of the returns.
    """
    facts, siblings = require_token_metadata(step), step.trained_group(trajectory)
    if not ESTIMATORS[facts.estimator].group_based:
        return {}
    names = ESTIMATORS.option_names(facts.estimator)
    neutral = {name: value for name, value in (("gamma", 1.0), ("normalize", None)) if name in names}
    inputs = build_stored_advantage_inputs(siblings)
    row = [item.key for item in siblings].index(trajectory.key)
    last = {item.key.sample: sibling for sibling, item in enumerate(siblings)}
    for sibling, item in enumerate(siblings):
        if item.key.branch > siblings[last[item.key.sample]].key.branch:
            last[item.key.sample] = sibling

    def baseline(returns: Mapping[int, float]) -> float:
        """Compute the token's baseline for ``returns``, keyed by index in ``siblings``. Missing returns are 0."""
        rewards = torch.zeros_like(inputs.rewards)
        for sibling, value in returns.items():
            rewards[sibling, int(siblings[sibling].model_token_positions[-1])] = value
        probe = replace(inputs, rewards=rewards)
        made = compute_advantages(facts.estimator, probe, communicator=None, **(facts.estimator_options | neutral))
        return float(made.baselines[row, int(trajectory.model_token_positions[index])])

    weights = {sibling: baseline({sibling: 1.0}) for sibling in last.values()}
    # With irregular returns, a baseline that is not linear in the returns differs from the weighted sum.
    returns = {sibling: 1.0 + 0.37 * number**1.5 for number, sibling in enumerate(last.values())}
    linear = sum(weight * returns[sibling] for sibling, weight in weights.items())
    if not np.isclose(linear, baseline(returns), rtol=1e-5, atol=1e-6):
        return {}
    return {siblings[sibling].key: weight for sibling, weight in weights.items()}


def loss_log_prob_gradients(facts: TokenMetadata, row: TrajectoryTokens) -> np.ndarray | None:
    """Compute d loss / d log p [K] of a trajectory's tokens in the update that trained on it.

    The factor ``loss_weight``, entropy and KL terms are not included. Returns None if the loss selects tokens over the
    whole step.
    """
    if LOSSES.traits(facts.loss).step_wide:
        return None
    before = torch.from_numpy(row.log_probs.copy())[None]
    now = before if row.update_log_probs is None else torch.from_numpy(row.update_log_probs.copy())[None]
    now = now.clone().requires_grad_()
    per_token, _ = policy_loss(
        facts.loss,
        log_probs=now,
        old_log_probs=None if row.update_log_probs is None else before,
        advantages=torch.from_numpy(row.advantages.copy())[None],
        loss_mask=torch.from_numpy(row.loss_mask.copy())[None],
        response_mask=torch.ones_like(now, dtype=torch.bool),
        weights=None if row.weights is None else torch.from_numpy(row.weights.copy())[None],
        selected=None,
        **facts.loss_options,
    )
    per_token.sum().backward()  # type: ignore[no-untyped-call]
    assert now.grad is not None
    return now.grad[0].numpy()


def _format_options(options: dict[str, object]) -> str:
    return "".join(f", {name}={value}" for name, value in options.items())
