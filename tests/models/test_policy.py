"""The policy as training sees it, the fused head, and models on disk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from rollout.fakes import byte_tokenizer, played, tiny_model

from agentrl.batch import Batch, MicroBatch
from agentrl.errors import SettingsError
from agentrl.models.loading import (
    build_tiny_model,
    model_fingerprint,
    read_model,
    read_model_config_if_available,
    train_tokenizer,
    write_model,
)
from agentrl.models.policy import FrozenHead, FusedHead, PolicyModel
from agentrl.models.settings import ModelSettings, TinyModelSettings
from agentrl.trajectory import Segment

SETTINGS = ModelSettings(dtype="float32")


def batch() -> Batch:
    def segment(*ids: int) -> Segment:
        return Segment(
            origin="model", token_ids=ids, text="", log_probs=(-1.0,) * len(ids), version_spans=((0, len(ids)),)
        )

    seen = Segment(origin="observation", token_ids=(40, 41), text="")
    first = played(prompt_ids=(1, 2, 3), segments=(segment(4, 5), seen, segment(6)))
    second = played(prompt_ids=(7,), segments=(segment(8),))
    return Batch.from_micro_batch(MicroBatch.from_trajectories([first, second]))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_statistics_are_those_of_a_plain_forward_one_position_earlier(temperature: float) -> None:
    data, model = batch(), tiny_model()
    # Sequence 1 2 3 4 5 40 41 6: its sampled tokens 4, 5, 6 are predicted at places 2, 3, 6.
    rows = [([1, 2, 3, 4, 5, 40, 41, 6], [2, 3, 6], [4, 5, 6]), ([7, 8], [0], [8])]
    expected = []
    for ids, places, targets in rows:
        logits = model(input_ids=torch.tensor([ids])).logits[0, places] / temperature
        expected.append(torch.log_softmax(logits, dim=-1)[range(len(targets)), targets])
    inputs = (data.row, data.rows, data.columns)
    statistics, hidden = PolicyModel(model)(*inputs, temperature=temperature, keep_hidden=True)
    torch.testing.assert_close(statistics.log_probs, torch.cat(expected), rtol=0, atol=1e-5)
    assert hidden.shape == (4, 32)
    assert not hidden.requires_grad
    assert statistics.log_probs.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_divergence_from_a_reference_is_that_of_all_logits(temperature: float) -> None:
    data = batch()
    model, other = tiny_model(), tiny_model()
    with torch.no_grad():
        other.lm_head.weight.copy_(torch.randn_like(other.lm_head.weight) * 0.3)
    places = [(0, [2, 3, 6]), (1, [0])]

    def log_softmax(causal_lm: torch.nn.Module) -> torch.Tensor:
        logits = causal_lm(input_ids=data.input_ids).logits
        return torch.log_softmax(torch.cat([logits[row, at] for row, at in places]) / temperature, dim=-1)

    log_p, log_q = log_softmax(model), log_softmax(other).detach()
    wanted = (log_p.exp() * (log_p - log_q)).sum(-1)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(wanted.sum(), parameters)

    inputs = (data.row, data.rows, data.columns)
    reference = PolicyModel(other)
    _, hidden = reference(*inputs, temperature=temperature, keep_hidden=True)
    head = FrozenHead(hidden=hidden, weight=reference.head.weight.detach(), bias=None)
    statistics, _ = PolicyModel(model)(*inputs, temperature=temperature, reference=head)
    torch.testing.assert_close(statistics.full_kl, wanted, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(statistics.full_kl.sum(), parameters)
    for one, two in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


def conversations(draw: random.Random, rows: int) -> Batch:
    """Rows of a few prompts in any order, with one to twelve response tokens."""
    prompts = [tuple(draw.randrange(1, 250) for _ in range(draw.randint(1, 9))) for _ in range(3)]

    def response() -> Segment:
        ids = tuple(draw.randrange(250) for _ in range(draw.randint(1, 12)))
        return Segment(
            origin="model", token_ids=ids, text="", log_probs=(-1.0,) * len(ids), version_spans=((0, len(ids)),)
        )

    made = [played(prompt_ids=draw.choice(prompts), segments=(response(),)) for _ in range(rows)]
    return Batch.from_micro_batch(MicroBatch.from_trajectories(made))


def test_shared_prompts_go_through_the_model_once() -> None:
    data = conversations(random.Random(2), 9)
    policy = PolicyModel(tiny_model())
    shapes = []
    policy.causal_lm.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: shapes.append(tuple(output.shape))
    )
    policy(data.row, data.rows, data.columns)
    distinct = {tuple(row[:length]) for row, length in zip(data.input_ids.tolist(), data.prompt_lengths, strict=True)}
    assert len(distinct) <= 3
    assert shapes == [(1, sum(map(len, distinct)) + int(data.response_lengths.sum()), 32)]


def test_a_model_with_layers_that_mix_documents_is_refused_by_name() -> None:
    model = tiny_model()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(SettingsError, match=r"the model \(qwen2\) has layers of type linear_attention, which would"):
        PolicyModel(model)


def test_the_fused_head_shares_the_tied_weight_and_still_gives_logits() -> None:
    model = tiny_model()
    ids = torch.tensor([[1, 2, 3]])
    before = model(input_ids=ids).logits
    policy = PolicyModel(model)
    assert policy.head.weight is model.model.embed_tokens.weight
    assert PolicyModel(model).head is policy.head
    assert torch.equal(model(input_ids=ids).logits, before)
    with_bias = torch.nn.Linear(4, 6)
    states = torch.randn(5, 4)
    assert torch.equal(FusedHead.from_linear(with_bias)(states), with_bias(states))


def test_a_written_model_comes_back_the_same(tmp_path: Path) -> None:
    model = tiny_model()
    write_model(tmp_path, model=model, tokenizer=byte_tokenizer(), title="Toy", body="From a test.")
    again = read_model(tmp_path, SETTINGS)
    assert model_fingerprint(again.state_dict().items()) == model_fingerprint(model.state_dict().items())
    assert "# Toy" in (tmp_path / "README.md").read_text()


def test_a_fingerprint_sees_values_names_and_shapes() -> None:
    tensors = {"a": torch.zeros(4), "b": torch.ones(2)}
    print_of = {
        "same": model_fingerprint(reversed(tensors.items())),
        "value": model_fingerprint({**tensors, "a": torch.tensor([0.0, 0, 0, 1e-30])}.items()),
        "shape": model_fingerprint({**tensors, "a": torch.zeros(2, 2)}.items()),
        "name": model_fingerprint({"c": tensors["a"], "b": tensors["b"]}.items()),
        "dtype": model_fingerprint({**tensors, "a": torch.zeros(4, dtype=torch.bfloat16)}.items()),
    }
    reference = model_fingerprint(tensors.items())
    assert {name for name, value in print_of.items() if value == reference} == {"same"}


def test_a_configuration_that_is_not_here_is_none(tmp_path: Path) -> None:
    assert read_model_config_if_available(ModelSettings(path=str(tmp_path / "nowhere"))) is None
    tiny = read_model_config_if_available(ModelSettings(tiny=TinyModelSettings(hidden_size=48, heads=2)))
    assert (tiny.hidden_size, tiny.num_attention_heads, tiny.tie_word_embeddings) == (48, 2, True)


def test_the_tiny_policy_depends_on_its_seed_and_leaves_the_global_one_alone() -> None:
    tokenizer = train_tokenizer(["2 + 3 = 5\n"], vocabulary_size=300)
    shape = TinyModelSettings(vocabulary_size=300, hidden_size=16, layers=1, heads=2, intermediate_size=16)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, same, other = (build_tiny_model(shape, tokenizer, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    prints = [model_fingerprint(model.state_dict().items()) for model in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
    assert one.config.eos_token_id == tokenizer.eos_token_id
