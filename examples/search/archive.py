"""An agent that searches a small corpus with BM25, reads the results, and answers in plain text."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from bm25 import Index


@functools.cache
def index() -> Index:
    """Return the index of the corpus, which has one document per line. Built once per process."""
    lines = Path("data/corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return Index([json.loads(line)["text"] for line in lines])


class Archive:
    """A corpus and a question about it, which takes one search or two."""

    def reset(self, answer: str) -> None:
        """Store the reference answer."""
        self._gold = answer
        self._right = False

    def search(self, query: str) -> str:
        """Searches the archive and returns the best document.

        Args:
            query: words to look for
        """
        found = index().search(query, 1)
        return found[0] if found else "nothing found"

    def step(self, text: str) -> None:
        """Read the reply, which is a turn without a call. Its last word is the answer."""
        self._right = text.split()[-1:] == [self._gold]

    def get_reward(self) -> float:
        """Return 1 for the right answer."""
        return float(self._right)
