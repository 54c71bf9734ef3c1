from __future__ import annotations

import json
from pathlib import Path

import torch

from agentrl.models.loading import build_tiny_model, read_model, train_tokenizer, write_model
from agentrl.models.settings import ModelSettings, TinyModelSettings
from agentrl.weights.exports import read_export, write_export, write_shards, write_untied_copy


def test_shards_hold_no_more_than_they_may(tmp_path: Path) -> None:
    tensors = {name: torch.randn(size) for name, size in (("a", 10), ("b", 10), ("c", 100))}
    tensors["d"] = torch.randn(2, 5).to(torch.bfloat16).t()  # not contiguous
    write_shards(tmp_path, tensors.items(), max_bytes=80)
    shards = [f"model-{number:05d}.safetensors" for number in (1, 2, 3)]
    assert [file.name for file in sorted(tmp_path.iterdir())] == [*shards, "model.safetensors.index.json"]
    read = dict(read_export(tmp_path))
    assert list(read) == ["a", "b", "c", "d"]
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_version_lies_whole_in_its_own_folder_and_the_one_before_stays(tmp_path: Path) -> None:
    for version in (1, 2, 10):
        write_export(tmp_path, [("a", torch.full((2,), float(version)))], version)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["version-000000002", "version-000000010"]
    again = write_export(tmp_path, [("a", torch.zeros(2))], 10)  # sent once more
    assert dict(read_export(again))["a"].tolist() == [0.0, 0.0]
    assert sorted(item.name for item in tmp_path.iterdir()) == ["version-000000002", "version-000000010"]


def test_an_untied_copy_is_the_same_policy(tmp_path: Path) -> None:
    settings = TinyModelSettings(vocabulary_size=300, hidden_size=32, layers=1, heads=2, intermediate_size=48)
    tokenizer = train_tokenizer(["1 + 1 = 2\n"], vocabulary_size=300)
    model = build_tiny_model(settings, tokenizer, seed=5)
    write_model(tmp_path / "tied", model=model, tokenizer=tokenizer, title="random", body="Untrained.")
    copy = write_untied_copy(tmp_path / "tied", tmp_path / "copy")
    assert json.loads((copy / "config.json").read_text())["tie_word_embeddings"] is False
    assert (copy / "tokenizer.json").is_file()
    untied = read_model(copy, ModelSettings(dtype="float32"))
    assert untied.lm_head.weight.data_ptr() != untied.model.embed_tokens.weight.data_ptr()
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(untied(ids).logits, model(ids).logits)
