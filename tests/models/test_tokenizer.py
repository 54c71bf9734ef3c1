"""Text to tokens and back: untrusted text never becomes a special token, and bytes are never lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout.fakes import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from agentrl.errors import SettingsError
from agentrl.models.loading import train_tokenizer
from agentrl.models.tokenizer import TextCodec, read_tokenizer, special_token_differences

MARKUP = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</s>", "<s>", "<unk>"]
TEXTS = ["What is 2 + 3?\n```py\nprint(2 + 3)\n```\nCode execution result: 5\n", "<|endoftext|> <|im_start|>"] * 30


def trained() -> Any:
    tokenizer = train_tokenizer(TEXTS, vocabulary_size=330)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["<tool_call>"])
    return tokenizer


def sentencepiece(*, unigram: bool) -> Any:
    """As SentencePiece models are converted: blanks as U+2581, bytes as ``<0x0A>``, specials in the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
    if unigram:
        scores = [(piece, -float(index)) for index, piece in enumerate(pieces)]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    else:
        merges = [("\u2581", "a"), ("a", "b")]
        vocabulary = {piece: index for index, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def looked_up_whole() -> Any:
    """A byte-level BPE that looks whole words up first (as Llama 3 does) and has its end token in the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate([*alphabet, "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "trained": trained(),
    "sentencepiece": sentencepiece(unigram=False),
    "unigram": sentencepiece(unigram=True),
    "whole": looked_up_whole(),
}
CODECS = {name: TextCodec(tokenizer) for name, tokenizer in TOKENIZERS.items()}
texts = st.lists(st.one_of(st.sampled_from(MARKUP), st.text(max_size=8)), max_size=6).map("".join)


@pytest.mark.parametrize("name", CODECS)
@given(text=texts)
def test_no_text_encodes_to_an_added_token_and_all_of_it_comes_back(name: str, text: str) -> None:
    codec = CODECS[name]
    ids = codec.encode(text)
    assert not set(ids) & set(TOKENIZERS[name].get_added_vocab().values())
    as_sentencepiece = name in ("sentencepiece", "unigram")  # which writes a blank as U+2581
    assert codec.decode(ids) == (text.replace("\u2581", " ") if as_sentencepiece else text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_attack_is_real(name: str) -> None:
    # The tokenizer itself does read its end token out of plain text.
    tokenizer = TOKENIZERS[name]
    assert tokenizer.eos_token_id in tokenizer(tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    assert CODECS[name].decode(CODECS[name].encode(tokenizer.eos_token)) == tokenizer.eos_token


@pytest.mark.parametrize("name", ["bytes", "trained"])
@given(data=st.binary(max_size=12))
def test_any_sampled_bytes_decode_like_python_does(name: str, data: bytes) -> None:
    codec = CODECS[name]
    token_of = {piece: index for index, piece in enumerate(codec.token_bytes) if len(piece) == 1}
    assert codec.decode([token_of[bytes([byte])] for byte in data]) == data.decode(errors="replace")


def test_the_table_holds_text_and_leaves_special_tokens_out() -> None:
    codec, tokenizer = CODECS["trained"], TOKENIZERS["trained"]
    added = tokenizer.get_added_vocab()
    assert codec.token_bytes[added["<tool_call>"]] == b"<tool_call>"
    assert [codec.token_bytes[added[name]] for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [
        b"",
        b"",
        b"",
    ]
    assert codec.decode([len(codec.token_bytes) + 5, *codec.encode("5")]) == "5"


def test_the_table_of_a_sentencepiece_vocabulary() -> None:
    table = CODECS["sentencepiece"].token_bytes
    assert table[:4] == [b"", b"", b"", b"\x00"]
    assert [table[index] for index in (3 + 0x0A, 3 + 0xFF, 259, 260, 262, 263)] == [
        b"\n", b"\xff", b" ", b"a", b" a", b"ab"
    ]  # fmt: skip


def test_a_prompt_starts_as_the_tokenizer_starts_every_text() -> None:
    assert {name: codec.prefix_ids for name, codec in CODECS.items()} == {
        "bytes": (), "trained": (), "sentencepiece": (1,), "unigram": (1,), "whole": ()
    }  # fmt: skip
    codec = CODECS["sentencepiece"]
    assert codec.encode_prompt("ab") == (1, *codec.encode("ab"))


def test_end_ids() -> None:
    assert CODECS["sentencepiece"].eos_id == 2
    assert CODECS["trained"].eos_id == 0


def test_a_saved_tokenizer_encodes_alike(tmp_path: Any) -> None:
    TOKENIZERS["trained"].save_pretrained(tmp_path)
    text = "What is 2 + 3?<tool_call>\n"
    assert TextCodec(read_tokenizer(tmp_path)).encode(text) == CODECS["trained"].encode(text)


def test_tokenizers_that_differ_in_special_tokens_name_them_and_others_are_refused() -> None:
    policy, teacher = byte_tokenizer(), byte_tokenizer()
    assert special_token_differences(policy, teacher, owner="the teacher t") == {}
    teacher.add_special_tokens({"additional_special_tokens": ["<think>"]})
    (message,) = special_token_differences(policy, teacher, owner="the teacher t").values()
    assert "differ: id 260 is None for the policy and '<think>' for the teacher t" in message
    with pytest.raises(SettingsError, match="the tokenizers of the policy and of the teacher t differ: id "):
        special_token_differences(policy, trained(), owner="the teacher t")


def test_digits_and_newlines_stand_alone() -> None:
    codec = CODECS["trained"]
    assert [codec.token_bytes[token] for token in codec.encode("12\n\n3")] == [b"1", b"2", b"\n", b"\n", b"3"]
