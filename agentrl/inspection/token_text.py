"""The text of single tokens, special ones included, by the tokenizer of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from agentrl.telemetry.run_directory import RunDirectory

_FILE = "tokenizer.json"


class TokenText:
    """Cuts a run's token ids into pieces of text. Without the run's tokenizer, every piece is unknown."""

    def __init__(self, path: Path | None) -> None:
        self._tokenizer = None if path is None else Tokenizer.from_file(str(path))
        added = {} if self._tokenizer is None else self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, about in added.items() if about.special)

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    def pieces(self, token_ids: Sequence[int]) -> list[str | None]:
        """The text that each token adds, "" for one that begins a character which a later one completes."""
        if self._tokenizer is None:
            return [None] * len(token_ids)
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, token) or "" for token in token_ids]

    def specials(self, token_ids: Sequence[int]) -> list[int]:
        """The places of special tokens."""
        return [place for place, token in enumerate(token_ids) if token in self._special]


def token_text(run: RunDirectory, model: object) -> TokenText:
    """The tokenizer of a run: its own file, that of a policy it wrote, or that of the model it began with."""
    folders = [run.path, run.path / "policy", run.path / "best"]
    if isinstance(model, str) and model:
        folders.append(Path(model))
    for folder in folders:
        if (folder / _FILE).is_file():
            return _opened(folder / _FILE, (folder / _FILE).stat().st_mtime_ns)
    return _opened(_in_the_cache(model), 0)


@lru_cache(maxsize=4)
def _opened(path: Path | None, _changed: int) -> TokenText:
    return TokenText(path)


def _in_the_cache(model: object) -> Path | None:
    """The file of a model of the Hugging Face hub, if it was downloaded earlier."""
    if not isinstance(model, str) or model.count("/") != 1 or model.startswith((".", "/")):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, _FILE)
    return Path(found) if isinstance(found, str) else None
