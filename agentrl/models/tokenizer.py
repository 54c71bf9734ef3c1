"""Conversion between text and tokens. Untrusted text never becomes a special token."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from agentrl.errors import SettingsError
from agentrl_envs.chat import MarkedText, Part, TemplateMark, split_marked_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Number of cached prompts. The rollouts of a group share a prompt.
_PROMPTS = 512


class TextCodec:
    """Encodes untrusted text and decodes sampled tokens with one tokenizer of `transformers`.

    ``encode`` treats added tokens in the text as plain text, so a program that prints ``<|endoftext|>`` does not end
    the turn. Only the marks of a :class:`~agentrl_envs.chat.MarkedText`, which protocols create, become special tokens.
    ``end_ids`` are the tokens at which every engine ends a turn.

    Not guaranteed: a tokenizer without a byte-level alphabet or byte fallback encodes unsupported characters as its
    unknown token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        turn_end: str = "",
        generation_ends: Iterable[int] = (),
        shown_special_tokens: Collection[str] = (),
    ) -> None:
        """Create a codec. ``turn_end`` is the chat template's end-of-turn marker, a special token.

        ``shown_special_tokens`` remain in decoded text, for example ``[TOOL_CALLS]``. For ``generation_ends``, see
        :func:`read_end_token_ids`. Raises ValueError if ``turn_end`` is not a single token.
        """
        self._encode_mark = lru_cache(maxsize=64)(
            lambda mark: tuple(tokenizer(mark, add_special_tokens=False)["input_ids"])
        )
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        self._byte_level = "ByteLevel" in json.dumps(backend.get("decoder"))
        special = set(tokenizer.all_special_ids)
        self._added = {
            token["id"]: b""
            if (token["special"] or token["id"] in special) and token["content"] not in shown_special_tokens
            else token["content"].encode()
            for token in backend["added_tokens"]
        }
        self._plain = _without_added_tokens(backend)
        self.eos_id: int = tokenizer.eos_token_id
        ends = self._encode_mark(turn_end) if turn_end else ()
        if len(ends) > 1:
            raise ValueError(f"the end-of-turn marker {turn_end!r} must be a single token; got {len(ends)} tokens")
        self.end_ids: frozenset[int] = frozenset({self.eos_id, *ends, *generation_ends})
        self.prefix_ids: tuple[int, ...] = self._prepended_tokens(tokenizer)
        self._encode_plain_prompt = lru_cache(maxsize=_PROMPTS)(lambda text: self.prefix_ids + self.encode(text))

    def _prepended_tokens(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Return the tokens that the tokenizer prepends to every text (a BOS token for Llama, none for Qwen)."""
        whole, text = tuple(tokenizer("a", add_special_tokens=True)["input_ids"]), self.encode("a")
        places = range(len(whole) - len(text) + 1)
        return whole[: next((place for place in places if whole[place : place + len(text)] == text), 0)]

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of plain text, without special tokens."""
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt: the tokenizer's prefix and the plain text.

        The prefix is omitted for a MarkedText, whose marks determine how the text starts.
        """
        if isinstance(text, MarkedText):
            return self.encode_parts(text.parts)
        # Only plain texts are cached, because two equal marked texts may differ in their marks.
        return self._encode_plain_prompt(text)

    def encode_parts(self, parts: Iterable[Part]) -> tuple[int, ...]:
        """Encode each part separately. Only marks may become special tokens; other parts are plain text."""
        return tuple(
            token
            for part in parts
            for token in (self._encode_mark(part.text) if isinstance(part, TemplateMark) else self.encode(part))
        )

    def parts_without_sampled_turn_end(self, text: str, context: Sequence[int]) -> tuple[Part, ...]:
        """Return the parts of an observation, without the end-of-turn marker if ``context`` already ends with it."""
        parts = split_marked_text(text)
        first = parts[0]
        if isinstance(first, TemplateMark) and first.ends_turn:
            ids = self._encode_mark(first.text)
            if tuple(context[len(context) - len(ids) :]) == ids:
                return parts[1:]
        return parts

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes of every token id, empty for special tokens. A text is the concatenated bytes of its tokens."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        vocabulary = self._plain.get_vocab()
        size = max([*vocabulary.values(), *self._added, -1]) + 1
        table = [b""] * size
        alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
        for token, index in vocabulary.items():
            if self._byte_level:
                table[index] = bytes(alphabet[character] for character in token if character in alphabet)
            elif len(token) == 6 and token.startswith("<0x"):
                table[index] = bytes([int(token[3:5], 16)])
            else:
                table[index] = token.replace("\u2581", " ").encode()
        for index, content in self._added.items():
            table[index] = content
        return table

    def decode(self, token_ids: Iterable[int]) -> str:
        """Decode sampled tokens, without special tokens. Incomplete UTF-8 is replaced."""
        table = self.token_bytes
        size = len(table)  # models pad their vocabulary, so they may have more ids than the tokenizer
        return b"".join([table[token] for token in token_ids if token < size]).decode(errors="replace")


def _without_added_tokens(backend: dict[str, Any]) -> Tokenizer:
    """Create a tokenizer from its JSON, without added tokens, post-processor, padding or truncation.

    Added tokens that are also ordinary pieces (SentencePiece's ``</s>``) get names that no text can spell.
    """
    contents = {token["content"] for token in backend["added_tokens"] if not token["content"].isspace()}
    backend |= {"added_tokens": [], "post_processor": None, "padding": None, "truncation": None}
    model = backend["model"]
    if isinstance(model["vocab"], dict):
        hidden = {content: uuid.uuid4().hex for content in contents if content in model["vocab"]}
        model["vocab"] = {hidden.get(piece, piece): index for piece, index in model["vocab"].items()}
        merges = (pair if isinstance(pair, list) else pair.split(" ", 1) for pair in model.get("merges", ()))
        if "merges" in model:
            model["merges"] = [pair for pair in merges if not hidden.keys() & {*pair, "".join(pair)}]
        if model.get("unk_token") in hidden:
            model["unk_token"] = hidden[model["unk_token"]]
    else:
        model["vocab"] = [[uuid.uuid4().hex if piece in contents else piece, score] for piece, score in model["vocab"]]
    return Tokenizer.from_str(json.dumps(backend))


def read_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory or Hugging Face id."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def special_token_differences(
    policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, *, owner: str
) -> dict[int, str]:
    """Return the ids of special tokens that differ between two tokenizers, each with a message that names the token.

    Raises SettingsError if an ordinary token differs. ``owner`` describes the model of the other tokenizer.
    """
    tables = [{index: token for token, index in item.get_vocab().items()} for item in (policy, other)]
    added = policy.added_tokens_decoder.keys() | other.added_tokens_decoder.keys()
    different = {}
    for index in sorted(tables[0].keys() | tables[1].keys()):
        own, there = (table.get(index) for table in tables)
        if own != there:
            different[index] = (
                f"the tokenizers of the policy and of {owner} differ: id {index} is {own!r} for the policy and "
                f"{there!r} for {owner}; choose a model of the same family"
            )
            if index not in added:
                raise SettingsError(different[index])
    return different


def read_end_token_ids(path: str | Path) -> tuple[int, ...]:
    """Return the end-of-sequence tokens from generation_config.json or, if the file is missing, from config.json.

    In these files, chat models list tokens that their tokenizer does not list (``<|im_end|>`` in addition to
    ``<|endoftext|>``).
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the model has no such file
        found = AutoConfig.from_pretrained(path).get_text_config().eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
