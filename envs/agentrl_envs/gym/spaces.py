"""A text space for all of Unicode.

By default, gymnasium's `Text` accepts only letters and digits; with all of Unicode as its charset it takes seconds and
hundreds of megabytes. `UnicodeText` samples from a small charset and accepts every text that UTF-8 can encode.
"""

from __future__ import annotations

import re
import string
from typing import Any

import numpy as np
from gymnasium.spaces import Text

_SURROGATE = re.compile("[\ud800-\udfff]")
_SAMPLED = string.ascii_letters + string.digits + string.punctuation + " \näπ∑中🙂"
_LONGEST_SAMPLE = 64


class UnicodeText(Text):
    """Any text of up to ``max_length`` characters, including the empty text.

    Samples have up to 64 characters. Not flattenable: there is no fixed table of characters.
    """

    def __init__(self, max_length: int, *, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(max_length, min_length=0, charset=_SAMPLED, seed=seed)

    def contains(self, x: object) -> bool:
        """Whether x is a str of valid length without lone surrogates, which have no encoding."""
        return isinstance(x, str) and len(x) <= self.max_length and _SURROGATE.search(x) is None

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A random text. A mask or probabilities have the meaning they have in `gymnasium.spaces.Text.sample`."""
        if mask is None and probability is None:
            length = int(self.np_random.integers(0, min(_LONGEST_SAMPLE, self.max_length) + 1))
            return super().sample(mask=(length, None))
        return super().sample(mask=mask, probability=probability)

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_length})"

    def __eq__(self, other: object, /) -> bool:
        return isinstance(other, UnicodeText) and self.max_length == other.max_length

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_np_flattenable(self) -> bool:
        """False."""
        return False
