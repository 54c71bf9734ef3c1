"""Sampling from the tempered distribution, with random numbers keyed by request and position."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from agentrl.kernels.arithmetic import cumulative_sum

_ROUNDING = 1e-6  # float32 tolerance: a set that misses top_p by at most this much counts as reaching top_p


def sampling_key(*parts: int | str) -> int:
    """Return a 64-bit key for the parts that identify a request: seed, step, problem, sample, turn."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def keyed_uniform_numbers(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return uniform numbers in [0, 1) for pairs of key and position (SplitMix64, Steele et al. 2014).

    The inputs are uint64, and the result is float64.

    >>> keys = np.array([1, 1, 2], dtype=np.uint64)
    >>> u = keyed_uniform_numbers(keys, np.array([0, 1, 0], dtype=np.uint64))
    >>> bool(((0 <= u) & (u < 1)).all()), len(set(u.tolist()))
    (True, 3)
    """
    with np.errstate(over="ignore"):
        z = keys + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) / float(1 << 53)


def sample_tokens(
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, restrict: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Takes ``logits`` [n, V], ``temperatures`` [n] and ``uniforms`` [n] float64 in [0, 1). ``restrict`` maps the
    log-probabilities [n, V] of ``softmax(logits / temperature)`` to the log-probabilities of the sampling distribution.
    Returns token ids [n], their log-probabilities [n] (float32) and all log-probabilities [n, V] under the sampling
    distribution. At temperature 0, the most likely token is selected (the first on a tie), with log-probability 0.
    """
    greedy = temperatures == 0
    divisors = torch.where(greedy, 1.0, temperatures)
    log_probs = torch.log_softmax(logits.float() / divisors[:, None], dim=-1)  # [n, V]
    if restrict is not None:
        log_probs = restrict(log_probs)
    cumulative = cumulative_sum(log_probs.double().exp_())
    threshold = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[-1] - 1)  # [n, 1]
    drawn = log_probs.gather(1, tokens)[:, 0]
    chosen = torch.where(greedy, log_probs.argmax(dim=-1), tokens[:, 0])
    return chosen, torch.where(greedy, 0.0, drawn), log_probs


def restrict_to_likely_tokens(log_probs: Tensor, *, min_ps: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Restrict each row to its likely tokens and renormalize it. All other log-probabilities are -inf.

    Keeps the tokens with at least the fraction ``min_p`` [n] of the largest probability (0: all). Of these, it keeps
    the ``top_k`` [n] most likely tokens (0: all), with ties broken by the smaller id. Of these, it keeps the smallest
    set of most likely tokens whose renormalized probability reaches ``top_p`` [n] (1: all; Holtzman et al. 2020). A row
    without limits is unchanged.

    >>> row = torch.tensor([[0.5, 0.3, 0.2]]).log()
    >>> limits = {"min_ps": torch.tensor([0.0]), "top_ks": torch.tensor([0]), "top_ps": torch.tensor([0.6])}
    >>> restrict_to_likely_tokens(row, **limits).exp()
    tensor([[0.6250, 0.3750, 0.0000]])
    """
    limited = (min_ps > 0) | (top_ks > 0) | (top_ps < 1)
    ordered, indices = log_probs.sort(dim=-1, descending=True, stable=True)  # [n, V]
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    cut = ordered < ordered[:, :1] + min_ps[:, None].log()
    cut |= (ranks >= top_ks[:, None]) & (top_ks > 0)[:, None]
    probabilities = torch.softmax(ordered.masked_fill(cut, -torch.inf).double(), dim=-1)
    before = cumulative_sum(probabilities) - probabilities
    cut |= (before >= top_ps[:, None] - _ROUNDING) & (top_ps < 1)[:, None]
    cut[:, 0] = False
    kept = log_probs.masked_fill(torch.zeros_like(cut).scatter(1, indices, cut), -torch.inf)
    return torch.where(limited[:, None], torch.log_softmax(kept, dim=-1), log_probs)
