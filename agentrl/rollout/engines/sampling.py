"""Sampling from the tempered distribution, with randomness keyed by request and position.

A key's uniform number depends on nothing else: not on the batch a request happens to share, not on the order of
arrival, not on the device.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

_MASK = 0xFFFFFFFFFFFFFFFF


def sampling_key(*parts: int | str) -> int:
    """A 64-bit key of the things that identify a request: seed, step, problem, sample, turn."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def keyed_uniform(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1) for pairs of key and position (SplitMix64, Steele et al. 2014). uint64 in, float64 out.

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


def sample_tokens(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution.

    ``logits`` [n, V], ``temperatures`` [n], ``uniforms`` [n] float64 in [0, 1) give token ids [n] and their
    log-probabilities [n] (float32) under ``softmax(logits / temperature)``, the distribution sampled from. At
    temperature 0 that is the likeliest token, the first of equals, with log-probability 0.
    """
    greedy = temperatures == 0
    divisors = torch.where(greedy, 1.0, temperatures)
    log_probs = torch.log_softmax(logits.float() / divisors[:, None], dim=-1)  # [n, V]
    cumulative = log_probs.double().exp_().cumsum_(dim=-1)
    threshold = uniforms[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[-1] - 1)  # [n, 1]
    drawn = log_probs.gather(1, tokens)[:, 0]
    return torch.where(greedy, log_probs.argmax(dim=-1), tokens[:, 0]), torch.where(greedy, 0.0, drawn)
