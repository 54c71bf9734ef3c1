"""Text of single tokens, including special ones, by the tokenizer of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from agentrl.errors import WorldError
from agentrl.telemetry.files import contained
from agentrl.telemetry.run_directory import RunDirectory

_FILE = "tokenizer.json"
_MOST_BYTES = 1 << 28  # the largest vocabularies take about 40 MB


class TokenText:
    """Splits a run's token ids into pieces of text. Without the run's tokenizer, every piece is None.

    ``problem`` is the reason why an existing tokenizer cannot be used, or empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, problem: str = "") -> None:
        self._tokenizer, self.problem = tokenizer, problem
        added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, about in added.items() if about.special)

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    def pieces(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the text that each token adds: "" if a later token completes its character."""
        if self._tokenizer is None:
            return [None] * len(token_ids)
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, token) or "" for token in token_ids]

    def specials(self, token_ids: Sequence[int]) -> list[int]:
        """Return the indices of special tokens."""
        return [index for index, token in enumerate(token_ids) if token in self._special]


def token_text(run: RunDirectory) -> TokenText:
    """Return the tokenizer of a run, from the file that training writes at its start or from a saved policy."""
    for folder in (run.path, run.path / "policy", run.path / "best"):
        if (folder / _FILE).is_file():
            return _opened(folder / _FILE, run.path, (folder / _FILE).stat().st_mtime_ns)
    return TokenText(None)


# Keyed by the modification time, so that a tokenizer that changes is read again.
@lru_cache(maxsize=4)
def _opened(path: Path, folder: Path, _changed: int) -> TokenText:
    try:
        path = contained(path, folder)
        if path.stat().st_size > _MOST_BYTES:
            return TokenText(None, f"{path}: damaged, over {_MOST_BYTES >> 20} MB")
        return TokenText(Tokenizer.from_file(str(path)))
    except (WorldError, OSError) as error:
        return TokenText(None, str(error))
    except Exception as error:  # noqa: BLE001  (tokenizers raises a plain Exception for a damaged file)
        return TokenText(None, f"{path}: damaged, not a tokenizer ({error})")
