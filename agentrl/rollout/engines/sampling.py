"""Sampling from the tempered distribution, with random numbers keyed by request and position."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from agentrl.kernels.arithmetic import running_sum

_MASK = 0xFFFFFFFFFFFFFFFF
_ROUNDING = 1e-6  # float32 tolerance: a set that misses top_p by at most this much counts as reaching top_p


def sampling_key(*parts: int | str) -> int:
    """Return a 64-bit key for the parts that identify a request: seed, step, problem, sample, turn."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def keyed_uniform(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return uniform numbers in [0, 1) for pairs of key and position (SplitMix64, Steele et al. 2014).

    The inputs are uint64, and the result is float64.

    >>> keys = np.array([1, 1, 2], dtype=np.uint64)
    >>> u = keyed_uniform(keys, np.array([0, 1, 0], dtype=np.uint64))
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
    logits: Tensor, temperatures: Tensor, uniforms: Tensor, top_ps: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Takes ``logits`` [n, V], ``temperatures`` [n], ``uniforms`` [n] float64 in [0, 1) and ``top_ps`` [n] in (0, 1]
    (None: all 1). Returns token ids [n] and their log-probabilities [n] (float32) under the sampling distribution:
    ``softmax(logits / temperature)``, restricted to its nucleus and renormalised. At temperature 0, the most likely
    token is selected (the first on a tie), with log-probability 0.
    """
    greedy = temperatures == 0
    divisors = torch.where(greedy, 1.0, temperatures)
    log_probs = torch.log_softmax(logits.float() / divisors[:, None], dim=-1)  # [n, V]
    if top_ps is not None and bool((top_ps < 1).any()):
        log_probs = nucleus(log_probs, top_ps)
    cumulative = running_sum(log_probs.double().exp_())
    threshold = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[-1] - 1)  # [n, 1]
    drawn = log_probs.gather(1, tokens)[:, 0]
    return torch.where(greedy, log_probs.argmax(dim=-1), tokens[:, 0]), torch.where(greedy, 0.0, drawn)


def nucleus(log_probs: Tensor, top_ps: Tensor) -> Tensor:
    """Restrict each row to the smallest set of most likely tokens whose probability reaches ``top_p``.

    The set is renormalised, and all other log-probabilities are -inf. Rows with ``top_p`` 1 keep every token (Holtzman
    et al. 2020).

    >>> nucleus(torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([0.6])).exp()
    tensor([[0.6250, 0.3750, 0.0000]])
    """
    ordered, indices = log_probs.sort(dim=-1, descending=True, stable=True)  # [n, V]
    probabilities = ordered.double().exp()
    before = running_sum(probabilities) - probabilities
    cut = (before >= top_ps[:, None] - _ROUNDING) & (top_ps < 1)[:, None]
    cut[:, 0] = False
    outside = torch.zeros_like(cut).scatter(1, indices, cut)
    kept = log_probs.masked_fill(outside, -torch.inf)
    return torch.where((top_ps < 1)[:, None], torch.log_softmax(kept, dim=-1), log_probs)
