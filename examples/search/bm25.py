"""BM25 over a few thousand documents, in memory."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

_WORD = re.compile(r"\w+")


class Index:
    """BM25 (Robertson and Zaragoza, 2009) over documents.

    A document scores ``idf(w) * f * (k + 1) / (f + k * (1 - b + b * l / mean))`` for each word ``w`` of the query that
    occurs in it ``f`` times; ``l`` is the number of words of the document.
    ``idf(w) = log(1 + (N - n + 0.5) / (n + 0.5))`` for a word in ``n`` of ``N`` documents.

    >>> Index(["a cat sleeps", "a dog barks", "the dog sleeps"]).search("dog sleeps", 2)
    ['the dog sleeps', 'a cat sleeps']
    """

    def __init__(self, documents: Sequence[str], *, k: float = 1.2, b: float = 0.75) -> None:
        self._documents = documents
        counts = [Counter(words(document)) for document in documents]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / len(lengths)
        found: dict[str, list[int]] = defaultdict(list)
        for number, count in enumerate(counts):
            for word in count:
                found[word].append(number)
        self.scores: dict[str, list[tuple[int, float]]] = {}
        for word, numbers in found.items():
            rare = math.log(1 + (len(documents) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            self.scores[word] = [
                (n, rare * counts[n][word] * (k + 1) / (counts[n][word] + k * (1 - b + b * lengths[n] / mean)))
                for n in numbers
            ]

    def search(self, query: str, most: int) -> list[str]:
        """Return the best documents that contain a word of the query, best first. Ties go to the earlier document."""
        totals: dict[int, float] = defaultdict(float)
        for word in words(query):
            for number, score in self.scores.get(word, ()):
                totals[number] += score
        best = sorted(totals, key=lambda number: (-totals[number], number))
        return [self._documents[number] for number in best[:most]]


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return _WORD.findall(text.lower())
